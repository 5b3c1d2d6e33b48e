"""The two sets of a probe: the clips that are scored, and the bank of those that it learns from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch

from manifests.errors import UserError
from manifests.store import read_captions
from train.config.evaluation import ProbeEvaluation
from train.config.training import ClipSettings
from train.data.batch import Batch
from train.data.classes import ClassList, label_names, read_classes
from train.data.decoding.clip import Views
from train.data.inputs import LatentSettings, clip_shape, loader_settings, open_labelled_folder, open_latents
from train.data.labelled_clips import LabelledClips
from train.data.latents.labelled import LabelledLatents
from train.distributed.world import World
from train.evaluation.probe.features import Features, Tower, extract, gathered
from train.evaluation.probe.probing import Known, known

# What a probe looks at: the labelled clips of a split, of pixels or of latents, each once, as a run's clips look.


Labelled = LabelledClips | LabelledLatents


def read_probe_classes(
    settings: ClipSettings, labels: Sequence[str], *, splits: Sequence[str]
) -> tuple[ClassList, ...]:
    """The classes of each label in some splits together.

    Raises:
        UserError: the data is no folder with a manifest, the captions have no such label, or fewer than two classes.
    """
    folder = open_labelled_folder(settings).path
    return tuple(read_classes(folder, label=label, splits=splits) for label in labels)


def labels_there(settings: ClipSettings) -> list[str]:
    """The labels that captions of the data have.

    Raises:
        UserError: the data is no folder with a manifest.
    """
    return label_names(read_captions(open_labelled_folder(settings).path))


def open_labelled(
    settings: ClipSettings, *, split: str, classes: Sequence[ClassList], world: World, device: torch.device
) -> Labelled:
    """This rank's part of the clips of a split that have any of the labels.

    Raises:
        UserError: there are none.
    """
    own, *also = classes
    if getattr(settings, "input", "pixels") == "latents":
        return open_latents(
            partial(LabelledLatents, classes=own, also=also),
            cast(LatentSettings, settings),
            split=split,
            world=world,
            batch=_batch(settings, world),
        )
    folder = open_labelled_folder(settings)
    loading = loader_settings(settings, world, device=device)
    return LabelledClips(
        folder.path,
        split=split,
        classes=own,
        also=also,
        shape=clip_shape(settings, views=Views()),
        loading=replace(loading, batch=_batch(settings, world), group=1),
        decode=settings.decode,
        tars=folder.tars,
    )


def _batch(settings: ClipSettings, world: World) -> int:
    # What one process can train on at once, it can look at: an autoencoder then sees all cubes, but keeps nothing.
    return settings.microbatch or world.share(settings.batch)


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
