"""A captioner as the layers that a pipeline is cut between."""

from train.distributed.partition import LayerCost
from train.models.captioner import Captioner
from train.tasks.caption.stages import CaptionerPart, all_stages, parameters_by_stage

_BLOCK_KIND = "block"


def layers_of(captioner: Captioner) -> list[LayerCost]:
    """The layers, in order; blocks of tower and decoder are of one kind."""
    kinds = [_BLOCK_KIND if stage.kind.endswith(_BLOCK_KIND) else stage.kind for stage in all_stages(captioner)]
    return [LayerCost(*layer) for layer in zip(kinds, parameters_by_stage(captioner), strict=True)]


def part_of(captioner: Captioner, layers: range) -> CaptionerPart:
    """Some layers of a captioner, which they take over."""
    return CaptionerPart(captioner, begin=layers.start, end=layers.stop)
