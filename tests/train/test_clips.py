from fractions import Fraction

import numpy as np
import pytest

from train.data.clips import ChunkTimes, FramePlace, locate_frames, segment_times_us, to_us


def chunk(start_ms: int, num_frames: int = 450, fps_num: int = 30, fps_den: int = 1) -> ChunkTimes:
    return ChunkTimes(start_ms=start_ms, num_frames=num_frames, fps_num=fps_num, fps_den=fps_den)


@pytest.mark.parametrize(
    ("begin_s", "end_s", "num_frames", "expected"),
    [
        (0.0, 4.0, 4, [15, 45, 75, 105]),
        (2.0, 2.1, 1, [61]),
        (3.3, 3.4, 2, [99, 101]),  # 3.325 s and 3.375 s: frames 99.75 and 101.25
        (0.0, 15.0, 1, [225]),
        (14.9, 15.0, 3, [447, 448, 449]),
        (1.0, 1.001, 3, [30, 30, 30]),
    ],
)
def test_centres_of_segments_become_frames(begin_s: float, end_s: float, num_frames: int, expected: list[int]) -> None:
    times = segment_times_us(to_us(begin_s), to_us(end_s), num_frames=num_frames, rng=None)
    assert [place.frame for place in locate_frames(times, [chunk(0)])] == expected


@pytest.mark.parametrize(
    ("fps_num", "fps_den"), [(30, 1), (30000, 1001), (24000, 1001), (25, 1), (10, 1), (60000, 1001)]
)
def test_the_first_instant_of_every_frame_belongs_to_it_and_the_one_before_does_not(fps_num: int, fps_den: int) -> None:
    one = chunk(5000, 300, fps_num, fps_den)
    for frame in range(300):
        begins = 5_000_000 + Fraction(frame * fps_den * 1_000_000, fps_num)
        assert locate_frames([begins], [one]) == [FramePlace(0, frame)]
        if frame:
            assert locate_frames([begins - Fraction(1, 10**9)], [one]) == [FramePlace(0, frame - 1)]


def test_decimal_times_are_not_led_astray_by_binary_ones() -> None:
    """3.3 as a double lies just under 3.3, which would be the frame before."""
    assert Fraction(3.3) < Fraction(33, 10)
    assert locate_frames([Fraction(to_us(3.3))], [chunk(0, 150, 10)]) == [FramePlace(0, 33)]


def test_a_clip_across_a_border_takes_each_frame_from_its_own_chunk() -> None:
    times = segment_times_us(to_us(14.0), to_us(16.0), num_frames=4, rng=None)
    places = locate_frames(times, [chunk(0), chunk(15000)])
    assert places == [FramePlace(0, 427), FramePlace(0, 442), FramePlace(1, 7), FramePlace(1, 22)]


def test_a_clip_may_span_three_chunks_of_different_rates() -> None:
    chunks = [chunk(0, 10, 10), chunk(1000, 25, 25), chunk(2000, 30, 30)]
    times = [Fraction(500_000), Fraction(1_500_000), Fraction(2_500_000)]
    assert locate_frames(times, chunks) == [FramePlace(0, 5), FramePlace(1, 12), FramePlace(2, 15)]


def test_the_sliver_that_rounded_starts_leave_belongs_to_the_last_frame() -> None:
    """15 s at 23.976: 360 frames last 15.015 s; the third chunk begins at 30.030 s."""
    chunks = [chunk(0, 359, 24000, 1001), chunk(14974, 359, 24000, 1001)]  # the first ends at 14.973292 s
    assert locate_frames([Fraction(14_973_900)], chunks) == [FramePlace(0, 358)]
    assert locate_frames([Fraction(14_974_000)], chunks) == [FramePlace(1, 0)]


def test_a_moment_that_no_chunk_holds_is_refused() -> None:
    for time_us in (-1, 15_002_000):
        with pytest.raises(ValueError, match="no chunk holds"):
            locate_frames([Fraction(time_us)], [chunk(0)])
    with pytest.raises(ValueError, match="no chunk holds"):
        locate_frames([Fraction(20_000_000)], [chunk(0), chunk(30_000)])


def test_jitter_stays_in_its_segment_and_follows_its_seed() -> None:
    for seed in range(200):
        times = segment_times_us(1_000_000, 4_000_000, num_frames=3, rng=np.random.default_rng(seed))
        assert [int(time // 1_000_000) for time in times] == [1, 2, 3]
        again = segment_times_us(1_000_000, 4_000_000, num_frames=3, rng=np.random.default_rng(seed))
        assert times == again


@pytest.mark.parametrize(("begin", "end", "num_frames"), [(5, 5, 4), (6, 5, 4), (0, 5, 0)])
def test_an_empty_span_is_refused(begin: int, end: int, num_frames: int) -> None:
    with pytest.raises(ValueError, match="moments"):
        segment_times_us(begin, end, num_frames=num_frames, rng=None)
