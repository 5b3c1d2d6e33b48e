"""A few frames of a clip as one small picture."""

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from train.evaluation.shown import from_middles

_NUM_COLUMNS = 2
_MAX_FRAMES = 4
_HEIGHT_PX = 96
_QUALITY = 78
_GAP_PX = 2
_GAP_GREY = 128


def sheet_uri(frames: Sequence[NDArray[np.uint8]]) -> str:
    """Four of the frames in two rows, from left to right, as the data URI of a JPEG of some 8 kB.

    Args:
        frames: uint8 RGB [H, W, 3], all of one size; fewer than four stand in one row. Without any, the URI is empty.
    """
    import cv2

    chosen = from_middles(list(frames), at_most=_MAX_FRAMES)
    if not chosen:
        return ""
    height, width = chosen[0].shape[:2]
    size = (max(1, round(width * _HEIGHT_PX / height)), _HEIGHT_PX)
    gap = ((0, _GAP_PX), (0, _GAP_PX), (0, 0))
    small = [
        np.pad(cv2.resize(frame, size, interpolation=cv2.INTER_AREA), gap, constant_values=_GAP_GREY)
        for frame in chosen
    ]
    columns = _NUM_COLUMNS if len(small) == _MAX_FRAMES else len(small)
    rows = [np.hstack(small[place : place + columns]) for place in range(0, len(small), columns)]
    sheet = np.vstack(rows)[:-_GAP_PX, :-_GAP_PX]
    # OpenCV writes blue first.
    _, jpeg = cv2.imencode(".jpg", sheet[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    return "data:image/jpeg;base64," + base64.b64encode(jpeg.tobytes()).decode()
