"""Transfers between host and device without synchronisation: late reads of metrics, and copies of small values.

The host launches the next step before it reads the metrics of the current step:

    host      launch step 1 | launch step 2 | read 1 | launch step 3 | read 2 | ...
    device                  | step 1 ........... | step 2 ........... | ...

Therefore the device always has work. The host waits once per step, for the end of the previous step. Metrics are
stacked and copied to pinned memory as part of the step, so the host has to wait for only one event to read them. The
host reads metrics immediately if something depends on them (a checkpoint, an evaluation, a stop request, or the end of
the run).

When the host reads a non-finite metric, it has already launched the next step. `StepGuard` prevents both steps from
changing the weights.

`torch.tensor(..., device="cuda")`, and `.to` without `non_blocking`, wait for all work queued on the GPU. A copy from
pageable memory may also wait. A training step uses `send` and `constant_tensor` instead.

A non-blocking copy reads its source later. Memory from `pinned_memory` is therefore filled only once, and each batch
has separate memory. torch's allocator reuses the memory once nothing refers to it and all copies from it have ended.
(For each copy, the allocator records an event on the stream, regardless of the code that made the copy.)
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Scalar = float | torch.Tensor


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return True if reading a tensor does not synchronise with a device."""
    return tensor.device.type == "cpu"


class DeviceEvent:
    """Event that marks the end of all work that is queued on a device when the event is created."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time_s = 0.0
        if device.type == "cuda":
            # `blocking`: a waiting thread sleeps and leaves its core to the data loader.
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._time_s = time.perf_counter()

    def wait(self) -> None:
        """Block until the event is reached."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier_event: "DeviceEvent") -> float:
        """Return the time from an earlier event on the same device to this event in seconds.

        Both events must have been reached.
        """
        if self._event is None or earlier_event._event is None:
            return self._time_s - earlier_event._time_s
        return earlier_event._event.elapsed_time(self._event) / 1e3


class LateMetrics:
    """Metrics in transfer from a device to the host.

    Args:
        metrics: Metrics, keyed by name: numbers, or zero-dimensional tensors on the device.

    Attributes:
        end: Event that marks the end of the transfer.
    """

    def __init__(self, metrics: Mapping[str, Scalar], device: torch.device) -> None:
        self._numbers: dict[str, Scalar] = dict(metrics)
        tensors = {name: value for name, value in metrics.items() if isinstance(value, torch.Tensor)}
        self._names, self._values = list(tensors), torch.empty(0)
        if tensors:
            values = torch.stack([value.detach().double() for value in tensors.values()])
            if device.type == "cuda":
                self._values = pinned_memory(values.shape, values.dtype).copy_(values, non_blocking=True)
            else:
                self._values = values
        self.end = DeviceEvent(device)

    def read(self) -> dict[str, float]:
        """Wait for the transfer, and return all metrics in their original order."""
        if self._names:
            self.end.wait()
            self._numbers |= dict(zip(self._names, self._values.tolist(), strict=True))
            self._names = []
        return cast(dict[str, float], dict(self._numbers))


class StepGuard:
    """Guard that blocks optimizer steps after a non-finite loss or gradient norm, without waiting for the device.

    All ranks have the same metrics, so they block the same steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_finite = torch.ones((), dtype=torch.bool, device=device)

    def allow(self, loss: Scalar, grad_norm: Scalar, *, skips: bool) -> torch.Tensor:
        """Return a bool tensor on the device: True if this step may be taken.

        Args:
            skips: True if a non-finite gradient norm blocks only this step (fp16), and not the later steps.
        """
        is_loss_finite, is_norm_finite = (
            torch.as_tensor(value, device=self._is_finite.device).isfinite() for value in (loss, grad_norm)
        )
        self._is_finite = self._is_finite & is_loss_finite
        may_step = self._is_finite & is_norm_finite
        if not skips:
            self._is_finite = may_step
        return may_step


def pinned_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate pinned memory. Fill it only once, because copies from it may run at any later time."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def send(values: torch.Tensor | NDArray[np.generic], device: torch.device | str) -> torch.Tensor:
    """Copy `values` to a GPU through pinned memory, without synchronising.

    The caller may modify `values` immediately, unless `device` already holds them: the result then shares their memory.
    """
    tensor, device = torch.from_numpy(values) if isinstance(values, np.ndarray) else values, torch.device(device)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    # Copy pinned tensors too, because the caller may modify them.
    return pinned_memory(tensor.shape, tensor.dtype).copy_(tensor).to(device, non_blocking=True)


def send_pinned(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Send a tensor from `pinned_memory` without another copy on the host; send other tensors as `send` does."""
    # torch would copy a tensor with gaps to pageable memory first.
    if tensor.is_pinned() and _is_dense(tensor):
        return tensor.to(device, non_blocking=True)
    return send(tensor, device)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the values have no gaps in memory, regardless of the order of the dimensions."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


@cache
def constant_tensor(values: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a cached tensor of values that are the same in every step. Do not modify the tensor.

    Args:
        values: Values as nested tuples, which are hashable.
    """
    return send(torch.tensor(values, dtype=dtype), device)


# Forward passes in training mode update some buffers: running statistics of batch norms, vectors of spectral norms.
#
# Each microbatch of a step updates them once, in its forward pass with gradients. Other passes must not update them:
# GradCache's first pass, the pass that measures the tensors between pipeline stages, and the recomputation of
# activations.


def changing_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that training may update, keyed by name: persistent buffers of modules in training mode."""
    return {
        name: buffer
        for path, module in model.named_modules()
        if module.training
        for name, buffer in module.named_buffers(path, recurse=False)
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set
    }


@contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` after the block, which runs additional forward passes."""
    copies = {name: buffer.clone() for name, buffer in changing_buffers(model).items()}
    try:
        yield
    finally:
        with torch.no_grad():
            # Look up the buffers again, because a module may replace a buffer instead of updating it in place.
            for name, buffer in changing_buffers(model).items() if copies else ():
                buffer.copy_(copies[name])


def keep_buffers_in_recomputation(model: nn.Module) -> None:
    """Add hooks that restore the buffers of `model` whenever activation checkpointing recomputes a module."""
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            _keep_in_recomputation(module)


def _keep_in_recomputation(module: nn.Module) -> None:
    contexts = ExitStack()

    def save(module: nn.Module, _: Any) -> None:
        # During the backward pass, a forward pass can only be a recomputation. A compiled block recomputes activations
        # inside its graph, which updates the buffers only once.
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            contexts.enter_context(keep_buffers(module))

    def restore(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            contexts.close()

    module.register_forward_pre_hook(save)
    # `always_call` runs the hook after an exception, too. torch ends a recomputation with an exception as soon as all
    # activations are available.
    module.register_forward_hook(restore, always_call=True)
