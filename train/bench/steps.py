"""A run that is opened to be measured, and its steps, timed one by one: of `train bench` and `train quickstart`."""

import resource
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.progress import Activity
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.fields import in_steps
from clipmill.train.data.outcomes import LoadedBatch, TooManyFailures
from clipmill.train.data.prefetch import prefetch
from clipmill.train.device.precision import open_precision
from clipmill.train.device.transfer import StepGuard
from clipmill.train.distributed.world import World
from clipmill.train.engine.attention_choice import choose_attention
from clipmill.train.engine.loop import epoch_steps, next_step, run_step
from clipmill.train.engine.rank_consistency import NamedSamples, open_consistent
from clipmill.train.engine.state import new_state
from clipmill.train.engine.task import StartableTask
from clipmill.train.engine.throughput import Throughput
from clipmill.train.spec import TaskSpec
from clipmill.train.weights.source import Say
from clipmill.train.weights.sources import fetch_tag, open_weights

_LONGEST_S = 45.0  # of steps that are taken although `seconds` are over


@dataclass(frozen=True)
class Opened:
    """A task with its training set, as a run begins; `settings` are those that take effect."""

    task: StartableTask
    samples: NamedSamples
    settings: ClipSettings
    world: World
    device: torch.device

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def open_to_measure(spec: TaskSpec, settings: ClipSettings, *, world: World, device: torch.device, say: Say) -> Opened:
    """Open a task as `train TASK` does; all ranks call it.

    Raises:
        UserError: the data or the weights do not suit the task.
    """
    products = open_precision(settings.precision, device_type=device.type).products
    attention, _ = choose_attention(settings, device=device, products=products, world=world)
    world.first(lambda: fetch_tag(settings.init, say=say))
    source = open_weights(settings.init, settings.towers)
    settings = spec.effective(settings, source, say=_print_nothing)
    task = spec.open(settings, attention=attention, device=device)
    with Activity(f"opening {', '.join(settings.folders)}"):
        samples = open_consistent(
            lambda: task.training_set(world.replicas), settings, columns=task.columns, world=world
        )
    if source is not None:
        task.start_from(source, samples, say=_print_nothing)
    settings = in_steps(settings, epoch_steps(settings, samples))
    return Opened(task, samples, settings, world, device)


class Steps:
    """Steps of the training loop, on this rank's batches."""

    def __init__(self, opened: Opened) -> None:
        self._opened, device = opened, opened.device
        self.state = new_state(opened.task, opened.samples, opened.settings, world=opened.world, device=device)
        self._throughput = Throughput(device=device, precision=self.state.precision.name)
        self._guard = StepGuard(device)

    def batches(self) -> Generator[LoadedBatch, None, None]:
        """Batches on the device in training order, from the first one on."""
        opened = self._opened
        return prefetch(opened.samples.batches(position=0, max_failures=opened.settings.max_failures), opened.device)

    def take(self, loaded: LoadedBatch) -> None:
        """Take one step, and wait for the device."""
        opened = self._opened
        step = next_step(self.state, opened.samples, opened.settings, world=opened.world)
        run_step(
            step,
            self.state,
            loaded,
            opened.settings,
            world=opened.world,
            throughput=self._throughput,
            soundness=self._guard,
        )
        opened.wait()

    @property
    def state_bytes(self) -> int:
        """Size of a checkpoint."""
        return sum(one.numel() * one.element_size() for one in self.state.tensors().values())


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Whole steps.

    Attributes:
        first_s: time of the first one, which compiles, allocates and counts FLOPs.
        step_times: seconds of the others, without those whose batches were loaded during the first one.
        wait_share: share of these that was spent waiting for data.
        memory_bytes: peak of this process; of the GPU's memory on a GPU.
    """

    first_s: float
    step_times: tuple[float, ...]
    wait_share: float
    memory_bytes: int

    @property
    def step_s(self) -> float:
        """Mean time of a step: they take from a queue, where a fast one only means that others have waited."""
        return sum(self.step_times) / len(self.step_times)


def take_steps(steps: Steps, opened: Opened, *, seconds: float, at_least: int = 2) -> Taken:
    """Take a first step, and then as many as fit into `seconds`, but `at_least` some if they do not take long.

    Raises:
        FailedWork: too many samples could not be loaded.
    """
    taken, waited = list[float](), list[float]()
    with enough_samples(opened.settings), closing(steps.batches()) as batches:
        while len(taken) <= at_least or sum(taken[1:]) < seconds:
            began_s = time.perf_counter()
            loaded = next(batches)
            waited.append(time.perf_counter() - began_s)
            steps.take(loaded)
            taken.append(time.perf_counter() - began_s)
            if len(taken) > 1 and sum(taken) > max(_LONGEST_S, seconds):
                break
    # Batches that were loaded during the first step cost no waiting: leave these steps out if others remain.
    num_ahead = 1 + opened.settings.batches_ahead
    begin = 1 + num_ahead if len(taken) > 2 * num_ahead + 1 else 1
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if opened.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(opened.device)
    return Taken(
        first_s=taken[0],
        step_times=tuple(taken[begin:]),
        wait_share=sum(waited[begin:]) / sum(taken[begin:]),
        memory_bytes=peak_bytes,
    )


@contextmanager
def enough_samples(settings: ClipSettings) -> Iterator[None]:
    """Turn TooManyFailures within the block into FailedWork."""
    try:
        yield
    except TooManyFailures as error:
        raise FailedWork(
            f"too many samples could not be loaded (--max-failures {settings.max_failures}); the last: {error}"
        ) from error


def _print_nothing(_: Any) -> None:
    """Print nothing: the run says it."""
