"""The objective that settings name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from train.distributed.world import World
from train.losses.cached import Inputs
from train.losses.contrastive import ContrastiveObjective
from train.losses.global_contrast import GlobalContrast, GlobalSet
from train.losses.infonce import InfoNCE
from train.losses.max_margin import MaxMargin
from train.losses.one_temperature import OneTemperature
from train.losses.sample_temperature import SampleTemperature
from train.losses.settings import Kind, Loss
from train.losses.siglip import SigLIP

# Every kind of `--loss.kind` is in one of the two.
OF_THE_BATCH: Mapping[Kind, Callable[[Inputs, Loss], ContrastiveObjective]] = MappingProxyType(
    {"infonce": InfoNCE, "mbcl": InfoNCE, "siglip": SigLIP, "max-margin": MaxMargin}
)
OF_THE_SET: Mapping[Kind, type[GlobalContrast]] = MappingProxyType(
    {
        "sogclr": OneTemperature,
        "isogclr": SampleTemperature,
        "fastclip-v0": OneTemperature,
        "fastclip-v1": OneTemperature,
        "fastclip-v2": SampleTemperature,
        "fastclip-v3": OneTemperature,
    }
)


def build_contrast(settings: Loss, *, inputs: Inputs, whole: GlobalSet | None, world: World) -> ContrastiveObjective:
    """The contrastive objective of `--loss.*`.

    Args:
        inputs: clips and captions of a batch, as the model takes them.
        whole: the set that a loss in OF_THE_SET compares with; no other loss looks at it.

    Raises:
        KeyError: there is no such kind of loss.
    """
    if settings.kind in OF_THE_BATCH:
        return OF_THE_BATCH[settings.kind](inputs, settings)
    of_the_set = OF_THE_SET[settings.kind]
    assert whole is not None, "a loss of the whole set has a set"
    return of_the_set(inputs, settings, whole, world=world)
