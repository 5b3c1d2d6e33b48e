"""Plan a first run: measure training steps, and derive the settings, the command line, and the plan as text and JSON.

Steps are measured with smaller and smaller batches until a batch fits into memory.
"""

import gc
import math
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from clipmill.manifests.caption_spans import is_model_source
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun, duration_text, size_text
from clipmill.manifests.progress import Activity
from clipmill.manifests.publish import TEMPORARY_PREFIX
from clipmill.train.bench.steps import OpenedTask, Steps, StepTimes, open_to_measure, take_steps
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.fields import convert_epochs
from clipmill.train.config.files import load_settings, preset_path, presets_of
from clipmill.train.data.captions import equal_weights
from clipmill.train.data.held_out import HeldOut, look_alikes_of
from clipmill.train.distributed.world import World
from clipmill.train.doctor.commands import judge, wrap_words
from clipmill.train.doctor.machine import MachineFacts
from clipmill.train.quickstart import choice
from clipmill.train.quickstart.choice import (
    Choice,
    ExpectedTime,
    Length,
    Survey,
    describe,
    first_batch,
    split_to_evaluate,
    split_to_train,
)
from clipmill.train.quickstart.request import OFFERED_TASKS, Request
from clipmill.train.registry import find_task
from clipmill.train.run.checkpoint_writer import CheckpointWriter
from clipmill.train.spec import TaskSpec
from clipmill.train.weights.source import Say


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Measurements of training steps.

    Attributes:
        batch: Largest batch size that fits into the memory of this process.
        num_samples: Number of samples per epoch.
        data: Description of the samples.
        start_s: Time from the start of the command to the end of the first step, in seconds.
        steps: Times and memory of the steps.
        checkpoint_bytes: Size of model, optimizer and objective, in bytes.
        checkpoint_s: Time for writing a checkpoint, in seconds; 0 if the disk has too little free space for one.
        num_halved: Number of larger batch sizes that did not fit.
    """

    batch: int
    num_samples: int
    data: str
    start_s: float
    steps: StepTimes
    checkpoint_bytes: int
    checkpoint_s: float
    num_halved: int

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict, with the number of steps and their mean time."""
        values = asdict(self)
        steps = values.pop("steps")
        num_steps = len(steps.pop("step_times"))
        return {**values, **steps, "num_steps": num_steps, "step_s": self.steps.step_s}


