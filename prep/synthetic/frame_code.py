"""Frame numbers drawn into the pixels, so that they remain readable after scaling and compression.

The picture is a grid of 8 x 4 black or white cells: 20 bits of the number and 12 bits of its CRC-32, row by row, most
significant bit first. A cell is read as the mean of its central region, so that any size from about 32 x 16 pixels
works. Blending two frames produces grey cells, and a grey cell is an error.
"""

import zlib
from functools import cache

import numpy as np

MAX_FRAME_NUMBER = (1 << 20) - 1
_COLUMNS, _ROWS = 8, 4
_CHECK_BITS = 12
_DARK_BELOW, _LIGHT_ABOVE = 96, 160


def draw_frame_number(number: int, *, width: int, height: int) -> np.ndarray:
    """Draw `number` as a picture, uint8[height, width] of 0 and 255.

    Raises:
        ValueError: `number` is not in [0, MAX_FRAME_NUMBER].
    """
    if not 0 <= number <= MAX_FRAME_NUMBER:
        raise ValueError(f"frame number {number} is not in [0, {MAX_FRAME_NUMBER}]")
    code = (number << _CHECK_BITS) | _check(number)
    shifts = np.arange(_COLUMNS * _ROWS - 1, -1, -1)
    cells = (((code >> shifts) & 1) * 255).astype(np.uint8).reshape(_ROWS, _COLUMNS)
    rows = np.arange(height) * _ROWS // height
    columns = np.arange(width) * _COLUMNS // width
    return cells[rows][:, columns]


def read_frame_number(picture: np.ndarray) -> int:
    """Read the number in a picture of any size: [H, W] grey or [H, W, 3] RGB, values 0 to 255.

    Raises:
        ValueError: a cell is neither black nor white, or the check bits do not match.
    """
    grey = picture.astype(np.float32)
    if grey.ndim == 3:
        grey = grey.mean(axis=2)
    height, width = grey.shape
    # Two products of matrices: the mean of each region by itself takes ten times as long, and tests read many frames.
    levels = _weights(_ROWS, height) @ grey @ _weights(_COLUMNS, width).T
    code = 0
    for cell, level in enumerate(levels.ravel().tolist()):
        if _DARK_BELOW <= level <= _LIGHT_ABOVE:
            row, column = divmod(cell, _COLUMNS)
            raise ValueError(f"cell {row},{column} of the frame code has level {level:.0f}: neither black nor white")
        code = code << 1 | (level > _LIGHT_ABOVE)
    number = code >> _CHECK_BITS
    if code & ((1 << _CHECK_BITS) - 1) != _check(number):
        raise ValueError(f"the frame code reads {number}, but its check bits do not fit")
    return number


@cache
def _weights(num_cells: int, length: int) -> np.ndarray:
    """Return the weights of pixels in the means of the central regions of cells, float32[num_cells, length]."""
    weights = np.zeros((num_cells, length), np.float32)
    for index in range(num_cells):
        first, last = index * length / num_cells, (index + 1) * length / num_cells
        quarter = (last - first) / 4
        begin = int(first + quarter)
        end = max(int(last - quarter), begin + 1)
        weights[index, begin:end] = 1 / (end - begin)
    return weights


def _check(number: int) -> int:
    return zlib.crc32(number.to_bytes(4, "big")) & ((1 << _CHECK_BITS) - 1)
