"""The step whose numbers are still on their way: read, checked, and given to the trackers, each step once, in order."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train.device.transfer import DeviceEvent, LateMetrics
from train.distributed.step import Step
from train.distributed.world import World
from train.engine.agreement import Shown, require_finite
from train.engine.throughput import Throughput
from train.run.folder import RunFolder
from train.run.tracking import Trackers


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A step that has been begun.

    Attributes:
        numbers: of its line in metrics.jsonl, besides those of speed and evaluation; `loss` and `grad_norm` among them.
        began: when the device was done with the step before, or, if it had none to do, when the host began.
        waited_s: time that the host waited for the batch.
        num_failed: samples that had failed until then.
        shown: what this rank saw.
        skips: a norm that is not finite is no error.
    """

    step: Step
    numbers: LateMetrics
    began: DeviceEvent
    waited_s: float
    num_failed: int
    shown: Shown
    skips: bool


class Journal:
    """Keeps one step until its numbers are there. All ranks call its methods in the same order.

    Args:
        num_samples: of a step, on all ranks.
    """

    def __init__(
        self, trackers: Trackers, throughput: Throughput, *, run: RunFolder, world: World, num_samples: int
    ) -> None:
        self._trackers, self._throughput = trackers, throughput
        self._run, self._world, self._num_samples = run, world, num_samples
        self._taken: Taken | None = None
        self._is_evaluated = False

    @property
    def end(self) -> DeviceEvent | None:
        """When the step that it keeps is done; None if it keeps none."""
        return None if self._taken is None else self._taken.numbers.end

    def add(self, taken: Taken) -> None:
        """Keeps a step; the one before must have been settled."""
        assert self._taken is None
        self._taken = taken

    def check(self) -> None:
        """Waits for the step that it keeps, which is to be evaluated: its line is written with those numbers, or never.

        Raises:
            FailedWork: the loss or the norm of the gradients is not finite; all ranks raise it.
        """
        self._check()
        self._is_evaluated = True

    def _check(self) -> None:
        taken = self._taken
        if taken is None:
            return
        numbers = taken.numbers.read()
        looked_at = {"loss": numbers["loss"]}
        if not taken.skips:
            looked_at["norm of the gradients"] = numbers["grad_norm"]
        for what, value in looked_at.items():
            if not math.isfinite(value):
                self._taken = None
            require_finite(what, value, taken.shown, step=taken.step, world=self._world, run=self._run)

    def settle(self, found: Mapping[str, float] | None = None) -> None:
        """Waits for the step that it keeps, if there is one, and gives its line to the trackers.

        Args:
            found: numbers of an evaluation after the step.

        Raises:
            FailedWork: as `check`; the line is not written then.
        """
        self._check()
        taken, self._taken = self._taken, None
        self._is_evaluated = False
        if taken is not None:
            self._trackers.log(self._line(taken, found or {}))

    def close(self) -> None:
        """Gives the trackers a step that was good before something else ended the run; asks no other rank."""
        taken, self._taken = self._taken, None
        if taken is None or self._is_evaluated:
            return
        try:
            numbers = taken.numbers.read()
        except RuntimeError:
            return  # it was the device that failed
        if math.isfinite(numbers["loss"]) and (taken.skips or math.isfinite(numbers["grad_norm"])):
            self._trackers.log(self._line(taken, {}))

    def _line(self, taken: Taken, found: Mapping[str, float]) -> dict[str, Any]:
        line: dict[str, Any] = taken.numbers.read()
        if not math.isfinite(line["grad_norm"]):
            line["grad_norm"] = None
        if "num_skipped" in line:
            line["num_skipped"] = int(line["num_skipped"])
        speed = self._throughput.numbers(
            step_s=taken.numbers.end.since(taken.began), waited_s=taken.waited_s, num_samples=self._num_samples
        )
        return {**line, **speed, **found, "num_failed": taken.num_failed}
