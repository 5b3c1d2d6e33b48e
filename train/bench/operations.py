"""Rates of the loader's operations on a sample: read, decode, crop, tokens.

A loader thread runs them in sequence; here all threads run one of them at a time. Samples come in training order, so
that reads are as cold, or as warm, as in training.
"""

import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice

import numpy as np
import torch

from clipmill.manifests.errors import FailedWork
from clipmill.train.bench.rates import Rate, Rounds, repeat
from clipmill.train.data.batch import Batch, BatchRing, Sample, to_device
from clipmill.train.data.clip_samples import ClipPlan
from clipmill.train.data.decoding.clip import Clip
from clipmill.train.data.decoding.decoders import ChunkFrames
from clipmill.train.data.decoding.reading import ChunkBytes
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.order import SampleOrder
from clipmill.train.data.outcomes import LoadedBatch, SampleFailed
from clipmill.train.data.prefetch import prefetch
from clipmill.train.data.video_captions import VideoCaptions
from clipmill.train.device.transfer import StepGuard
from clipmill.train.distributed.world import World
from clipmill.train.engine.loop import next_step, run_step
from clipmill.train.engine.state import new_state
from clipmill.train.engine.throughput import Throughput
from clipmill.train.optim.optimizer import clip_gradients
from clipmill.train.tasks.dual_encoder.settings import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask

_SAMPLES_PER_ROUND = 64


@dataclass(frozen=True)
class _Work:
    """Samples that are loaded together because they share a chunk, and the results of the operations so far."""

    requests: tuple[SampleRequest, ...]
    plans: tuple[ClipPlan, ...] = ()
    contents: dict[int, ChunkBytes] = field(default_factory=dict)  # by chunk
    frames: dict[int, ChunkFrames] = field(default_factory=dict)  # by chunk
    clips: tuple[Clip, ...] = ()
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class ClipRates:
    """Rates by operation, the last samples (at most a batch), and the errors of samples that failed."""

    rates: dict[str, Rate]
    read_bytes_per_item: float
    samples: list[Sample]
    failed: list[str]


