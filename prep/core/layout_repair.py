"""A layout from the commits: which spans lie in which shards is written in the shards themselves.

It serves when the file of a layout is damaged or gone. Spans of shards that were never committed get a place again
when the layout is extended.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from manifests.errors import UserError
from prep.core.data_folder import TEXT, VIDEO
from prep.core.layout import LAYOUT
from prep.video.recipe import SPAN_CHUNKS, recipe_from_dict
from prep.video.settings import ChunkSettings
from shards.commits import Commit, Failure
from shards.damage import Damaged
from shards.dataset import list_variants, variant_dir
from shards.index import open_index
from shards.reader import Variant

Span = tuple[str, int]  # video id, number of the span in its video


def video_layout_of_commits(data_dir: Path, settings: ChunkSettings, *, video_ids: pa.Array) -> pa.Table:
    """The layout (schema LAYOUT) of chunks of this length, from every variant that shares it.

    Args:
        video_ids: of the manifest, in its order.
    """
    chunk_ms = float(1000 * settings.chunk_frames / settings.fps_exact)

    def span_indexes(start_ms: np.ndarray) -> np.ndarray:
        return np.rint(start_ms / chunk_ms).astype(np.int64) // SPAN_CHUNKS

    def spans(index: pa.Table) -> list[Span]:
        of_rows = span_indexes(index["start_ms"].to_numpy()).tolist()
        return list(dict.fromkeys(zip(index["video_id"].to_pylist(), of_rows, strict=True)))

    def span_of_failure(failure: Failure) -> Span | None:
        if failure.key is None:
            return None
        start_ms = int(failure.key.rpartition("_")[2])
        return failure.video_id, int(span_indexes(np.array([start_ms]))[0])

    def shares_layout(variant: Variant) -> bool:
        try:
            other = recipe_from_dict(variant.recipe).settings()
        except UserError:
            return False
        return (other.len, other.tail, other.fps_exact) == (settings.len, settings.tail, settings.fps_exact)

    variants = [variant for variant in _variants(data_dir, VIDEO) if shares_layout(variant)]
    return _layout_of(variants, video_ids, spans=spans, span_of_failure=span_of_failure)


def text_layout_of_commits(data_dir: Path, *, video_ids: pa.Array) -> pa.Table:
    """The layout (schema LAYOUT) of `text`, in which each video is a single span."""

    def spans(index: pa.Table) -> list[Span]:
        return [(video_id, 0) for video_id in index["video_id"].to_pylist()]

    return _layout_of(
        list(_variants(data_dir, TEXT)),
        video_ids,
        spans=spans,
        span_of_failure=lambda failure: (failure.video_id, 0),
    )


def _variants(data_dir: Path, column: str) -> Iterator[Variant]:
    for name in list_variants(data_dir, column):
        yield Variant(variant_dir(data_dir, column, name))


def _layout_of(
    variants: list[Variant],
    video_ids: pa.Array,
    *,
    spans: Callable[[pa.Table], list[Span]],
    span_of_failure: Callable[[Failure], Span | None],
) -> pa.Table:
    place = {video_id: row for row, video_id in enumerate(video_ids.to_pylist())} if variants else {}
    shards: dict[int, tuple[str, list[Span]]] = {}
    for variant in variants:
        for commit in variant.commits.values():
            try:
                there = _spans_of(variant.directory, commit, spans=spans)
            except (Damaged, OSError):
                continue  # made again, in a new shard
            failed = {span for span in map(span_of_failure, commit.failures) if span is not None}.difference(there)
            if failed:
                # As the layout was made: in the order of the manifest.
                there = sorted([*there, *failed], key=lambda span: (place.get(span[0], len(place)), span[1]))
            if len(there) > len(shards.get(commit.shard_id, ("", []))[1]):
                shards[commit.shard_id] = (commit.split, there)
    rows = [(shard_id, split, *span) for shard_id, (split, of_shard) in sorted(shards.items()) for span in of_shard]
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, LAYOUT, strict=True)]
    return pa.table(arrays, schema=LAYOUT)


def _spans_of(directory: Path, commit: Commit, *, spans: Callable[[pa.Table], list[Span]]) -> list[Span]:
    return [] if commit.files is None else spans(open_index(directory / commit.files.index))
