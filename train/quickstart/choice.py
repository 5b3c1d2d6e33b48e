"""What a first run should be, as functions of what was found: task, preset, batch size, number of steps, command."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.train.data.classes import proposed_label
from clipmill.train.quickstart.asked import OFFERED
from clipmill.train.quickstart.survey import Survey
from clipmill.train.registry import DEFAULT, find_task
from clipmill.train.spec import FirstRun

EPOCHS = 30  # about those of the presets for synthetic videos
_MIN_STEPS = 200
_FEWEST_STEPS = 20  # of a short time of which the start takes most
NUM_CHECKPOINTS = 4
_MOST_AT_ONCE = 256  # clips on a GPU in the first step that is tried
_MIN_GPU_BYTES = 8 * 10**9  # a ViT-B/16 with a text tower, its gradients and AdamW's moments take 2.4 GB without clips
MINUTES = {"cpu": 10.0, "cuda": 60.0}


def first_run_of(task: str) -> FirstRun:
    """The presets of a task that quickstart offers."""
    found = find_task(task).first_run
    assert found is not None
    return found


def task_without_captions() -> str:
    """The first task whose samples need none."""
    return next(name for name in OFFERED if not first_run_of(name).needs_captions)


@dataclass(frozen=True)
class Chosen:
    """A value and the reason for it."""

    value: str
    reason: str


def choose_task(surveys: Sequence[Survey], *, split: str, asked: str | None) -> Chosen:
    """The task to train.

    Raises:
        UserError: the task that is asked for needs captions or labels, and a data folder has none.
    """
    without = [one.address for one in surveys if not one.splits[split].num_captions]
    num = sum(one.splits[split].num_captions for one in surveys)
    if asked is None:
        if not without:
            return Chosen(DEFAULT, count_noun(num, "caption"))
        where = "no captions" if len(without) == len(surveys) else f"no captions in {', '.join(without)}"
        task = task_without_captions()
        return Chosen(task, f"{where}, and train {task} needs none")
    if without and first_run_of(asked).needs_captions:
        raise UserError(
            f"split {split!r} of {without[0]} has no captions, and train {asked} needs them",
            hint="add a table of captions: prep manifest folder VIDEOS --captions captions.csv --data "
            f"{without[0]}; or use --task {task_without_captions()}",
        )
    return Chosen(asked, "--task")


def choose_label(surveys: Sequence[Survey], *, asked: str | None) -> str:
    """The label to train on.

    Raises:
        UserError: there is none that all data folders have, or there are several and none is asked for.
    """
    labels = [name for name in surveys[0].labels if all(name in one.labels for one in surveys)]
    if asked is not None and asked in labels:
        return asked
    if asked is not None:
        raise UserError(
            f"the captions have no label {asked!r}",
            hint=f"labels: {', '.join(labels) or 'none'}; see docs/classification.md",
        )
    if not labels:
        raise UserError(
            "the captions have no labels, and this task needs them",
            hint="see docs/classification.md for datasets with labels; or use another --task",
        )
    if len(labels) > 1:
        raise UserError(
            f"the captions have several labels: {', '.join(labels)}", hint=f"use --label {proposed_label(labels)}"
        )
    return labels[0]


def choose_preset(task: str, *, gpu_bytes: Sequence[int]) -> Chosen:
    """The preset of a task.

    Args:
        gpu_bytes: memory of each GPU; empty to train on a CPU.
    """
    recipe = first_run_of(task)
    if not gpu_bytes:
        return Chosen(recipe.on_cpu, "small enough for a CPU")
    if recipe.on_gpu is None:
        return Chosen(recipe.on_cpu, f"train {task} has no larger preset that needs no further files")
    if min(gpu_bytes) < _MIN_GPU_BYTES:
        return Chosen(recipe.on_cpu, f"{recipe.on_gpu} needs a GPU with {size_text(_MIN_GPU_BYTES)}")
    which = "a GPU has" if len(gpu_bytes) == 1 else f"{len(gpu_bytes)} GPUs have at least"
    return Chosen(recipe.on_gpu, f"{which} {size_text(min(gpu_bytes))} of memory")


def first_batch(preset: int, *, num_samples: int, on_gpu: bool) -> int:
    """The batch size of a process to try first: a power of two, at most the preset's and half of the samples."""
    most = min(preset, max(2, num_samples // 2), _MOST_AT_ONCE if on_gpu else preset)
    return 1 << (most.bit_length() - 1)


@dataclass(frozen=True)
class Length:
    """How long to train, and why."""

    steps: int
    epochs: float
    reason: str


def choose_length(num_samples: int, *, batch: int, step_s: float, other_s: float, minutes: float) -> Length:
    """The number of steps: `EPOCHS`, but at least `_MIN_STEPS`, if these fit into the time; `_FEWEST_STEPS` anyway.

    Args:
        num_samples: of an epoch.
        batch: on all processes.
        step_s: time of a step.
        other_s: time of the start, the first step included, and of the checkpoints.
        minutes: the time of the whole run.
    """
    wanted = math.ceil(EPOCHS * num_samples / batch)
    reason = f"{EPOCHS} epochs"
    if wanted < _MIN_STEPS:
        wanted, reason = _MIN_STEPS, "the fewest steps that show learning"
    affordable = int((60 * minutes - other_s) / step_s)
    if affordable < _FEWEST_STEPS:
        wanted, reason = _FEWEST_STEPS, f"the fewest; --minutes {minutes:g} allows fewer"
    elif wanted > affordable:
        wanted, reason = affordable, f"the most that --minutes {minutes:g} allows"
    epochs = wanted * batch / num_samples
    return Length(wanted, epochs, reason)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The time of a run in seconds, and a range for it."""

    seconds: float
    least_s: float
    most_s: float


_SPREAD = (0.85, 1.15)  # the speed of a machine varies by that anyway
_BUSY_SPREAD = (0.5, 2.0)  # where other processes want the same cores, they may leave them, or want more


def is_busy(load: float, *, cores: float) -> bool:
    """Whether others use the cores: more processes want to run than there are cores, this one not counted."""
    return load - 1 > 0.75 * cores


def expected_time(
    steps: int, *, step_times: Sequence[float], start_s: float, checkpoints_s: float, num_processes: int, busy: bool
) -> Expected:
    """The time of a run from the times of some of its steps.

    The range is that of the means of four sections of these steps, and at least `_SPREAD`.

    Args:
        step_times: in seconds, at least one.
        start_s: from the start of the run to the end of its first step.
        checkpoints_s: time of all checkpoints.
        num_processes: the gradients of several are averaged, which was not measured: it widens the range.
        busy: whether other processes use the machine.
    """
    mean, size = fmean(step_times), max(1, len(step_times) // 4)
    means = [fmean(step_times[begin : begin + size]) for begin in range(0, len(step_times) - size + 1, size)]
    low, high = _BUSY_SPREAD if busy else _SPREAD
    communication = 1.0 if num_processes == 1 else 1.5
    later, other_s = max(0, steps - 1), start_s + checkpoints_s
    return Expected(
        seconds=other_s + later * mean,
        least_s=low * other_s + later * min(*means, low * mean),
        most_s=high * other_s + later * max(*means, high * mean) * communication,
    )
