"""Images that carry a number, which a reader recognizes at any size, but only upright and complete.

A bright frame surrounds each image, so that its edges can be found within black bars. Two rows of six blocks encode
the number in binary, with three check bits. The lowest row has patches of pure colors.
"""

from dataclasses import dataclass

import numpy as np

MAX_NUMBER = (1 << 9) - 1
_EDGE, _GROUND, _DARK, _LIGHT = 225, 90, 20, 235
_EDGE_MIN = 160  # a row or column without a brighter pixel belongs to a black bar
_COLORS = ((190, 60, 60), (60, 190, 60), (60, 60, 190), (190, 190, 60))
_BLOCK_ROWS, _COLOR_ROWS = (0.15, 0.42, 0.69), (0.74, 0.88)


@dataclass(frozen=True)
class Reading:
    """Values read from an image.

    Attributes:
        number: Number in the image; -1 if it cannot be read.
        width, height: Size of the image within its black bars, in pixels.
        colors: Means of the color patches, RGB from 0 to 255; array of shape [4, 3].
    """

    number: int
    width: int
    height: int
    colors: np.ndarray


def draw_number(number: int, *, width: int, height: int) -> np.ndarray:
    """Draw an RGB image with a number; array of shape [height, width, 3]."""
    picture = np.full((height, width, 3), _GROUND, np.uint8)
    for bit in range(12):
        row, column = divmod(bit, 6)
        rows = slice(round(_BLOCK_ROWS[row] * height), round(_BLOCK_ROWS[row + 1] * height))
        columns = slice(round((1 + column) * width / 8), round((2 + column) * width / 8))
        picture[rows, columns] = _LIGHT if _code(number) >> bit & 1 else _DARK
    for place, color in enumerate(_COLORS):
        begin, end = (round((1 + 1.5 * (place + side)) * width / 8) for side in (0, 1))
        picture[round(_COLOR_ROWS[0] * height) : round(_COLOR_ROWS[1] * height), begin:end] = color
    edge = max(4, round(min(width, height) / 20))
    for side in (picture[:edge], picture[-edge:], picture[:, :edge], picture[:, -edge:]):
        side[:] = _EDGE
    return picture


def read_number(picture: np.ndarray) -> Reading:
    """Read an RGB image, which may have black bars."""
    rows, columns = ((picture[:, :, 1].max(axis=axis) > _EDGE_MIN).nonzero()[0] for axis in (1, 0))
    if not (len(rows) and len(columns)):
        return Reading(-1, 0, 0, np.zeros((4, 3)))
    within = picture[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    height, width = within.shape[:2]
    code, is_clear = 0, True
    for bit in range(12):
        row, column = divmod(bit, 6)
        x, y = (1.5 + column) * width / 8, (_BLOCK_ROWS[row] + _BLOCK_ROWS[row + 1]) / 2 * height
        level = _mean_around(within, x, y).mean()
        code |= int(level > 128) << bit
        is_clear &= not 90 < level < 165
    number = code & MAX_NUMBER
    colors = [
        _mean_around(within, (1.75 + 1.5 * place) * width / 8, sum(_COLOR_ROWS) / 2 * height) for place in range(4)
    ]
    return Reading(number if is_clear and code == _code(number) else -1, width, height, np.array(colors))


def color_error(reading: Reading) -> float:
    """Return the largest difference between the color patches and the drawn colors, in levels from 0 to 255."""
    return float(np.abs(reading.colors - np.array(_COLORS)).max())


def _code(number: int) -> int:
    return number | (7 - number % 7) << 9  # a remainder, because a mirrored image passes a parity check


def _mean_around(picture: np.ndarray, x: float, y: float) -> np.ndarray:
    return picture[int(y) - 1 : int(y) + 2, int(x) - 1 : int(x) + 2].mean(axis=(0, 1))
