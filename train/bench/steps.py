"""Take and time training steps, and measure the rates of their stages, for `train bench` and `train quickstart`."""

import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.progress import Activity
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.fields import convert_epochs
from clipmill.train.data.batch import to_device
from clipmill.train.data.chunks import ClipReader
from clipmill.train.data.decoders import ChunkBytes
from clipmill.train.data.outcomes import LoadedBatch, TooManyFailures
from clipmill.train.data.prefetch import prefetch
from clipmill.train.device.precision import open_precision
from clipmill.train.device.transfer import StepGuard
from clipmill.train.distributed.world import World
from clipmill.train.engine.loop import epoch_steps, next_step, run_step
from clipmill.train.engine.metrics import Throughput
from clipmill.train.engine.rank_consistency import NamedSamples, open_consistent
from clipmill.train.engine.state import new_state
from clipmill.train.engine.task import StartableTask
from clipmill.train.models.attention_choice import choose_attention
from clipmill.train.spec import TaskSpec
from clipmill.train.weights.source import Say
from clipmill.train.weights.sources import fetch_tag, open_weights

_MAX_S = 45.0  # maximum time of a measurement, unless `seconds` is longer


@dataclass(frozen=True)
class OpenedTask:
    """Task with its training set and effective settings, as at the start of a run."""

    task: StartableTask
    samples: NamedSamples
    settings: ClipSettings
    world: World
    device: torch.device

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def open_to_measure(
    spec: TaskSpec, settings: ClipSettings, *, world: World, device: torch.device, say: Say
) -> OpenedTask:
    """Open a task as `train TASK` does. All ranks must call this function.

    Raises:
        UserError: The data or the weights do not fit the task.
    """
    products = open_precision(settings.precision, device_type=device.type).matmul_dtype
    attention, _ = choose_attention(settings, device=device, products=products, world=world)
    world.first(lambda: fetch_tag(settings.init, say=say))
    source = open_weights(settings.init, settings.towers)
    # Do not print which settings the weights change: the run prints them.
    settings = spec.effective_settings(settings, source, say=lambda _: None)
    task = spec.open(settings, attention=attention, device=device)
    with Activity(f"opening {', '.join(settings.folders)}"):
        samples = open_consistent(
            lambda: task.training_set(world.replicas), settings, columns=task.columns, world=world
        )
    if source is not None:
        task.start_from(source, samples, say=lambda _: None)
    settings = convert_epochs(settings, epoch_steps(settings, samples))
    return OpenedTask(task, samples, settings, world, device)


class Steps:
    """Steps of the training loop, with the batches of this rank."""

    def __init__(self, opened_task: OpenedTask) -> None:
        self._opened_task, device = opened_task, opened_task.device
        self.state = new_state(
            opened_task.task, opened_task.samples, opened_task.settings, world=opened_task.world, device=device
        )
        self._throughput = Throughput(device=device, precision=self.state.precision.name)
        self._guard = StepGuard(device)

    def batches(self) -> Generator[LoadedBatch, None, None]:
        """Return batches on the device, in training order."""
        opened_task = self._opened_task
        return prefetch(
            opened_task.samples.batches(position=0, max_failures=opened_task.settings.max_failures), opened_task.device
        )

    def take(self, loaded_batch: LoadedBatch) -> None:
        """Take one step, and wait for the device."""
        opened_task = self._opened_task
        step = next_step(self.state, opened_task.samples, opened_task.settings, world=opened_task.world)
        run_step(
            step,
            self.state,
            loaded_batch,
            opened_task.settings,
            world=opened_task.world,
            throughput=self._throughput,
            guard=self._guard,
        )
        opened_task.wait()

    @property
    def state_bytes(self) -> int:
        """Size of a checkpoint in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state.tensors().values())


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Measurements of complete steps.

    Attributes:
        first_s: Time of the first step in seconds; it includes compilation, allocation and the counting of FLOPs.
        step_times: Time of each later step in seconds, except steps whose batches were loaded during the first step.
        wait_share: Fraction of `step_times` that was spent waiting for data.
        memory_bytes: Peak memory of this process; on a GPU, peak GPU memory.
    """

    first_s: float
    step_times: tuple[float, ...]
    wait_share: float
    memory_bytes: int

    @property
    def step_s(self) -> float:
        """Mean step time in seconds. A single step is not representative, because it takes its batch from a queue."""
        return sum(self.step_times) / len(self.step_times)


