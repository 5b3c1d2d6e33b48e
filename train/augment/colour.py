"""Colour kinds: six encodings of colours as Y, U, V, as exact matrices. This module does not load torch.

A kind is a number from 0 to 5: 2 * matrix + (1 for full range). The matrices are BT.601, BT.709 and BT.2020, in this
order. The recommendations with these names define the weights of red and blue; H.273 defines the matrix numbers.
"""

import numpy as np
from numpy.typing import NDArray

COLOUR_KINDS = (
    "bt601-limited",
    "bt601-full",
    "bt709-limited",
    "bt709-full",
    "bt2020-limited",
    "bt2020-full",
)

# Weights of red and blue in luma.
_LUMA_WEIGHTS = ((0.299, 0.114), (0.2126, 0.0722), (0.2627, 0.0593))
# By number in H.273. The weights of SMPTE 240M (7) are closest to BT.709.
_MATRIX_OF_COLORSPACE = {1: 1, 7: 1, 9: 2, 10: 2}
_FULL_RANGE = 2


def colour_kind(*, colorspace: int, color_range: int, is_full_format: bool) -> int:
    """Return the kind of a frame.

    Args:
        colorspace: Number of the matrix in libav (`frame.colorspace`). An unspecified matrix is interpreted as BT.601,
            as in ffmpeg.
        color_range: Number of the range in libav (`frame.color_range`): 2 is full, all other numbers are limited.
        is_full_format: True if the pixel format implies full range (yuvj420p and the like).
    """
    return 2 * _MATRIX_OF_COLORSPACE.get(colorspace, 0) + (is_full_format or color_range == _FULL_RANGE)


def rgb_matrices() -> NDArray[np.float64]:
    """Return the affine map of each kind, [6, 3, 4], from (Y, U, V, 1) with values 0..255 to R, G, B in 0..1."""
    matrices = np.empty((len(COLOUR_KINDS), 3, 4))
    for number, (red, blue) in enumerate(_LUMA_WEIGHTS):
        green = 1 - red - blue
        from_ypbpr = np.array(
            [
                [1, 0, 2 * (1 - red)],
                [1, -2 * (1 - blue) * blue / green, -2 * (1 - red) * red / green],
                [1, 2 * (1 - blue), 0],
            ]
        )
        # In limited range, black is 16, white is 235, and chroma ranges from 16 to 240. Zero chroma is 128 in both.
        for is_full, black, luma_span, chroma_span in ((0, 16, 219, 224), (1, 0, 255, 255)):
            linear = from_ypbpr / np.array([luma_span, chroma_span, chroma_span])
            matrices[2 * number + is_full, :, :3] = linear
            matrices[2 * number + is_full, :, 3] = -linear @ np.array([black, 128, 128])
    return matrices
