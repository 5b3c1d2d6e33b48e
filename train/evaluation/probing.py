"""Run probes of frozen features: open the scored clips and the bank of labelled clips, and compute the results.

`train eval probe` compares a trained run with the same tower with random weights. During training, all ranks probe
the model together.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import read_captions
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.evaluation import PROBE_NUMBERS, ProbeEvaluation
from clipmill.train.data.batch import Batch
from clipmill.train.data.classes import ClassList, class_labels, list_labels, read_classes
from clipmill.train.data.query import DataQuery, loader_settings, open_labelled_folder, open_samples
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.features import ClipFeatures, Tower, extract, gather_features, tower_of
from clipmill.train.evaluation.probe import METHOD_TITLES, ProbeFlags
from clipmill.train.evaluation.probe_classifiers import LabelledFeatures, probe
from clipmill.train.evaluation.runner import OpenedRun, Score, describe_clip, every_for, split_metrics
from clipmill.train.evaluation.tables import majority_baseline
from clipmill.train.run.tracking import count_batches

if TYPE_CHECKING:
    from clipmill.train.data.samples import Samples


@dataclass(frozen=True)
class ProbeSets:
    """The two sets of samples that a probe needs. Every rank has a part of each set.

    Attributes:
        queries: Clips to score; every `queries_every`-th one is used.
        bank: Neighbours for k-NN, and training set of linear layers; every `bank_every`-th one is used.
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
        """Extract features of queries and bank for each tower, with labels. All ranks must call it.

        Raises:
            FailedWork: No clip could be decoded, or a feature is not finite.
        """
        parts = []
        for samples, every in ((self.queries, self.queries_every), (self.bank, self.bank_every)):
            batches = samples.evaluation_batches(every=every)
            batches = count_batches(batches, "extracting features", total=-(-len(samples) // every))
            features = extract(towers, batches, inputs=inputs, device=device)
            parts.append(gather_features(features, world))
        queries, bank = parts
        return _labelled_features(queries, self.queries), _labelled_features(bank, self.bank), queries, bank


def _labelled_features(features: ClipFeatures, samples: "Samples[Any]") -> list[LabelledFeatures]:
    """Return the features of each tower, with the labels and videos of the clips."""
    rows = features.sample.cpu().numpy()
    label_NL = torch.from_numpy(samples.all_labels[rows]).to(features.sample.device)
    return [LabelledFeatures(features_ND, label_NL, samples.video[rows]) for features_ND in features.of_tower]


def open_sets(
    settings: ClipSettings,
    evaluation: ProbeEvaluation,
    *,
    bank_split: str,
    world: World,
    device: torch.device,
    is_whole: bool = False,
) -> ProbeSets:
    """Open both sets of samples.

    Args:
        is_whole: True to use all samples, regardless of `max_samples` and `max_bank`.

    Raises:
        UserError: The data are not a folder with a manifest; a split has no clips with a label; the bank is too small
            or has a single class; or both splits are the same.
    """
    if evaluation.split == bank_split:
        raise UserError(
            f"{bank_split!r} is both the split to learn from and the split to score: every clip would find itself",
            hint="use two splits",
        )
    folder = open_labelled_folder(settings, column=None).path
    splits = (bank_split, evaluation.split)
    classes = tuple(read_classes(folder, label=label, splits=splits) for label in evaluation.labels)
    bank = _open_labelled(settings, split=bank_split, classes=classes, world=world, device=device)
    queries = _open_labelled(settings, split=evaluation.split, classes=classes, world=world, device=device)
    every = [
        1 if is_whole else every_for(len(samples), at_most=most)
        for samples, most in ((queries, evaluation.max_samples), (bank, evaluation.max_bank))
    ]
    sets = ProbeSets(classes, queries, bank, *every)
    _check(sets, evaluation, bank_split=bank_split)
    return sets


def _open_labelled(
    settings: ClipSettings, *, split: str, classes: Sequence[ClassList], world: World, device: torch.device
) -> "Samples[Any]":
    """Open this rank's part of the clips (pixels or latents) of a split that have any of the labels; each clip once."""
    # A batch of the training's size fits into memory: an autoencoder sees all cubes here, but keeps no activations.
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


def _check(sets: ProbeSets, evaluation: ProbeEvaluation, *, bank_split: str) -> None:
    bank_ML, label_NL = sets.bank.all_labels[:: sets.bank_every], sets.queries.all_labels[:: sets.queries_every]
    for label, bank_M, label_N in zip(sets.classes, bank_ML.T, label_NL.T, strict=True):
        classes = np.unique(bank_M[bank_M >= 0])
        if len(classes) < 2:
            what = f"are of the class {label.names[int(classes[0])]!r}" if len(classes) else f"have no {label.label}"
            raise UserError(
                f"all clips of split {bank_split!r} {what}: there is nothing to tell apart",
                hint="use more data, or a different label",
            )
        if not (label_N >= 0).any():
            raise UserError(
                f"no clip of split {evaluation.split!r} has a {label.label}", hint="use a different split or label"
            )
        num_bank = int((bank_M >= 0).sum())
        if "knn" in evaluation.methods and evaluation.neighbours > num_bank:
            raise UserError(
                f"{evaluation.neighbours} neighbours are to vote, but split {bank_split!r} has only "
                f"{count_noun(num_bank, 'clip')} "
                f"with a {label.label}",
                hint=f"use {num_bank} or fewer for --neighbours (in training --evaluate.neighbours), ideally far fewer "
                "than a class has clips",
            )


class LoopProbe:
    """Probe that is repeated during training, always on the same clips.

    Args:
        settings: Settings of the run, with the data to evaluate. The bank has clips of the training split.
        name: Prefix of the metrics.
        inputs: Function that takes a batch and returns clips [B, C, T, H, W], as the video tower takes them in an
            evaluation.

    Raises:
        UserError: The labels do not exist, or there are too few clips.
    """

    def __init__(
        self,
        settings: ClipSettings,
        evaluation: ProbeEvaluation,
        *,
        name: str,
        inputs: Callable[[Batch], torch.Tensor],
        world: World,
        device: torch.device,
    ) -> None:
        self._evaluation, self._name, self._inputs, self._device = evaluation, name, inputs, device
        self._sets = open_sets(settings, evaluation, bank_split=settings.split, world=world, device=device)

    @property
    def queries(self) -> "Samples[Any]":
        """Scored clips of this rank."""
        return self._sets.queries

    def __call__(self, model: nn.Module, world: World) -> dict[str, float]:
        """Return accuracies as `<name>/<label>_<method>_<metric>`, equal on all ranks. All ranks must call it.

        The model must be in evaluation mode, and unsharded on every rank.
        """
        (queries,), (bank,), *features = self._sets.extract(
            [tower_of(model)], inputs=self._inputs, world=world, device=self._device
        )
        metrics: dict[str, float] = {}
        for result in probe(queries, bank, evaluation=self._evaluation, classes=self._sets.classes):
            accuracies = asdict(result.found)
            metrics |= {f"{result.label}_{result.method}_{name}": accuracies[name] for name in PROBE_NUMBERS}
        # All ranks compute the same values, up to the rounding of their devices: use the values of rank 0.
        values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=self._device)
        metrics = dict(zip(metrics, world.gather(values)[: len(values)].tolist(), strict=True))
        return split_metrics(self._name, metrics, num_failed=sum(part.num_failed for part in features))


def score_features(opened: OpenedRun, flags: ProbeFlags) -> Score:
    """Probe a run's latest checkpoint, and the same tower with random weights, on all clips of both splits.

    Raises:
        UserError: The labels do not exist, or there are too few clips.
        FailedWork: No clip could be decoded.
    """
    features, settings, trained, evaluation = opened.spec.features, opened.settings, opened.trained, flags.evaluation()
    assert features is not None  # every task with this evaluation has features
    if not flags.label:
        known = class_labels(read_captions(open_labelled_folder(settings, column=None).path).schema)
        raise UserError(
            "--label is missing",
            hint=f"use an available label: {list_labels(known)}",
            flags=("--label",),
        )
    device = trained.device
    sets = open_sets(settings, evaluation, bank_split=flags.train_split, world=World(), device=device, is_whole=True)
    towers = {name: tower_of(model) for name, model in _models(opened, split=flags.split).items()}
    with trained.precision.autocast():
        queries, bank, *plain = sets.extract(
            list(towers.values()), inputs=features.inputs(opened.task), world=World(), device=device
        )
    results_by_tower = {
        name: probe(tower_queries, tower_bank, evaluation=evaluation, classes=sets.classes)
        for name, tower_queries, tower_bank in zip(towers, queries, bank, strict=True)
    }
    names = {classes.label: classes.names for classes in sets.classes}
    by_class = [
        probed.predictions.by_class(names[probed.label], title=f"{probed.label}, {METHOD_TITLES[probed.method]}")
        for probed in results_by_tower["trained"]
    ]
    findings = [
        {"encoder": name, **result.as_json(), "majority_baseline": majority_baseline(counts)}
        for name, results in results_by_tower.items()
        for result, counts in zip(results, by_class, strict=True)
    ]
    # For each label and method, random weights follow trained weights.
    findings.sort(key=lambda entry: (flags.label.index(entry["label"]), flags.method.index(entry["method"])))
    return Score(
        name=f"probe-{flags.split}",
        samples=sets.queries,
        clip=describe_clip(settings, sets.queries, is_consecutive=features.is_consecutive(settings)),
        values={
            "bank": sets.bank.describe(),
            "features": f"{features.description}; random: the same tower with weights drawn from seed {settings.seed}",
            "protocol": _protocol(evaluation, bank_split=flags.train_split),
            "num_samples": len(plain[0].sample),
            "findings": findings,
            "by_class": by_class,
        },
        failed=[failure for part in plain for failure in part.failed],
    )


def _models(opened: OpenedRun, *, split: str) -> dict[str, nn.Module]:
    """Return a run's model, and a model with weights drawn from its seed, in evaluation mode on the device."""
    task, trained = opened.task, opened.trained
    # The samples determine the resolution of a run's clips. Other weights record it.
    samples = None if opened.run is None else task.samples(split, World())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(opened.settings.seed)
        random = task.build_model(samples).to(trained.device).eval()
    return {"trained": trained.fill(task.build_model(samples)), "random": random}


def _protocol(evaluation: ProbeEvaluation, *, bank_split: str) -> str:
    methods = {
        "knn": f"k-NN: the {evaluation.neighbours} nearest clips of split {bank_split!r} by cosine, "
        f"each votes with exp(cosine / {evaluation.temperature:g})",
        "linear": f"linear: multinomial logistic regression on standardised features of split {bank_split!r}, solved "
        "to its optimum, L2 by the cross-entropy on a fifth of its videos",
    }
    baseline = "majority baseline: always the most frequent classes of these clips"
    return "; ".join([*(methods[method] for method in evaluation.methods), baseline, "ties count against the model"])
