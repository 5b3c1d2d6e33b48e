"""Probes of frozen features: of a trained run and of random weights, and in the training loop by all ranks together."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.evaluation import PROBE_NUMBERS, ProbeEvaluation
from clipmill.train.data.batch import Batch
from clipmill.train.data.classes import list_labels
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.by_class import majority_baseline
from clipmill.train.evaluation.probe.features import tower_of
from clipmill.train.evaluation.probe.probing import probe
from clipmill.train.evaluation.probe.sets import available_labels, open_sets
from clipmill.train.evaluation.probe.spec import METHOD_TITLES, ProbeFlags
from clipmill.train.evaluation.runner import OpenedRun, Score, describe_clip, split_metrics

if TYPE_CHECKING:
    from clipmill.train.data.samples import Samples


class LoopProbe:
    """Probes a model repeatedly on the same clips while it is trained.

    Args:
        settings: of the run, with the data to evaluate; clips of the training split of these data are the bank.
        name: prefix of the metrics.
        inputs: from a batch to clips [B, C, T, H, W] as the video tower takes them in an evaluation.

    Raises:
        UserError: there are no such labels, or too few clips.
    """

    def __init__(
        self,
        settings: ClipSettings,
        wanted: ProbeEvaluation,
        *,
        name: str,
        inputs: Callable[[Batch], torch.Tensor],
        world: World,
        device: torch.device,
    ) -> None:
        self._wanted, self._name, self._inputs, self._device = wanted, name, inputs, device
        self._sets = open_sets(settings, wanted, bank_split=settings.split, world=world, device=device)

    @property
    def queries(self) -> "Samples[Any]":
        """This rank's part of the clips that are scored."""
        return self._sets.queries

    def __call__(self, model: nn.Module, world: World) -> dict[str, float]:
        """Accuracies as `<name>/<label>_<method>_<metric>`, equal on all ranks; collective.

        The model is in evaluation mode, and unsharded on every rank.
        """
        (queries,), (bank,), *features = self._sets.extract(
            [tower_of(model)], inputs=self._inputs, world=world, device=self._device
        )
        metrics: dict[str, float] = {}
        for result in probe(queries, bank, wanted=self._wanted, classes=self._sets.classes):
            its = result.found.as_json()
            metrics |= {f"{result.label}_{result.method}_{name}": its[name] for name in PROBE_NUMBERS}
        # All ranks computed the same; rank 0 decides in case devices round differently.
        own = torch.tensor(list(metrics.values()), dtype=torch.float64, device=self._device)
        metrics = dict(zip(metrics, world.gather(own)[: len(own)].tolist(), strict=True))
        return split_metrics(self._name, metrics, num_failed=sum(one.num_failed for one in features))


def score_features(opened: OpenedRun, wanted: ProbeFlags) -> Score:
    """Probe a run's latest checkpoint, and the same tower with random weights, on all clips of both splits.

    Raises:
        UserError: there are no such labels, or too few clips.
        FailedWork: nothing could be decoded.
    """
    features, settings, trained, how = opened.spec.features, opened.settings, opened.trained, wanted.evaluation()
    assert features is not None  # of every task that lists this evaluation
    if not wanted.label:
        raise UserError(
            "--label is missing", hint=f"labels there: {list_labels(available_labels(settings))}", flags=("--label",)
        )
    device = trained.device
    sets = open_sets(settings, how, bank_split=wanted.train_split, world=World(), device=device, is_whole=True)
    towers = {name: tower_of(model) for name, model in _models(opened, split=wanted.split).items()}
    with trained.precision.autocast():
        queries, bank, *plain = sets.extract(
            list(towers.values()), inputs=features.inputs(opened.task), world=World(), device=device
        )
    found = {
        name: probe(its_queries, its_bank, wanted=how, classes=sets.classes)
        for name, its_queries, its_bank in zip(towers, queries, bank, strict=True)
    }
    names = {its.label: its.names for its in sets.classes}
    by_class = [
        one.predictions.by_class(names[one.label], title=f"{one.label}, {METHOD_TITLES[one.method]}")
        for one in found["trained"]
    ]
    findings = [
        {"encoder": name, **result.as_json(), "majority_baseline": majority_baseline(of_trained)}
        for name, results in found.items()
        for result, of_trained in zip(results, by_class, strict=True)
    ]
    # Trained and random weights of one label and method stand together.
    findings.sort(key=lambda one: (wanted.label.index(one["label"]), wanted.method.index(one["method"])))
    return Score(
        name=f"probe-{wanted.split}",
        samples=sets.queries,
        clip=describe_clip(settings, sets.queries, is_consecutive=features.is_consecutive(settings)),
        values={
            "bank": sets.bank.describe(),
            "features": f"{features.description}; random: the same tower with weights drawn from seed {settings.seed}",
            "protocol": _protocol(how, bank_split=wanted.train_split),
            "num_samples": len(plain[0].sample),
            "findings": findings,
            "by_class": by_class,
        },
        failed=[failure for part in plain for failure in part.failed],
    )


def _models(opened: OpenedRun, *, split: str) -> dict[str, nn.Module]:
    """A run's model, and one with weights drawn from its seed, in evaluation mode on the device."""
    task, trained = opened.task, opened.trained
    # Samples determine the size of a run's clips; other weights say their own.
    samples = None if opened.run is None else task.samples(split, World())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(opened.settings.seed)
        random = task.build_model(samples).to(trained.device).eval()
    return {"trained": trained.fill(task.build_model(samples)), "random": random}


def _protocol(wanted: ProbeEvaluation, *, bank_split: str) -> str:
    methods = {
        "knn": f"k-NN: the {wanted.neighbours} nearest clips of split {bank_split!r} by cosine, "
        f"each votes with exp(cosine / {wanted.temperature:g})",
        "linear": f"linear: multinomial logistic regression on standardised features of split {bank_split!r}, solved "
        "to its optimum, L2 by the cross-entropy on a fifth of its videos",
    }
    baseline = "majority baseline: always the most frequent classes of these clips"
    return "; ".join([*(methods[method] for method in wanted.methods), baseline, "ties count against the model"])
