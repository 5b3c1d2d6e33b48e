"""What the ranks tell one another in a step, so that all take it or none does: batches, failures, orders to stop."""

import math
import shlex
import signal
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from manifests.errors import ClipmillError, FailedWork
from manifests.publish import publish_json
from train.data.cursor import Cursor
from train.data.outcomes import FailedSample, LoadedBatch, TooManyFailures
from train.data.prefetch import on_all_stages
from train.distributed.sharded import local_part
from train.distributed.step import Step
from train.distributed.world import World
from train.run.checkpoint import latest_checkpoint
from train.run.folder import RunFolder, append_lines, keep_lines


@dataclass(frozen=True)
class AgreedBatch:
    """This rank's batch, and what all ranks know. Of a pipeline's stages only the first has the pictures.

    Attributes:
        stops: whether a rank was told to stop, so that this step is not taken.
        waited_s: of the rank that waited longest for its batch.
    """

    loaded: LoadedBatch
    stops: bool
    waited_s: float


class FailureLog:
    """The samples of all ranks that could not be had: failures.jsonl, and how many may follow.

    Attributes:
        num_failed: so far.
    """

    def __init__(self, run: RunFolder, *, world: World, max_failures: int, cursor: Cursor) -> None:
        """Keeps what the file has of the positions before `cursor`; the others are loaded again."""
        self._path, self._world, self._max_failures = run.failures, world, max_failures

        def kept() -> int:
            return len(keep_lines(run.failures, lambda line: cursor.has_passed(line["position"])))

        self.num_failed = world.first(kept)

    @property
    def num_left(self) -> int:
        """Failures that are still allowed."""
        return self._max_failures - self.num_failed

    def next_batch(self, batches: Generator[LoadedBatch, None, None], *, stops: bool) -> AgreedBatch:
        """The next batch, once every rank has one; all ranks call it before each step.

        Args:
            stops: whether this rank was told to stop.

        Raises:
            FailedWork: too many samples failed.
            ClipmillError: what the loader of a rank raised; all ranks raise it.
        """
        began_s = time.perf_counter()
        loaded, error = None, None
        failed: tuple[FailedSample, ...] = ()
        try:
            if self._world.stages.is_first:
                loaded = next(batches)
                failed = loaded.failed
        except TooManyFailures as too_many:
            failed = too_many.failed
        except ClipmillError as own:
            error = own
        waited_s = time.perf_counter() - began_s
        # A few numbers each step, and more only where something is amiss.
        own_14 = torch.tensor([[len(failed), float(stops), float(error is not None), waited_s]], dtype=torch.float64)
        said_R4 = self._world.gather(own_14)
        num_failed, num_stops, num_errors, _ = said_R4.sum(dim=0).tolist()
        if num_failed:
            self._record([one for of_rank in self._world.gather_objects(failed) for one in of_rank])
        if num_errors:
            raise next(one for one in self._world.gather_objects(error) if one is not None)
        loaded = on_all_stages(loaded, self._world.stages)
        assert loaded is not None  # or a failure too many or an error would have been raised
        return AgreedBatch(loaded, stops=num_stops > 0, waited_s=said_R4[:, 3].max().item())

    def _record(self, failed: list[FailedSample]) -> None:
        self.num_failed += len(failed)
        if self._world.is_first:
            append_lines(self._path, [failure.as_json() for failure in failed])
        if self.num_failed > self._max_failures:
            raise FailedWork(
                f"{self.num_failed} samples failed, more than --max-failures {self._max_failures}; "
                f"the last one: {failed[-1].key}: {failed[-1].detail}; all are listed in {self._path}"
            )


@dataclass(frozen=True)
class Shown:
    """What a rank saw in a step, for the error that its numbers may become: not the pictures, which fill a GPU.

    Attributes:
        keys: of chunks, as the batch has them.
        caption_id: int64 [B] on the CPU; None where there are no captions.
    """

    keys: Sequence[str]
    caption_id: torch.Tensor | None


