"""What a model is trained towards: the part of a task that the loop knows besides the model."""

from collections.abc import Mapping, Sequence

from torch import nn

from train.data.batch import Batch
from train.device.transfer import Scalar
from train.distributed.step import Step


class Objective(nn.Module):
    """A loss with whatever belongs to it: its own parameters (a temperature), its state per sample.

    Its parameters are small and equal on all ranks; the loop trains them beside the model's and averages their
    gradients over the ranks itself. What `state_dict` has is in the checkpoints; a tensor that is spread over ranks is
    a DTensor there.
    """

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> Mapping[str, Scalar]:
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

    def learning_rate(self, scheduled: float) -> Scalar:
        """Learning rate of its own parameters in a step for which the model's schedule gives `scheduled`.

        A tensor without dimensions where the device decides: float32 on a GPU, which torch's fused optimizers ask for.
        """
        return scheduled

    def after_step(self, step: Step) -> None:
        """Called after each step of the optimizer, for limits that parameters must keep."""
