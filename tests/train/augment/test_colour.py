import io
import subprocess
import sys
from itertools import product
from typing import cast

import av
import numpy as np
import pytest
import torch
from av.container import InputContainer
from av.video.reformatter import ColorRange, Colorspace

from clipmill.train.augment.colour import COLOUR_ENCODINGS, colour_encoding, rgb_matrices
from clipmill.train.augment.model_input import to_rgb_uint8
from tests.train.augment.planes import Bytes, planes_of_frame, planes_of_rgb, random_planes
from tests.train.tiny_data import encode_chunk

SIZE_PX = 16
KNOWN_COLOURS = ((0, 0, 0), (255, 255, 255), (200, 30, 60), (20, 180, 90), (40, 60, 220), (240, 200, 10), (127,) * 3)


def back_to_rgb(planes: Bytes, kind: int, *, size_px: int = SIZE_PX) -> Bytes:
    video = torch.from_numpy(planes)[None, None]
    return to_rgb_uint8(video, torch.tensor([kind], dtype=torch.uint8), size_px=size_px)[0, 0].numpy()


@pytest.mark.parametrize("kind", range(6), ids=COLOUR_ENCODINGS)
def test_a_known_colour_comes_back_from_libav(kind: int) -> None:
    for colour in KNOWN_COLOURS:
        picture = np.full((SIZE_PX, SIZE_PX, 3), colour, dtype=np.uint8)
        back = back_to_rgb(planes_of_rgb(picture, kind=kind), kind)
        assert np.abs(back.astype(int) - picture).max() <= 2, colour


def test_another_kind_gives_another_colour() -> None:
    picture = np.full((SIZE_PX, SIZE_PX, 3), (200, 30, 60), dtype=np.uint8)
    for kind, other in product(range(6), repeat=2):
        back = back_to_rgb(planes_of_rgb(picture, kind=kind), other)
        assert (np.abs(back.astype(int) - picture).max() <= 2) == (kind == other), (kind, other)


def test_matrices_take_black_and_white_and_grey_to_themselves() -> None:
    for kind, matrix in enumerate(rgb_matrices()):
        black, white = (0, 255) if kind % 2 else (16, 235)
        np.testing.assert_allclose(matrix @ [black, 128, 128, 1], 0, atol=1e-12)
        np.testing.assert_allclose(matrix @ [white, 128, 128, 1], 1, atol=1e-12)


def test_the_numbers_of_libav_become_kinds() -> None:
    def kind(space: int, range_: int = ColorRange.MPEG, *, full: bool = False) -> int:
        return colour_encoding(colorspace=space, color_range=range_, is_full_format=full)

    assert [kind(space) for space in (Colorspace.ITU601, Colorspace.SMPTE170M, 4, 2, 0, 99)] == [0] * 6
    assert [kind(space) for space in (Colorspace.ITU709, Colorspace.SMPTE240M, 9, 10)] == [2, 2, 4, 4]
    assert kind(Colorspace.ITU709, ColorRange.JPEG) == 3
    assert kind(Colorspace.ITU601, ColorRange.UNSPECIFIED) == 0
    assert kind(Colorspace.ITU601, ColorRange.UNSPECIFIED, full=True) == 1
    assert all(kind(space, range_) in range(6) for space, range_ in product(range(-1, 20), range(4)))


def test_a_decoded_frame_looks_as_swscale_shows_it() -> None:
    with av.open(io.BytesIO(encode_chunk(100, 3))) as container:
        frames = list(cast(InputContainer, container).decode(video=0))
    for frame in frames:
        kind = colour_encoding(colorspace=frame.colorspace, color_range=frame.color_range, is_full_format=False)
        back = back_to_rgb(planes_of_frame(frame), kind, size_px=frame.width)
        # The images are grey, so the interpolation of chroma does not matter, and swscale's tables err by a level or
        # two.
        assert np.abs(back.astype(int) - frame.to_ndarray(format="rgb24")).max() <= 3


def test_values_beyond_black_and_white_are_held() -> None:
    planes = random_planes(1, 1, SIZE_PX)[0, 0]
    back = back_to_rgb(planes, 0)
    assert back.min() == 0 and back.max() == 255


def test_naming_a_kind_does_not_load_torch() -> None:
    program = (
        "import sys, clipmill.train.augment.colour, clipmill.train.config.clips; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