def measure(
    spec: TaskSpec, settings: ClipSettings, *, device: torch.device, seconds: float, began_s: float, say: Say
) -> Measurements:
    """Take steps for about `seconds`. If a batch does not fit into memory, try a smaller batch.

    Args:
        spec: Spec of the task.
        settings: Settings of the run. Their batch size is tried first.
        device: Device to train on.
        seconds: Time for the steps, in seconds.
        began_s: Time at which the command started, so that `start_s` includes the import of PyTorch, as in a run.
        say: Function that prints a line.

    Raises:
        UserError: The data or the weights do not fit the task, or even the smallest batch does not fit into memory.
        FailedWork: Too many samples could not be loaded.
    """
    num_halved = 0
    while True:
        opened = _open_task(spec, settings, device=device, say=say)
        batch, opened_s = opened.settings.batch, time.perf_counter() - began_s
        if (trial := _steps(opened, seconds=seconds)) is not None:
            break
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if batch // 2 < settings.min_batch:
            raise UserError(
                f"out of memory: not even a batch of {count_noun(batch, 'clip')} fits on the {_processor(device)}",
                hint="use --preset tiny, or --device cpu",
            )
        say(f"{batch} clips do not fit into memory; trying {batch // 2}")
        settings, num_halved = replace(settings, batch=batch // 2), num_halved + 1
    steps, checkpoint_bytes, checkpoint_s = trial
    return Measurements(
        batch=batch,
        num_samples=opened.samples.num_samples or 1,
        data=opened.samples.describe(),
        start_s=opened_s + steps.first_s,
        steps=steps,
        checkpoint_bytes=checkpoint_bytes,
        checkpoint_s=checkpoint_s,
        num_halved=num_halved,
    )


def _steps(opened: OpenedTask, *, seconds: float) -> tuple[StepTimes, int, float] | None:
    """Take steps and write a checkpoint. Return their measurements, or None if the batch does not fit into memory."""
    try:
        with Activity(
            f"trying steps of {count_noun(opened.settings.batch, 'clip')} on the {_processor(opened.device)}"
        ):
            steps = Steps(opened)
            step_times = take_steps(steps, opened, seconds=seconds)
        with Activity("trying a checkpoint"):
            return step_times, steps.state_bytes, _checkpoint_s(steps, opened)
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            return None
        raise


def _open_task(spec: TaskSpec, settings: ClipSettings, *, device: torch.device, say: Say) -> OpenedTask:
    """Open the task with the largest batch that the number of samples allows."""
    opened = open_to_measure(spec, settings, world=World(), device=device, say=say)
    num_samples = opened.samples.num_samples or 1
    batch = first_batch(settings.batch, num_samples=num_samples, on_gpu=device.type == "cuda")
    if batch < settings.batch:
        opened = open_to_measure(spec, replace(settings, batch=batch), world=World(), device=device, say=say)
    if batch > num_samples:
        raise UserError(
            f"the training set has only {count_noun(num_samples, 'sample')}, too few for a batch of {batch}",
            hint="add videos or captions, and run the command that prep status shows",
        )
    return opened


def _checkpoint_s(steps: Steps, opened: OpenedTask) -> float:
    """Write a checkpoint next to the future run and remove it. Return the time in seconds.

    If the checkpoint would fill the disk, nothing is written, the time is 0, and the plan will contain a warning.
    """
    parent = existing_folder(opened.settings.out)
    if shutil.disk_usage(parent).free < 2 * steps.state_bytes:
        return 0.0
    try:
        folder = TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=parent)
    except OSError as error:
        raise UserError(f"{parent} cannot be written to: {error.strerror}", hint="use a different --out") from error
    state, world = steps.state, opened.world
    with folder as name, closing(CheckpointWriter(Path(name), world=world, keep=1, best=None)) as writer:
        began_s = time.perf_counter()
        facts = state.facts(opened.task, opened.samples, opened.settings, world=world, metrics={})
        writer.save(state.tensors(), facts)
        writer.wait()
        return time.perf_counter() - began_s


