"""`<variant>/captions.parquet`: the captions of a variant as a table that `prep manifest captions` takes.

It is derived from the shards, and written at the end of a run.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clipmill.manifests.caption_table import METADATA_KEY, PSEUDO_CAPTIONS, SCHEMA, write_pseudo_captions
from clipmill.manifests.publish import parse_json
from clipmill.prep.core.recipe import recipe_fingerprint
from clipmill.shards.chunk_table import order_of, read_chunk_rows
from clipmill.shards.columns import VIDEO
from clipmill.shards.reader import Variant

TABLE_FILE = "captions.parquet"
SOURCE = "vlm"
_COLUMNS = ("video_id", "start_ms", "num_frames", "fps_num", "fps_den", "caption_text")


def publish_caption_table(variant: Variant) -> Path:
    """Write the table of a variant.

    Raises:
        Damaged: a merged table or an index is damaged.
        OSError: a file cannot be read or written.
    """
    rows = read_chunk_rows(variant, columns=_COLUMNS)
    ids, codes = rows.dictionary_codes("video_id")
    starts, frames, fps_num, fps_den = (rows.table[name].to_numpy().astype(np.int64) for name in _COLUMNS[1:5])
    distinct = ids.dictionary_encode()
    order = order_of(distinct.indices.to_numpy()[codes], starts)
    at = pa.array(np.arange(len(codes)) if order is None else order)
    recipe = variant.recipe
    count = len(codes)
    table = pa.table(
        [
            ids.take(pa.array(codes)),
            pa.array(starts / 1000),
            pa.array(starts / 1000 + frames * fps_den / fps_num),
            rows.table["caption_text"].combine_chunks(),
            pa.array([f"{SOURCE}@{recipe_fingerprint(recipe)[:8]}"] * count, pa.string()),
            pa.nulls(count, pa.float32()),
            pa.array(np.zeros(count, np.int16)),
        ],
        schema=SCHEMA,
    ).take(at)
    path = variant.directory / TABLE_FILE
    write_pseudo_captions(path, [table], record=_record(variant, dict(recipe)))
    return path


def _record(variant: Variant, recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": PSEUDO_CAPTIONS,
        "weights": recipe.pop("model"),
        "weights_sha256": recipe.pop("model_sha256"),
        "video_variant": recipe.pop(VIDEO),
        "captions_variant": variant.directory.name,
        "commits_sha256": variant.commits.digest.decode(),
        "settings": {name: value for name, value in recipe.items() if value is not None},
    }


def caption_table_problem(variant: Variant) -> str | None:
    """Return why the table of a variant cannot be used; None if it can, or if there is nothing to put into it."""
    if not any(commit.files for commit in variant.commits.values()):
        return None
    path = variant.directory / TABLE_FILE
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        record = parse_json((table.schema.metadata or {})[METADATA_KEY])
        is_current = record["commits_sha256"] == variant.commits.digest.decode()
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        return f"{path} is damaged: {error}"
    return None if is_current else f"{path} is stale: shards of captions have changed since it was written"
