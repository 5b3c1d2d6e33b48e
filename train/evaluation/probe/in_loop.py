"""The probe that is made while a model is trained, by all ranks together."""

from collections.abc import Callable

import torch
from torch import nn

from train.config.evaluation import PROBE_NUMBERS, ProbeEvaluation
from train.config.training import ClipSettings
from train.data.batch import Batch
from train.distributed.world import World
from train.evaluation.probe.features import tower_of
from train.evaluation.probe.probing import probe
from train.evaluation.probe.sets import open_sets


class LoopProbe:
    """Probes a model again and again on the same clips.

    Args:
        settings: of the run; clips of its training split are the bank.
        inputs: clips [B, C, T, H, W] of a batch, as the video tower takes them in an evaluation.

    Raises:
        UserError: there are no such labels, or too few clips.
    """

    def __init__(
        self,
        settings: ClipSettings,
        wanted: ProbeEvaluation,
        *,
        inputs: Callable[[Batch], torch.Tensor],
        world: World,
        device: torch.device,
    ) -> None:
        self._wanted, self._inputs, self._device = wanted, inputs, device
        self._sets = open_sets(settings, wanted, bank_split=settings.split, world=world, device=device)

    def __call__(self, model: nn.Module, world: World) -> dict[str, float]:
        """`train.config.evaluation.number_names` as `<split>/<name>`, equal on all ranks; collective.

        The model is in evaluation mode, and whole on every rank.
        """
        (asked,), (bank,), *bare = self._sets.extract(
            [tower_of(model)], inputs=self._inputs, world=world, device=self._device
        )
        numbers: dict[str, float] = {}
        for finding in probe(asked, bank, wanted=self._wanted, classes=self._sets.classes):
            its = finding.found.as_json()
            numbers |= {f"{finding.label}_{finding.method}_{name}": its[name] for name in PROBE_NUMBERS}
        # Every rank has worked out the same; those of rank 0 are taken, should two devices round otherwise.
        own = torch.tensor(list(numbers.values()), dtype=torch.float64, device=self._device)
        numbers = dict(zip(numbers, world.gather(own)[: len(own)].tolist(), strict=True))
        if num_failed := sum(part.num_failed for part in bare):
            numbers["num_failed"] = float(num_failed)
        return {f"{self._wanted.split}/{name}": value for name, value in numbers.items()}
