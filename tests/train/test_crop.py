import numpy as np
import pytest
import torch
from torchvision.transforms import RandomResizedCrop

from clipmill.train.data.clip_frames import (
    Rectangle,
    centre_square,
    multi_scale_rectangle,
    random_resized_rectangle,
    rectangle_of,
    simple_rectangle,
)


@pytest.mark.parametrize(("width", "height"), [(512, 288), (288, 512), (64, 64), (1000, 10), (1, 1)])
def test_random_rectangles_lie_inside_and_follow_their_seed(width: int, height: int) -> None:
    for seed in range(200):
        box = random_resized_rectangle(width, height, min_area=0.3, rng=np.random.default_rng(seed))
        assert box.left >= 0 and box.left + box.width <= width and box.width > 0
        assert box.top >= 0 and box.top + box.height <= height and box.height > 0
        assert box == random_resized_rectangle(width, height, min_area=0.3, rng=np.random.default_rng(seed))


def test_random_rectangles_keep_to_area_and_ratio() -> None:
    rectangles = [
        random_resized_rectangle(512, 288, min_area=0.25, rng=np.random.default_rng(seed)) for seed in range(500)
    ]
    areas = [rectangle.width * rectangle.height / (512 * 288) for rectangle in rectangles]
    ratios = [rectangle.width / rectangle.height for rectangle in rectangles]
    assert 0.24 < min(areas) < 0.3 and max(areas) <= 1
    assert 0.74 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.35


def test_the_centre_square_is_centred() -> None:
    assert centre_square(512, 288) == Rectangle(112, 0, 288, 288)
    assert centre_square(7, 10) == Rectangle(0, 1, 7, 7)


def test_random_rectangles_are_drawn_as_torchvision_draws_them() -> None:
    """Areas, ratios and positions of 4000 rectangles have RandomResizedCrop's distributions, with its fallback."""
    torch.manual_seed(0)
    picture = torch.empty(1, 288, 512)
    theirs = []
    for _ in range(4000):
        top, left, height, width = RandomResizedCrop.get_params(picture, [0.3, 1.0], [3 / 4, 4 / 3])
        theirs.append((width * height, width / height, left, top))
    ours = []
    for seed in range(4000):
        box = random_resized_rectangle(512, 288, min_area=0.3, rng=np.random.default_rng(seed))
        ours.append((box.width * box.height, box.width / box.height, box.left, box.top))
    for our_places, other in zip(np.transpose(ours), np.transpose(theirs), strict=True):
        places = np.sort(np.concatenate([our_places, other]))
        own_share = np.searchsorted(np.sort(our_places), places, side="right") / len(our_places)
        other_share = np.searchsorted(np.sort(other), places, side="right") / len(other)
        # Two samples of 4000 from one distribution differ by more than this in 1 of 1000 cases (Kolmogorov-Smirnov).
        assert np.abs(own_share - other_share).max() < 0.044


@pytest.mark.parametrize(("width", "height"), [(1000, 10), (10, 1000), (5, 5)])
def test_where_no_rectangle_fits_the_fallback_is_torchvisions(width: int, height: int) -> None:
    theirs = RandomResizedCrop.get_params(torch.empty(1, height, width), [1.0, 1.0], [3 / 4, 4 / 3])
    box = random_resized_rectangle(width, height, min_area=1.0, rng=np.random.default_rng(0))
    assert [box.top, box.left, box.height, box.width] == list(theirs)


def test_multi_scale_rectangles_have_four_sides_and_thirteen_places() -> None:
    """Properties of the crop of TSN and VideoMAE, at the 340 x 256 of their papers."""
    rectangles = [multi_scale_rectangle(340, 256, rng=np.random.default_rng(seed)) for seed in range(4000)]
    assert (
        {rectangle.width for rectangle in rectangles}
        == {rectangle.height for rectangle in rectangles}
        == {256, 224, 192, 168}
    )
    sizes = [256, 224, 192, 168]
    assert all(abs(sizes.index(rectangle.width) - sizes.index(rectangle.height)) <= 1 for rectangle in rectangles)
    small = {
        (rectangle.left, rectangle.top) for rectangle in rectangles if (rectangle.width, rectangle.height) == (168, 168)
    }
    assert len(small) == 13 and (0, 0) in small and (172, 88) in small and (86, 44) in small and (43, 66) in small
    for rectangle in rectangles:
        assert 0 <= rectangle.left <= 340 - rectangle.width and 0 <= rectangle.top <= 256 - rectangle.height
    assert multi_scale_rectangle(1, 1, rng=np.random.default_rng(0)) == Rectangle(0, 0, 1, 1)


def test_simple_squares_are_of_one_size_and_lie_anywhere() -> None:
    """AlexNet crops 224 of 256 pixels. Every even offset is as likely as with torchvision's RandomCrop."""
    rectangles = [
        simple_rectangle(456, 256, fraction=224 / 256, rng=np.random.default_rng(seed)) for seed in range(8000)
    ]
    assert {(rectangle.width, rectangle.height) for rectangle in rectangles} == {(224, 224)}
    lefts, tops = (np.bincount([getattr(rectangle, name) for rectangle in rectangles]) for name in ("left", "top"))
    assert len(lefts) == 456 - 224 + 1 and len(tops) == 256 - 224 + 1
    assert not lefts[1::2].any() and not tops[1::2].any()
    for counts in (lefts[::2], tops[::2]):
        expected = 8000 / len(counts)
        assert np.abs(counts - expected).max() < 5 * expected**0.5


@pytest.mark.parametrize(("width", "height"), [(255, 301), (64, 64), (1000, 10), (3, 2), (1, 1)])
@pytest.mark.parametrize("share", [0.5, 0.875, 1.0])
def test_simple_squares_lie_inside(width: int, height: int, share: float) -> None:
    for seed in range(50):
        box = simple_rectangle(width, height, fraction=share, rng=np.random.default_rng(seed))
        assert 0 <= box.left <= width - box.width and 0 <= box.top <= height - box.height and box.width == box.height
        assert abs(box.width - min(width, height) * share) < 2


def test_evaluation_has_the_centre_square_whatever_the_rule() -> None:
    for rule in ("random", "simple", "multi-scale", "centre"):
        assert rectangle_of(rule, width=512, height=288, min_area=0.1, rng=None) == Rectangle(112, 0, 288, 288)
