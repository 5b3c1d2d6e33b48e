"""The plan of a first run: from what was found and measured to settings and a command line."""

import math
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.quoting import counted
from clipmill.train.config.files import load_settings, preset_path, presets_of
from clipmill.train.config.training import ClipSettings
from clipmill.train.doctor.examined import Examined
from clipmill.train.doctor.judge import judge
from clipmill.train.quickstart import choice
from clipmill.train.quickstart.choice import RECIPES, Asked, Chosen, Expected, Length
from clipmill.train.quickstart.survey import Survey, split_to_evaluate, split_to_train
from clipmill.train.quickstart.trial import Trial, existing
from clipmill.train.registry import task_named
from clipmill.train.spec import TaskSpec


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What follows from data and machine, before a step was taken.

    Attributes:
        held_out: split for evaluations; None without one.
        settings: with the preset's batch size and number of steps.
        num_processes: one per GPU.
        load: mean number of processes that wanted to run in the last minute.
    """

    surveys: tuple[Survey, ...]
    examined: Examined
    task: Chosen
    preset: Chosen
    split: str
    held_out: str | None
    settings: ClipSettings
    num_processes: int
    minutes: float
    load: float

    @property
    def spec(self) -> TaskSpec:
        """The task."""
        return task_named(self.task.value)

    @property
    def is_on_gpu(self) -> bool:
        """Whether the run trains on GPUs."""
        return bool(self.examined.accelerator.gpus) and self.settings.device != "cpu"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A first run.

    Attributes:
        settings: complete; those of the command.
        words: the command line.
        then: commands for after the run.
        warnings: what to know before.
    """

    proposal: Proposal
    trial: Trial
    settings: ClipSettings
    length: Length
    expected: Expected
    disk_bytes: int
    free_bytes: int
    words: tuple[str, ...]
    then: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command line, for a shell."""
        return shlex.join(self.words)


def propose(asked: Asked, surveys: Sequence[Survey], examined: Examined) -> Proposal:
    """Choose task, preset, splits and run folder.

    Raises:
        UserError: the data do not suit what is asked for.
        FailedWork: something on this machine would stop training.
    """
    if broken := [one for one in judge(examined) if one.level == "broken"]:
        raise FailedWork(f"{broken[0].what} would stop training: {broken[0].hint}")
    split = split_to_train(surveys)
    task = choice.choose_task(surveys, split=split, asked=asked.task)
    gpus = [] if asked.device == "cpu" else [gpu.memory_bytes for gpu in examined.accelerator.gpus]
    preset = choice.choose_preset(task.value, gpu_bytes=gpus)
    kind = task_named(task.value).settings
    if asked.preset is not None:
        preset = Chosen(asked.preset, "--preset")
        if asked.preset not in presets_of(kind):
            raise UserError(
                f"preset {asked.preset!r} is not one of train {task.value}",
                hint=f"presets of train {task.value}: {', '.join(presets_of(kind))}",
            )
    settings: Any = load_settings(preset_path(preset.value, task.value), kind)
    device = "cuda" if gpus else "cpu"
    changes: dict[str, Any] = {
        "shards": asked.data[0] if len(asked.data) == 1 else asked.data,
        "split": split,
        "out": asked.out or _free_folder(Path("runs")),
        "device": asked.device,
        "workers": min(settings.workers, max(1, examined.host.allowed_cores)),
    }
    if asked.weights is not None:
        changes["init"] = replace(settings.init, weights=asked.weights)
    if task.value == "classify":
        changes["label"] = choice.choose_label(surveys, asked=asked.label)
    elif asked.label is not None:
        raise UserError(
            f"--label {asked.label} is about train classify, and this is {task.value}", hint="add --task classify"
        )
    if asked.out is not None and asked.out.exists() and any(asked.out.iterdir()):
        raise UserError(f"{asked.out} exists and is not empty", hint="name another --out, or leave it out")
    return Proposal(
        surveys=tuple(surveys),
        examined=examined,
        task=task,
        preset=preset,
        split=split,
        held_out=split_to_evaluate(surveys, trained=split),
        settings=replace(settings, **changes),
        num_processes=max(1, len(gpus)),
        minutes=choice.MINUTES[device] if asked.minutes is None else asked.minutes,
        load=os.getloadavg()[0],
    )


def make_plan(proposal: Proposal, trial: Trial) -> Plan:
    """The plan, with what was measured."""
    before, num = proposal.settings, proposal.num_processes
    batch = trial.batch * num
    length = choice.choose_length(
        trial.num_samples,
        batch=batch,
        step_s=trial.step_s,
        other_s=trial.start_s + choice.NUM_CHECKPOINTS * sum(trial.checkpoint_s),
        minutes=proposal.minutes,
    )
    settings = replace(
        before,
        batch=batch,
        steps=length.steps,
        warmup_steps=choice.warmup_steps(before.warmup_steps, steps=length.steps),
        checkpoint_every=choice.checkpoint_every(before.checkpoint_every, steps=length.steps),
    )
    needed = choice.disk_bytes(
        trial.checkpoint_bytes, steps=settings.steps, every=settings.checkpoint_every, keep=settings.keep_checkpoints
    )
    free_bytes = shutil.disk_usage(existing(settings.out)).free
    return Plan(
        proposal=proposal,
        trial=trial,
        settings=settings,
        length=length,
        expected=choice.expected_time(
            length.steps,
            step_times=trial.step_times,
            start_s=trial.start_s,
            checkpoints_s=_checkpoints_s(proposal, trial, settings),
            num_processes=num,
            busy_share=_busy_share(proposal, trial),
        ),
        disk_bytes=needed,
        free_bytes=free_bytes,
        words=tuple(_words(proposal, settings)),
        then=tuple(_then(proposal, settings)),
        warnings=tuple(_warnings(proposal, trial, length, needed=needed, free=free_bytes)),
    )


def _is_busy(proposal: Proposal) -> bool:
    host = proposal.examined.host
    return choice.is_busy(proposal.load, cores=min(host.allowed_cores, host.quota_cores or host.allowed_cores))


def _busy_share(proposal: Proposal, trial: Trial) -> float | None:
    """Share of the machine that the trial had beside other processes; None if there are none."""
    if not _is_busy(proposal):
        return None
    return 0.5 if proposal.is_on_gpu else trial.cpu_share


def _checkpoints_s(proposal: Proposal, trial: Trial, settings: ClipSettings) -> float:
    """Time of all checkpoints: beside steps on a GPU they are written in the background, all but the last."""
    copy_s, write_s = trial.checkpoint_s
    num = math.ceil(settings.steps / settings.checkpoint_every)
    num_waited = 1 if proposal.is_on_gpu else num
    return num * copy_s + num_waited * write_s


def _free_folder(parent: Path) -> Path:
    names = ("quickstart", *(f"quickstart-{number}" for number in range(2, 10_000)))
    return next(parent / name for name in names if not (parent / name).exists())


def _words(proposal: Proposal, settings: ClipSettings) -> list[str]:
    """The command line: the preset, and what differs from it."""
    preset = load_settings(preset_path(proposal.preset.value, settings.command), type(settings))
    words = ["torchrun", "--nproc-per-node", str(proposal.num_processes), "--no-python"]
    words = [*(words if proposal.num_processes > 1 else ()), "train", settings.command]
    for folder in settings.folders:
        words += ["--shards", folder]
    words += ["--preset", proposal.preset.value]
    for name in ("split", "label", "steps", "batch", "warmup_steps", "checkpoint_every", "workers", "device"):
        value = getattr(settings, name, None)
        if name in ("steps", "batch") or value != getattr(preset, name, None):
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--init.weights", settings.init.weights] if settings.init.weights else []
    return [*words, "--out", str(settings.out)]


def _then(proposal: Proposal, settings: ClipSettings) -> list[str]:
    """Commands for after the run, which need a split that was not trained on, or the split itself for a search."""
    run = shlex.quote(str(settings.out))
    found = []
    evaluation = proposal.spec.first_evaluation
    if proposal.held_out is not None and evaluation is not None:
        split = "" if proposal.held_out == evaluation.settings().split else f" --split {proposal.held_out}"
        found.append(f"train eval {evaluation.name} {run}{split}")
    if RECIPES[proposal.task.value].searches and len(settings.folders) == 1:
        embedded = shlex.quote(f"{settings.out}-embedded")
        found.append(f"train embed {run} --split {proposal.held_out or proposal.split} --out {embedded}")
        found.append(f'train search {embedded} "what to look for" --page search.html')
    return found


def _warnings(proposal: Proposal, trial: Trial, length: Length, *, needed: int, free: int) -> list[str]:
    found = [f"{one.what}; {one.hint}" for one in judge(proposal.examined) if one.level == "warning"]
    if proposal.held_out is None:
        found.append(
            f"all chunks are of split {proposal.split!r}, so no evaluation can tell how the model does on other "
            "videos: give some the split val (column split of the table of captions or videos), and run prep manifest "
            "again"
        )
    recipe = RECIPES[proposal.task.value]
    if recipe.weights and proposal.preset.value == recipe.on_gpu and proposal.settings.init.weights is None:
        found.append(
            f"{recipe.on_gpu} was published with pretrained weights: add --init.weights {recipe.weights}, which "
            "open_clip downloads; without them it begins with random weights and learns slowly"
        )
    if length.epochs < 1:
        found.append(f"the run shows only {length.epochs:.0%} of the samples: allow more time with --minutes")
    if trial.wait_share > 0.3:
        found.append(f"steps wait for data {trial.wait_share:.0%} of the time: train bench finds the bottleneck")
    if _is_busy(proposal):
        found.append(
            f"other processes use this machine (load {proposal.load:.0f} on "
            f"{counted(proposal.examined.host.allowed_cores, 'core')}), and the time depends on them"
        )
    if needed > free:
        found.append(f"checkpoints take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: use another --out")
    return found
