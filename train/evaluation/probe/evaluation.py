"""Probes of the frozen features of a run's latest checkpoint, and of the same tower with random weights."""

import torch
from torch import nn

from manifests.errors import UserError
from train.config.evaluation import ProbeEvaluation
from train.distributed.world import World
from train.evaluation.probe.features import tower_of
from train.evaluation.probe.probing import probe
from train.evaluation.probe.samples import labels_there
from train.evaluation.probe.sets import open_sets
from train.evaluation.probe.spec import ProbeFlags
from train.evaluation.runner import OpenedRun, Score, describe_clip


def score_features(opened: OpenedRun, wanted: ProbeFlags) -> Score:
    """Scores the features of a run's latest checkpoint, and of random weights, on all clips of both splits.

    Raises:
        UserError: the task has no video tower to probe, there are no such labels, or too few clips.
        FailedWork: nothing could be decoded.
    """
    features, settings, trained, how = opened.spec.features, opened.settings, opened.trained, wanted.evaluation()
    assert features is not None  # of every task that lists this evaluation
    if not wanted.label:
        raise UserError("--label is missing", hint=f"labels there: {', '.join(labels_there(settings)) or 'none'}")
    device = trained.device
    sets = open_sets(settings, how, bank_split=wanted.train_split, world=World(), device=device, is_whole=True)
    towers = {name: tower_of(model) for name, model in _models(opened, split=wanted.split).items()}
    inputs = features.inputs(opened.task)
    with trained.precision.autocast():
        asked, bank, *bare = sets.extract(list(towers.values()), inputs=inputs, world=World(), device=device)
    findings = [
        {"encoder": name, **finding.as_json()}
        for name, its_asked, its_bank in zip(towers, asked, bank, strict=True)
        for finding in probe(its_asked, its_bank, wanted=how, classes=sets.classes)
    ]
    # What is compared stands together.
    findings.sort(key=lambda one: (wanted.label.index(one["label"]), wanted.method.index(one["method"])))
    return Score(
        name=f"probe-{wanted.split}",
        samples=sets.asked,
        clip=describe_clip(settings, is_consecutive=features.is_consecutive(settings)),
        values={
            "bank": sets.bank.describe(),
            "features": f"{features.description}; random: the same tower with weights drawn from seed {settings.seed}",
            "protocol": _protocol(how, bank_split=wanted.train_split),
            "num_samples": len(bare[0].sample),
            "findings": findings,
        },
        failed=[failure for part in bare for failure in part.failed],
    )


def _models(opened: OpenedRun, *, split: str) -> dict[str, nn.Module]:
    """A run's model, and one with weights as its seed draws them, in evaluation mode on the device."""
    task, trained = opened.task, opened.trained
    samples = task.samples(split, World())  # which say how large clips are
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(opened.settings.seed)
        random = task.build_model(samples).to(trained.device).eval()
    return {"trained": trained.fill(task.build_model(samples)), "random": random}


def _protocol(wanted: ProbeEvaluation, *, bank_split: str) -> str:
    words = {
        "knn": f"k-NN: the {wanted.neighbours} nearest clips of split {bank_split!r} by cosine, "
        f"each votes with exp(cosine / {wanted.temperature:g})",
        "linear": f"linear: multinomial logistic regression on standardised features of split {bank_split!r}, solved "
        "to its optimum, L2 by the cross-entropy on a fifth of its videos",
    }
    chance = f"chance: the classes that are most frequent in split {bank_split!r}"
    return "; ".join([*(words[method] for method in wanted.methods), chance, "ties count against the model"])
