"""What `train eval probe` does, once its flags are read."""

import shlex
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from train.config.evaluation import ProbeEvaluation
from train.distributed.world import World
from train.engine.trained_run import open_trained_run
from train.evaluation.examples import clip_in_words
from train.evaluation.probe.features import tower_of
from train.evaluation.probe.probing import probe
from train.evaluation.probe.runs import FEATURES, open_probed_run, read_clip_settings, shows_row
from train.evaluation.probe.samples import labels_there
from train.evaluation.probe.sets import open_sets
from train.report.results import write_page
from train.run.folder import RunFolder, open_run


def probe_run(run_path: Path, wanted: ProbeEvaluation, *, bank_split: str, shards: str | None) -> dict[str, Any]:
    """Scores the features of a run's latest checkpoint, and of random weights, and adds the result to its page.

    Args:
        wanted: what is scored; all clips of both splits are.
        bank_split: split that neighbours and linear layers come from.

    Raises:
        UserError: there is no such run, or no such labels, or too few clips.
        FailedWork: nothing could be decoded.
    """
    run = open_run(run_path)
    task, settings = read_clip_settings(run, shards=shards)
    if not wanted.labels:
        raise UserError("--label is missing", hint=f"labels there: {', '.join(labels_there(settings)) or 'none'}")
    trained = open_trained_run(run, settings)
    device = trained.device
    sets = open_sets(settings, wanted, bank_split=bank_split, world=World(), device=device, is_whole=True)
    probed = open_probed_run(trained, split=wanted.split)
    towers = {"trained": tower_of(probed.trained), "random": tower_of(probed.random)}
    with trained.precision.autocast():
        asked, bank, *bare = sets.extract(list(towers.values()), inputs=probed.inputs, world=World(), device=device)
    findings = [
        {"encoder": name, **finding.as_json()}
        for name, its_asked, its_bank in zip(towers, asked, bank, strict=True)
        for finding in probe(its_asked, its_bank, wanted=wanted, classes=sets.classes)
    ]
    # What is compared stands together.
    findings.sort(key=lambda one: (wanted.labels.index(one["label"]), wanted.methods.index(one["method"])))
    result = {
        "evaluation": "probe",
        "split": wanted.split,
        **run.data_facts(shards),
        "step": trained.step,
        "weights": trained.weights,
        "data": sets.asked.describe(),
        "bank": sets.bank.describe(),
        "variant": sets.asked.variant_name,
        "clip": clip_in_words(settings, is_in_row=shows_row(settings)),
        "features": f"{FEATURES[task]}; random: the same tower with the weights that seed {settings.seed} draws",
        "protocol": _protocol(wanted, bank_split=bank_split),
        "num_samples": len(bare[0].sample),
        "findings": findings,
        "failed": [failure.as_json() for part in bare for failure in part.failed],
        "command": _command(run, wanted, bank_split=bank_split, shards=shards),
    }
    run.write_evaluation(f"probe-{wanted.split}", result)
    write_page(run)
    return result


def _protocol(wanted: ProbeEvaluation, *, bank_split: str) -> str:
    words = {
        "knn": f"k-NN: the {wanted.neighbours} nearest clips of split {bank_split!r} by cosine, "
        f"each votes with exp(cosine / {wanted.temperature:g})",
        "linear": f"linear: multinomial logistic regression on standardised features of split {bank_split!r}, solved "
        "to its optimum, L2 by the cross-entropy on a fifth of its videos",
    }
    chance = f"chance: the classes that are most frequent in split {bank_split!r}"
    return "; ".join([*(words[method] for method in wanted.methods), chance, "ties count against the model"])


def _command(run: RunFolder, wanted: ProbeEvaluation, *, bank_split: str, shards: str | None) -> str:
    words = ["train", "eval", "probe", str(run.path)]
    words += [word for label in wanted.labels for word in ("--label", label)]
    words += [word for method in wanted.methods for word in ("--method", method)]
    words += [] if shards is None else ["--shards", shards]
    words += ["--split", wanted.split, "--train-split", bank_split, "--neighbours", str(wanted.neighbours)]
    return shlex.join(words)
