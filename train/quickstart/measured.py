"""Real steps of a first run, with smaller batches until one fits, and what a checkpoint takes."""

import gc
import shutil
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity
from clipmill.manifests.publish import TEMPORARY_PREFIX
from clipmill.shards.columns import VIDEO, command_for
from clipmill.train.bench.steps import Opened, Steps, Taken, open_to_measure, take_steps
from clipmill.train.config.clips import ClipSettings
from clipmill.train.distributed.world import World
from clipmill.train.quickstart.choice import first_batch
from clipmill.train.run.checkpoint_writer import CheckpointWriter
from clipmill.train.spec import TaskSpec
from clipmill.train.weights.source import Say


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What some steps took.

    Attributes:
        batch: that fits, of this process.
        num_samples: of an epoch.
        start_s: from the start of the command to the end of the first step.
        taken: the steps.
        checkpoint_bytes: of model, optimizer and objective.
        checkpoint_s: time of writing a checkpoint; 0 if the disk is full.
        num_halved: batches that did not fit.
    """

    batch: int
    num_samples: int
    data: str
    start_s: float
    taken: Taken
    checkpoint_bytes: int
    checkpoint_s: float
    num_halved: int

    def as_json(self) -> dict[str, Any]:
        """As plain values; the times of the steps as their number and mean."""
        values = asdict(self)
        steps = values.pop("taken")
        num_steps = len(steps.pop("step_times"))
        return {**values, **steps, "num_steps": num_steps, "step_s": self.taken.step_s}


def measure(
    spec: TaskSpec, settings: ClipSettings, *, device: torch.device, seconds: float, began_s: float, say: Say
) -> Measured:
    """Take steps for about `seconds`, with smaller batches until one fits.

    Args:
        settings: of the run; their batch size is the first to try.
        began_s: when the command began, which imports PyTorch as a run does too.

    Raises:
        UserError: the data or the weights do not suit the task, or not even the smallest batch fits.
        FailedWork: too many samples could not be loaded.
    """
    least, num_halved = settings.least_batch, 0
    while True:
        opened = _open_task(spec, settings, device=device, say=say)
        batch, opened_s = opened.settings.batch, time.perf_counter() - began_s
        if (found := _steps(opened, seconds=seconds)) is not None:
            break
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if batch // 2 < least:
            raise UserError(
                f"out of memory: not even a batch of {count_noun(batch, 'clip')} fits on the {device.type}",
                hint="use --preset tiny, or --device cpu",
            )
        say(f"{batch} clips do not fit into memory; trying {batch // 2}")
        settings, num_halved = replace(settings, batch=batch // 2), num_halved + 1
    taken, checkpoint_bytes, checkpoint_s = found
    return Measured(
        batch=batch,
        num_samples=opened.samples.num_samples or 1,
        data=opened.samples.describe(),
        start_s=opened_s + taken.first_s,
        taken=taken,
        checkpoint_bytes=checkpoint_bytes,
        checkpoint_s=checkpoint_s,
        num_halved=num_halved,
    )


def _steps(opened: Opened, *, seconds: float) -> tuple[Taken, int, float] | None:
    """Steps, and the size and the time of a checkpoint; None if they do not fit into memory."""
    try:
        with Activity(f"trying steps of {count_noun(opened.settings.batch, 'clip')} on the {opened.device.type}"):
            steps = Steps(opened)
            taken = take_steps(steps, opened, seconds=seconds)
        with Activity("trying a checkpoint"):
            return taken, steps.state_bytes, _checkpoint_s(steps, opened)
    except RuntimeError as error:  # of which torch.OutOfMemoryError is one
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            return None
        raise


def _open_task(spec: TaskSpec, settings: ClipSettings, *, device: torch.device, say: Say) -> Opened:
    """The task with the largest batch to try that its samples allow."""
    opened = open_to_measure(spec, settings, world=World(), device=device, say=say)
    num_samples = opened.samples.num_samples or 1
    batch = first_batch(settings.batch, num_samples=num_samples, on_gpu=device.type == "cuda")
    if batch < settings.batch:
        opened = open_to_measure(spec, replace(settings, batch=batch), world=World(), device=device, say=say)
    if batch > num_samples:
        raise UserError(
            f"the training set has {count_noun(num_samples, 'sample')}, too few for a batch of {batch}",
            hint=f"add videos or captions, and run prep {command_for(VIDEO)} again",
        )
    return opened


def _checkpoint_s(steps: Steps, opened: Opened) -> float:
    """Write a checkpoint beside where the run will be, and remove it; seconds that it took.

    Where it would fill the disk, nothing is written and the time is 0; the plan warns of that.
    """
    parent = existing_folder(opened.settings.out)
    if shutil.disk_usage(parent).free < 2 * steps.state_bytes:
        return 0.0
    try:
        folder = TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=parent)
    except OSError as error:
        raise UserError(f"{parent} cannot be written: {error.strerror}", hint="name another --out") from error
    state, world = steps.state, opened.world
    with folder as name, closing(CheckpointWriter(Path(name), world=world, keep=1, best=None)) as writer:
        began_s = time.perf_counter()
        facts = state.facts(opened.task, opened.samples, opened.settings, world=world, metrics={})
        writer.save(state.tensors(), facts)
        writer.wait()
        return time.perf_counter() - began_s


def existing_folder(path: Path) -> Path:
    """The folder closest to a path that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
