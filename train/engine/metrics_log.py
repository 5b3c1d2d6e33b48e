"""Metrics of steps, logged one step late: the device may still compute them when the host begins the next step.

`MetricsLog` waits for them, checks that they are finite, and gives them to the trackers, each step once and in order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import publish_json
from clipmill.train.device.transfer import DeviceEvent, LateMetrics
from clipmill.train.distributed.sharded import local_part
from clipmill.train.distributed.step import Step
from clipmill.train.distributed.world import World
from clipmill.train.engine.throughput import Throughput
from clipmill.train.run.folder import RunFolder
from clipmill.train.run.tracking import Trackers

# Stop a run whose loss, gradients or state are not finite, before anything is saved; and one that learns nothing.


_MAX_NAMED = 3
_NUM_IDLE = 10  # steps from the first on without gradients that end a run; a trained model may have such steps


@dataclass(frozen=True)
class BatchIds:
    """Which samples a rank had in a step, for the error message; it holds no pictures, which would fill a GPU.

    Attributes:
        keys: of chunks, as in the batch.
        caption_id: int64 [B] on the CPU; None for batches without captions.
    """

    keys: Sequence[str]
    caption_id: torch.Tensor | None


def require_finite(what: str, value: float, batch: BatchIds, *, step: Step, world: World, run: RunFolder) -> None:
    """Stop all ranks if a value that they share is not finite, and list the samples of all in bad_batch.json.

    Raises:
        FailedWork: the value is NaN or infinite.
    """
    if math.isfinite(value):
        return
    path = run.path / "bad_batch.json"
    own: dict[str, list[Any]] = {"keys": list(batch.keys)}
    if batch.caption_id is not None:
        own["caption_ids"] = batch.caption_id.tolist()
    ranks = step.world.gather_objects(own)
    if world.is_first:
        publish_json(path, {"step": step.number, what: str(value), "ranks": ranks})
    raise FailedWork(f"the {what} is {value} at step {step.number}; the keys of its batch are in {path}")


def require_finite_state(tensors: Mapping[str, torch.Tensor], *, step: int, world: World, run: RunFolder) -> None:
    """Refuse to save a state that no run could continue from; all ranks call it before they save a checkpoint.

    Raises:
        FailedWork: a tensor holds NaN or infinity; all ranks raise it.
    """
    if (names := not_finite(tensors, world=world)) is not None:
        raise FailedWork(
            f"after step {step} these tensors hold values that are not finite (NaN or infinity): {names}; "
            f"no checkpoint is made of them, and those of earlier steps stay in {run.checkpoints}"
        )


def not_finite(tensors: Mapping[str, torch.Tensor], *, world: World) -> str | None:
    """Names of the tensors that hold NaN or infinity, abbreviated; None if all are finite. All ranks call it.

    Each rank checks its own shards without copying them, and waits for the device once. Losses keep logarithms, which
    are -inf until a sample is first seen: there, only NaN and +inf count.

    Args:
        tensors: by their names in checkpoints, whole or sharded.
    """
    parts = {name: local_part(one) for name, one in tensors.items() if one.is_floating_point()}
    parts = {name: one.detach() for name, one in parts.items() if one.numel()}
    found: set[str] = set()
    by_device: dict[torch.device, list[str]] = {}
    for name, part in parts.items():
        by_device.setdefault(part.device, []).append(name)
    for names in by_device.values():
        # aminmax propagates NaN.
        ends_N2 = torch.stack([torch.stack(parts[name].aminmax()).double() for name in names]).cpu()
        is_log_N = torch.tensor([name.startswith("objective.") for name in names])
        is_good_N2 = ends_N2.isfinite() | (is_log_N[:, None] & (ends_N2 == -torch.inf))
        found |= {name for name, is_good in zip(names, is_good_N2.all(dim=1).tolist(), strict=True) if not is_good}
    num_found = world.sum(torch.tensor([float(len(found))]))
    if not num_found.item():
        return None
    all_found = sorted({name for of_rank in world.gather_objects(found) for name in of_rank})
    more = f" and {len(all_found) - _MAX_NAMED} more" if len(all_found) > _MAX_NAMED else ""
    return ", ".join(all_found[:_MAX_NAMED]) + more


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
        sources: of a mixture, number of samples of each data folder so far, failed ones included.
    """

    step: Step
    metrics: LateMetrics
    began: DeviceEvent
    waited_s: float
    num_failed: int
    batch: BatchIds
    skips: bool
    sources: Mapping[str, int] = field(default_factory=dict)


class MetricsLog:
    """Holds one pending step until its metrics arrive. All ranks call its methods in the same order.

    Args:
        num_samples: of a step, on all ranks.
        num_steps: of the run.
    """

    def __init__(
        self,
        trackers: Trackers,
        throughput: Throughput,
        *,
        run: RunFolder,
        world: World,
        num_samples: int,
        num_steps: int,
    ) -> None:
        self._trackers, self._throughput = trackers, throughput
        self._run, self._world, self._num_samples = run, world, num_samples
        self._pending: PendingStep | None = None
        self._is_evaluated = False
        self._idle_until, self._learns = min(_NUM_IDLE, num_steps), False

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
            FailedWork: the loss or the norm of the gradients is not finite, or all gradients of the first steps are 0;
                all ranks raise it.
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
        self._learns |= bool(metrics["grad_norm"])
        if not self._learns and pending.step.number == self._idle_until:
            raise FailedWork(
                f"nothing is learned: the loss is {metrics['loss']:.4f}, and the gradients of the first "
                f"{count_noun(self._idle_until, 'step')} are exactly 0. Either nothing is left to predict (captions "
                "without tokens, a single class, a margin that all pairs keep), or what the loss depends on is frozen"
            )

    def settle(
        self, found: Mapping[str, float] | None = None, of_batches: Mapping[str, list[float]] | None = None
    ) -> None:
        """Wait for the pending step, if there is one, and log its line.

        Args:
            found: metrics of an evaluation after the step.
            of_batches: those of each of its batches.

        Raises:
            FailedWork: as `check`; the line is not written then.
        """
        self._check()
        pending, self._pending = self._pending, None
        self._is_evaluated = False
        if pending is not None:
            more = {"batches": dict(of_batches)} if of_batches else {}
            self._trackers.log(self._line(pending, found or {}) | more)

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
        sources = {"sources": dict(pending.sources)} if pending.sources else {}
        return {**line, **speed, **found, **sources, "num_failed": pending.num_failed}
