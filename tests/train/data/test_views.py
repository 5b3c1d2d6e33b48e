"""Several views of a clip in an evaluation: their moments, their crops and their order."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from clipmill.train.data.clip_frames import ClipShape, Rectangle, Views, centre_square, square_views
from clipmill.train.data.frame_sampling import (
    ChunkTimes,
    Sampling,
    SamplingRule,
    frame_indices,
    moments_of,
    view_offsets,
)
from tests.train.test_video_captions import load, numbers, open_set


def frames(
    rule: SamplingRule, num_views: int, *, end_us: int = 10_000_000, num_frames: int = 4, stride: int = 8
) -> list[list[int]]:
    chunk = ChunkTimes(start_ms=0, num_frames=300, fps_num=30, fps_den=1)
    sampling = Sampling(num_frames=num_frames, rule=rule, stride=stride)
    places = frame_indices(0, end_us, sampling, [chunk], rng=None, num_views=num_views)
    return [
        [place.frame for place in places[begin : begin + num_frames]] for begin in range(0, len(places), num_frames)
    ]


def test_one_look_is_in_the_middle_whatever_the_rule() -> None:
    for rule in ("uniform", "stride", "lavila"):
        assert view_offsets(rule, 1) == (Fraction(1, 2),)
    assert frames("uniform", 1) == [[37, 112, 187, 262]]
    assert frames("stride", 1) == [[134, 142, 150, 158]]


def test_looks_with_a_stride_reach_from_the_begin_of_the_span_to_its_end() -> None:
    assert frames("stride", 3) == [[0, 8, 16, 24], [134, 142, 150, 158], [268, 276, 284, 292]]
    # In a span shorter than the window, all views are the same.
    assert len({tuple(sample_frames) for sample_frames in frames("stride", 3, end_us=900_000)}) == 1


def test_five_clips_of_sixteen_frames_begin_at_quarters_of_the_room() -> None:
    for place, look in enumerate(frames("stride", 5, num_frames=16, stride=4)):
        begin = (300 - 16 * 4) * place // 4
        assert look == list(range(begin, begin + 64, 4))


def test_looks_at_equal_segments_are_spread_within_each() -> None:
    looks = frames("uniform", 5)
    assert looks[2] == frames("uniform", 1)[0]
    for segment in range(4):
        places = [look[segment] for look in looks]
        assert places == [int(75 * segment + 75 * (2 * view + 1) / 10) for view in range(5)]
    lavila = frames("lavila", 2)
    assert all(low < high for low, high in zip(*lavila, strict=True))


@pytest.mark.parametrize("rule", ["uniform", "stride", "lavila"])
@pytest.mark.parametrize("num_views", [1, 2, 3, 7])
def test_no_look_leaves_the_span(rule: SamplingRule, num_views: int) -> None:
    sampling = Sampling(num_frames=3, rule=rule, stride=5)
    for at in view_offsets(rule, num_views):
        moments = moments_of(1_200_000, 2_700_001, sampling, fps_num=30, fps_den=1, rng=None, view_offset=at)
        assert all(1_200_000 <= time / moments.denominator < 2_700_001 for time in moments.numerators)


def test_squares_reach_from_one_end_of_the_longer_side_to_the_other() -> None:
    assert square_views(512, 288, num_crops=3) == [
        Rectangle(0, 0, 288, 288),
        Rectangle(112, 0, 288, 288),
        Rectangle(224, 0, 288, 288),
    ]
    assert square_views(288, 512, num_crops=2) == [Rectangle(0, 0, 288, 288), Rectangle(0, 224, 288, 288)]
    assert square_views(512, 288, num_crops=1) == [centre_square(512, 288)]


def test_the_frames_of_all_views_come_one_view_after_another(data_dir: Path) -> None:
    sampling = Sampling(num_frames=2)
    shape = ClipShape(sampling=sampling, size_px=64, min_crop_area=1.0, views=Views(num_clips=3, num_crops=2))
    samples = open_set(data_dir, shape=shape)
    # The clip has frames 30 to 54 at 10 per second, in two segments of 12.5 frames. The views lie at 1/6, 3/6 and 5/6
    # of each segment, and each view has two square crops.
    times = [3.0 + 1.25 * half + 1.25 * (2 * view + 1) / 6 for view in range(3) for _ in range(2) for half in range(2)]
    assert numbers(samples, 2) == [int(10 * time + 1e-9) for time in times]
    assert len(load(open_set(data_dir, shape=shape), 2, seed=5)["video"]) == 2  # training shows one view


def test_crops_of_a_wide_picture_are_its_parts() -> None:
    import av

    from clipmill.train.data.clip_frames import make_clip

    grey = np.repeat(np.arange(0, 192, 2, dtype=np.uint8)[None], 32, axis=0)  # 96 x 32, brighter to the right
    frame = av.VideoFrame.from_ndarray(np.concatenate([grey, np.full((16, 96), 128, np.uint8)]), format="yuv420p")
    shape = ClipShape(sampling=Sampling(num_frames=1), size_px=32, views=Views(num_crops=3))
    clip = make_clip([frame], shape, rng=None, in_graph=False, key="v")
    luma = clip.video[:, : 32 * 32].reshape(3, 32, 32)
    for number, left in enumerate((0, 32, 64)):
        assert np.array_equal(luma[number], grey[:, left : left + 32])