def _processor(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else "CPU"


def existing_folder(path: Path) -> Path:
    """Return the path if it exists, otherwise its closest parent folder that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


_LINE_WIDTH = 100
_HIGH_WAIT_FRACTION = 0.3  # fraction of the time that steps wait for data, above which a warning is shown


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Choices that follow from the data and the machine, before steps are measured.

    Attributes:
        held_out: Split for evaluations; None if there is no such split.
        settings: Settings with the preset's batch size and number of steps.
        num_processes: Number of processes, one per GPU.
        minutes: Time limit of the run.
        load: Load average of the last minute.
    """

    surveys: tuple[Survey, ...]
    machine: MachineFacts
    task: Choice
    preset: Choice
    split: str
    held_out: str | None
    settings: ClipSettings
    num_processes: int
    minutes: float
    load: float

    @property
    def spec(self) -> TaskSpec:
        """Spec of the task."""
        return find_task(self.task.value)

    @property
    def is_on_gpu(self) -> bool:
        """True if the run trains on GPUs."""
        return bool(self.machine.accelerator.gpus) and self.settings.device != "cpu"

    @property
    def is_busy(self) -> bool:
        """True if other processes use the same cores."""
        host = self.machine.host
        return choice.is_busy(self.load, cores=min(host.allowed_cores, host.quota_cores or host.allowed_cores))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a first run.

    Attributes:
        settings: Complete settings of the command.
        disk_bytes: Size of all checkpoints, in bytes.
        free_bytes: Free space on the disk, in bytes.
        arguments: Arguments of the command line, including the program.
        next_commands: Commands to use after the run.
        warnings: Warnings to read before the run.
    """

    proposal: Proposal
    measurements: Measurements
    settings: ClipSettings
    length: Length
    expected: ExpectedTime
    disk_bytes: int
    free_bytes: int
    arguments: tuple[str, ...]
    next_commands: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def command(self) -> str:
        """Command line for a shell."""
        return shlex.join(self.arguments)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a JSON-serialisable dict."""
        proposal, host = self.proposal, self.proposal.machine.host
        return {
            "data": [asdict(data) for data in proposal.surveys],
            "machine": {
                "gpus": [asdict(gpu) for gpu in proposal.machine.accelerator.gpus],
                "processor": host.processor,
                "cores": host.allowed_cores,
                "memory_bytes": host.memory_bytes,
            },
            "task": asdict(proposal.task),
            "preset": asdict(proposal.preset),
            "split": proposal.split,
            "held_out": proposal.held_out,
            "batch": self.settings.batch,
            "steps": self.settings.steps,
            "epochs": self.length.epochs,
            "steps_reason": self.length.reason,
            "minutes": proposal.minutes,
            "expected": asdict(self.expected),
            "measured": self.measurements.as_json(),
            "disk_bytes": self.disk_bytes,
            "free_bytes": self.free_bytes,
            "out": str(self.settings.out),
            "warnings": list(self.warnings),
            "argv": list(self.arguments),
            "command": self.command,
            "then": list(self.next_commands),
        }

    def text(self) -> str:
        """Return the plan as text for a terminal."""
        lines, last_label = list[str](), ""
        for label, text in self._rows():
            lines.append(wrap_words(text, label="" if label == last_label else label, columns=_LINE_WIDTH))
            last_label = label if label != "warning" else ""
        return "\n".join([*lines, "", f"    {self.command}", ""])

    def _rows(self) -> Iterator[tuple[str, str]]:
        proposal, measurements, settings, expected = self.proposal, self.measurements, self.settings, self.expected
        host, gpus = proposal.machine.host, proposal.machine.accelerator.gpus
        yield from (("data", line) for data in proposal.surveys for line in describe(data))
        gpu = f"{count_noun(len(gpus), 'GPU')} ({', '.join(sorted({gpu.name for gpu in gpus}))})" if gpus else "no GPU"
        memory = "" if host.memory_bytes is None else f", {size_text(host.memory_bytes)} of memory"
        yield "machine", f"{gpu}; {count_noun(host.allowed_cores, 'core')}{memory}"
        yield "task", f"{proposal.task.value} on split {proposal.split}: {proposal.task.reason}"
        clip = f"{count_noun(settings.num_frames, 'frame')} at {settings.size_px} px"
        yield "preset", f"{proposal.preset.value}, {clip}: {proposal.preset.reason}"
        gpus_text = f" on {proposal.num_processes} GPUs; one was measured" if proposal.num_processes > 1 else ""
        misfits = (
            f"; {count_noun(measurements.num_halved, 'larger size')} did not fit" if measurements.num_halved else ""
        )
        yield "batch", f"{count_noun(settings.batch, 'clip')}{gpus_text}{misfits}"
        samples = count_noun(measurements.num_samples, "sample")
        yield "steps", f"{settings.steps:,}, {self.length.epochs:.1f} epochs of {samples}: {self.length.reason}"
        times = [duration_text(seconds) for seconds in (expected.seconds, expected.least_s, expected.most_s)]
        yield (
            "time",
            f"about {times[0]}, between {times[1]} and {times[2]}; "
            f"measured: {measurements.steps.step_s:.2g} s per step, {measurements.steps.wait_share:.0%} of it waiting "
            f"for data, {measurements.start_s:.0f} s to start, {measurements.checkpoint_s:.1f} s per checkpoint",
        )
        kind = " of GPU memory" if proposal.is_on_gpu else ""
        yield "memory", f"{size_text(measurements.steps.memory_bytes)}{kind}, measured"
        yield "disk", f"{size_text(self.disk_bytes)} for checkpoints; {size_text(self.free_bytes)} are free"
        yield from (("warning", text) for text in self.warnings)


def propose(request: Request, surveys: Sequence[Survey], machine: MachineFacts) -> Proposal:
    """Choose the task, the preset, the splits and the run folder.

    Raises:
        UserError: The data do not fit the request, or the preset or run folder in the request cannot be used.
        FailedWork: A problem of this machine would stop training.
    """
    if problems := [finding for finding in judge(machine) if finding.level == "broken"]:
        raise FailedWork(f"a problem would stop training: {problems[0].what}; {problems[0].hint}")
    split = split_to_train(surveys)
    task = choice.choose_task(surveys, split=split, requested=request.task)
    gpus = [] if request.device == "cpu" else [gpu.memory_bytes for gpu in machine.accelerator.gpus]
    preset = choice.choose_preset(task.value, gpu_bytes=gpus)
    settings_class = find_task(task.value).settings
    if request.preset is not None:
        preset = Choice(request.preset, "--preset")
        if request.preset not in presets_of(settings_class):
            raise UserError(
                f"{request.preset!r} is not a preset of train {task.value}",
                hint=f"use one of the presets: {', '.join(presets_of(settings_class))}",
            )
    settings: Any = load_settings(preset_path(preset.value, task.value), settings_class)
    folders = (Path("runs", f"quickstart-{index}" if index > 1 else "quickstart") for index in range(1, 10_000))
    changes: dict[str, Any] = {
        "shards": surveys[0].address if len(surveys) == 1 else tuple(data.address for data in surveys),
        "split": split,
        "out": request.out or next(folder for folder in folders if not folder.exists()),
        "device": request.device,
        "workers": min(settings.workers, max(1, machine.host.allowed_cores)),
    }
    if request.weights is not None:
        changes["init"] = replace(settings.init, weights=request.weights)
    sources = sorted({name for data in surveys for name in data.splits[split].sources})
    captions = getattr(settings, "captions", None)
    if captions is not None and sources and all(map(is_model_source, sources)):
        changes["captions"] = replace(captions, sources=equal_weights(sources))
    if choice.first_run_of(task.value).needs_label:
        changes["label"] = choice.choose_label(surveys, requested=request.label)
    elif request.label is not None:
        raise UserError(
            f"--label {request.label} has no effect, because train {task.value} needs no labels",
            hint="add --task " + " or ".join(name for name in OFFERED_TASKS if choice.first_run_of(name).needs_label),
            flags=("--label",),
        )
    if request.out is not None and request.out.exists() and any(request.out.iterdir()):
        raise UserError(f"{request.out} exists and is not empty", hint="use a different --out, or omit --out")
    return Proposal(
        surveys=tuple(surveys),
        machine=machine,
        task=task,
        preset=preset,
        split=split,
        held_out=split_to_evaluate(surveys, training_split=split),
        settings=replace(settings, **changes),
        num_processes=max(1, len(gpus)),
        minutes=choice.MINUTES["cuda" if gpus else "cpu"] if request.minutes is None else request.minutes,
        load=os.getloadavg()[0],
    )


def make_plan(proposal: Proposal, measurements: Measurements) -> Plan:
    """Complete a proposal with measurements."""
    batch = measurements.batch * proposal.num_processes
    # On a GPU, all checkpoints except the last are written in the background.
    num_blocking_checkpoints = 1 if proposal.is_on_gpu else choice.NUM_CHECKPOINTS
    length = choice.choose_length(
        measurements.num_samples,
        batch=batch,
        step_s=measurements.steps.step_s,
        other_s=measurements.start_s + num_blocking_checkpoints * measurements.checkpoint_s,
        minutes=proposal.minutes,
    )
    settings = convert_epochs(proposal.settings, measurements.num_samples / batch)
    checkpoint_every = max(1, min(settings.checkpoint_every, math.ceil(length.steps / choice.NUM_CHECKPOINTS)))
    settings = replace(
        settings,
        batch=batch,
        steps=length.steps,
        warmup_steps=min(settings.warmup_steps, length.steps // 10),
        checkpoint_every=checkpoint_every,
    )
    num_checkpoints = math.ceil(length.steps / checkpoint_every)
    # In addition to the checkpoints that are kept, one checkpoint may be in progress.
    disk_bytes = measurements.checkpoint_bytes * min(num_checkpoints, settings.keep_checkpoints + 1)
    free_bytes = shutil.disk_usage(existing_folder(settings.out)).free
    return Plan(
        proposal=proposal,
        measurements=measurements,
        settings=settings,
        length=length,
        expected=choice.expected_time(
            length.steps,
            step_times=measurements.steps.step_times,
            start_s=measurements.start_s,
            checkpoints_s=measurements.checkpoint_s * (1 if proposal.is_on_gpu else num_checkpoints),
            num_processes=proposal.num_processes,
            busy=proposal.is_busy,
        ),
        disk_bytes=disk_bytes,
        free_bytes=free_bytes,
        arguments=tuple(_command_arguments(proposal, settings)),
        next_commands=tuple(_following_commands(proposal, settings)),
        warnings=tuple(_warnings(proposal, measurements, length, disk_bytes=disk_bytes, free_bytes=free_bytes)),
    )


def _command_arguments(proposal: Proposal, settings: ClipSettings) -> list[str]:
    """Return the command line, with the preset and the settings that differ from the preset."""
    preset = load_settings(preset_path(proposal.preset.value, settings.command), type(settings))
    launcher = ["torchrun", "--nproc-per-node", str(proposal.num_processes), "--no-python"]
    arguments = [*(launcher if proposal.num_processes > 1 else ()), "train", settings.command]
    for folder in settings.folders:
        arguments += ["--shards", folder]
    arguments += ["--preset", proposal.preset.value]
    for name in ("split", "label", "steps", "batch", "warmup_steps", "checkpoint_every", "workers", "device"):
        value = getattr(settings, name, None)
        if name in ("steps", "batch") or value != getattr(preset, name, None):
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    arguments += ["--init.weights", settings.init.weights] if settings.init.weights else []
    captions: Any = getattr(settings, "captions", None)
    if captions != getattr(preset, "captions", None):
        arguments += ["--captions.sources", captions.sources]
    return [*arguments, "--out", str(settings.out)]


def _following_commands(proposal: Proposal, settings: ClipSettings) -> Iterator[str]:
    """Yield commands to use after the run: an evaluation if there is a held-out split, an embedding, and a search."""
    run = shlex.quote(str(settings.out))
    evaluation = proposal.spec.first_evaluation
    if proposal.held_out is not None and evaluation is not None:
        split = "" if proposal.held_out == evaluation.settings().split else f" --split {proposal.held_out}"
        yield f"train eval {evaluation.name} {run}{split}"
    if choice.first_run_of(proposal.task.value).can_search and len(settings.folders) == 1:
        embeddings = shlex.quote(f"{settings.out}-embedded")
        yield f"train embed {run} --split {proposal.held_out or proposal.split} --out {embeddings}"
        yield f'train search {embeddings} "what to look for" --page search.html'


def _held_out_clips(proposal: Proposal, split: str) -> HeldOut:
    """Return facts about the held-out split. If the task needs captions, they also limit the number of clips."""
    num_chunks = sum(data.splits[split].num_chunks for data in proposal.surveys)
    num_captions = sum(data.splits[split].num_captions for data in proposal.surveys)
    needs_captions = choice.first_run_of(proposal.task.value).needs_captions
    look_alikes = [
        look_alikes_of(data.address, cache=None, split=split, trained_split=proposal.split) for data in proposal.surveys
    ]
    return HeldOut(
        num_clips=min(num_chunks, num_captions) if needs_captions else num_chunks,
        num_chunks=num_chunks,
        num_alike=sum(len(clips or ()) for clips in look_alikes),
        trained_split=proposal.split,
    )


def _warnings(
    proposal: Proposal, measurements: Measurements, length: Length, *, disk_bytes: int, free_bytes: int
) -> Iterator[str]:
    findings = [finding for finding in judge(proposal.machine) if finding.level == "warning"]
    yield from (f"{finding.what}; {finding.hint}" for finding in findings)
    if proposal.held_out is None:
        yield (
            f"all chunks are in split {proposal.split!r}, so the model cannot be evaluated on other videos: assign "
            "some videos to the split val (column split in the table of captions or videos), and run prep manifest "
            "again"
        )
    elif cautions := _held_out_clips(proposal, proposal.held_out).cautions():
        yield f"metrics on split {proposal.held_out!r} mean little: {'; '.join(cautions)}"
    recipe = choice.first_run_of(proposal.task.value)
    if recipe.weights and proposal.preset.value == recipe.gpu_preset and proposal.settings.init.weights is None:
        yield (
            f"{recipe.gpu_preset} was published with pretrained weights: add --init.weights {recipe.weights}, which "
            "open_clip downloads; otherwise training starts from random weights and learns slowly"
        )
    if length.epochs < 1:
        yield f"the run uses only {length.epochs:.0%} of the samples: allow more time with --minutes"
    if measurements.steps.wait_share > _HIGH_WAIT_FRACTION:
        share = f"{measurements.steps.wait_share:.0%}"
        yield f"steps wait for data {share} of the time: train bench {proposal.task.value} finds the bottleneck"
    if proposal.is_busy:
        cores = count_noun(proposal.machine.host.allowed_cores, "core")
        yield f"other processes use this machine (load {proposal.load:.0f} on {cores}), so the time depends on them"
    if disk_bytes > free_bytes:
        yield f"checkpoints take {size_text(disk_bytes)}, but {size_text(free_bytes)} are free: use a different --out"
