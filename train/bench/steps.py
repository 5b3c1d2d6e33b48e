"""Rates of the operations on a batch (collate, transfer, augment, model), of the loader, and of whole steps."""

import time
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import nn

from train.bench.rates import Rate, Rounds, repeat
from train.data.batch import Batch, BatchRing, Sample, to_device
from train.data.prefetch import prefetch
from train.data.video_captions import VideoCaptions
from train.distributed.step import Step
from train.distributed.world import World
from train.models.dual_encoder import DualEncoder
from train.optim.optimizer import make_optimizer
from train.tasks.dual_encoder.settings import DualEncoderSettings
from train.tasks.dual_encoder.task import DualEncoderTask


@dataclass(frozen=True)
class WholeSteps:
    """The rate of training steps, and the share of their time spent waiting for data."""

    rate: Rate
    wait_share: float


class BatchOperations:
    """The operations on a batch of the task."""

    def __init__(
        self, task: DualEncoderTask, samples: VideoCaptions, settings: DualEncoderSettings, *, device: torch.device
    ) -> None:
        self._task, self._samples, self._settings, self._device = task, samples, settings, device
        torch.manual_seed(settings.seed)
        self._model: DualEncoder = task.build_model(samples).to(device)
        self._objective = task.build_objective(samples, World()).to(device)
        self._optimizer = make_optimizer(self._model, self._objective, settings)

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
        batches = prefetch(self._samples.batches(position=0, max_failures=settings.max_failures), self._device)
        rounds, waited_s = Rounds(), 0.0
        try:
            self._learn(next(batches).batch, number=1)
            while rounds.total_s < seconds or len(rounds.seconds_per_item) < min_steps:
                began = time.perf_counter()
                loaded = next(batches)
                waited_s += time.perf_counter() - began
                self._learn(loaded.batch, number=len(rounds.seconds_per_item) + 2)
                rounds.add(time.perf_counter() - began, num_items=settings.batch)
        finally:
            batches.close()
        return WholeSteps(rounds.mean_rate, waited_s / rounds.total_s)

    def _transfer(self, collated: Batch, *, seconds: float) -> Rate | None:
        if self._device.type == "cpu":
            return None

        def transfer() -> None:
            to_device(collated, self._device)
            self._wait()

        return repeat(transfer, num_items=self._settings.batch, seconds=seconds)

    def _augment(self, batch: Batch) -> None:
        self._task.inputs(batch, is_training=True)
        self._wait()

    def _pass(self, clips: torch.Tensor, captions: torch.Tensor) -> None:
        """Model and optimizer of a step; the cost of the objective itself is negligible."""
        self._optimizer.zero_grad(set_to_none=True)
        video_BE, text_BE = self._model(clips, captions)
        (video_BE * text_BE).sum().backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm)
        self._optimizer.step()
        self._wait()

    def _learn(self, batch: Batch, *, number: int) -> None:
        step = Step(number=number, seed=self._settings.seed)
        self._optimizer.zero_grad(set_to_none=True)
        self._objective.backward(self._model, batch, step)
        nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm)
        self._optimizer.step()
        self._objective.after_step(step)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