class ClipOperations:
    """The operations on the samples of a set."""

    def __init__(self, samples: VideoCaptions, settings: DualEncoderSettings) -> None:
        self._samples, self._settings = samples, settings
        self._order = SampleOrder(len(samples), settings.seed, settings.samples_per_chunk)
        self._failed: dict[int, str] = {}  # by sample, which may be tried repeatedly

    def measure(self, *, seconds: float) -> ClipRates:
        """Measure each operation for about `seconds`; FailedWork if too many samples fail."""
        operations = {"read": self._read, "decode": self._decode, "crop": self._crop, "tokens": self._tokens}
        rounds = {name: Rounds() for name in operations}
        samples: list[Sample] = []
        num_read = size_bytes = num_rounds = 0
        with ThreadPoolExecutor(self._settings.workers) as pool:
            while sum(each.total_s for each in rounds.values()) < seconds * len(rounds):
                work = self._requests_of_round(num_rounds)
                is_warm = bool(samples)
                for name, operation in operations.items():
                    began = time.perf_counter()
                    work = [done for done in pool.map(partial(self._tried, operation), work) if done is not None]
                    took_s, num_items = time.perf_counter() - began, sum(len(one.requests) for one in work)
                    if is_warm and num_items:
                        rounds[name].add(took_s, num_items=num_items)
                num_rounds += 1
                samples = [*samples, *(sample for one in work for sample in one.samples)][-self._settings.batch :]
                num_read += sum(len(one.requests) for one in work)
                size_bytes += sum(content.size_bytes for one in work for content in one.contents.values())
                failed = list(self._failed.values())
                if len(failed) > self._settings.max_failures or len(failed) == len(self._samples):
                    raise FailedWork(f"{len(failed)} samples could not be loaded; the first: {failed[0]}")
        rates = {name: each.median_rate for name, each in rounds.items()}
        return ClipRates(rates, size_bytes / num_read, samples, list(self._failed.values()))

    def _requests_of_round(self, number: int) -> list[_Work]:
        group, seed = self._settings.samples_per_chunk, self._settings.seed
        num_groups = -(-min(self._settings.batch, _SAMPLES_PER_ROUND) // group)
        positions = group * num_groups * number + np.arange(group * num_groups, dtype=np.int64)
        requests = [
            SampleRequest(sample, position, seed)
            for sample, position in zip(self._order.at(positions).tolist(), positions.tolist(), strict=True)
        ]
        groups = [requests[begin : begin + group] for begin in range(0, len(requests), group)]
        # Empty places of the order have no sample.
        return [_Work(tuple(request for request in one if request.sample >= 0)) for one in groups]

    def _tried(self, operation: Callable[[_Work], _Work], work: _Work) -> _Work | None:
        try:
            return operation(work)
        except SampleFailed as error:
            self._failed |= {request.sample: str(error) for request in work.requests}
            return None

    def _read(self, work: _Work) -> _Work:
        """Choose frames, locate their bytes and read them."""
        plans = tuple(self._samples.plan(request) for request in work.requests)
        wanted: dict[int, set[int]] = {}
        for plan in plans:
            for chunk, frames in plan.by_chunk.items():
                wanted.setdefault(chunk, set()).update(frames)
        contents = {chunk: self._samples.chunks.read(chunk, frames) for chunk, frames in wanted.items()}
        return replace(work, plans=plans, contents=contents)

    def _decode(self, work: _Work) -> _Work:
        frames = {chunk: self._samples.chunks.decoder.decode(content) for chunk, content in work.contents.items()}
        return replace(work, frames=frames)

    def _crop(self, work: _Work) -> _Work:
        return replace(work, clips=tuple(self._samples.clip(plan, work.frames) for plan in work.plans))

    def _tokens(self, work: _Work) -> _Work:
        pairs = zip(work.plans, work.clips, strict=True)
        return replace(work, samples=tuple(self._samples.sample(plan, clip) for plan, clip in pairs))


# Rates of the operations on a batch (collate, transfer, augment, model), of the loader, and of whole steps.


@dataclass(frozen=True)
class WholeSteps:
    """The rate of training steps, and the share of their time spent waiting for data."""

    rate: Rate
    wait_share: float


class Steps:
    """Steps of the training loop, on this rank's batches."""

    def __init__(
        self,
        task: DualEncoderTask,
        samples: VideoCaptions,
        settings: DualEncoderSettings,
        *,
        world: World,
        device: torch.device,
    ) -> None:
        self._samples, self._settings, self._world, self._device = samples, settings, world, device
        self.state = new_state(task, samples, settings, world=world, device=device)
        self.state.trained.train()
        self._throughput = Throughput(device=device, precision=self.state.precision.name)
        self._guard = StepGuard(device)

    def batches(self) -> Generator[LoadedBatch, None, None]:
        """Batches in training order, from the first one on."""
        loaded = self._samples.batches(position=0, max_failures=self._settings.max_failures)
        return prefetch(loaded, self._device)

    def take(self, loaded: LoadedBatch) -> None:
        """Take one step, and wait for the device."""
        state, settings, world = self.state, self._settings, self._world
        step = next_step(state, self._samples, settings, world=world)
        run_step(step, state, loaded, settings, world=world, throughput=self._throughput, soundness=self._guard)
        self.wait()

    def wait(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class BatchOperations:
    """The operations on a batch of the task."""

    def __init__(
        self, task: DualEncoderTask, samples: VideoCaptions, settings: DualEncoderSettings, *, device: torch.device
    ) -> None:
        self._task, self._samples, self._settings, self._device = task, samples, settings, device
        self._steps = Steps(task, samples, settings, world=World(), device=device)

    def measure(self, samples: list[Sample], *, seconds: float) -> dict[str, Rate | None]:
        """Measure each operation for `seconds` on `samples`, repeated to fill a batch; None if it is not needed."""
        size = self._settings.batch
        chosen = list(islice(cycle(samples), size))
        ring = BatchRing(size, pin=self._device.type == "cuda")
        collated = ring.collate(chosen)
        here = to_device(collated, self._device)
        clips, captions = self._task.inputs(here, is_training=True)
        return {
            "collate": repeat(lambda: ring.collate(chosen), num_items=size, seconds=seconds),
            "transfer": self._transfer(collated, seconds=seconds),
            "augment": repeat(lambda: self._augment(here), num_items=size, seconds=seconds),
            "model": repeat(lambda: self._pass(clips, captions), num_items=size, seconds=seconds),
        }

    def loader(self, *, seconds: float) -> Rate:
        """Measure the loader alone, from disk to batches."""
        batches = self._samples.batches(position=0, max_failures=self._settings.max_failures)
        rounds = Rounds()
        try:
            next(batches)
            while rounds.total_s < seconds:
                began = time.perf_counter()
                next(batches)
                rounds.add(time.perf_counter() - began, num_items=self._settings.batch)
        finally:
            batches.close()
        return rounds.mean_rate

    def whole(self, *, seconds: float, min_steps: int) -> WholeSteps:
        """Measure at least `min_steps` training steps."""
        settings = self._settings
        batches = self._steps.batches()
        rounds, waited_s = Rounds(), 0.0
        try:
            self._steps.take(next(batches))
            while rounds.total_s < seconds or len(rounds.seconds_per_item) < min_steps:
                began = time.perf_counter()
                loaded = next(batches)
                waited_s += time.perf_counter() - began
                self._steps.take(loaded)
                rounds.add(time.perf_counter() - began, num_items=settings.batch)
        finally:
            batches.close()
        return WholeSteps(rounds.mean_rate, waited_s / rounds.total_s)

    def _transfer(self, collated: Batch, *, seconds: float) -> Rate | None:
        if self._device.type == "cpu":
            return None

        def transfer() -> None:
            to_device(collated, self._device)
            self._steps.wait()

        return repeat(transfer, num_items=self._settings.batch, seconds=seconds)

    def _augment(self, batch: Batch) -> None:
        self._task.inputs(batch, is_training=True)
        self._steps.wait()

    def _pass(self, clips: torch.Tensor, captions: torch.Tensor) -> None:
        """Model and optimizer of a step; the cost of the objective itself is negligible."""
        state = self._steps.state
        state.model.zero_grad(set_to_none=True)
        with state.precision.autocast():
            video_BE, text_BE = state.trained(clips, captions)
        (video_BE * text_BE).sum().backward()
        clip_gradients(state.parameters(), max_norm=self._settings.max_grad_norm)
        state.optimizer.step()
        self._steps.wait()
