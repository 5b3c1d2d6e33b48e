"""Probe frozen features: open the clips to score and the bank of labelled clips, and compute accuracies.

`train eval probe` compares a trained tower with the same tower with random weights. During training, all ranks probe
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
from clipmill.train.data.classes import ClassList, class_labels, label_hint, read_classes
from clipmill.train.data.query import DataQuery, loader_settings, open_labelled_folder, open_samples
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.features import ClipFeatures, Tower, extract, gather_features, tower_of
from clipmill.train.evaluation.probe import METHOD_TITLES, ProbeFlags
from clipmill.train.evaluation.probe_classifiers import LabelledFeatures, probe
from clipmill.train.evaluation.runner import OpenedRun, Score, describe_clip, sample_stride, split_metrics
from clipmill.train.evaluation.tables import majority_baseline
from clipmill.train.run.tracking import count_batches

if TYPE_CHECKING:
    from clipmill.train.data.samples import Samples


@dataclass(frozen=True)
class ProbeSets:
    """Two sets of samples for a probe. Each rank reads a share of each set.

    Attributes:
        classes: Classes of each label.
        queries: Clips to score.
        bank: Labelled clips: candidate neighbours for k-NN, and training set for linear layers.
        query_stride: Step between the clips that are used from `queries`; 1 for all clips.
        bank_stride: Step between the clips that are used from `bank`; 1 for all clips.
    """

    classes: tuple[ClassList, ...]
    queries: "Samples[Any]"
    bank: "Samples[Any]"
    query_stride: int = 1
    bank_stride: int = 1

    def extract(
        self,
        towers: Sequence[Tower],
        *,
        inputs: Callable[[Batch], torch.Tensor],
        world: World,
        device: torch.device,
    ) -> tuple[list[LabelledFeatures], list[LabelledFeatures], ClipFeatures, ClipFeatures]:
        """Extract the features of the queries and the bank with each tower. All ranks must call this method.

        Return the labelled features of the queries and of the bank, one entry per tower, and then the features of both
        sets, which also list the clips that failed.

        Raises:
            FailedWork: No clip could be decoded, or a feature is not finite.
        """
        parts = []
        for samples, stride in ((self.queries, self.query_stride), (self.bank, self.bank_stride)):
            batches = samples.evaluation_batches(stride=stride)
            batches = count_batches(batches, "extracting features", total=-(-len(samples) // stride))
            features = extract(towers, batches, inputs=inputs, device=device)
            parts.append(gather_features(features, world))
        queries, bank = parts
        return _labelled_features(queries, self.queries), _labelled_features(bank, self.bank), queries, bank


def _labelled_features(features: ClipFeatures, samples: "Samples[Any]") -> list[LabelledFeatures]:
    """Return the features from each tower, with the labels and videos of the clips."""
    rows = features.sample.cpu().numpy()
    label_NL = torch.from_numpy(samples.all_labels[rows]).to(features.sample.device)
    return [LabelledFeatures(features_ND, label_NL, samples.video[rows]) for features_ND in features.tower_features]


def open_sets(
    settings: ClipSettings,
    evaluation: ProbeEvaluation,
    *,
    bank_split: str,
    world: World,
    device: torch.device,
    uses_all: bool = False,
) -> ProbeSets:
    """Open the queries and the bank.

    Args:
        settings: Settings of the run, with the data to evaluate.
        evaluation: Settings of the probe.
        bank_split: Split that provides the bank.
        world: Ranks that share the samples.
        device: Device of this rank.
        uses_all: True to use all samples, regardless of `max_samples` and `max_bank`.

    Raises:
        UserError: The data are not a folder with a manifest, a split has no clips with one of the labels, the bank is
            too small or contains a single class, or both sets come from the same split.
    """
    if evaluation.split == bank_split:
        raise UserError(
            f"split {bank_split!r} provides the bank and the clips to score, so every clip would be its own neighbour",
            hint="use two different splits",
        )
    folder = open_labelled_folder(settings, column=None).path
    splits = (bank_split, evaluation.split)
    classes = tuple(read_classes(folder, label=label, splits=splits) for label in evaluation.labels)
    bank = _open_labelled(settings, split=bank_split, classes=classes, world=world, device=device)
    queries = _open_labelled(settings, split=evaluation.split, classes=classes, world=world, device=device)
    strides = [
        1 if uses_all else sample_stride(len(samples), at_most=limit)
        for samples, limit in ((queries, evaluation.max_samples), (bank, evaluation.max_bank))
    ]
    sets = ProbeSets(classes, queries, bank, *strides)
    _check(sets, evaluation, bank_split=bank_split)
    return sets


def _open_labelled(
    settings: ClipSettings, *, split: str, classes: Sequence[ClassList], world: World, device: torch.device
) -> "Samples[Any]":
    """Open this rank's share of a split (pixels or latents). Clips without any of the labels are omitted."""
    # Batches of the training size fit into memory. An autoencoder encodes all cubes here, but keeps no activations.
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
    bank_ML, label_NL = sets.bank.all_labels[:: sets.bank_stride], sets.queries.all_labels[:: sets.query_stride]
    for label, bank_M, label_N in zip(sets.classes, bank_ML.T, label_NL.T, strict=True):
        classes = np.unique(bank_M[bank_M >= 0])
        if len(classes) < 2:
            problem = f"no clip of the bank (split {bank_split!r}) has the label {label.label!r}"
            if len(classes):
                problem = (
                    f"all clips of the bank (split {bank_split!r}) have the class {label.names[int(classes[0])]!r}"
                )
            raise UserError(
                f"{problem}, but a probe needs at least two classes",
                hint="use more data, or a different label",
            )
        if not (label_N >= 0).any():
            raise UserError(
                f"none of the clips to score in split {evaluation.split!r} has the label {label.label!r}",
                hint="use a different split or label",
            )
        num_bank = int((bank_M >= 0).sum())
        if "knn" in evaluation.methods and evaluation.neighbours > num_bank:
            raise UserError(
                f"{evaluation.neighbours} neighbours are requested, but the bank (split {bank_split!r}) has only "
                f"{count_noun(num_bank, 'clip')} with the label {label.label!r}",
                hint=f"use --neighbours {num_bank} or fewer (during training: --evaluate.neighbours), ideally far "
                "fewer than the number of clips in a class",
            )


