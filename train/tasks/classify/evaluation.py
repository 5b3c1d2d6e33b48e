"""Evaluation of a classifier: top-1, top-5 and mean class accuracy on a split, and the classes of a run.

A clip's class probabilities are the softmax of the logits, averaged over the clip's views. The probability of
a verb or noun in EPIC-KITCHENS-100 is the sum of the probabilities of all actions with this verb or noun, or 0 if there
are no such actions.

Shape suffixes: N samples, B batch, V views, K classes, M marginal classes (verbs or nouns).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.classes import ClassList, read_class_file, require_names
from clipmill.train.data.clip_frames import Views
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.runner import OpenedRun, Score, describe_clip
from clipmill.train.evaluation.tables import Predictions, majority_baseline
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.classify.spec import ClassificationFlags

_TOP = (1, 5)


def view_mean(logits_BVK: torch.Tensor) -> torch.Tensor:
    """Return the class probabilities of clips, [B, K]: the softmax of the logits, averaged over views."""
    return logits_BVK.float().softmax(dim=-1).mean(dim=1)


def marginal_probabilities(probabilities_BK: torch.Tensor, part_K: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of marginal classes (verbs or nouns), [B, M].

    Args:
        part_K: Index of each class's verb or noun, int64. M is the highest index + 1.
    """
    num_parts = int(part_K.max()) + 1
    sums_BM = probabilities_BK.new_zeros(len(probabilities_BK), num_parts)
    return sums_BM.index_add(1, part_K, probabilities_BK)


