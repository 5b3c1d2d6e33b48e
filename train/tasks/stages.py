"""Tasks whose models can be cut into the stages of a pipeline."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from manifests.errors import UserError
from train.distributed.partition import LayerCost, partition
from train.distributed.settings import ParallelSettings
from train.distributed.world import World


@runtime_checkable
class CutTask(Protocol):
    """A task whose model is a flat list of layers. Its objective can run a train.distributed.pipeline.Pipeline."""

    def layers(self, model: Any) -> Sequence[LayerCost]:
        """The layers of a model, in order."""
        ...

    def part(self, model: Any, layers: range) -> nn.Module:
        """Some layers of a model, which it takes over: under the names that their parameters have in the whole."""
        ...


def check_stages(task: object, parallel: ParallelSettings) -> None:
    """Raises a UserError where the settings want stages, and the task's models cannot be cut."""
    if parallel.stages > 1 and not isinstance(task, CutTask):
        raise UserError(
            f"--parallel.stages is {parallel.stages}, and only models of train caption can be cut into stages",
            hint="use --parallel.strategy fsdp for models that are larger than a GPU",
        )


def own_part(task: object, model: nn.Module, parallel: ParallelSettings, *, stages: World) -> nn.Module:
    """This rank's layers of a model; the model itself where there is one stage.

    Raises:
        UserError: the model cannot be cut into as many stages.
    """
    check_stages(task, parallel)
    if stages.size == 1:
        return model
    assert isinstance(task, CutTask)
    cut = partition(task.layers(model), num_stages=stages.size, rule=parallel.partition)
    return task.part(model, cut[stages.rank])
