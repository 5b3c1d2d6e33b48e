"""The scores of all chunks in one table, `<data>/scores/<variant>/chunks.arrow`, which `prep scores` writes at its end.

It is an Arrow IPC file of one batch, ordered by video (as in the manifest) and start; readers map it into memory.
Columns: SCORES_FIELDS without `chunk_fingerprint`, `video_id` as a dictionary whose codes ascend; `duplicate_of`, the
row of the first chunk of an earlier video that looks alike, or -1; `has_look_alike`, whether any chunk of another video
does (clipmill.shards.look_alikes). A chunk whose scores could not be computed has a row of unknown values.

clipmill.shards.merged_table defines how readers recognise a stale or damaged file.
"""

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import split_key
from clipmill.manifests.store import read_videos
from clipmill.shards.columns import SCORES, VIDEO, command_for, how_to_make, how_to_repair
from clipmill.shards.damage import Damaged
from clipmill.shards.dataset import current_variant
from clipmill.shards.look_alikes import first_look_alikes, is_comparable
from clipmill.shards.merged_table import (
    CHUNKS_FILE,
    DamagedTable,
    is_table_of,
    open_merged_table,
    verify_columns,
    write_merged_table,
)
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import SCORES_FIELDS

_STALE = "shards of scores have changed since it was written"
_ROWS = pa.schema([field for field in SCORES_FIELDS if field.name != "chunk_fingerprint"])
_SCHEMA = pa.schema(
    [
        pa.field("video_id", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        *list(_ROWS)[1:],
        pa.field("duplicate_of", pa.int64(), nullable=False),
        pa.field("has_look_alike", pa.bool_(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Scores:
    """The merged table of a variant of the column `scores`."""

    table: pa.Table
    variant: Variant


def publish_score_table(variant: Variant) -> Path:
    """Merge the indexes of a variant of `scores` into its table, with near duplicates.

    Raises:
        UserError: an index is damaged, or holds a NaN.
    """
    return write_score_table(variant, _order_rows(_read_rows(variant), data_dir=variant.directory.parent.parent))


def write_score_table(variant: Variant, rows: pa.Table) -> Path:
    """Write the merged table of these rows, which are in its order and in one chunk; find the near duplicates."""
    phash = rows["phash"]
    comparable = np.flatnonzero(pc.is_valid(phash))
    hashes = pc.fill_null(phash, 0).to_numpy()[comparable]
    with_content = is_comparable(hashes)
    comparable, hashes = comparable[with_content], hashes[with_content]
    duplicate_of, has_look_alike = np.full(len(rows), -1), np.zeros(len(rows), bool)
    first, has_look_alike[comparable] = first_look_alikes(hashes, video=_codes(rows)[comparable])
    duplicate_of[comparable] = np.where(first >= 0, comparable[first], -1)
    rows = rows.append_column("duplicate_of", pa.array(duplicate_of))
    rows = rows.append_column("has_look_alike", pa.array(has_look_alike)).cast(_SCHEMA)
    path = variant.directory / CHUNKS_FILE
    write_merged_table(path, rows.combine_chunks(), commits=variant.commits, metadata={})
    return path


def open_scores(data_dir: Path, *, columns: Collection[str] | None = None) -> Scores:
    """Open the merged table of the current variant of `scores`.

    Args:
        columns: columns to open and verify; None for all.

    Raises:
        UserError: there are no scores, they are of another variant of `video`, or the table is missing, of other
            commits, or damaged.
    """
    variant = Variant.open(data_dir, column=SCORES).whole()
    require_current_chunks(variant, data_dir)
    hint = f"run {how_to_make(SCORES, data_dir)}"
    path = variant.directory / CHUNKS_FILE
    try:
        table = _read_table(path, columns=columns, hint=hint)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing", hint=hint) from error
    if not is_table_of(table, variant.commits):
        raise UserError(f"{path} is stale: {_STALE}", hint=hint)
    return Scores(table, variant)


def require_current_chunks(variant: Variant, data_dir: Path) -> None:
    """Raise a UserError if a variant was made from another variant of `video` than the current one."""
    column, made_of = variant.directory.parent.name, variant.recipe.get(VIDEO)
    video = current_variant(data_dir, VIDEO)
    if made_of is not None and made_of != video:
        raise UserError(
            f"the column {column} was made from the chunks of {made_of}, but the current variant of {VIDEO} is {video}",
            hint=f"make it again with its settings: prep status --data {shlex.quote(str(data_dir))} shows the command",
        )


def has_score_table(variant: Variant) -> bool:
    """Return True if the table of a variant is undamaged and made of its commits."""
    return score_table_problem(variant) is None


def score_table_problem(variant: Variant) -> str | None:
    """Return why the table of a variant cannot be used, because it is missing, stale or damaged; None if it can."""
    path = variant.directory / CHUNKS_FILE
    try:
        table = _read_table(path, columns=None, hint="")
    except FileNotFoundError:
        return f"{path} is missing"
    except UserError as error:
        return str(error)
    return None if is_table_of(table, variant.commits) else f"{path} is stale: {_STALE}"


def _read_table(path: Path, *, columns: Collection[str] | None, hint: str) -> pa.Table:
    """Read and verify columns of a table.

    Raises:
        FileNotFoundError: there is no table.
        UserError: it is damaged.
    """
    try:
        return verify_columns(open_merged_table(path), path, columns=columns)
    except FileNotFoundError:
        raise
    except (DamagedTable, OSError) as error:
        raise UserError(str(error), hint=hint) from error


def _read_rows(variant: Variant) -> pa.Table:
    """The rows of all indexes, and rows of unknown values for the chunks that failed."""
    tables = [_ROWS.empty_table()]
    for shard in variant.shards():
        try:
            table = shard.index.select(_ROWS.names).cast(_ROWS)
        except (Damaged, OSError, KeyError, pa.ArrowException) as error:
            hint = how_to_repair(SCORES)
            raise UserError(f"{shard.index_path}: {error}", hint=hint) from error
        for field in _ROWS:
            if pa.types.is_floating(field.type) and pc.any(pc.is_nan(table[field.name])).as_py():
                raise UserError(
                    f"{shard.index_path}: {field.name} is NaN for some chunks",
                    hint=f"remove {shard.index_path} and run prep {command_for(SCORES)}, which makes that shard again",
                )
        tables.append(table)
    failed = {failure.key for commit in variant.commits.values() for failure in commit.failures if failure.key}
    video_ids, starts_ms = zip(*map(split_key, sorted(failed)), strict=True) if failed else ((), ())
    unknown = {"video_id": video_ids, "start_ms": starts_ms}
    nothing = {field.name: pa.nulls(len(failed), field.type) for field in _ROWS if field.name not in unknown}
    return pa.concat_tables([*tables, pa.table({**unknown, **nothing}, schema=_ROWS)])


def _order_rows(rows: pa.Table, *, data_dir: Path) -> pa.Table:
    """Order rows by video and start, in one chunk; videos that are not in the manifest come last."""
    coded = rows["video_id"].dictionary_encode().combine_chunks()
    found = coded.dictionary
    number = pc.index_in(found, value_set=read_videos(data_dir)["video_id"].combine_chunks())
    by_number = pc.sort_indices(
        pa.table({"number": number, "id": found}), [("number", "ascending"), ("id", "ascending")]
    )
    rank = np.empty(len(found), np.int32)
    rank[by_number.to_numpy()] = np.arange(len(found), dtype=np.int32)
    codes = rank[coded.indices.to_numpy()]
    order = pa.array(np.lexsort((rows["start_ms"].to_numpy(), codes)))
    video_id = pa.DictionaryArray.from_arrays(pa.array(codes).take(order), found.take(by_number))
    ordered = rows.drop_columns("video_id").take(order).combine_chunks()
    return ordered.add_column(0, "video_id", video_id)


def _codes(rows: pa.Table) -> np.ndarray:
    return rows["video_id"].chunk(0).indices.to_numpy() if len(rows) else np.empty(0, np.int32)
