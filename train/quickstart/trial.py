"""Real steps on the real data, and a checkpoint: how long they take, and how much memory. Nothing is left on disk."""

import gc
import resource
import shutil
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.progress import Activity
from clipmill.manifests.publish import TEMPORARY_PREFIX
from clipmill.train.config.training import ClipSettings
from clipmill.train.data.loader import TrainingSet
from clipmill.train.data.outcomes import TooManyFailures
from clipmill.train.data.prefetch import prefetch
from clipmill.train.device.precision import open_precision
from clipmill.train.device.transfer import StepGuard
from clipmill.train.distributed.world import World
from clipmill.train.engine.attention_choice import choose_attention
from clipmill.train.engine.loop import next_step, run_step
from clipmill.train.engine.out_of_memory import available_bytes, fitting
from clipmill.train.engine.state import State, new_state
from clipmill.train.engine.throughput import Throughput
from clipmill.train.quickstart.choice import first_batch
from clipmill.train.run.checkpoint_writer import CheckpointWriter
from clipmill.train.spec import TaskSpec
from clipmill.train.weights.sources import Say, fetch_tag, open_weights

_LONGEST_S = 45.0  # of the steps after the first


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What some steps took.

    Attributes:
        batch: that fits, of this process.
        num_samples: of an epoch.
        data: description of the samples.
        start_s: from the start of the command to the end of the first step.
        step_times: seconds of the steps after those whose batches were loaded during the first one.
        cpu_share: share of these that the threads of PyTorch had a core; 1 if the machine was idle otherwise.
        wait_share: share of these that was spent waiting for data.
        checkpoint_s: time of copying the state, and of writing the copy.
        memory_bytes: peak of this process; of the GPU's memory on a GPU.
        checkpoint_bytes: of model, optimizer and objective.
        num_halved: batches that did not fit.
    """

    batch: int
    num_samples: int
    data: str
    start_s: float
    step_times: tuple[float, ...]
    cpu_share: float
    wait_share: float
    checkpoint_s: tuple[float, float]
    memory_bytes: int
    host_bytes: int
    checkpoint_bytes: int
    num_halved: int

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return sum(self.step_times) / len(self.step_times)

    def as_json(self) -> dict[str, Any]:
        """As plain values; the times of the steps as their number and mean."""
        values = asdict(self)
        del values["step_times"]
        return {**values, "num_steps": len(self.step_times), "step_s": self.step_s}


class _TooLarge(Exception):
    """A step did not fit into memory; `batch` may."""

    def __init__(self, batch: int | None) -> None:
        super().__init__(batch)
        self.batch = batch


def try_steps(
    spec: TaskSpec, settings: ClipSettings, *, device: torch.device, seconds: float, before_s: float, say: Say
) -> Trial:
    """Take steps for about `seconds`, with smaller batches until one fits.

    Args:
        settings: of the run; their batch size is the first to try.
        before_s: what the command took so far, mostly to import PyTorch, as a run does too.

    Raises:
        UserError: the data or the weights do not suit the task, or not even the smallest batch fits.
        FailedWork: too many samples could not be loaded.
    """
    least, num_halved = 2 if spec.name == "dual-encoder" else 1, 0
    while True:
        try:
            tried = _try(spec, settings, device=device, seconds=seconds, num_halved=num_halved, say=say)
            return replace(tried, start_s=before_s + tried.start_s)
        except _TooLarge as error:
            batch = error.batch
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if batch is None or batch < least:
            raise UserError(
                f"out of memory: not even {settings.batch} clips fit on the {device.type}",
                hint="use --preset tiny, or --device cpu",
            )
        say(f"{settings.batch} clips do not fit into memory; trying {batch}")
        settings, num_halved = replace(settings, batch=batch), num_halved + 1


def _try(
    spec: TaskSpec, settings: ClipSettings, *, device: torch.device, seconds: float, num_halved: int, say: Say
) -> Trial:
    began_s = time.perf_counter()
    world = World()
    precision = open_precision(settings.precision, device_type=device.type)
    attention, _ = choose_attention(settings, device=device, products=precision.products, world=world)
    fetch_tag(settings.init, say=say)
    source = open_weights(settings.init)
    settings = spec.effective(settings, source, say=_quiet)

    def opened(settings: ClipSettings) -> tuple[Any, TrainingSet]:
        task = spec.open(settings, attention=attention, device=device)
        return task, task.training_set(world)

    with Activity(f"opening {', '.join(settings.folders)}"):
        task, samples = opened(settings)
    num_samples = samples.num_samples or 1
    batch = first_batch(settings.batch, num_samples=num_samples, on_gpu=device.type == "cuda")
    if batch < settings.batch:
        settings = replace(settings, batch=batch)
        task, samples = opened(settings)
    if settings.batch > num_samples:
        raise UserError(
            f"there are {num_samples} samples to train on, too few for a batch of {settings.batch}",
            hint="add videos or captions, and run prep chunk again",
        )
    if source is not None:
        task.start_from(source, samples, say=_quiet)
    with Activity(f"trying steps of {settings.batch} clips on the {device.type}"):
        state = new_state(task, samples, settings, world=world, device=device)
        state.trained.train()
        taken = _take(state, samples, settings, world=world, device=device, seconds=seconds)
    # Batches that were loaded during the first step cost no waiting: leave these steps out if others remain.
    num_ahead = 1 + settings.batches_ahead
    later = taken[1 + num_ahead :] if len(taken) > 2 * num_ahead + 1 else taken[1:] or taken
    start_s = time.perf_counter() - began_s - sum(one.step_s for one in taken[1:])
    with Activity("trying a checkpoint"):
        checkpoint_s = _save(state, task, samples, settings, world=world)
    step_s = sum(one.step_s for one in later)
    host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes = (one.numel() * one.element_size() for one in state.tensors().values())
    return Trial(
        batch=settings.batch,
        num_samples=num_samples,
        data=samples.describe(),
        start_s=start_s,
        step_times=tuple(one.step_s for one in later),
        cpu_share=min(1.0, sum(one.cpu_s for one in later) / step_s / torch.get_num_threads()),
        wait_share=sum(one.waited_s for one in later) / step_s,
        checkpoint_s=checkpoint_s,
        memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host_bytes,
        host_bytes=host_bytes,
        checkpoint_bytes=sum(sizes),
        num_halved=num_halved,
    )


@dataclass(frozen=True)
class _Taken:
    """The time of a step, with that of waiting for its batch, and the CPU time of all threads."""

    step_s: float
    waited_s: float
    cpu_s: float


def _take(
    state: State,
    samples: TrainingSet,
    settings: ClipSettings,
    *,
    world: World,
    device: torch.device,
    seconds: float,
) -> list[_Taken]:
    """Take a first step, which compiles and allocates, and then as many as fit into `seconds`, but at least two."""
    throughput = Throughput(device=device, precision=state.precision.name)
    soundness = StepGuard(device)
    taken: list[_Taken] = []
    before_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    try:
        with closing(prefetch(samples.batches(position=0, max_failures=settings.max_failures), device)) as batches:
            while len(taken) < 3 or sum(one.step_s for one in taken[1:]) < seconds:
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                loaded = next(batches)
                waited_s = time.perf_counter() - began_s
                step = next_step(state, samples, settings, world=world)
                run_step(step, state, loaded, settings, world=world, throughput=throughput, soundness=soundness)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                cpu_s = time.process_time() - began_cpu_s
                taken.append(_Taken(time.perf_counter() - began_s, waited_s, cpu_s))
                if len(taken) > 1 and sum(one.step_s for one in taken) > _LONGEST_S:
                    break
    except TooManyFailures as error:
        raise FailedWork(f"more than {settings.max_failures} samples could not be loaded; the last: {error}") from error
    except torch.OutOfMemoryError:
        peak_bytes, total_bytes = torch.cuda.max_memory_allocated(device), available_bytes(device)
        smaller = fitting(settings.batch, before_bytes=before_bytes, peak_bytes=peak_bytes, total_bytes=total_bytes)
        raise _TooLarge(smaller) from None
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise _TooLarge(settings.batch // 2) from None
    return taken


def _save(
    state: State, task: Any, samples: TrainingSet, settings: ClipSettings, *, world: World
) -> tuple[float, float]:
    """Write a checkpoint beside where the run will be, and remove it: seconds of copying the state, and of writing it.

    Where it would fill the disk, nothing is written and the times are 0; the plan warns of that.
    """
    parent = existing(settings.out)
    size_bytes = sum(one.numel() * one.element_size() for one in state.tensors().values())
    if shutil.disk_usage(parent).free < 2 * size_bytes:
        return 0.0, 0.0
    try:
        folder = TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=parent)
    except OSError as error:
        raise UserError(f"{parent} cannot be written: {error.strerror}", hint="name another --out") from error
    with folder as name, closing(CheckpointWriter(Path(name), world=world, keep=1, best=None)) as writer:
        began_s = time.perf_counter()
        writer.save(state.tensors(), state.facts(task, samples, settings, world=world, metrics={}))
        copied_s = time.perf_counter()
        writer.wait()
        return copied_s - began_s, time.perf_counter() - copied_s


def existing(path: Path) -> Path:
    """The folder closest to a path that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def _quiet(_: str) -> None:
    """Print nothing: the run says it."""
