"""The training objective: besides the model, the part of a task that the training loop calls."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from clipmill.train.data.batch import Batch
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.step import Step


class Objective(nn.Module):
    """Loss with its parameters (such as a temperature) and its per-sample state.

    The parameters are small and equal on all ranks. The loop trains them together with the model's parameters, and
    averages their gradients over the ranks. Checkpoints contain the `state_dict`; tensors that are sharded over ranks
    are DTensors.
    """

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> Mapping[str, Scalar]:
        """Add this rank's gradients to the parameters of the model and of the objective.

        The average of these gradients over the ranks is the gradient of the batch's loss. The method must not
        synchronise with the device: all facts about a batch that the host needs are in the batch's host tensors.

        Returns:
            Metrics for the log, equal on all ranks. `loss` is the loss over the batch of all ranks. Values computed on
            the device stay there, as zero-dimensional tensors that are not modified later.
        """
        raise NotImplementedError

    def learning_rate(self, scheduled: float) -> Scalar:
        """Return the objective's learning rate for a step in which the model's rate is `scheduled`.

        A rate that the device computes is a zero-dimensional tensor: float32 on a GPU, as torch's fused optimizers
        require.
        """
        return scheduled

    def after_step(self, step: Step) -> None:
        """Keep parameters within their bounds. The loop calls this method after each optimizer step."""


def backward_microbatches(
    loss_of: Callable[[slice], torch.Tensor], *, num_samples: int, step: Step, gradient_factor: int = 1
) -> list[torch.Tensor]:
    """Run forward and backward passes of a rank's share of the batch, microbatch by microbatch.

    Gradients accumulate over microbatches. Ranks exchange them only in the last microbatch. Each microbatch has
    different random numbers (`Step.seed_generators`).

    Args:
        loss_of: Function that returns the loss of a slice of rows, as a summand of the loss of the rank's share.
        num_samples: Number of samples in the share.
        gradient_factor: Factor for the gradients, but not for the returned losses: the number of ranks if the losses
            are summands of the batch's loss, because gradients are averaged over ranks.

    Returns:
        The detached losses of the microbatches.
    """
    size = min(step.microbatch or num_samples, num_samples)
    losses = []
    for part, begin in enumerate(range(0, num_samples, size)):
        rows = slice(begin, min(begin + size, num_samples))
        with step.synced(rows.stop == num_samples), step.seed_generators(part):
            loss = loss_of(rows)
            step.scale(loss if gradient_factor == 1 else loss * gradient_factor).backward()
        losses.append(loss.detach())
    return losses
