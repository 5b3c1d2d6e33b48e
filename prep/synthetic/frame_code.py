"""Frame numbers drawn into the pixels, so that they remain readable after scaling and compression.

The picture is a grid of 8 x 4 black or white cells: 20 bits of the number and 12 bits of its CRC-32, row by row, most
significant bit first. A cell is read as the mean of its central region, so that any size from about 32 x 16 pixels
works. Blending two frames produces grey cells, and a grey cell is an error.
"""

import zlib

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
    code = 0
    for row in range(_ROWS):
        for column in range(_COLUMNS):
            level = float(grey[_middle(row, _ROWS, height), _middle(column, _COLUMNS, width)].mean())
            if _DARK_BELOW <= level <= _LIGHT_ABOVE:
                raise ValueError(
                    f"cell {row},{column} of the frame code has level {level:.0f}: neither black nor white"
                )
            code = code << 1 | (level > _LIGHT_ABOVE)
    number = code >> _CHECK_BITS
    if code & ((1 << _CHECK_BITS) - 1) != _check(number):
        raise ValueError(f"the frame code reads {number}, but its check bits do not fit")
    return number


def _middle(index: int, num_cells: int, length: int) -> slice:
    first, last = index * length / num_cells, (index + 1) * length / num_cells
    quarter = (last - first) / 4
    begin = int(first + quarter)
    return slice(begin, max(int(last - quarter), begin + 1))


def _check(number: int) -> int:
    return zlib.crc32(number.to_bytes(4, "big")) & ((1 << _CHECK_BITS) - 1)
