"""Tests of moments in any number of videos of any length: the result is right, or the input is rejected by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clipmill.manifests.errors import UserError
from clipmill.prep.video.spans import ShotCutting
from clipmill.shards.chunk_table import Moments, order_of
from clipmill.shards.selection import find_chunks
from clipmill.train.data.caption_rows import usable_captions
from clipmill.train.data.data_folder import ChunkTable, rows_with_video

# Values around the powers of two at which 40 bits for the time or 32 bits for the row would overflow; and the last of
# 10^9.
ROWS = np.array([0, 1, 2**23 - 1, 2**23, 2**24 - 1, 2**24, 2**24 + 1, 10**9 - 1], np.int32)
DAY_MS = 86_400_000


def test_captions_of_a_thousand_million_videos_are_of_their_own_chunks() -> None:
    chunks = np.repeat(ROWS, 2)  # [0, 15) and [15, 30) s of each video
    starts = np.tile(np.array([0, 15_000]), len(ROWS))
    plain: dict[str, Any] = {
        name: np.full(len(chunks), value) for name, value in (("num_frames", 450), ("fps_num", 30))
    }
    ones: dict[str, Any] = {name: np.ones(len(chunks), np.int64) for name in ("fps_den", "shard", "row")}
    crc32 = np.zeros(len(chunks), np.uint32)
    table = ChunkTable(video_row=chunks, start_ms=starts, **plain, **ones, crc32=crc32)
    rows = np.append(ROWS, 10**9 - 2).astype(np.int32)  # the last video has no chunk
    captions = usable_captions(
        video_row=rows.astype(np.int64),
        begin_s=np.full(len(rows), 16.0),
        end_s=np.full(len(rows), 17.0),
        chunks=table,
    )
    assert captions.num_unusable == {"video_without_chunks": 1}
    assert captions.first_chunk.tolist() == list(range(1, 2 * len(ROWS), 2))


def test_rows_are_put_in_order_whatever_their_number() -> None:
    shuffled = np.random.default_rng(0).permutation(np.repeat(ROWS, 2))
    starts = np.random.default_rng(1).permutation(len(shuffled)) * (2**40 // 8)
    _, order = rows_with_video(shuffled, starts)
    assert order is not None
    in_order = sorted(zip(shuffled.tolist(), starts.tolist(), strict=True))
    assert list(zip(shuffled[order].tolist(), starts[order].tolist(), strict=True)) == in_order
    assert order_of(shuffled[order], starts[order]) is None


def _found_scores(starts: np.ndarray, row: int, start_ms: int) -> int:
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["a", "b"]))
    table = pa.table({"video_id": codes, "start_ms": starts})
    expected = {"video_row": np.array([row]), "start_ms": np.array([start_ms])}
    return int(find_chunks(table, video_ids=pa.array(["a", "b", "c"]), **expected)[0])


def _found_span(starts: np.ndarray, row: int, start: int) -> int:
    cutting = ShotCutting(
        begins=np.array([0, 1, 2]), first_frame=starts, chunk_frames=np.array([1, 1]), span_chunks=1,
        num_left_out=0, frames_left_out=0, videos_left_out=(),
    )  # fmt: skip
    return int(cutting.span_index(np.array([row]), np.array([start]))[0])


@pytest.mark.parametrize("find", [_found_scores, _found_span])
def test_a_late_chunk_is_not_taken_for_one_of_the_next_video(find: Callable[[np.ndarray, int, int], int]) -> None:
    starts = np.array([2**40, 1])
    assert find(starts, 0, 2**40) == 0 and find(starts, 1, 1) >= 0
    for row, start in ((1, 0), (0, 1), (0, 2**40 + 1), (1, 2**40)):
        assert find(starts, row, start) == -1


def test_what_64_bits_cannot_tell_apart_is_refused_by_name() -> None:
    Moments.build(np.array([10**9 - 1]), np.array([0, 100 * DAY_MS]))
    with pytest.raises(UserError, match="1,000,000,000 videos with times from 0 to 10,368,000,000"):
        Moments.build(np.array([10**9 - 1]), np.array([0, 120 * DAY_MS]))


def test_moments_outside_lie_between_those_inside() -> None:
    rows, times = np.array([0, 0, 3]), np.array([5, 9, 7])
    moments = Moments.build(rows, times)
    known_numbers = moments.numbers(rows, times)
    others = np.array([-1, 0, 0, 1, 3, 3, 2**31]), np.array([9, -(2**50), 2**50, 7, 6, 8, 0])
    numbers = moments.numbers(*others)
    assert np.searchsorted(known_numbers, numbers).tolist() == [0, 0, 2, 2, 2, 3, 3]
    assert not np.isin(numbers, known_numbers).any()