def take_steps(steps: Steps, opened_task: OpenedTask, *, seconds: float, min_steps: int = 2) -> StepTimes:
    """Take a first step, and then steps until `seconds` have passed.

    Args:
        min_steps: Minimum number of steps after the first one, unless the steps are very slow.

    Raises:
        FailedWork: Too many samples could not be loaded.
    """
    step_times, wait_times = list[float](), list[float]()
    with convert_failures(opened_task.settings), closing(steps.batches()) as batches:
        while len(step_times) <= min_steps or sum(step_times[1:]) < seconds:
            began_s = time.perf_counter()
            loaded_batch = next(batches)
            wait_times.append(time.perf_counter() - began_s)
            steps.take(loaded_batch)
            step_times.append(time.perf_counter() - began_s)
            if len(step_times) > 1 and sum(step_times) > max(_MAX_S, seconds):
                break
    # Steps whose batches were loaded during the first step did not wait. Omit them if other steps remain.
    num_ahead = 1 + opened_task.settings.batches_ahead
    first_index = 1 + num_ahead if len(step_times) > 2 * num_ahead + 1 else 1
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if opened_task.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(opened_task.device)
    return StepTimes(
        first_s=step_times[0],
        step_times=tuple(step_times[first_index:]),
        wait_share=sum(wait_times[first_index:]) / sum(step_times[first_index:]),
        memory_bytes=peak_bytes,
    )


@contextmanager
def convert_failures(settings: ClipSettings) -> Iterator[None]:
    """Convert a `TooManyFailures` error within the block to `FailedWork`."""
    try:
        yield
    except TooManyFailures as error:
        raise FailedWork(
            f"too many samples could not be loaded (--max-failures {settings.max_failures}); the last one: {error}"
        ) from error


# Rates of the stages of a step: in the threads of the loader, the copy to the device, and the model.
#
# The measurements use the loader and the steps of a run. A stopwatch around their methods sums the time of each stage.
# Each thread of the loader runs the stages in sequence. The rate of a stage is the rate that all threads together would
# reach if they ran only this stage.

READ, DECODE, CROP, TOKENS, AUGMENT = "read", "decode", "crop", "tokens", "augment"
LOADER_STAGES = (READ, DECODE, CROP, TOKENS)


