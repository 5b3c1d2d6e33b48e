"""The six supported colour encodings, which represent RGB as Y, U and V, with exact conversion matrices.

The index of an encoding, from 0 to 5, is 2 * matrix + (1 for full range). The matrices are BT.601, BT.709 and BT.2020,
in this order. The weights of red and blue come from the ITU-R recommendations with these names, and the matrix
coefficient codes come from H.273. This module does not load torch.
"""

import numpy as np
from numpy.typing import NDArray

COLOUR_ENCODINGS = (
    "bt601-limited",
    "bt601-full",
    "bt709-limited",
    "bt709-full",
    "bt2020-limited",
    "bt2020-full",
)

# Weights of red and blue in luma, for each matrix.
_LUMA_WEIGHTS = ((0.299, 0.114), (0.2126, 0.0722), (0.2627, 0.0593))
# Matrix for each code in H.273. SMPTE 240M (7) is treated as BT.709, whose weights are the closest, and BT.2020 with
# constant luminance (10) as BT.2020 without constant luminance (9).
_MATRIX_OF_COLORSPACE = {1: 1, 7: 1, 9: 2, 10: 2}
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG in libav


def colour_encoding(*, colorspace: int, color_range: int, is_full_format: bool) -> int:
    """Return the index of a decoded frame's colour encoding.

    Args:
        colorspace: Matrix code in libav (`frame.colorspace`). An unspecified matrix is treated as BT.601, as in ffmpeg.
        color_range: Range code in libav (`frame.color_range`): 2 means full range; all other codes mean limited range.
        is_full_format: True if the pixel format implies full range (such as yuvj420p).
    """
    return 2 * _MATRIX_OF_COLORSPACE.get(colorspace, 0) + (is_full_format or color_range == _FULL_RANGE)


def rgb_matrices() -> NDArray[np.float64]:
    """Return the affine map of each encoding, [6, 3, 4], from (Y, U, V, 1) with values 0..255 to R, G and B in 0..1."""
    matrices = np.empty((len(COLOUR_ENCODINGS), 3, 4))
    for index, (red, blue) in enumerate(_LUMA_WEIGHTS):
        green = 1 - red - blue
        from_ypbpr = np.array(
            [
                [1, 0, 2 * (1 - red)],
                [1, -2 * (1 - blue) * blue / green, -2 * (1 - red) * red / green],
                [1, 2 * (1 - blue), 0],
            ]
        )
        # In limited range, black is 16, white is 235, and chroma ranges from 16 to 240. In both ranges, neutral chroma
        # is 128.
        for is_full, black, luma_span, chroma_span in ((0, 16, 219, 224), (1, 0, 255, 255)):
            linear = from_ypbpr / np.array([luma_span, chroma_span, chroma_span])
            matrices[2 * index + is_full, :, :3] = linear
            matrices[2 * index + is_full, :, 3] = -linear @ np.array([black, 128, 128])
    return matrices
