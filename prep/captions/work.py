"""`ChunkWork` of the column `captions`, and its caption table `<variant>/captions.parquet`.

At the end of a run, the table is written from the shards. `prep manifest captions` reads the table.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clipmill.manifests.caption_table import METADATA_KEY, PSEUDO_CAPTIONS, SCHEMA, write_pseudo_captions
from clipmill.manifests.plugins import import_late, import_object
from clipmill.manifests.publish import parse_json
from clipmill.prep.captions.answers import ANSWER_FILE, ANSWERS_FOLDER, EXTENSION
from clipmill.prep.captions.recipe import CaptionsSettings, local_weights, resolve, variant_name
from clipmill.prep.core.chunk_work import ChunkWork
from clipmill.prep.core.column import data_flags
from clipmill.prep.core.recipe import recipe_fingerprint
from clipmill.prep.core.work import MERGED_TABLE, ExtraFile, ExtraFolder
from clipmill.shards.chunk_table import order_of, read_chunk_rows
from clipmill.shards.columns import CAPTIONS, VIDEO
from clipmill.shards.format import CAPTIONS_FIELDS
from clipmill.shards.reader import Variant

if TYPE_CHECKING:
    from clipmill.prep.core.chunk_plan import ChunksPlan
    from clipmill.prep.core.request import Request


TABLE_FILE = "captions.parquet"
SOURCE = "vlm"
_COLUMNS = ("video_id", "start_ms", "num_frames", "fps_num", "fps_den", "caption_text")


def publish_caption_table(variant: Variant) -> Path:
    """Write the caption table of a variant, sorted by video and time, and return its path.

    Raises:
        Damaged: The merged table or an index is damaged.
        OSError: A file cannot be read or written.
    """
    rows = read_chunk_rows(variant, columns=_COLUMNS)
    ids, codes = rows.dictionary_codes("video_id")
    starts, frames, fps_num, fps_den = (rows.table[name].to_numpy().astype(np.int64) for name in _COLUMNS[1:5])
    encoded_ids = ids.dictionary_encode()
    order = order_of(encoded_ids.indices.to_numpy()[codes], starts)
    sorted_rows = pa.array(np.arange(len(codes)) if order is None else order)
    source = f"{SOURCE}@{recipe_fingerprint(variant.recipe)[:8]}"
    recipe = dict(variant.recipe)
    count = len(codes)
    record = {
        "kind": PSEUDO_CAPTIONS,
        "weights": recipe.pop("model"),
        "weights_sha256": recipe.pop("model_sha256"),
        "video_variant": recipe.pop(VIDEO),
        "captions_variant": variant.directory.name,
        "commits_sha256": variant.commits.digest.decode(),
        "settings": {name: value for name, value in recipe.items() if value is not None},
    }
    table = pa.table(
        [
            ids.take(pa.array(codes)),
            pa.array(starts / 1000),
            pa.array(starts / 1000 + frames * fps_den / fps_num),
            rows.table["caption_text"].combine_chunks(),
            pa.array([source] * count, pa.string()),
            pa.nulls(count, pa.float32()),
            pa.array(np.zeros(count, np.int16)),
        ],
        schema=SCHEMA,
    ).take(sorted_rows)
    path = variant.directory / TABLE_FILE
    write_pseudo_captions(path, [table], record=record)
    return path


def caption_table_problem(variant: Variant) -> str | None:
    """Return why the caption table of a variant is unusable; None if it is usable or the variant has no captions."""
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
    return None if is_current else f"{path} is stale: shards have changed since the table was written"


def _require(settings: CaptionsSettings) -> None:
    from clipmill.prep.captions.endpoint import require_client

    settings.with_prompt()
    if settings.endpoint is not None:
        require_client()


def _on_plan(plan: "ChunksPlan", request: "Request") -> None:
    if request.trial:
        import_object("clipmill.prep.captions.run:run_trial")(plan, request)


WORK = ChunkWork(
    fields=CAPTIONS_FIELDS,
    extension=EXTENSION,
    make=import_late("clipmill.prep.captions.worker:make_captions"),
    require=_require,
    resolve=resolve,
    name=variant_name,
    weights=local_weights,
    workers=import_late("clipmill.prep.captions.run:choose_workers"),
    extra_input=import_late("clipmill.prep.captions.run:other_journals"),
    on_plan=_on_plan,
    is_function_of_plan=False,  # a model may return different answers for the same request
    estimate=import_late("clipmill.prep.captions.run:estimate"),
    summary=import_late("clipmill.prep.captions.run:summary"),
    has_cpu_speed=False,
    # Readers ignore damaged lines of a journal, so every journal passes the check.
    extra_folders=(ExtraFolder(ANSWERS_FOLDER, ANSWER_FILE, lambda path: True),),
    extra_files=(MERGED_TABLE, ExtraFile(TABLE_FILE, caption_table_problem, publish_caption_table)),
    sample_facts=import_late("clipmill.prep.captions.run:sample_facts"),
    next_command=lambda data: [
        *("prep", "manifest", "captions"),
        str(Variant.open(data, column=CAPTIONS).directory / TABLE_FILE),
        *data_flags(data),
    ],
)
