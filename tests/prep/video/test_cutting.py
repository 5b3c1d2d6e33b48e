"""Tests of the arithmetic of chunks at shot boundaries: their lengths, and the assignment of every frame."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipmill.prep.video.spans import shot_chunks, shot_cutting


@st.composite
def videos(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Draw (cuts, number of frames, longest chunk, shortest chunk)."""
    longest = draw(st.integers(1, 40))
    shortest = draw(st.integers(1, -(-longest // 2)))
    shots = draw(st.lists(st.integers(1, 100), min_size=1, max_size=60))
    return np.cumsum(shots)[:-1].tolist(), sum(shots), longest, shortest


@settings(deadline=None)
@given(videos())
def test_every_frame_is_in_one_chunk_or_in_a_short_shot_without_room_beside_it(
    video: tuple[list[int], int, int, int],
) -> None:
    cuts, num_frames, longest, shortest = video
    made = shot_chunks(cuts, num_frames, max_frames=longest, min_frames=shortest)
    end, gaps = 0, []
    for number, (first, frames) in enumerate([*made.chunks, (num_frames, 0)]):
        assert first >= end
        if first > end:
            before = made.chunks[number - 1][1] if number and end == sum(made.chunks[number - 1]) else None
            gaps.append((end, first, before, frames or None))
        end = first + frames
    assert all(shortest <= frames <= longest for _, frames in made.chunks)
    borders = {0, *cuts, num_frames}
    for begin, gap_end, before, after in gaps:
        assert gap_end - begin < shortest and begin in borders and gap_end in borders
        # The chunk after the gap may have grown since, so only the chunk before it is certain.
        assert before is None or before + gap_end - begin > longest
        assert after is not None or gap_end == num_frames
    assert made.num_left_out >= len(gaps)
    assert (made.num_left_out == 0) == (not gaps)


@settings(deadline=None)
@given(videos())
def test_a_chunk_without_a_cut_inside_has_the_shot_s_borders_or_is_one_of_its_equal_parts(
    video: tuple[list[int], int, int, int],
) -> None:
    cuts, num_frames, longest, shortest = video
    made = shot_chunks(cuts, num_frames, max_frames=longest, min_frames=shortest)
    borders = np.array([0, *cuts, num_frames])
    for first, frames in made.chunks:
        shot = int(np.searchsorted(borders, first, side="right")) - 1
        begin, end = borders[shot : shot + 2].tolist()
        num_parts = -(-(end - begin) // longest)
        parts = {begin + (end - begin) * part // num_parts for part in range(num_parts + 1)}
        assert first in parts
        if first + frames <= end:
            assert first + frames in parts


@pytest.mark.parametrize(
    ("shots", "chunks", "num_left_out"),
    [
        ([60], [(0, 60)], 0),
        ([450], [(0, 450)], 0),
        ([451], [(0, 225), (225, 226)], 0),
        ([1000], [(0, 333), (333, 333), (666, 334)], 0),
        ([100, 59, 300], [(0, 159), (159, 300)], 0),
        ([300, 59, 100], [(0, 300), (300, 159)], 0),
        ([100, 59, 100], [(0, 159), (159, 100)], 0),
        ([440, 59, 440], [(0, 440), (499, 440)], 1),
        ([440, 20, 20, 440], [(0, 440), (480, 440)], 2),
        ([440, 59, 390], [(0, 440), (440, 449)], 0),
        ([59], [], 1),
        ([1], [], 1),
        ([450, 1], [(0, 450)], 1),
        ([1] * 130, [(0, 60), (60, 70)], 0),
    ],
    ids=str,
)
def test_the_rule(shots: list[int], chunks: list[tuple[int, int]], num_left_out: int) -> None:
    cuts = np.cumsum(shots)[:-1].tolist()
    made = shot_chunks(cuts, sum(shots), max_frames=450, min_frames=60)
    assert (made.chunks, made.num_left_out) == (chunks, num_left_out)


def test_spans_hold_the_chunks_in_order_and_say_what_lies_between_them() -> None:
    shots = [440, 59, 440, *[100] * 40]
    cutting = shot_cutting(
        [None, np.cumsum(shots)[:-1].tolist(), []],
        np.array([900, sum(shots), 100]),
        max_frames=450,
        min_frames=60,
        span_chunks=20,
    )
    assert cutting.num_chunks.tolist() == [0, 42, 1]
    assert (cutting.num_left_out, cutting.frames_left_out) == (1, 59)
    spans = [cutting.span(1, index) for index in range(3)]
    assert [len(span.chunk_frames) for span in spans] == [20, 20, 2]
    assert [span.is_last for span in spans] == [False, False, True]
    assert spans[0].segment_lengths() == [(440, True), (59, False), (440, True), *[(100, True)] * 18]
    assert spans[0].chunk_starts()[:3] == [0, 499, 939]
    assert spans[1].gaps == () and spans[1].first_frame == spans[0].num_frames
    assert cutting.span_frames(np.array([1, 1, 1, 2]), np.array([0, 1, 2, 0])).tolist() == [2680, 2000, 200, 100]
    starts = np.array([first for span in spans for first in span.chunk_starts()] + [7, 0])
    of_videos = np.array([1] * 42 + [1, 2])
    assert cutting.span_index(of_videos, starts).tolist() == [0] * 20 + [1] * 20 + [2] * 2 + [-1, 0]
    assert len({*cutting.identities(np.arange(3)).to_pylist()}) == 3
