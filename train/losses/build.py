"""The objective that settings name."""

from train.distributed.world import World
from train.losses.cached import Inputs
from train.losses.contrastive import ContrastiveObjective
from train.losses.global_contrast import GlobalSet
from train.losses.infonce import InfoNCE
from train.losses.max_margin import MaxMargin
from train.losses.one_temperature import OneTemperature
from train.losses.sample_temperature import SampleTemperature
from train.losses.settings import GLOBAL, PER_SAMPLE, Loss
from train.losses.siglip import SigLIP


def build_contrast(settings: Loss, *, inputs: Inputs, whole: GlobalSet | None, world: World) -> ContrastiveObjective:
    """The contrastive objective of `--loss.*`.

    Args:
        inputs: clips and captions of a batch, as the model takes them.
        whole: the set that a loss in GLOBAL compares with; no other loss looks at it.
    """
    if settings.kind in GLOBAL:
        assert whole is not None, "a global loss has a set"
        kind = SampleTemperature if settings.kind in PER_SAMPLE else OneTemperature
        return kind(inputs, settings, whole, world=world)
    if settings.kind == "siglip":
        return SigLIP(inputs, settings)
    if settings.kind == "max-margin":
        return MaxMargin(inputs, settings)
    return InfoNCE(inputs, settings)
