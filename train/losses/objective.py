"""The training objective: the part of a task that the loop knows besides the model."""

from collections.abc import Mapping, Sequence

from torch import nn

from train.data.batch import Batch
from train.device.transfer import Scalar
from train.distributed.step import Step


class Objective(nn.Module):
    """A loss with its own parameters (a temperature) and its state per sample.

    The parameters are small and equal on all ranks. The loop trains them beside the model's and averages their
    gradients over the ranks itself. Checkpoints hold the `state_dict`; a tensor that is sharded over ranks is a DTensor
    there.
    """

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> Mapping[str, Scalar]:
        """Add this rank's gradients to those of the parameters of the model and of the objective.

        Averaged over the ranks they are the gradients of the loss of the whole batch. Nothing here synchronises with
        the device: what the host must know of a batch is in the batch's tensors on the host.

        Returns:
            Metrics for the log, equal on all ranks; `loss` is that of the whole batch. What the device computes stays
            there, as zero-dimensional tensors that nobody modifies.
        """
        raise NotImplementedError

    def check_resumable(self, sizes: Mapping[str, Sequence[int]], *, where: str) -> None:
        """Raise a UserError if a checkpoint has state that the objective cannot continue from.

        Args:
            sizes: shapes of the objective's tensors in the checkpoint `where`, by their names in `state_dict`.
        """

    def learning_rate(self, scheduled: float) -> Scalar:
        """Learning rate of the objective's parameters in a step whose schedule gives the model the rate `scheduled`.

        A zero-dimensional tensor where the device decides: float32 on a GPU, as torch's fused optimizers require.
        """
        return scheduled

    def after_step(self, step: Step) -> None:
        """Called after each optimizer step, to keep parameters within their bounds."""
