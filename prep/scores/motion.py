"""Motion between two frames: dense optical flow, told apart into the camera's part and the rest.

The flow is DIS (Kroeger et al., Fast Optical Flow using Dense Inverse Search, ECCV 2016) in OpenCV's implementation, on
small luma. The camera's part is the similarity transform (translation, rotation, zoom) that explains the flow at the
textured points of a grid, by least median of squares; everything else is the motion of objects. Where there is no
texture, a flow cannot be observed, and such pixels follow the camera. If the texture covers too little of the picture
to tell a moving camera from a moving object, the camera is taken to stand still.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from clipmill.prep.scores.frames import Luma

Flow = NDArray[np.float32]  # [H, W, 2]: x and y in pixels
Mask = NDArray[np.bool_]  # [H, W]

_GRID_PX = 6
_TEXTURE = 4.0  # mean absolute luma gradient, in levels per pixel, around a textured pixel
_TEXTURE_WINDOW_PX = 9
_CELLS = 3  # the picture has 3 x 3 cells
_MIN_CELLS = 6  # so many of which need texture before a camera is estimated
_MIN_CELL_POINTS = 2
_REST_PX = 0.03
_MIN_SIDE_PX = 16  # DIS needs a few patches of 8 pixels


@dataclass(frozen=True)
class Motion:
    """Mean displacements over the picture, in the units of the flow."""

    all: float
    camera: float
    objects: float

    def times(self, factor: float) -> "Motion":
        """Return the displacements in another unit."""
        return Motion(self.all * factor, self.camera * factor, self.objects * factor)

    @classmethod
    def mean(cls, motions: "Sequence[Motion]") -> "Motion":
        """Return the mean of one or more."""
        return cls(*(fmean(values) for values in zip(*map(astuple, motions), strict=True)))


def optical_flow(before: Luma, after: Luma) -> Flow | None:
    """Return the flow from one small luma to another; None if the picture is too small."""
    if min(before.shape) < _MIN_SIDE_PX:
        return None
    dis: Any = cv2.DISOpticalFlow  # its type stub lacks the optional flow to begin with
    flow = dis.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM).calc(before, after, None)
    return np.asarray(flow, np.float32)


def textured(luma: Luma) -> Mask:
    """Return the pixels with texture around them."""
    gradients = [cv2.convertScaleAbs(cv2.Sobel(luma, cv2.CV_16S, dx, dy, scale=1 / 8)) for dx, dy in ((1, 0), (0, 1))]
    window = (_TEXTURE_WINDOW_PX, _TEXTURE_WINDOW_PX)
    return np.asarray(sum(cv2.blur(gradient.astype(np.float32), window) for gradient in gradients) >= _TEXTURE)


def split_motion(flow: Flow, texture: Mask) -> Motion:
    """Tell the camera's motion in a flow from that of objects."""
    camera = camera_flow(flow, texture)
    rest = (flow - camera) * texture[..., None]
    return Motion(_mean_length(camera + rest), _mean_length(camera), _mean_length(rest))


def camera_flow(flow: Flow, texture: Mask) -> Flow:
    """Return the flow that a moving camera alone would cause, [H, W, 2]; zero if it cannot be told."""
    grid = np.zeros_like(texture)
    grid[_GRID_PX // 2 :: _GRID_PX, _GRID_PX // 2 :: _GRID_PX] = True
    rows, columns = np.nonzero(grid & texture)
    height, width = texture.shape
    cells = np.bincount(rows * _CELLS // height * _CELLS + columns * _CELLS // width, minlength=_CELLS**2)
    if (cells >= _MIN_CELL_POINTS).sum() < _MIN_CELLS:
        return np.zeros_like(flow)
    points = np.stack([columns, rows], axis=1).astype(np.float32)
    transform: Any = cv2.estimateAffinePartial2D(points, points + flow[rows, columns], method=cv2.LMEDS)[0]
    if transform is None:
        return np.zeros_like(flow)
    a, b, c, d, e, f = np.asarray(transform, np.float32).ravel()
    x, y = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)[:, None]
    camera = np.stack([(a - 1) * x + (b * y + c), d * x + ((e - 1) * y + f)], axis=2)
    # A camera at rest is preferred to one that explains the typical point hardly better.
    moving, still = (_lengths((flow - other)[rows, columns]) for other in (camera, np.zeros_like(flow)))
    return camera if np.median(still) - np.median(moving) > _REST_PX else np.zeros_like(flow)


def _lengths(flow: Flow) -> NDArray[np.float32]:
    return np.sqrt(flow[..., 0] ** 2 + flow[..., 1] ** 2)  # a third of np.hypot's time


def _mean_length(flow: Flow) -> float:
    return float(_lengths(flow).mean(dtype=np.float64))
