from fractions import Fraction

import numpy as np
import pytest

from clipmill.train.data.frame_sampling import (
    ChunkTimes,
    FrameIndex,
    Moments,
    Sampling,
    SamplingRule,
    locate_frames,
    moments_of,
    to_us,
)


def chunk(start_ms: int, num_frames: int = 450, fps_num: int = 30, fps_den: int = 1) -> ChunkTimes:
    return ChunkTimes(start_ms=start_ms, num_frames=num_frames, fps_num=fps_num, fps_den=fps_den)


def at(*times_us: Fraction | int) -> Moments:
    """Return moments at exact times."""
    scale = 10**9 * 30000 * 24000
    return Moments(tuple(int(time_us * scale) for time_us in times_us), scale)


def moments(begin_us: int, end_us: int, num_frames: int, *, seed: int | None = None) -> Moments:
    rng = None if seed is None else np.random.default_rng(seed)
    return moments_of(begin_us, end_us, Sampling(num_frames=num_frames), fps_num=30, fps_den=1, rng=rng)


def frames_of(
    rule: SamplingRule, begin_us: int, end_us: int, *, seed: int | None = None, stride: int = 4, num_frames: int = 16
) -> list[int]:
    """Return the frames of a 30 fps video that a rule selects."""
    sampling = Sampling(num_frames=num_frames, rule=rule, stride=stride)
    rng = None if seed is None else np.random.default_rng(seed)
    moments_found = moments_of(begin_us, end_us, sampling, fps_num=30, fps_den=1, rng=rng)
    return [place.frame for place in locate_frames(moments_found, [chunk(0)])]


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
    moments_found = moments(to_us(begin_s), to_us(end_s), num_frames)
    assert [place.frame for place in locate_frames(moments_found, [chunk(0)])] == expected


@pytest.mark.parametrize(
    ("fps_num", "fps_den"), [(30, 1), (30000, 1001), (24000, 1001), (25, 1), (10, 1), (60000, 1001)]
)
def test_the_first_instant_of_every_frame_belongs_to_it_and_the_one_before_does_not(fps_num: int, fps_den: int) -> None:
    only_chunk = chunk(5000, 300, fps_num, fps_den)
    for frame in range(300):
        begins = 5_000_000 + Fraction(frame * fps_den * 1_000_000, fps_num)
        assert locate_frames(at(begins), [only_chunk]) == [FrameIndex(0, frame)]
        assert only_chunk.frame_begin_us(frame) == begins
        if frame:
            assert locate_frames(at(begins - Fraction(1, 10**9)), [only_chunk]) == [FrameIndex(0, frame - 1)]


def test_decimal_times_are_not_led_astray_by_binary_ones() -> None:
    """As a double, 3.3 is slightly smaller than 3.3, which would select the previous frame."""
    assert Fraction(3.3) < Fraction(33, 10)
    assert locate_frames(at(to_us(3.3)), [chunk(0, 150, 10)]) == [FrameIndex(0, 33)]


def test_a_clip_across_a_border_takes_each_frame_from_its_own_chunk() -> None:
    places = locate_frames(moments(to_us(14.0), to_us(16.0), 4), [chunk(0), chunk(15000)])
    assert places == [FrameIndex(0, 427), FrameIndex(0, 442), FrameIndex(1, 7), FrameIndex(1, 22)]


def test_a_clip_may_span_three_chunks_of_different_rates() -> None:
    chunks = [chunk(0, 10, 10), chunk(1000, 25, 25), chunk(2000, 30, 30)]
    assert locate_frames(at(500_000, 1_500_000, 2_500_000), chunks) == [
        FrameIndex(0, 5),
        FrameIndex(1, 12),
        FrameIndex(2, 15),
    ]


def test_the_sliver_that_rounded_starts_leave_belongs_to_the_last_frame() -> None:
    """With chunks of 15 s at 23.976 fps, 360 frames last 15.015 s, and the third chunk starts at 30.030 s."""
    chunks = [chunk(0, 359, 24000, 1001), chunk(14974, 359, 24000, 1001)]  # the first ends at 14.973292 s
    assert locate_frames(at(14_973_900), chunks) == [FrameIndex(0, 358)]
    assert locate_frames(at(14_974_000), chunks) == [FrameIndex(1, 0)]