class Stopwatch:
    """Timer for the calls of each stage, active while `is_running`. A nested call counts only for the inner stage.

    Args:
        wait: Function that waits for the work that a stage has queued on the device.

    Attributes:
        times_s: Time of each call in seconds, keyed by stage.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self.times_s: dict[str, list[float]] = defaultdict(list)
        self.is_running = False
        self._wait, self._local = wait, threading.local()

    def time_calls(self, stage: str, work: Callable[..., Any], *, is_on_device: bool = False) -> Callable[..., Any]:
        """Wrap `work` so that the time of its calls counts for `stage`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_running:
                return work(*args, **kwargs)
            outer_s, self._local.nested_s = getattr(self._local, "nested_s", 0.0), 0.0
            if is_on_device:
                self._wait()
            began_s = time.perf_counter()
            try:
                result = work(*args, **kwargs)
                if is_on_device:
                    self._wait()
                return result
            finally:
                took_s = time.perf_counter() - began_s
                self.times_s[stage].append(took_s - self._local.nested_s)
                self._local.nested_s = outer_s + took_s

        return call

    def watch(self, owner: object, method: str, stage: str, *, is_on_device: bool = False) -> None:
        """Time later calls of an object's method as `stage`, if the object has this method."""
        if (work := getattr(owner, method, None)) is not None:
            setattr(owner, method, self.time_calls(stage, work, is_on_device=is_on_device))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates in items per second.

    Attributes:
        stages: Rate of each stage; None for a stage that is not needed. Only a loader of pixel clips has stages.
        loader, compute: Rates of the loader (from the disk to batches) and of steps on one batch, measured separately.
        read_bytes_per_item: Bytes that the loader reads per item; None if the loader has no stages.
        failures: Details of the samples that could not be loaded, keyed by sample key.
    """

    stages: dict[str, float | None]
    loader: float
    compute: float
    read_bytes_per_item: float | None
    failures: dict[str, str]


def measure_stages(opened_task: OpenedTask, *, seconds: float) -> tuple[Rates, Steps]:
    """Measure the loader, the copy to the device and the steps, for about `seconds` each. Also return the steps.

    Raises:
        FailedWork: Too many samples could not be loaded.
    """
    settings, batch = opened_task.settings, opened_task.settings.batch
    stopwatch, sizes, failures = Stopwatch(opened_task.wait), list[int](), dict[str, str]()
    reader = getattr(opened_task.samples, "reader", None)
    if isinstance(reader, ClipReader):  # latents and streams have no such stages
        _watch_loading(reader, stopwatch, sizes)
    # Also stop if every sample has failed a hundred times, because such a training set has no rate.
    max_failures = min(settings.max_failures, 100 * (opened_task.samples.num_samples or 1000))
    batches = opened_task.samples.batches(position=0, max_failures=max_failures)
    stopwatch.is_running, waits_s = True, list[float]()
    with Activity("measuring the loader"), convert_failures(settings), closing(batches):
        while sum(waits_s[1:]) < seconds:  # the first wait includes the start of the threads
            began_s = time.perf_counter()
            loaded_batch = next(batches)
            waits_s.append(time.perf_counter() - began_s)
            failures |= {sample.key: sample.detail for sample in loaded_batch.failed}
    stopwatch.is_running = False
    # The threads have loaded more samples than were used.
    num_loaded = len(stopwatch.times_s[TOKENS])
    stages: dict[str, float | None] = {}
    if num_loaded:
        stages = {stage: settings.workers * num_loaded / sum(stopwatch.times_s[stage]) for stage in LOADER_STAGES}
    stopwatch.watch(opened_task.task, "inputs", AUGMENT, is_on_device=True)
    with Activity("measuring the model"):
        steps = Steps(opened_task)
        device_batch = loaded_batch._replace(batch=to_device(loaded_batch.batch, opened_task.device))

        def copy() -> None:
            to_device(loaded_batch.batch, opened_task.device)
            opened_task.wait()

        is_copied = opened_task.device.type != "cpu"
        stages["transfer"] = batch / median(_measure_calls(copy, seconds=seconds)) if is_copied else None
        steps.take(device_batch)
        stopwatch.is_running = True
        steps_s = _measure_calls(lambda: steps.take(device_batch), seconds=seconds)
        stopwatch.is_running = False
    compute_s, augment_s = median(steps_s), 0.0
    if calls_s := stopwatch.times_s[AUGMENT]:  # one call per microbatch
        augment_s = median(calls_s) * len(calls_s) / len(steps_s)
        stages[AUGMENT] = batch / augment_s
    stages["model"] = batch / max(compute_s - augment_s, 1e-9)
    rates = Rates(
        stages=stages,
        loader=batch / fmean(waits_s[1:]),
        compute=batch / compute_s,
        read_bytes_per_item=sum(sizes) / num_loaded if num_loaded else None,
        failures=failures,
    )
    return rates, steps


def _watch_loading(reader: ClipReader, stopwatch: Stopwatch, sizes: list[int]) -> None:
    """Time the stages of a clip reader, and append the number of bytes of each read to `sizes`."""
    chunks, decoder = reader.chunks, reader.decoder
    read_chunk, decode_each = chunks.read, decoder.decode_each

    def read(chunk: int, frames: Collection[int]) -> ChunkBytes:
        content = read_chunk(chunk, frames)
        sizes.append(content.size_bytes)
        return content

    def decode(content: ChunkBytes, use: Callable[..., None]) -> None:
        decode_each(content, stopwatch.time_calls(CROP, use))  # each frame is cropped as soon as the decoder outputs it

    stopwatch.watch(reader, "plan", READ)
    setattr(chunks, "read", stopwatch.time_calls(READ, read))  # noqa: B010 - changes only this object, not its class
    setattr(decoder, "decode_each", stopwatch.time_calls(DECODE, decode))  # noqa: B010
    stopwatch.watch(reader, "_make", CROP)
    stopwatch.watch(reader, "annotate", TOKENS)


def _measure_calls(work: Callable[[], object], *, seconds: float) -> list[float]:
    """Call `work` until `seconds` have passed, and return the time of each call in seconds."""
    times = list[float]()
    while sum(times) < seconds:
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return times
