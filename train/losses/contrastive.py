"""What contrastive losses have in common as objectives: pairs of clips and captions, embedded and compared."""

from dataclasses import dataclass, field

import torch
from torch import nn

from train.data.batch import Batch
from train.device.transfer import Scalar
from train.distributed.step import Step
from train.losses.cached import Inputs, backward_through
from train.losses.objective import Objective
from train.losses.scores import Scores
from train.losses.settings import Loss

# Rows of equal captions differ by rounding.
_SAME = 1e-5


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """What a loss finds in a batch. The gradients' mean over ranks is that of the whole batch.

    Attributes:
        loss: of the whole batch, a scalar.
        video_grad_bE: by the embeddings of this rank's clips.
        text_grad_bE: of this rank's captions.
        own_grads: by the objective's own parameters, by their names.
        numbers: scalars for the log, equal on all ranks.
    """

    loss: torch.Tensor
    video_grad_bE: torch.Tensor
    text_grad_bE: torch.Tensor
    own_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, Scalar] = field(default_factory=dict)


class ContrastiveObjective(Objective):
    """A loss of pairs. The model takes clips and captions and gives their embeddings, of unit length.

    Args:
        inputs: clips and captions of a batch, as the model takes them.
    """

    def __init__(self, inputs: Inputs, settings: Loss) -> None:
        super().__init__()
        self._inputs = inputs
        self._settings = settings

    def contrast(self, scores: Scores, batch: Batch, step: Step) -> Contrast:
        """Loss and gradients of a batch whose similarities are `scores`; state per sample moves on."""
        raise NotImplementedError

    def log_scale(self) -> torch.Tensor | None:
        """log of 1 / temperature, as CLIP's files store it; None for a loss without one."""
        return None

    def learning_rate(self, scheduled: float) -> Scalar:
        """The temperature's own, where it has one."""
        return self._settings.own_temperature_lr or scheduled

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Adds the gradients of the loss over the batches of all ranks.

        Returns:
            loss; batch_accuracy: share of clips to which no caption is nearer than their own; temperature, where the
            loss has one, before the step; and what the loss adds.
        """
        found: dict[str, Scalar] = {}

        def gradients(video_bE: torch.Tensor, text_bE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                scores = Scores(video_bE, text_bE, step.world)
                contrast = self.contrast(scores, batch, step)
                for name, gradient in contrast.own_grads.items():
                    _add_gradient(self.get_parameter(name), step.scale(gradient))
                # Equal captions are as near, and right as well.
                is_right_b = scores.pair_b >= scores.nearest_b - _SAME
                found["loss"] = contrast.loss
                found["batch_accuracy"] = step.world.sum(is_right_b.to(contrast.loss.dtype).sum()) / scores.num
                if (log_scale := self.log_scale()) is not None:
                    found["temperature"] = (-log_scale).exp()
                found.update(contrast.numbers)
            return contrast.video_grad_bE, contrast.text_grad_bE

        backward_through(model, self._inputs, batch, step, gradients)
        return found


def _add_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    if not parameter.requires_grad:
        return
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