def ranks(probabilities_BK: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
    """Return the rank of the correct class, int64 [B]; 1 is best.

    Classes with equal probabilities are ranked by ascending index.
    """
    correct_B1 = probabilities_BK.gather(1, label_B[:, None])
    is_higher_BK = probabilities_BK > correct_B1
    is_earlier_BK = torch.arange(probabilities_BK.shape[1], device=label_B.device) < label_B[:, None]
    return 1 + (is_higher_BK | ((probabilities_BK == correct_B1) & is_earlier_BK)).sum(dim=1)


def hits(probabilities_BK: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
    """Return two bools per clip, [B, 2]: whether the correct class is first, and whether it is among the first five."""
    return torch.stack([ranks(probabilities_BK, label_B) <= k for k in _TOP], dim=1)


@dataclass
class Tally:
    """Counts of samples and correct predictions per class.

    Attributes:
        num_right: Number of correct predictions (top-1 and top-5) for each class, int64 [K, 2].
        num_samples: Number of samples of each class, int64 [K].
    """

    num_right: torch.Tensor
    num_samples: torch.Tensor

    @staticmethod
    def zeros(num_classes: int, device: torch.device) -> "Tally":
        """Return a tally of zeros."""
        return Tally(
            torch.zeros(num_classes, len(_TOP), dtype=torch.int64, device=device),
            torch.zeros(num_classes, dtype=torch.int64, device=device),
        )

    def add(self, probabilities_BK: torch.Tensor, label_B: torch.Tensor) -> None:
        """Add a batch to the counts."""
        self.num_right.index_add_(0, label_B, hits(probabilities_BK, label_B).long())
        self.num_samples.index_add_(0, label_B, torch.ones_like(label_B))

    def metrics(self) -> dict[str, float]:
        """Return `top1`, `top5` and `mean_class` (the mean top-1 accuracy over all classes that have samples)."""
        total = int(self.num_samples.sum())
        top1, top5 = (self.num_right.sum(dim=0).double() / max(total, 1)).tolist()
        has_samples = self.num_samples > 0
        accuracies = self.num_right[has_samples, 0].double() / self.num_samples[has_samples].double()
        return {"top1": top1, "top5": top5, "mean_class": accuracies.mean().item() if len(accuracies) else 0.0}


@dataclass
class ClassTallies:
    """Tallies for the classes of a classifier and, if the classes are actions, for verbs and nouns.

    Attributes:
        tallies: Tally for the classes of each label, such as `action`, `verb` and `noun`.
        parts: Index of each class's verb or noun, int64 [K], by label; empty if the classes are not actions.
        predictions: Predictions for each label.
    """

    classes: ClassList
    device: torch.device
    tallies: dict[str, Tally] = field(default_factory=dict)
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    predictions: dict[str, list[Predictions]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts: dict[str, NDArray[np.int64]] = self.classes.parts
        self.parts = {name: torch.from_numpy(part_K).to(self.device) for name, part_K in parts.items()}
        for name, part_K in self.parts.items():
            self.tallies[name] = Tally.zeros(int(part_K.max()) + 1, self.device)
        self.tallies[self.classes.label] = Tally.zeros(len(self.classes), self.device)

    def add(self, probabilities_BK: torch.Tensor, label_B: torch.Tensor) -> None:
        """Add a batch to the counts."""
        self._add(self.classes.label, probabilities_BK, label_B)
        for name, part_K in self.parts.items():
            self._add(name, marginal_probabilities(probabilities_BK, part_K), part_K[label_B])

    def _add(self, name: str, probabilities_BK: torch.Tensor, label_B: torch.Tensor) -> None:
        self.tallies[name].add(probabilities_BK, label_B)
        predictions = Predictions.of(probabilities_BK, label_B, rank_N=ranks(probabilities_BK, label_B))
        self.predictions.setdefault(name, []).append(predictions)

    def by_class(self) -> list[dict[str, Any]]:
        """Return this rank's results by class (`Predictions.by_class`), for each label."""
        return [
            Predictions.join(self.predictions[name]).by_class(
                self.classes.names if name == self.classes.label else list(map(str, range(len(tally.num_samples)))),
                title=name,
            )
            for name, tally in self.tallies.items()
            if name in self.predictions
        ]

    def metrics(self, world: World) -> dict[str, float]:
        """Return the metrics over all ranks, such as `<label>_top1`. All ranks must call this method."""
        metrics: dict[str, float] = {}
        for name, tally in self.tallies.items():
            total = Tally(world.sum(tally.num_right), world.sum(tally.num_samples))
            metrics |= {f"{name}_{key}": value for key, value in total.metrics().items()}
        return metrics


@dataclass(frozen=True)
class ClassResult:
    """Result of an evaluation.

    Attributes:
        metrics: Metrics over all ranks (`ClassTallies.metrics`).
        num_samples: Number of scored samples on all ranks.
        num_failed: Number of failed samples on all ranks.
        failed: Samples that failed on this rank.
        by_class: Results of this rank by class.
    """

    metrics: dict[str, float]
    num_samples: int
    num_failed: int
    failed: tuple[FailedSample, ...]
    by_class: list[dict[str, Any]]


@torch.no_grad()  # not inference_mode, because training reuses tensors that the model caches
def score_classifier(
    model: nn.Module,
    batches: Iterable[LoadedBatch],
    *,
    inputs: Callable[[Batch], torch.Tensor],
    classes: ClassList,
    num_views: int,
    world: World,
    device: torch.device,
) -> ClassResult:
    """Score a model in evaluation mode on this rank's part of a split. All ranks must call this function.

    Args:
        inputs: Function that takes a batch and returns clips [B, C, T, H, W]. The frames of a clip's views follow each
            other along T.
        num_views: Number of views per clip.

    Raises:
        FailedWork: No clip could be decoded, or logits are not finite.
    """
    tallies = ClassTallies(classes, device)
    failed: list[FailedSample] = []
    is_finite = True
    for loaded in batches:
        failed += loaded.failed
        if not loaded.batch:
            continue
        batch = to_device(loaded.batch, device)
        views = inputs(batch).unflatten(2, (num_views, -1)).unbind(2)
        logits_BVK = torch.stack([model(view_BCTHW) for view_BCTHW in views], dim=1)
        is_finite &= bool(logits_BVK.isfinite().all())
        tallies.add(view_mean(logits_BVK), batch["label"])
    num_samples = int(world.sum(tallies.tallies[classes.label].num_samples).sum())
    counts = world.sum(torch.tensor([len(failed), not is_finite], device=device)).tolist()
    metrics = tallies.metrics(world)
    if counts[1]:
        raise FailedWork("logits are not finite: the weights have diverged")
    if not num_samples:
        raise FailedWork(f"no clip could be decoded ({counts[0]:,} failed)")
    return ClassResult(metrics, num_samples, counts[0], tuple(failed), tallies.by_class())


_PROTOCOL = "probabilities are means over views; majority baseline: always the most frequent classes of these clips"
_PARTS = "; the probability of a verb or noun is the sum over its actions"


def score_run(opened: OpenedRun, flags: ClassificationFlags) -> Score:
    """Score the latest checkpoint of a run on all clips of a split.

    Raises:
        UserError: The split has no clips, or the class files do not match the classes.
        FailedWork: No clip could be decoded, or logits are not finite.
    """
    opened.require_complete()
    settings, trained, task = opened.settings, opened.trained, opened.task
    classes: ClassList = task.classes
    names = names_of_numbers(classes, flags.classes)
    views = Views(num_clips=flags.clips, num_crops=flags.crops)
    samples = task.samples(flags.split, World(), views=views)
    model = trained.fill(task.build_model(samples))
    with trained.precision.autocast():
        result = task.score(model, samples, World(), views=views)
    num_classes = {name: len(set(part.tolist())) for name, part in classes.parts.items()}
    suffix = "" if len(views) == 1 else f"-{flags.clips}x{flags.crops}"
    return Score(
        name=f"classification-{flags.split}{suffix}",
        samples=samples,
        clip=describe_clip(
            settings, samples, views=views, mean_of="probabilities", is_consecutive=settings.sampling == "stride"
        ),
        values={
            "label": classes.label,
            "num_classes": {**num_classes, classes.label: len(classes)},
            "protocol": _PROTOCOL + (_PARTS if classes.parts else ""),
            "num_samples": result.num_samples,
            "numbers": result.metrics,
            "majority_baseline": {table["title"]: majority_baseline(table) for table in result.by_class},
            "by_class": [
                {**table, "names": [names.get(table["title"], {}).get(name, name) for name in table["names"]]}
                for table in result.by_class
            ],
        },
        failed=result.failed,
    )


def names_of_numbers(classes: ClassList, files: Sequence[Path]) -> dict[str, dict[str, str]]:
    """Return the names of numbered classes by label and number, including the names of verbs and nouns for actions.

    Args:
        files: Class file of the label, or the files of verbs and nouns for actions; empty for no names.

    Raises:
        UserError: The classes are not numbers, the number of files is wrong, or a file has no name for a class.
    """
    parts = classes.parts or {classes.label: np.array([int(name) for name in classes.names if name.isdecimal()])}
    if not files:
        return {}
    if any(len(part) < len(classes) for part in parts.values()):
        raise UserError(
            f"--classes names numbered classes, but the classes of the label {classes.label!r} are not numbers",
            hint="omit --classes",
        )
    if len(files) != len(parts):
        raise UserError(
            f"--classes lists {count_noun(len(files), 'file')}, but {classes.label} needs {len(parts)}",
            hint=f"use {' '.join(f'--classes {name.upper()}S.csv' for name in parts)}",
            flags=("--classes",),
        )
    names_of_label: dict[str, dict[str, str]] = {}
    for path, (label, part) in zip(files, parts.items(), strict=True):
        class_names = read_class_file(path)
        require_names(part, class_names, path=path, label=label)
        names_of_label[label] = {str(number): names[0] for number, names in enumerate(class_names)}
    if classes.parts:
        verb, noun = names_of_label.values()
        pairs = (name.split(":") for name in classes.names)
        names_of_label[classes.label] = {f"{v}:{n}": f"{verb[v]} {noun[n]}" for v, n in pairs}
    return names_of_label


def classes_of_run(run: RunFolder) -> dict[str, ClassList]:
    """Return the classes of a run, as an argument for its task (`TaskSpec.run_arguments`).

    Raises:
        UserError: `run` is not a run of `train classify`.
    """
    try:
        facts = run.require_facts()
        return {"classes": ClassList(facts["classes"]["label"], tuple(facts["classes"]["names"]))}
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{run.facts} lists no classes: {run.path} is not a run of train classify",
            hint="see train eval --help for the evaluations of other runs",
        ) from error
