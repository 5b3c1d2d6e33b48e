"""Layouts: the assignment of spans of videos to shards.

An assignment never changes: adding videos does not move existing spans. Layouts are stored in `<data>/layout/`. Those
of `video` are named after the chunk length and shared by all recipes with that length, so that their variants have the
same shards; the layout of any other column is `<column>.parquet`. If a layout file is damaged or missing, the layout is
rebuilt from the commits, which record what each shard holds. Spans of shards that were never committed are assigned
again when the layout is next extended.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.prep.core.table_file import as_array, read_table_file, write_table_file
from clipmill.shards.columns import COLUMNS, VIDEO, command_for
from clipmill.shards.commits import Commit, Failure
from clipmill.shards.dataset import list_variants, variant_dir
from clipmill.shards.format import RECIPE_FILE
from clipmill.shards.index import open_index
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant

LAYOUT_FOLDER = "layout"
SpanId = tuple[str, int]  # (video id, number of the span within its video)

LAYOUT = pa.schema(
    [
        pa.field("shard_id", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("video_id", pa.string(), nullable=False),
        pa.field("span_index", pa.int32(), nullable=False),
    ]
)


def owner_of_layout(path: Path) -> str:
    """Return the column that owns a layout: the column that the file is named after, otherwise `video`."""
    name = path.name.partition(".")[0]
    is_column = name in COLUMNS or any((path.parent.parent / name).glob(f"*/{RECIPE_FILE}"))
    return name if is_column else VIDEO


class DamagedLayout(UserError):
    """A layout file is damaged."""

    def __init__(self, path: Path, why: str) -> None:
        command = f"prep {command_for(owner_of_layout(path))}"
        super().__init__(
            f"the layout {path} is damaged: {why}",
            hint=f"run `{command}` again with the same settings as before; it rebuilds the layout from the commits",
        )


def read_layout(path: Path, *, expected: Mapping[str, pa.ChunkedArray] | None = None) -> pa.Table:
    """Read the layout at `path`; return an empty layout if the file does not exist.

    Args:
        expected: columns that it probably has, which are then returned instead of copies.

    Raises:
        DamagedLayout: the file is damaged.
    """
    try:
        return read_table_file(path, schema=LAYOUT, expected=expected)
    except FileNotFoundError:
        return LAYOUT.empty_table()
    except ValueError as error:
        raise DamagedLayout(path, str(error)) from None


def stored_or_rebuilt_layout(
    path: Path, rebuild: Callable[[], pa.Table], *, video_ids: pa.Array, splits: pa.Array
) -> pa.Table:
    """Read the layout at `path`, or rebuild it from the commits with `rebuild()` if the file is damaged or missing.

    Args:
        video_ids: ids of the manifest's videos, in its order.
        splits: their splits. If each video has one span and all have one split, the layout has the same columns.
    """
    try:
        if path.exists():
            given = {"video_id": video_ids, "split": splits}
            return read_layout(path, expected={name: pa.chunked_array([array]) for name, array in given.items()})
        layout, why = rebuild(), f"the layout {path} is missing"
    except DamagedLayout as damage:
        layout, why = rebuild(), str(damage)
    if len(layout):
        sys.stderr.write(f"warning: {why}; using the layout recorded in the commits\n")
    return layout


def write_layout(path: Path, layout: pa.Table) -> None:
    """Publish the layout unless the file already holds it; call it before any work that relies on the layout."""
    try:
        expected = dict(zip(layout.column_names, layout.columns, strict=True))
        if path.exists() and read_layout(path, expected=expected).equals(layout):
            return
    except DamagedLayout:
        pass  # replaced with the rebuilt layout
    path.parent.mkdir(exist_ok=True)
    write_table_file(path, layout)


def video_rows_of(layout: pa.Table, video_ids: pa.Array) -> np.ndarray:
    """Return the row in `video_ids` of the video of each row of `layout`, int64; -1 if it is not among them."""
    if not len(layout):
        return np.zeros(0, np.int64)
    ids = layout["video_id"]
    if ids.equals(pa.chunked_array([video_ids])):  # usual if each video has one span; looked up, millions take seconds
        return np.arange(len(ids))
    return np.asarray(pc.fill_null(pc.index_in(ids, value_set=video_ids), -1)).astype(np.int64)


def wanted_spans(
    layout: pa.Table, *, video_rows: np.ndarray, splits: pa.Array, num_spans: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of `layout` whose span is still wanted, in layout order, and the row of the video for each.

    A span is wanted while its video is in the manifest with the split of the shard and is long enough to contain it.

    Args:
        layout: table with schema LAYOUT.
        video_rows: result of `video_rows_of`.
        splits: splits of the videos, in manifest order.
        num_spans: number of spans of each video, int64.
    """
    if not len(layout):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    known = video_rows >= 0
    same_split = np.zeros(len(layout), bool)
    same_split[known] = np.asarray(
        pc.equal(as_array(layout["split"]).filter(pa.array(known)), splits.take(pa.array(video_rows[known])))
    )
    exists = np.zeros(len(layout), bool)
    exists[known] = np.asarray(layout["span_index"])[known] < num_spans[video_rows[known]]
    rows = np.flatnonzero(same_split & exists)
    return rows, video_rows[rows]


def variants_of(data_dir: Path, column: str) -> Iterator[Variant]:
    """Open all variants of a column."""
    for name in list_variants(data_dir, column):
        yield Variant(variant_dir(data_dir, column, name))


def layout_of_commits(
    variants: list[Variant],
    video_ids: pa.Array,
    *,
    spans: Callable[[pa.Table], list[SpanId]],
    span_of_failure: Callable[[Failure], SpanId | None],
) -> pa.Table:
    """Rebuild the layout (schema LAYOUT) from the commits of some variants.

    Args:
        video_ids: ids of the manifest's videos, in its order.
        spans: return the spans of a shard, given its index.
        span_of_failure: return the span that a failure in a commit belongs to, or None.
    """
    position = {video_id: row for row, video_id in enumerate(video_ids.to_pylist())} if variants else {}
    shards: dict[int, tuple[str, list[SpanId]]] = {}
    for variant in variants:
        for commit in variant.commits.values():
            try:
                held = _spans_of(variant.directory, commit, spans=spans)
            except (Damaged, OSError):
                continue  # it will be assigned to a new shard
            failed = {span for span in map(span_of_failure, commit.failures) if span is not None}.difference(held)
            if failed:
                # The order in which the layout was made: that of the manifest.
                held = sorted([*held, *failed], key=lambda span: (position.get(span[0], len(position)), span[1]))
            if len(held) > len(shards.get(commit.shard_id, ("", []))[1]):
                shards[commit.shard_id] = (commit.split, held)
    rows = [(shard_id, split, *span) for shard_id, (split, of_shard) in sorted(shards.items()) for span in of_shard]
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, LAYOUT, strict=True)]
    return pa.table(arrays, schema=LAYOUT)


def _spans_of(directory: Path, commit: Commit, *, spans: Callable[[pa.Table], list[SpanId]]) -> list[SpanId]:
    return [] if commit.files is None else spans(open_index(directory / commit.files.index))
