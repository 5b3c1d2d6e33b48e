import numpy as np
import pytest
import torch

from train.data.crop import Rectangle, centre_square, crop_and_resize, random_resized_rectangle


@pytest.mark.parametrize(("width", "height"), [(512, 288), (288, 512), (64, 64), (1000, 10), (1, 1)])
def test_random_rectangles_lie_inside_and_follow_their_seed(width: int, height: int) -> None:
    for seed in range(200):
        one = random_resized_rectangle(width, height, min_area=0.3, rng=np.random.default_rng(seed))
        assert one.left >= 0 and one.left + one.width <= width and one.width > 0
        assert one.top >= 0 and one.top + one.height <= height and one.height > 0
        assert one == random_resized_rectangle(width, height, min_area=0.3, rng=np.random.default_rng(seed))


def test_random_rectangles_keep_to_area_and_ratio() -> None:
    rectangles = [
        random_resized_rectangle(512, 288, min_area=0.25, rng=np.random.default_rng(seed)) for seed in range(500)
    ]
    areas = [one.width * one.height / (512 * 288) for one in rectangles]
    ratios = [one.width / one.height for one in rectangles]
    assert 0.24 < min(areas) < 0.3 and max(areas) <= 1
    assert 0.74 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.35


def test_the_centre_square_is_centred() -> None:
    assert centre_square(512, 288) == Rectangle(112, 0, 288, 288)
    assert centre_square(7, 10) == Rectangle(0, 1, 7, 7)


def test_all_frames_are_cut_alike() -> None:
    frames = [np.zeros((40, 60, 3), np.uint8) for _ in range(2)]
    for number, frame in enumerate(frames):
        frame[10:30, 20:40] = 100 + number
    video = crop_and_resize(frames, Rectangle(20, 10, 20, 20), size_px=8)
    assert video.shape == (2, 8, 8, 3) and video.dtype == torch.uint8
    assert (video[0] == 100).all() and (video[1] == 101).all()
