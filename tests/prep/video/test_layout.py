from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipmill.manifests.errors import UserError
from clipmill.prep.core.tables import LAYOUT, read_layout, video_rows_of, write_layout
from clipmill.prep.video.settings import SPAN_CHUNKS
from clipmill.prep.video.spans import MAX_SHARD_CHUNKS, extend_layout, required_rows, shards_of_moved_videos

Videos = list[tuple[str, str, int]]  # video_id, split, number of chunks
SPLITS = ["train", "val", "test"]
VIDEOS = st.lists(
    st.tuples(st.integers(0, 30).map("v{}".format), st.sampled_from(SPLITS), st.integers(0, 90)),
    max_size=20,
    unique_by=lambda video: video[0],
)


def columns(videos: Videos) -> tuple[pa.Array, pa.Array, np.ndarray]:
    ids, splits, chunks = ([video[column] for video in videos] for column in range(3))
    return pa.array(ids, pa.string()), pa.array(splits, pa.string()), np.array(chunks, np.int64)


def extend(layout: pa.Table, videos: Videos) -> pa.Table:
    ids, splits, chunks = columns(videos)
    extended = extend_layout(layout, video_ids=ids, splits=splits, num_chunks=chunks)
    assert extended.video_rows.tolist() == video_rows_of(extended.table, ids).tolist()
    rows, _ = required_rows(extended.table, video_rows=extended.video_rows, splits=splits, num_chunks=chunks)
    assert extended.required.tolist() == rows.tolist()
    return extended.table


def wanted_spans(layout: pa.Table, videos: Videos) -> list[tuple[str, int]]:
    ids, splits, chunks = columns(videos)
    of_layout = video_rows_of(layout, ids)
    rows, video_rows = required_rows(layout, video_rows=of_layout, splits=splits, num_chunks=chunks)
    assert layout["video_id"].take(rows).to_pylist() == [videos[row][0] for row in video_rows]
    return list(zip(*(layout[name].take(rows).to_pylist() for name in ("video_id", "span_index")), strict=True))


@settings(deadline=None)
@given(manifests=st.lists(VIDEOS, min_size=1, max_size=5))
def test_every_span_has_one_shard_and_none_ever_moves(manifests: list[Videos]) -> None:
    """Change the manifest in any way: videos are added and removed, grow, shrink and change their split."""
    layout = LAYOUT.empty_table()
    for videos in manifests:
        longer = extend(layout, videos)
        assert longer.slice(0, len(layout)).equals(layout)
        new_shards = set(longer["shard_id"].to_pylist()[len(layout) :])
        assert new_shards.isdisjoint(layout["shard_id"].to_pylist())
        layout = longer
        all_spans = [(name, span) for name, _, chunks in videos for span in range(-(-chunks // SPAN_CHUNKS))]
        assert sorted(wanted_spans(layout, videos)) == sorted(all_spans)
        assert extend(layout, videos) is layout
        shards = layout["shard_id"].to_pylist()
        assert shards == sorted(shards)
        assert len(set(zip(shards, layout["split"].to_pylist(), strict=True))) == len(set(shards))


def test_shards_of_videos_with_another_split_are_found() -> None:
    before = [("a", "train", 300), ("b", "train", 300), ("c", "train", 1), ("d", "train", 1)]
    after = [("a", "val", 300), ("b", "train", 300), ("c", "val", 1), ("e", "val", 1)]
    first = extend(LAYOUT.empty_table(), before)
    layout = extend(first, after)
    held: dict[int, set[str]] = {}
    for name, shard_id in zip(layout["video_id"].to_pylist(), layout["shard_id"].to_pylist(), strict=True):
        held.setdefault(shard_id, set()).add(name)
    ids, splits, _ = columns(after)
    stored = set(first["shard_id"].to_pylist())
    rows = video_rows_of(layout, ids)
    moved = shards_of_moved_videos(layout, video_rows=rows, splits=splits, stored=stored)
    assert moved == {shard_id: names <= {"a", "c"} for shard_id, names in held.items() if names & {"a", "c"}}
    assert shards_of_moved_videos(layout, video_rows=rows, splits=splits, stored=()) == {}


def test_shards_of_a_large_set_have_a_bounded_size_and_keep_the_order() -> None:
    videos = [(f"v{n}", "train", 33) for n in range(1000)]
    layout = extend(LAYOUT.empty_table(), videos)
    chunks = Counter[int]()
    for shard, span in zip(layout["shard_id"].to_pylist(), layout["span_index"].to_pylist(), strict=True):
        chunks[shard] += 20 if span == 0 else 13
    assert max(chunks.values()) <= MAX_SHARD_CHUNKS and min(list(chunks.values())[:-1]) > MAX_SHARD_CHUNKS - SPAN_CHUNKS
    assert layout["video_id"].to_pylist() == [f"v{n}" for n in range(1000) for _ in range(2)]


def test_a_small_set_makes_work_for_many_cores() -> None:
    layout = extend(LAYOUT.empty_table(), [("v", "train", 20 * 64)])
    assert len(set(layout["shard_id"].to_pylist())) == 16


def test_a_layout_is_read_as_written_and_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "layout/15s-keep.parquet"
    assert len(read_layout(path)) == 0
    layout = extend(LAYOUT.empty_table(), [("v", "train", 50), ("w", "val", 3)])
    write_layout(path, layout)
    assert read_layout(path).equals(layout)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged"):
        read_layout(path)
