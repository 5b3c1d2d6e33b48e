"""Interface of training objectives. The training loop calls a task's objective with the model and a batch."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from clipmill.train.data.batch import Batch
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.world import Step


class Objective(nn.Module):
    """Loss with its parameters, such as a temperature, and any values that it stores for samples of the training set.

    The parameters are small, and have the same values on all ranks. The loop trains them together with the model's
    parameters, and averages their gradients over the ranks. Checkpoints contain the `state_dict`, in which
    tensors that are sharded over ranks are DTensors.
    """

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> Mapping[str, Scalar]:
        """Accumulate this rank's gradients in the parameters of the model and the objective.

        The average of these gradients over the ranks is the gradient of the loss of the global batch. This method must
        not synchronise with the device. Everything that the host needs to know about a batch is stored in the
        batch's CPU tensors.

        Returns:
            Metrics to log, the same on all ranks. `loss` is the loss of the global batch. Values computed on the device
            stay on the device, as zero-dimensional tensors that are not modified later.
        """
        raise NotImplementedError

    def learning_rate(self, model_lr: float) -> Scalar:
        """Return the objective's learning rate for a step with the model's rate `model_lr`.

        A rate that is computed on the device is a zero-dimensional tensor. On a GPU, it is float32, as torch's fused
        optimizers require.
        """
        return model_lr

    def after_step(self, step: Step) -> None:
        """Clamp parameters to their bounds. The loop calls this method after each optimizer step."""


def backward_microbatches(
    loss_fn: Callable[[slice], torch.Tensor], *, num_samples: int, step: Step, gradient_factor: int = 1
) -> list[torch.Tensor]:
    """Run the forward and backward passes for this rank's samples, microbatch by microbatch.

    Gradients accumulate over the microbatches, and are exchanged between ranks only in the last microbatch. Each
    microbatch draws different random numbers (`Step.seed_generators`).

    Args:
        loss_fn: Function that returns the loss of a slice of rows. The sum over all slices is this rank's loss.
        num_samples: Number of samples on this rank.
        gradient_factor: Factor for the gradients, but not for the returned losses. If the sum of the ranks' losses is
            the loss of the global batch, pass the number of ranks, because gradients are averaged over ranks.

    Returns:
        The detached losses of the microbatches.
    """
    size = min(step.microbatch or num_samples, num_samples)
    losses = []
    for index, start in enumerate(range(0, num_samples, size)):
        rows = slice(start, min(start + size, num_samples))
        with step.sync_context(rows.stop == num_samples), step.seed_generators(index):
            loss = loss_fn(rows)
            step.scale(loss if gradient_factor == 1 else loss * gradient_factor).backward()
        losses.append(loss.detach())
    return losses
