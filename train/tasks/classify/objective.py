"""Cross-entropy with mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019).

One share and one kind of mixing are drawn per batch, from torch's CPU generator. Clip i of B is mixed with clip
B - 1 - i, and its target with that clip's target by the same share. Cutmix replaces one rectangle in all frames.

Shape suffixes: B batch of a rank, R rows of a microbatch, C channels, T frames, H and W pixels, K classes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from clipmill.train.data.batch import Batch
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.step import Step
from clipmill.train.losses.objective import Objective, backward_microbatches
from clipmill.train.tasks.classify.spec import ClassifySettings

# Number of the random draw of a batch's mix; microbatches are numbered from 0.
_MIXING = -1


class SoftCrossEntropy(Objective):
    """Cross-entropy with soft targets, mean over the batch.

    Args:
        inputs: clips [R, C, T, H, W] of some rows of a batch.
        side: height and width of these clips.
    """

    def __init__(
        self,
        inputs: Callable[[Batch, slice], torch.Tensor],
        settings: ClassifySettings,
        *,
        num_classes: int,
        side: int,
    ) -> None:
        super().__init__()
        self._inputs, self._settings, self._num_classes, self._side = inputs, settings, num_classes, side

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Add the gradients of this rank's share of the batch; return the loss of the whole batch."""
        settings = self._settings
        num_samples = len(batch["label"])
        with step.seed_generators(_MIXING):
            mix = draw_mix(mixup=settings.mixup, cutmix=settings.cutmix, size_px=self._side)
        targets_BK = mixed_targets(
            batch["label"], num_classes=self._num_classes, smoothing=settings.label_smoothing, mix=mix
        )

        def loss_of(rows: slice) -> torch.Tensor:
            clips_RCTHW = self._inputs(batch, rows)
            if mix != NO_MIX:
                opposite = slice(num_samples - rows.stop, num_samples - rows.start)
                partners = clips_RCTHW if opposite == rows else self._inputs(batch, opposite)
                clips_RCTHW = mix_clips(clips_RCTHW, partners.flip(0), mix)
            with step.autocast():
                logits_RK = model(clips_RCTHW)
            share = (rows.stop - rows.start) / num_samples
            return soft_cross_entropy(logits_RK.float(), targets_BK[rows]) * share

        losses = backward_microbatches(loss_of, num_samples=num_samples, step=step)
        return {"loss": step.world.sum(sum(losses[1:], losses[0])).double() / step.world.size}


def soft_cross_entropy(logits_RK: torch.Tensor, targets_RK: torch.Tensor) -> torch.Tensor:
    """Mean over rows of the cross-entropy between targets and softmax of logits."""
    return -(targets_RK * logits_RK.log_softmax(dim=1)).sum(dim=1).mean()


@dataclass(frozen=True)
class Mix:
    """How the clips of a batch are mixed.

    Attributes:
        share: of a clip's own target; the rest is its partner's.
        box: rows [top, bottom) and columns [left, right) that come from the partner; None for mixup.
    """

    share: float
    box: tuple[int, int, int, int] | None = None


NO_MIX = Mix(1.0)


def draw_mix(*, mixup: float, cutmix: float, size_px: int) -> Mix:
    """Draw how a batch is mixed.

    Args:
        mixup, cutmix: alpha of the Beta distribution of shares, 0 for none. With both, each applies to half of the
            batches.
    """
    if not mixup and not cutmix:
        return NO_MIX
    is_cut = bool(cutmix) and (not mixup or torch.rand(()).item() < 0.5)
    alpha = torch.tensor(cutmix if is_cut else mixup, dtype=torch.float64)
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    if not is_cut:
        return Mix(share)
    top, left = (int(torch.randint(size_px, ())) for _ in range(2))
    return cut_around(top, left, share=share, size_px=size_px)


def cut_around(row: int, column: int, *, share: float, size_px: int) -> Mix:
    """A square of area 1 - `share` around a pixel, clipped at the borders; the share is computed from the rest."""
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
        smoothing: label smoothing (Szegedy et al. 2016, section 7).
    """
    # torch's one_hot checks the range of the labels, for which the host would wait for the device.
    one_hot_BK = (label_B[:, None] == torch.arange(num_classes, device=label_B.device)).float()
    smooth_BK = one_hot_BK * (1 - smoothing) + smoothing / num_classes
    return mix.share * smooth_BK + (1 - mix.share) * smooth_BK.flip(0)