def test_a_moment_that_no_chunk_holds_is_refused() -> None:
    for time_us in (-1, 15_002_000):
        with pytest.raises(ValueError, match="no chunk contains"):
            locate_frames(at(time_us), [chunk(0)])
    with pytest.raises(ValueError, match="no chunk contains"):
        locate_frames(at(20_000_000), [chunk(0), chunk(30_000)])


def test_jitter_stays_in_its_segment_and_follows_its_seed() -> None:
    for seed in range(200):
        moments_found = moments(1_000_000, 4_000_000, 3, seed=seed)
        assert [time // (moments_found.denominator * 1_000_000) for time in moments_found.numerators] == [1, 2, 3]
        assert moments_found == moments(1_000_000, 4_000_000, 3, seed=seed)


@pytest.mark.parametrize(("begin", "end", "num_frames"), [(5, 5, 4), (6, 5, 4), (0, 5, 0)])
def test_an_empty_span_is_refused(begin: int, end: int, num_frames: int) -> None:
    with pytest.raises(ValueError, match="moments"):
        moments(begin, end, num_frames)


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), -float("inf")])
def test_a_time_that_is_no_number_is_refused(time_s: float) -> None:
    with pytest.raises(ValueError, match="not a time"):
        to_us(time_s)


def test_strided_frames_lie_a_stride_apart_wherever_the_window_begins() -> None:
    firsts = set()
    for seed in range(200):
        frames = frames_of("stride", 1_000_000, 9_000_000, seed=seed)
        assert set(np.diff(frames)) == {4} and frames[0] >= 30 and frames[-1] + 4 <= 271
        firsts.add(frames[0])
    assert min(firsts) < 40 and max(firsts) > 195  # of 30 to 206
    assert frames_of("stride", 1_000_000, 9_000_000) == list(range(118, 182, 4))  # the middle of 30 ... 270


def test_the_stride_shrinks_in_a_span_that_is_too_short() -> None:
    assert frames_of("stride", 0, 1_600_000) == list(range(0, 48, 3))  # 48 frames in place of 64
    assert frames_of("stride", 0, 1_600_000, seed=5) == list(range(0, 48, 3))
    assert frames_of("stride", 1_000_000, 1_100_000, num_frames=6) == [30, 30, 31, 31, 32, 32]


def test_lavilas_rule_rounds_segment_borders_to_frames() -> None:
    """One second has frames 0 ... 30, in segments of 29 / 4 frames.

    The rounded boundaries are 0, 7, 14 (14.5 rounds to even), 22 and 29.
    """
    assert frames_of("lavila", 0, 1_000_000, num_frames=4) == [3, 10, 18, 25]
    seen = {tuple(frames_of("lavila", 0, 1_000_000, num_frames=4, seed=seed)) for seed in range(300)}
    for place, borders in enumerate([(0, 7), (7, 14), (14, 22), (22, 29)]):
        assert {frames[place] for frames in seen} == set(range(borders[0], borders[1] + 1))
    assert frames_of("lavila", 50_000, 60_000, num_frames=3) == [1, 1, 1]


@pytest.mark.parametrize("rule", ["uniform", "stride", "lavila"])
@pytest.mark.parametrize(("fps_num", "fps_den"), [(30, 1), (30000, 1001), (12, 5)])
def test_every_moment_lies_in_the_span_and_they_are_in_order(rule: SamplingRule, fps_num: int, fps_den: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        begin_us = int(rng.integers(0, 10**7))
        end_us = begin_us + int(rng.choice([1, 40, 30_000, 2_000_000, 9_000_000]))
        for generator in (None, rng):
            sampling = Sampling(num_frames=int(rng.integers(1, 20)), rule=rule, stride=int(rng.integers(1, 9)))
            moments_found = moments_of(begin_us, end_us, sampling, fps_num=fps_num, fps_den=fps_den, rng=generator)
            assert len(moments_found.numerators) == sampling.num_frames
            assert list(moments_found.numerators) == sorted(moments_found.numerators)
            assert begin_us * moments_found.denominator <= moments_found.numerators[0]
            assert moments_found.numerators[-1] < end_us * moments_found.denominator
