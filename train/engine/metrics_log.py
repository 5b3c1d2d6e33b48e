"""Metrics of steps, logged one step late: the device may still compute them when the host begins the next step.

`MetricsLog` waits for them, checks that they are finite, and gives them to the trackers, each step once and in order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train.device.transfer import DeviceEvent, LateMetrics
from train.distributed.step import Step
from train.distributed.world import World
from train.engine.finite import BatchIds, require_finite
from train.engine.throughput import Throughput
from train.run.folder import RunFolder
from train.run.tracking import Trackers


@dataclass(frozen=True, kw_only=True)
class PendingStep:
    """A step whose metrics the device may not have computed yet.

    Attributes:
        metrics: `loss`, `grad_norm` and the others of its line in metrics.jsonl, without throughput and evaluation.
        began: when the device finished the previous step, or, if there was none, when the host began.
        waited_s: time that the host waited for the batch.
        num_failed: number of samples that had failed by then.
        batch: the samples of this rank.
        skips: the gradient norm may be infinite, as the step is skipped then (fp16).
    """

    step: Step
    metrics: LateMetrics
    began: DeviceEvent
    waited_s: float
    num_failed: int
    batch: BatchIds
    skips: bool


class MetricsLog:
    """Holds one pending step until its metrics arrive. All ranks call its methods in the same order.

    Args:
        num_samples: of a step, on all ranks.
    """

    def __init__(
        self, trackers: Trackers, throughput: Throughput, *, run: RunFolder, world: World, num_samples: int
    ) -> None:
        self._trackers, self._throughput = trackers, throughput
        self._run, self._world, self._num_samples = run, world, num_samples
        self._pending: PendingStep | None = None
        self._is_evaluated = False

    @property
    def end(self) -> DeviceEvent | None:
        """When the pending step ends on the device; None if there is none."""
        return None if self._pending is None else self._pending.metrics.end

    def add(self, pending: PendingStep) -> None:
        """Hold a step; the previous one must have been settled."""
        assert self._pending is None
        self._pending = pending

    def check(self) -> None:
        """Wait for the pending step before it is evaluated: its line is then logged with the evaluation, or not at all.

        Raises:
            FailedWork: the loss or the norm of the gradients is not finite; all ranks raise it.
        """
        self._check()
        self._is_evaluated = True

    def _check(self) -> None:
        pending = self._pending
        if pending is None:
            return
        metrics = pending.metrics.read()
        checked = {"loss": metrics["loss"]}
        if not pending.skips:
            checked["norm of the gradients"] = metrics["grad_norm"]
        for what, value in checked.items():
            if not math.isfinite(value):
                self._pending = None
            require_finite(what, value, pending.batch, step=pending.step, world=self._world, run=self._run)

    def settle(self, found: Mapping[str, float] | None = None) -> None:
        """Wait for the pending step, if there is one, and log its line.

        Args:
            found: metrics of an evaluation after the step.

        Raises:
            FailedWork: as `check`; the line is not written then.
        """
        self._check()
        pending, self._pending = self._pending, None
        self._is_evaluated = False
        if pending is not None:
            self._trackers.log(self._line(pending, found or {}))

    def close(self) -> None:
        """Log a pending step that was finite when something else ended the run; without other ranks."""
        pending, self._pending = self._pending, None
        if pending is None or self._is_evaluated:
            return
        try:
            metrics = pending.metrics.read()
        except RuntimeError:
            return  # the device itself failed
        if math.isfinite(metrics["loss"]) and (pending.skips or math.isfinite(metrics["grad_norm"])):
            self._trackers.log(self._line(pending, {}))

    def _line(self, pending: PendingStep, found: Mapping[str, float]) -> dict[str, Any]:
        line: dict[str, Any] = pending.metrics.read()
        if not math.isfinite(line["grad_norm"]):
            line["grad_norm"] = None
        if "num_skipped" in line:
            line["num_skipped"] = int(line["num_skipped"])
        speed = self._throughput.metrics(
            step_s=pending.metrics.end.since(pending.began), waited_s=pending.waited_s, num_samples=self._num_samples
        )
        return {**line, **speed, **found, "num_failed": pending.num_failed}