def require_finite(what: str, value: float, shown: Shown, *, step: Step, world: World, run: RunFolder) -> None:
    """Stops all ranks where a number that they share is none, and names the samples of all in bad_batch.json.

    Raises:
        FailedWork: the number is infinite or none.
    """
    if math.isfinite(value):
        return
    path = run.path / "bad_batch.json"
    own: dict[str, list[Any]] = {"keys": list(shown.keys)}
    if shown.caption_id is not None:
        own["caption_ids"] = shown.caption_id.tolist()
    ranks = step.world.gather_objects(own)
    if world.is_first:
        publish_json(path, {"step": step.number, what: str(value), "ranks": ranks})
    raise FailedWork(f"the {what} is {value} at step {step.number}; the keys of its batch are in {path}")


def require_finite_state(tensors: Mapping[str, torch.Tensor], *, step: int, world: World, run: RunFolder) -> None:
    """Keeps a state that nobody can go on from out of the checkpoints; all ranks call it before they save one.

    Raises:
        FailedWork: a tensor holds NaN or infinity; all ranks raise it.
    """
    if (names := not_finite(tensors, world=world)) is not None:
        raise FailedWork(
            f"after step {step} these tensors hold values that are not finite (NaN or infinity): {names}; "
            f"no checkpoint is made of them, and those of earlier steps stay in {run.checkpoints}"
        )


@contextmanager
def with_resume_hint(run: RunFolder) -> Iterator[None]:
    """An interruption from the keyboard (Ctrl-C) leaves with the words how to go on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        step = "the latest checkpoint" if latest_checkpoint(run.checkpoints) else "its begin: it has no checkpoint yet"
        out = shlex.quote(str(run.path))
        raise KeyboardInterrupt(f"--resume --out {out} goes on from {step}") from interrupt


class StopSignal:
    """Whether this process has been told to stop (SIGTERM)."""

    def __init__(self) -> None:
        self.is_set = False

    @contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        """Within, SIGTERM is remembered and ends nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may set what a signal does
            return

        def remember(_: int, __: FrameType | None) -> None:
            self.is_set = True

        before = signal.signal(signal.SIGTERM, remember)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, before)


# Whether the numbers of a run are finite: what has become NaN or infinite is no state to go on from, nor to keep.


_MANY = 3


def not_finite(tensors: Mapping[str, torch.Tensor], *, world: World) -> str | None:
    """Names of the tensors that hold NaN or infinity, a few of them; None where there are none. All ranks call it.

    Each rank looks at its own parts, without copies, and the device is waited for once. Losses keep logarithms, which
    are -inf before the first visit: there only NaN and +inf count.

    Args:
        tensors: by the names of checkpoints, whole or spread over ranks.
    """
    parts = {name: local_part(one) for name, one in tensors.items() if one.is_floating_point()}
    parts = {name: one.detach() for name, one in parts.items() if one.numel()}
    found: set[str] = set()
    by_device: dict[torch.device, list[str]] = {}
    for name, part in parts.items():
        by_device.setdefault(part.device, []).append(name)
    for names in by_device.values():
        # NaN is the least and the highest of what it is in.
        ends_N2 = torch.stack([torch.stack(parts[name].aminmax()).double() for name in names]).cpu()
        is_log_N = torch.tensor([name.startswith("objective.") for name in names])
        is_good_N2 = ends_N2.isfinite() | (is_log_N[:, None] & (ends_N2 == -torch.inf))
        found |= {name for name, is_good in zip(names, is_good_N2.all(dim=1).tolist(), strict=True) if not is_good}
    num_found = world.sum(torch.tensor([float(len(found))]))
    if not num_found.item():
        return None
    all_found = sorted({name for of_rank in world.gather_objects(found) for name in of_rank})
    more = f" and {len(all_found) - _MANY} more" if len(all_found) > _MANY else ""
    return ", ".join(all_found[:_MANY]) + more
