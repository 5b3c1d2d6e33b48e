"""The two sets of a probe: the clips that are scored, and the bank of those that it learns from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manifests.errors import UserError
from train.config.evaluation import ProbeEvaluation
from train.config.training import ClipSettings
from train.data.batch import Batch
from train.data.classes import ClassList
from train.distributed.world import World
from train.evaluation.probe.features import Features, Tower, extract, gathered
from train.evaluation.probe.probing import Known, known
from train.evaluation.probe.samples import Labelled, open_labelled, read_probe_classes


@dataclass(frozen=True)
class ProbeSets:
    """Opened sets; every rank has its part of each.

    Attributes:
        asked: clips that are scored, of which every `asked_every`-th is.
        bank: clips that neighbours and linear layers come from, likewise.
    """

    classes: tuple[ClassList, ...]
    asked: Labelled
    bank: Labelled
    asked_every: int = 1
    bank_every: int = 1

    def extract(
        self,
        towers: Sequence[Tower],
        *,
        inputs: Callable[[Batch], torch.Tensor],
        world: World,
        device: torch.device,
    ) -> tuple[list[Known], list[Known], Features, Features]:
        """For each tower what is known of the clips that are scored and of the bank, and the bare features; collective.

        Raises:
            FailedWork: no clip could be decoded, or a feature is no number.
        """
        parts = []
        for samples, every in ((self.asked, self.asked_every), (self.bank, self.bank_every)):
            own = extract(towers, samples.evaluation_batches(every=every), inputs=inputs, device=device)
            parts.append(gathered(own, world))
        asked, bank = parts
        return known(asked, self.asked), known(bank, self.bank), asked, bank


def open_sets(
    settings: ClipSettings,
    wanted: ProbeEvaluation,
    *,
    bank_split: str,
    world: World,
    device: torch.device,
    is_whole: bool = False,
) -> ProbeSets:
    """Opens both sets.

    Args:
        is_whole: all samples are visited, whatever `max_samples` and `max_bank` say.

    Raises:
        UserError: a split has no such clips, or the bank is too small, of one class, or what is scored.
    """
    if wanted.split == bank_split:
        raise UserError(
            f"{bank_split!r} is the split to learn from and the one to score: every clip would find itself",
            hint="use two splits",
        )
    classes = read_probe_classes(settings, wanted.labels, splits=(bank_split, wanted.split))
    bank = open_labelled(settings, split=bank_split, classes=classes, world=world, device=device)
    asked = open_labelled(settings, split=wanted.split, classes=classes, world=world, device=device)
    every = [
        1 if is_whole else -(-len(samples) // most)
        for samples, most in ((asked, wanted.max_samples), (bank, wanted.max_bank))
    ]
    sets = ProbeSets(classes, asked, bank, *every)
    _check(sets, wanted, bank_split=bank_split)
    return sets


def _check(sets: ProbeSets, wanted: ProbeEvaluation, *, bank_split: str) -> None:
    bank_ML, asked_NL = sets.bank.all_labels[:: sets.bank_every], sets.asked.all_labels[:: sets.asked_every]
    for its, bank_M, asked_N in zip(sets.classes, bank_ML.T, asked_NL.T, strict=True):
        there = np.unique(bank_M[bank_M >= 0])
        if len(there) < 2:
            what = f"are of the class {its.names[int(there[0])]!r}" if len(there) else f"have no {its.label}"
            raise UserError(
                f"all clips of split {bank_split!r} {what}: there is nothing to tell apart",
                hint="use more data, or another label",
            )
        if not (asked_N >= 0).any():
            raise UserError(f"no clip of split {wanted.split!r} has a {its.label}", hint="use another split or label")
        num_bank = int((bank_M >= 0).sum())
        if "knn" in wanted.methods and wanted.neighbours > num_bank:
            raise UserError(
                f"{wanted.neighbours} neighbours are to vote, and split {bank_split!r} has {num_bank} clips "
                f"with a {its.label}",
                hint=f"ask for {num_bank} or fewer, best for far fewer than a class has clips",
            )
