"""Detect on a CPU where the host would wait for a GPU, by tracking device tensors and recording every read of them.

A tensor counts as a device tensor if it belongs to the model, was sent to the device, or was created or changed by an
operation with a device tensor among its arguments. On a GPU, `torch.cuda.set_sync_debug_mode` detects the same reads,
and also those that only kernels can detect.
"""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clipmill.train.engine.loop
from clipmill.train.data.batch import TENSORS
from clipmill.train.device.transfer import LateMetrics
from clipmill.train.engine.failures import FailureLog, SyncedBatch
from clipmill.train.engine.state import State

# These operations return a number, or a tensor whose size depends on values.
LOOKS = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount",
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """A read of device values.

    Attributes:
        step: Step of the loop, or 0 before the first batch.
        where: File and line of the read.
        numbers_of: Step whose numbers were read, if the read was for the journal.
    """

    step: int
    where: str
    numbers_of: int | None = None


class DeviceReads(TorchDispatchMode):
    """Dispatch mode that records reads with the step of the loop (0 before the first batch)."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[Look] = []
        self.step = 0
        # The storages are kept alive, so that no other memory gets the same address.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._thread = threading.get_ident()

    def take(self, *values: Any) -> None:
        """Treat tensors as device tensors from now on."""
        for tree_leaf in tree_leaves(values):
            if isinstance(tree_leaf, torch.Tensor):
                storage = tree_leaf.untyped_storage()
                self._storages[storage._cdata] = storage

    def has(self, *values: Any) -> bool:
        """Return True if any of these tensors is a device tensor."""
        tensors = (tree_leaf for tree_leaf in tree_leaves(values) if isinstance(tree_leaf, torch.Tensor))
        return any(tensor.untyped_storage()._cdata in self._storages for tensor in tensors)

    def is_heard(self) -> bool:
        """Return True in the training thread; reads in the loader's threads do not block a step."""
        return threading.get_ident() == self._thread

    def note(self, numbers_of: int | None = None) -> None:
        """Record a read and its location."""
        frames = [
            frame
            for frame in traceback.extract_stack()
            if "/train/" in frame.filename and "tests" not in frame.filename
        ]
        where = f"{frames[-1].filename.rpartition('/train/')[2]}:{frames[-1].lineno}" if frames else "?"
        self.looks.append(Look(self.step, where, numbers_of))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.has(args, kwargs):
            return func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if name in LOOKS or (name == "repeat_interleave" and kwargs.get("output_size") is None) or _by_mask(name, args):
            self.note()
        out = func(*args, **kwargs)
        self.take(out)
        if func._schema.is_mutable:
            self.take(args, kwargs)
        return out


def _by_mask(name: str, args: Any) -> bool:
    """Return True if a mask selects rows, so that its true values must be counted.

    Assigning a single number needs no count.
    """
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    is_filled = name != "index" and args[2].numel() == 1
    return not is_filled and any(arg is not None and arg.dtype == torch.bool for arg in args[1])


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Make optimizers behave as on a GPU. On a CPU they read numbers, because nothing has to wait for them."""
    patch.setattr("clipmill.train.optim.optimizer.is_on_host", lambda tensor: False)


@contextmanager
def device_reads(patch: pytest.MonkeyPatch) -> Iterator[DeviceReads]:
    """Track runs of clipmill.train.engine.loop inside the block as if their device were a GPU."""
    reads = DeviceReads()
    _follow_runs(reads, patch)
    _follow_methods(reads, patch)
    as_on_a_gpu(patch)
    with reads:
        yield reads


def _follow_runs(reads: DeviceReads, patch: pytest.MonkeyPatch) -> None:
    new_state, agree, read_late = clipmill.train.engine.loop.new_state, FailureLog.next_batch, LateMetrics.read

    def started(*args: Any, **kwargs: Any) -> State:
        state = new_state(*args, **kwargs)
        reads.take(list(state.model.parameters()), list(state.model.buffers()))
        reads.take(list(state.objective.parameters()), list(state.objective.buffers()))
        return state

    def next_batch(self: FailureLog, *args: Any, **kwargs: Any) -> SyncedBatch:
        reads.step += 1
        agreed = agree(self, *args, **kwargs)
        reads.take([value for name, value in agreed.loaded.batch.items() if name in TENSORS])
        return agreed

    def read(self: LateMetrics) -> dict[str, float]:
        if self._names:
            reads.note(numbers_of=int(self._numbers["step"]))
        with pytest.MonkeyPatch.context() as within:
            within.setattr(reads, "has", lambda *_: False)
            return read_late(self)

    patch.setattr(clipmill.train.engine.loop, "new_state", started)
    patch.setattr(FailureLog, "next_batch", next_batch)
    patch.setattr(LateMetrics, "read", read)


def _follow_methods(reads: DeviceReads, patch: pytest.MonkeyPatch) -> None:
    """Track the tensor methods that dispatch modes do not see."""
    for name in ("tolist", "numpy", "cpu", "__array__"):
        patch.setattr(torch.Tensor, name, _looking(reads, getattr(torch.Tensor, name)))
    for name in ("tensor", "as_tensor"):
        patch.setattr(torch, name, _making(reads, getattr(torch, name)))
    patch.setattr(torch.Tensor, "to", _moving(reads, torch.Tensor.to))


def _looking(reads: DeviceReads, method: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if reads.is_heard() and reads.has(self):
            reads.note()
        return method(self, *args, **kwargs)

    return look


def _making(reads: DeviceReads, method: Callable[..., Any]) -> Callable[..., Any]:
    def make(values: Any, *args: Any, **kwargs: Any) -> Any:
        if reads.is_heard() and kwargs.get("device") is not None and not isinstance(values, torch.Tensor):
            reads.note()
        return method(values, *args, **kwargs)

    return make


def _moving(reads: DeviceReads, method: Callable[..., Any]) -> Callable[..., Any]:
    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_moved = any(isinstance(argument, torch.device) for argument in (*args, *kwargs.values()))
        if not is_moved or not reads.is_heard() or reads.has(self):
            return method(self, *args, **kwargs)
        if not kwargs.get("non_blocking"):
            reads.note()
        # The copy is a device tensor, but the original stays a host tensor, as on a GPU.
        clone = method(self, *args, **kwargs).clone()
        reads.take(clone)
        return clone

    return move
