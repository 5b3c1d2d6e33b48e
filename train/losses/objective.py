"""What a model is trained towards: the part of a task that the loop knows besides the model."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from train.data.batch import Batch
from train.device.transfer import Number
from train.distributed.step import Step


class Objective(nn.Module):
    """A loss with whatever belongs to it: its own parameters (a temperature), its state per sample.

    Its parameters are small and equal on all ranks; the loop trains them beside the model's and averages their
    gradients over the ranks itself. What `state_dict` has is in the checkpoints; a tensor that is spread over ranks is
    a DTensor there.
    """

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> Mapping[str, Number]:
        """Adds this rank's gradients to those of the model's and its own parameters.

        Averaged over the ranks they are the gradients of the whole batch's loss. Nothing here waits for the device:
        what a task must know of a batch on the host, the batch has there.

        Returns:
            Numbers for the log, equal on all ranks; `loss` is the whole batch's. What the device computes stays there,
            as tensors without dimensions that nobody writes into.
        """
        raise NotImplementedError

    def check_resumable(self, sizes: Mapping[str, Sequence[int]], *, where: str) -> None:
        """Raises a UserError where a checkpoint has state that the loss, as it is now, cannot go on with.

        Args:
            sizes: of the tensors that the checkpoint `where` has of the objective, by the names of `state_dict`.
        """

    def learning_rate(self, scheduled: float) -> Number:
        """Learning rate of its own parameters in a step for which the model's schedule gives `scheduled`.

        A tensor without dimensions where the device decides: float32 on a GPU, which torch's fused optimizers ask for.
        """
        return scheduled

    def after_step(self, step: Step) -> None:
        """Called after each step of the optimizer, for limits that parameters must keep."""


def backward_microbatches(
    loss_of: Callable[[slice], torch.Tensor], *, num_samples: int, step: Step, gradient_factor: int = 1
) -> list[torch.Tensor]:
    """Run forward and backward passes of a rank's share of the batch, microbatch by microbatch.

    Gradients add up over microbatches; ranks exchange them in the last one only. Each microbatch has random numbers of
    its own (`Step.random`).

    Args:
        loss_of: loss of some rows of the share, as a summand of the share's loss.
        num_samples: of the share.
        gradient_factor: multiplies the gradients but not the returned losses; the number of ranks for losses that are
            summands of the whole batch's, as gradients are averaged over ranks.

    Returns:
        The losses of the microbatches, detached.
    """
    size = min(step.microbatch or num_samples, num_samples)
    losses = []
    for part, begin in enumerate(range(0, num_samples, size)):
        rows = slice(begin, min(begin + size, num_samples))
        with step.synced(rows.stop == num_samples), step.random(part):
            loss = loss_of(rows)
            step.scale(loss if gradient_factor == 1 else loss * gradient_factor).backward()
        losses.append(loss.detach())
    return losses
