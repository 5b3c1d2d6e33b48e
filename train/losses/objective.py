"""The training objective: the part of a task that the loop knows in addition to the model."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from clipmill.train.data.batch import Batch
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.step import Step


class Objective(nn.Module):
    """A loss with its parameters (a temperature) and its state per sample.

    The parameters are small and equal on all ranks. The loop trains them with the model's and averages their
    gradients over the ranks itself. Checkpoints hold the `state_dict`; a tensor that is sharded over ranks is a DTensor
    there.
    """

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> Mapping[str, Scalar]:
        """Add this rank's gradients to the parameters of the model and of the objective.

        Averaged over the ranks they are the gradients of the loss of the batch. Nothing here synchronises with
        the device: what the host must know of a batch is in the batch's tensors on the host.

        Returns:
            Metrics for the log, equal on all ranks; `loss` is the loss of the batch of all ranks. What the device
            computes stays there, as zero-dimensional tensors that are not modified later.
        """
        raise NotImplementedError

    def learning_rate(self, scheduled: float) -> Scalar:
        """Return the objective's learning rate in a step whose schedule gives the model the rate `scheduled`.

        A zero-dimensional tensor where the device decides: float32 on a GPU, as torch's fused optimizers require.
        """
        return scheduled

    def after_step(self, step: Step) -> None:
        """Keep parameters within their bounds; the loop calls it after each optimizer step."""


def backward_microbatches(
    loss_of: Callable[[slice], torch.Tensor], *, num_samples: int, step: Step, gradient_factor: int = 1
) -> list[torch.Tensor]:
    """Run forward and backward passes of a rank's share of the batch, microbatch by microbatch.

    Gradients add up over microbatches; ranks exchange them in the last one only. Each microbatch has different
    random numbers (`Step.random`).

    Args:
        loss_of: Function that returns the loss of some rows of the share, as a summand of the share's loss.
        num_samples: Number of samples of the share.
        gradient_factor: Factor of the gradients, but not of the returned losses; the number of ranks for losses
            that are summands of the batch's loss, as gradients are averaged over ranks.

    Returns:
        The losses of the microbatches, detached.
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
