"""The two sets of a probe: the clips that are scored, and the bank of labelled clips that it learns from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import read_captions
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.evaluation import ProbeEvaluation
from clipmill.train.data.batch import Batch
from clipmill.train.data.classes import ClassList, class_labels, read_classes
from clipmill.train.data.inputs import open_labelled_folder
from clipmill.train.data.query import DataQuery, loader_settings, open_samples
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.probe.features import ClipFeatures, Tower, extract, gather_features
from clipmill.train.evaluation.probe.probing import LabelledFeatures
from clipmill.train.evaluation.runner import every_for
from clipmill.train.run.counted_batches import counted_batches

if TYPE_CHECKING:
    from clipmill.train.data.samples import Samples


@dataclass(frozen=True)
class ProbeSets:
    """Opened sets; every rank has its part of each.

    Attributes:
        queries: clips that are scored, every `queries_every`-th of them.
        bank: clips that neighbours and linear layers come from, likewise.
    """

    classes: tuple[ClassList, ...]
    queries: "Samples[Any]"
    bank: "Samples[Any]"
    queries_every: int = 1
    bank_every: int = 1

    def extract(
        self,
        towers: Sequence[Tower],
        *,
        inputs: Callable[[Batch], torch.Tensor],
        world: World,
        device: torch.device,
    ) -> tuple[list[LabelledFeatures], list[LabelledFeatures], ClipFeatures, ClipFeatures]:
        """Features of queries and bank for each tower, with labels; then the same without labels; collective.

        Raises:
            FailedWork: no clip could be decoded, or a feature is not finite.
        """
        parts = []
        for samples, every in ((self.queries, self.queries_every), (self.bank, self.bank_every)):
            batches = samples.evaluation_batches(every=every)
            batches = counted_batches(batches, "extracting features", total=-(-len(samples) // every))
            own = extract(towers, batches, inputs=inputs, device=device)
            parts.append(gather_features(own, world))
        queries, bank = parts
        return _labelled_features(queries, self.queries), _labelled_features(bank, self.bank), queries, bank


def _labelled_features(found: ClipFeatures, samples: "Samples[Any]") -> list[LabelledFeatures]:
    """The features of each tower, with labels and videos of their clips."""
    rows = found.sample.cpu().numpy()
    label_NL = torch.from_numpy(samples.all_labels[rows]).to(found.sample.device)
    return [LabelledFeatures(features_ND, label_NL, samples.video[rows]) for features_ND in found.of_tower]


def available_labels(settings: ClipSettings) -> tuple[str, ...]:
    """The labels of the data's captions that can be classes.

    Raises:
        UserError: the data is not a folder with a manifest.
    """
    return class_labels(read_captions(open_labelled_folder(settings, column=None).path).schema)


def open_sets(
    settings: ClipSettings,
    wanted: ProbeEvaluation,
    *,
    bank_split: str,
    world: World,
    device: torch.device,
    is_whole: bool = False,
) -> ProbeSets:
    """Open both sets.

    Args:
        is_whole: visit all samples, whatever `max_samples` and `max_bank` are.

    Raises:
        UserError: the data is not a folder with a manifest; a split has no such clips; the bank is too small or of a
            single class; or both splits are the same.
    """
    if wanted.split == bank_split:
        raise UserError(
            f"{bank_split!r} is the split to learn from and the one to score: every clip would find itself",
            hint="use two splits",
        )
    folder = open_labelled_folder(settings, column=None).path
    splits = (bank_split, wanted.split)
    classes = tuple(read_classes(folder, label=label, splits=splits) for label in wanted.labels)
    bank = _open_labelled(settings, split=bank_split, classes=classes, world=world, device=device)
    queries = _open_labelled(settings, split=wanted.split, classes=classes, world=world, device=device)
    every = [
        1 if is_whole else every_for(len(samples), at_most=most)
        for samples, most in ((queries, wanted.max_samples), (bank, wanted.max_bank))
    ]
    sets = ProbeSets(classes, queries, bank, *every)
    _check(sets, wanted, bank_split=bank_split)
    return sets


def _open_labelled(
    settings: ClipSettings, *, split: str, classes: Sequence[ClassList], world: World, device: torch.device
) -> "Samples[Any]":
    """This rank's part of the clips of a split, pixels or latents, that have any of the labels, each once."""
    # A batch of training fits into memory; an autoencoder sees all cubes here, but keeps no activations.
    batch = settings.microbatch or world.share(settings.batch)
    loading = replace(loader_settings(settings, world, device=device), batch=batch, group=1)
    samples: Samples[Any] = open_samples(
        DataQuery(
            settings=settings,
            content="labels",
            split=split,
            loading=loading,
            classes=classes,
            has_all_segments=True,
        )
    )
    return samples


def _check(sets: ProbeSets, wanted: ProbeEvaluation, *, bank_split: str) -> None:
    bank_ML, label_NL = sets.bank.all_labels[:: sets.bank_every], sets.queries.all_labels[:: sets.queries_every]
    for its, bank_M, label_N in zip(sets.classes, bank_ML.T, label_NL.T, strict=True):
        there = np.unique(bank_M[bank_M >= 0])
        if len(there) < 2:
            what = f"are of the class {its.names[int(there[0])]!r}" if len(there) else f"have no {its.label}"
            raise UserError(
                f"all clips of split {bank_split!r} {what}: there is nothing to tell apart",
                hint="use more data, or another label",
            )
        if not (label_N >= 0).any():
            raise UserError(f"no clip of split {wanted.split!r} has a {its.label}", hint="use another split or label")
        num_bank = int((bank_M >= 0).sum())
        if "knn" in wanted.methods and wanted.neighbours > num_bank:
            raise UserError(
                f"{wanted.neighbours} neighbours are to vote, and split {bank_split!r} has "
                f"{count_noun(num_bank, 'clip')} "
                f"with a {its.label}",
                hint=f"use {num_bank} or fewer for --neighbours (in training --evaluate.neighbours), ideally far fewer "
                "than a class has clips",
            )