class LoopProbe:
    """Probe that is repeated during training, always on the same clips. The bank comes from the training split.

    Args:
        settings: Settings of the run, with the data to evaluate.
        evaluation: Settings of the probe.
        name: Prefix of the metrics.
        inputs: Function that takes a batch and returns clips [B, C, T, H, W], the input of the video tower.
        world: Ranks that share the samples.
        device: Device of this rank.

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
        """Clips that this rank scores."""
        return self._sets.queries

    def __call__(self, model: nn.Module, world: World) -> dict[str, float]:
        """Return accuracies as `<name>/<label>_<method>_<metric>`, the same on all ranks.

        All ranks must call this method with an unsharded model in evaluation mode.
        """
        (queries,), (bank,), *features = self._sets.extract(
            [tower_of(model)], inputs=self._inputs, world=world, device=self._device
        )
        metrics: dict[str, float] = {}
        for result in probe(queries, bank, evaluation=self._evaluation, classes=self._sets.classes):
            accuracies = asdict(result.accuracies)
            metrics |= {f"{result.label}_{result.method}_{name}": accuracies[name] for name in PROBE_NUMBERS}
        # The values of the ranks may differ by rounding, so use the values of rank 0 on all ranks.
        values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=self._device)
        metrics = dict(zip(metrics, world.gather(values)[: len(values)].tolist(), strict=True))
        return split_metrics(self._name, metrics, num_failed=sum(part.num_failed for part in features))


def score_features(opened: OpenedRun, flags: ProbeFlags) -> Score:
    """Probe opened weights, and the same tower with random weights, on all clips of both splits.

    Raises:
        UserError: The labels do not exist, or there are too few clips.
        FailedWork: No clip could be decoded.
    """
    features, settings, trained, evaluation = opened.spec.features, opened.settings, opened.trained, flags.evaluation()
    assert features is not None  # every task with this evaluation provides features
    if not flags.label:
        labels = class_labels(read_captions(open_labelled_folder(settings, column=None).path).schema)
        raise UserError(
            "--label is missing",
            hint=label_hint(labels),
            flags=("--label",),
        )
    device = trained.device
    sets = open_sets(settings, evaluation, bank_split=flags.train_split, world=World(), device=device, uses_all=True)
    towers = {name: tower_of(model) for name, model in _models(opened, split=flags.split).items()}
    with trained.precision.autocast():
        queries, bank, *set_features = sets.extract(
            list(towers.values()), inputs=features.inputs(opened.task), world=World(), device=device
        )
    results_by_tower = {
        name: probe(tower_queries, tower_bank, evaluation=evaluation, classes=sets.classes)
        for name, tower_queries, tower_bank in zip(towers, queries, bank, strict=True)
    }
    names = {classes.label: classes.names for classes in sets.classes}
    by_class = [
        result.predictions.by_class(names[result.label], title=f"{result.label}, {METHOD_TITLES[result.method]}")
        for result in results_by_tower["trained"]
    ]
    findings = [
        {"encoder": name, **result.as_json(), "majority_baseline": majority_baseline(counts)}
        for name, results in results_by_tower.items()
        for result, counts in zip(results, by_class, strict=True)
    ]
    # For each label and method, put random weights after trained weights.
    findings.sort(key=lambda entry: (flags.label.index(entry["label"]), flags.method.index(entry["method"])))
    return Score(
        name=f"probe-{flags.split}",
        samples=sets.queries,
        clip=describe_clip(settings, sets.queries, is_consecutive=features.is_consecutive(settings)),
        values={
            "bank": sets.bank.describe(),
            "features": f"{features.description}; random: the same tower with weights drawn from seed {settings.seed}",
            "protocol": _protocol(evaluation, bank_split=flags.train_split),
            "num_samples": len(set_features[0].sample),
            "findings": findings,
            "by_class": by_class,
        },
        failed=[failure for features in set_features for failure in features.failed],
    )


def _models(opened: OpenedRun, *, split: str) -> dict[str, nn.Module]:
    """Return the trained model and a model with random weights, both on the device in evaluation mode."""
    task, trained = opened.task, opened.trained
    # For a run, the samples determine the resolution. For other weights, the resolution is already known.
    samples = None if opened.run is None else task.samples(split, World())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(opened.settings.seed)
        random_model = task.build_model(samples).to(trained.device).eval()
    return {"trained": trained.fill(task.build_model(samples)), "random": random_model}


def _protocol(evaluation: ProbeEvaluation, *, bank_split: str) -> str:
    methods = {
        "knn": f"k-NN: the {evaluation.neighbours} nearest clips of split {bank_split!r} by cosine, "
        f"weighted by exp(cosine / {evaluation.temperature:g})",
        "linear": f"linear: multinomial logistic regression on standardised features of split {bank_split!r}, solved "
        "to its optimum, L2 chosen by the cross-entropy on a held-out fifth of its videos",
    }
    baseline = "majority baseline: always the most frequent classes of these clips"
    return "; ".join([*(methods[method] for method in evaluation.methods), baseline, "ties count against the model"])
