"""Runs an evaluation of a trained run, and writes its result file.

What all evaluations have in common stands here: opening the run, the head of the result, and the command line that
repeats the evaluation. What is scored, and how, is the evaluation's own (`train.spec.EvaluationSpec.score`).
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from train.config.training import ClipSettings, flat
from train.data.outcomes import FailedSample
from train.engine.trained_run import TrainedRun, open_trained_run, read_settings
from train.run.folder import RunFolder, result_name
from train.spec import EvaluationSpec, TaskSpec


class EvaluatedSamples(Protocol):
    """A set of samples as a result tells of it."""

    @property
    def variant_name(self) -> str:
        """The variants that it is made of."""
        ...

    def describe(self) -> str:
        """How many samples of what."""
        ...


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run to be evaluated.

    Attributes:
        settings: of the run, with the data that is to be evaluated.
        shards: data in place of the run's own, or None.
        task: with the classes or tokens that the run has kept.
    """

    spec: TaskSpec
    run: RunFolder
    settings: Any
    shards: str | None
    trained: TrainedRun[Any]
    task: Any

    def result_name(self, name: str) -> str:
        """The name of the result file for `name`, which differs where the data are not the run's own."""
        return result_name(name, self.run.data_facts(self.shards))


@dataclass(frozen=True, kw_only=True)
class Score:
    """What an evaluation found.

    Attributes:
        name: of the result file; the same evaluation again replaces it.
        samples: those that were scored.
        clip: what is looked at of a clip, in words.
        values: the metrics and all else that the result holds, as plain values.
        failed: samples that could not be decoded.
        beside: given the path of the result file, writes what lies beside it.
    """

    name: str
    samples: EvaluatedSamples
    clip: str
    values: dict[str, Any]
    failed: Sequence[FailedSample]
    beside: Callable[[Path, dict[str, Any]], None] | None = field(default=None)


def evaluate(
    spec: TaskSpec, evaluation: EvaluationSpec, run: RunFolder, wanted: Any, *, shards: str | None = None
) -> dict[str, Any]:
    """Evaluates the latest checkpoint of a run, and writes the result file.

    Args:
        wanted: settings of the evaluation.
        shards: data in place of the run's own.

    Raises:
        UserError: the run cannot be opened, or its data lack what the evaluation needs.
        FailedWork: nothing could be decoded.
    """
    settings: ClipSettings = read_settings(run, spec.settings, shards=shards)
    trained = open_trained_run(run, settings)
    task = spec.open(settings, attention=trained.attention, device=trained.device, run=run)
    opened = OpenedRun(spec=spec, run=run, settings=settings, shards=shards, trained=trained, task=task)
    found = evaluation.score(opened, wanted)
    result = {
        "evaluation": evaluation.result_name,
        "split": wanted.split,
        **run.data_facts(shards),
        "step": trained.step,
        "weights": trained.weights,
        "data": found.samples.describe(),
        "variant": found.samples.variant_name,
        "clip": found.clip,
        **found.values,
        "failed": [failure.as_json() for failure in found.failed],
        "command": command_line(evaluation.name, run, wanted, shards=shards),
    }
    path = run.write_evaluation(found.name, result)
    if found.beside is not None:
        found.beside(path, result)
    return result


def command_line(name: str, run: RunFolder, wanted: Any, *, shards: str | None) -> str:
    """The command line that repeats an evaluation: the split, and every setting that is not its default."""
    words = ["train", "eval", name, str(run.path), "--split", wanted.split]
    words += [] if shards is None else ["--shards", shards]
    defaults = _defaults(wanted)
    for flag, value in flat(asdict(wanted)).items():
        if flag == "split" or value is None or value == defaults.get(flag):
            continue
        flag = f"--{flag.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [flag] if one is True else [flag, str(one)]
    return shlex.join(words)


def every_for(num_samples: int, *, at_most: int) -> int:
    """The smallest step with which at most `at_most` of the samples are visited."""
    return -(-num_samples // at_most)


def _defaults(wanted: Any) -> dict[str, Any]:
    """The defaults by flag; those of a group that was left out are the group's own."""
    found = flat(asdict(type(wanted)()))
    for one in fields(wanted):
        value = getattr(wanted, one.name)
        if is_dataclass(value):
            kind: Any = type(value)
            found |= flat(asdict(kind()), f"{one.name}.")
    return found
