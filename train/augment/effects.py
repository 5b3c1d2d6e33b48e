"""Colour jitter and normalisation of a clip as one affine map of RGB.

The four changes mean what torchvision's ColorJitter means by them, with two differences:

- Hue turns the colour plane of YIQ by an angle. Torchvision turns hue in HSV, which keeps the largest of R, G and B
  and bends as it goes round; a turn in YIQ keeps the grey value and is linear, so that it fits into the one matrix.
- Values are held in [0, 1] once, after all of them, not after each: what one change pushes beyond white and the next
  brings back is not lost.

All four keep the grey weights of a pixel or scale them, so they commute: there is no order to draw.
"""

import numpy as np
from numpy.typing import NDArray

from train.augment.draws import Draw

# Of grey (BT.601, whatever the clip's own matrix), as torchvision has them but with a sum of exactly 1.
GREY_WEIGHTS = (0.299, 0.587, 0.114)

_YIQ = np.array([GREY_WEIGHTS, [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_GREY = np.outer(np.ones(3), GREY_WEIGHTS)
_CHROMA = np.eye(3) - _GREY
# A quarter turn of the colour plane, from red over yellow to green, as a growing hue goes.
_QUARTER_TURN = np.linalg.inv(_YIQ) @ np.array([[0, 0, 0], [0, 0, 1], [0, -1, 0]]) @ _YIQ @ _CHROMA


def colour_map(draw: Draw | None, *, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """What becomes of a colour, [B, 3, 5] (B = 1 without a draw).

    A colour c in [0, 1] of a clip whose mean grey is g becomes map @ (c, 1, g), normalised.
    """
    mean_3, std_3 = np.array(mean), np.array(std)
    if draw is None:
        linear, of_mean_grey = np.eye(3)[None], np.zeros(1)
    else:
        angle = 2 * np.pi * draw.hue.astype(float)[:, None, None]
        saturation, contrast, brightness = (
            values.astype(float)[:, None, None] for values in (draw.saturation, draw.contrast, draw.brightness)
        )
        chroma = saturation * (np.cos(angle) * _CHROMA + np.sin(angle) * _QUARTER_TURN)
        linear = brightness * contrast * (_GREY + chroma)
        of_mean_grey = (brightness * (1 - contrast))[:, 0, 0]
    result = np.empty((len(linear), 3, 5), dtype=np.float32)
    result[..., :3] = linear / std_3[:, None]
    result[..., 3] = -mean_3 / std_3
    result[..., 4] = of_mean_grey[:, None] / std_3
    return result
