"""Cross-entropy with mixed targets.

Shape suffixes: B batch of a rank, R a part of it, C channels, T frames, H and W pixels, K classes.
"""

from collections.abc import Callable

import torch
from torch import nn

from train.data.batch import Batch
from train.device.transfer import Number
from train.distributed.step import Step
from train.losses.objective import Objective
from train.tasks.classify.mixing import NOTHING, draw_mix, mix_clips, mixed_targets
from train.tasks.classify.settings import ClassifySettings

# Seeds the drawing of a batch's mix; parts of a batch are numbered from 0.
_MIXING = -1


class SoftCrossEntropy(Objective):
    """Mean over the batch of - sum over classes of target x log probability.

    Args:
        inputs: clips [R, C, T, H, W] of some rows of a batch.
        side: of these clips, H and W.
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

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Number]:
        """Adds the gradients of this rank's share of the batch; says the whole batch's loss."""
        settings = self._settings
        num_samples = len(batch["label"])
        with step.random(_MIXING):
            mix = draw_mix(mixup=settings.mixup, cutmix=settings.cutmix, size_px=self._side)
        targets_BK = mixed_targets(
            batch["label"], num_classes=self._num_classes, smoothing=settings.label_smoothing, mix=mix
        )
        size = min(step.microbatch or num_samples, num_samples)
        total = torch.zeros((), device=targets_BK.device)
        for part, begin in enumerate(range(0, num_samples, size)):
            rows = slice(begin, min(begin + size, num_samples))
            with step.synced(rows.stop == num_samples), step.random(part):
                clips_RCTHW = self._inputs(batch, rows)
                if mix != NOTHING:
                    opposite = slice(num_samples - rows.stop, num_samples - rows.start)
                    partners = clips_RCTHW if opposite == rows else self._inputs(batch, opposite)
                    clips_RCTHW = mix_clips(clips_RCTHW, partners.flip(0), mix)
                with step.autocast():
                    logits_RK = model(clips_RCTHW)
                loss = soft_cross_entropy(logits_RK.float(), targets_BK[rows]) * (
                    (rows.stop - rows.start) / num_samples
                )
                step.scale(loss).backward()
            total += loss.detach()
        return {"loss": step.world.sum(total).double() / step.world.size}


def soft_cross_entropy(logits_RK: torch.Tensor, targets_RK: torch.Tensor) -> torch.Tensor:
    """Mean over rows of the cross-entropy between targets and softmax of logits."""
    return -(targets_RK * logits_RK.log_softmax(dim=1)).sum(dim=1).mean()
