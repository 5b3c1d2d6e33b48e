"""Mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019) of clips: each with the one that stands opposite in its batch.

One share and one kind are drawn for a batch, from torch's generator of the CPU. Clip i of B is mixed with clip
B - 1 - i, and its target with that clip's target by the same share. A cut is one rectangle through all frames.

Shape suffixes: B batch, C channels, T frames, H and W pixels, K classes.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mix:
    """How the clips of a batch are mixed.

    Attributes:
        share: of a clip's own target; the rest is its partner's.
        box: rows and columns [top, bottom), [left, right) that come from the partner; None where pictures are blended.
    """

    share: float
    box: tuple[int, int, int, int] | None = None


NOTHING = Mix(1.0)


def draw_mix(*, mixup: float, cutmix: float, size_px: int) -> Mix:
    """Draws how a batch is mixed.

    Args:
        mixup, cutmix: alpha of the Beta distribution of shares, 0 for none; where both are given, each in half of
            the batches.
    """
    if not mixup and not cutmix:
        return NOTHING
    is_cut = bool(cutmix) and (not mixup or torch.rand(()).item() < 0.5)
    alpha = torch.tensor(cutmix if is_cut else mixup, dtype=torch.float64)
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    if not is_cut:
        return Mix(share)
    top, left = (int(torch.randint(size_px, ())) for _ in range(2))
    return cut_around(top, left, share=share, size_px=size_px)


def cut_around(row: int, column: int, *, share: float, size_px: int) -> Mix:
    """A square of 1 - `share` of a picture's area around a pixel, cut off at the edges; the share is what is left."""
    half = int(size_px * math.sqrt(1 - share)) // 2
    top, bottom = max(row - half, 0), min(row + half, size_px)
    left, right = max(column - half, 0), min(column + half, size_px)
    return Mix(1 - (bottom - top) * (right - left) / size_px**2, (top, bottom, left, right))


def mix_clips(clips_BCTHW: torch.Tensor, partners_BCTHW: torch.Tensor, mix: Mix) -> torch.Tensor:
    """The mixed clips."""
    if mix.box is None:
        return mix.share * clips_BCTHW + (1 - mix.share) * partners_BCTHW
    top, bottom, left, right = mix.box
    mixed_BCTHW = clips_BCTHW.clone()
    mixed_BCTHW[..., top:bottom, left:right] = partners_BCTHW[..., top:bottom, left:right]
    return mixed_BCTHW


def mixed_targets(label_B: torch.Tensor, *, num_classes: int, smoothing: float, mix: Mix) -> torch.Tensor:
    """Targets float32 [B, K] of a whole batch: each row sums to 1.

    Args:
        smoothing: part of a target that is spread evenly over all classes (Szegedy et al. 2016, section 7).
    """
    # torch's one_hot looks at the labels' range first, for which a host may wait for its device.
    one_hot_BK = (label_B[:, None] == torch.arange(num_classes, device=label_B.device)).float()
    smooth_BK = one_hot_BK * (1 - smoothing) + smoothing / num_classes
    return mix.share * smooth_BK + (1 - mix.share) * smooth_BK.flip(0)
