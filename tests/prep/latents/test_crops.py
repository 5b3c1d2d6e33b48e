"""Tests of the crop: one square for all frames of a segment, determined by settings, key and size."""

import pytest

from clipmill.prep.latents.frames import Square, flatten_squares, segment_squares
from clipmill.prep.latents.recipe import LatentsSettings

CENTRE, RANDOM = LatentsSettings(vae="tiny"), LatentsSettings(vae="tiny", crop="random")


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(512, 288, Square(112, 0, 288)), (288, 512, Square(0, 112, 288)), (96, 96, Square(0, 0, 96))],
)
def test_the_centre_is_the_largest_square(width: int, height: int, expected: Square) -> None:
    assert segment_squares(3, content="a_0", width=width, height=height, settings=CENTRE) == [expected] * 3


def test_a_random_square_lies_in_the_frame_and_leaves_256_of_288_pixels() -> None:
    squares = segment_squares(200, content="a_0", width=512, height=288, settings=RANDOM)
    assert {square.side for square in squares} == {256}
    lefts, tops = {square.left for square in squares}, {square.top for square in squares}
    assert min(lefts) >= 0 and max(lefts) <= 256 and min(tops) >= 0 and max(tops) <= 32
    assert len(lefts) > 80 and tops >= {0, 32}


def test_an_exact_square_has_the_size_that_is_asked_for_whatever_the_frame() -> None:
    settings = LatentsSettings(vae="tiny", crop="exact", size=128)
    squares = segment_squares(200, content="a_0", width=512, height=288, settings=settings)
    assert {square.side for square in squares} == {128} and len({square.left for square in squares}) > 100
    assert max(square.left for square in squares) <= 384 and max(square.top for square in squares) <= 160


def test_segments_keys_and_seeds_have_squares_of_their_own() -> None:
    def squares(key: str = "a_0", seed: int = 0, count: int = 20) -> list[Square]:
        settings = LatentsSettings(vae="tiny", crop="random", seed=seed)
        return segment_squares(count, content=key, width=512, height=288, settings=settings)

    assert squares() == squares()
    assert squares(count=5) == squares()[:5]
    assert len(set(squares())) > 15
    assert squares(key="b_0") != squares() != squares(seed=1)


def test_the_index_has_them_as_rectangles() -> None:
    assert flatten_squares([Square(1, 2, 3), Square(4, 5, 6)]) == [1, 2, 3, 3, 4, 5, 6, 6]
