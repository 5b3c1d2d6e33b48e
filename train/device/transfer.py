"""What a step says of itself, read a step late: the host begins the next step before it waits for this one's numbers.

    host      begin step 1 | begin step 2 | read 1 | begin step 3 | read 2 | ...
    device                 | step 1 .......... | step 2 .......... | ...

So the device always has work, and in a step the host waits for it once: for the end of the step before. Numbers are
stacked and copied into pinned memory by the step itself; to read them is to wait for one event. Where something depends
on them (a checkpoint, an evaluation, an order to stop, the end) they are read at once.

Between a bad number and the moment it is read, one more step is begun. `StepGuard` keeps that step, and the bad one,
from changing what the optimizer has made.
"""

import time
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

Scalar = float | torch.Tensor


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the host has what a tensor holds without a wait: what a CPU computes is there when it returns."""
    return tensor.device.type == "cpu"


class DeviceEvent:
    """A point in the work of a device: the end of all that it has been given until now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._at_s = 0.0
        if device.type == "cuda":
            # `blocking`: who waits sleeps, and leaves its core to the loader's threads.
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Until it has come."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, other: "DeviceEvent") -> float:
        """Seconds from another moment of the device to this one; both have come."""
        if self._event is None or other._event is None:
            return self._at_s - other._at_s
        return other._event.elapsed_time(self._event) / 1e3


class LateMetrics:
    """Numbers that a device has not computed yet, on their way to the host.

    Args:
        numbers: scalars, those of the device as tensors without dimensions.

    Attributes:
        end: when they are there.
    """

    def __init__(self, numbers: Mapping[str, Scalar], device: torch.device) -> None:
        self._numbers: dict[str, Scalar] = dict(numbers)
        waiting = {name: one for name, one in numbers.items() if isinstance(one, torch.Tensor)}
        self._names, self._values = list(waiting), torch.empty(0)
        if waiting:
            values = torch.stack([one.detach().double() for one in waiting.values()])
            if device.type == "cuda":
                self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                self._values.copy_(values, non_blocking=True)
            else:
                self._values = values
        self.end = DeviceEvent(device)

    def read(self) -> dict[str, float]:
        """All of them, in their order, as soon as they are there."""
        if self._names:
            self.end.wait()
            self._numbers |= dict(zip(self._names, self._values.tolist(), strict=True))
            self._names = []
        return cast(dict[str, float], dict(self._numbers))


class StepGuard:
    """Whether all steps so far had finite numbers, on the device: after one that had not, no step changes a weight.

    All ranks have the same numbers, so all of them leave out the same steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_sound = torch.ones((), dtype=torch.bool, device=device)

    def after(self, loss: Scalar, grad_norm: Scalar, *, skips: bool) -> torch.Tensor:
        """Whether the optimizer may take this step, a bool on the device.

        Args:
            skips: gradients that are not finite are left out and forgiven, as fp16 has them.
        """
        is_loss_good, is_norm_good = (
            torch.as_tensor(one, device=self._is_sound.device).isfinite() for one in (loss, grad_norm)
        )
        self._is_sound = self._is_sound & is_loss_good
        may_step = self._is_sound & is_norm_good
        if not skips:
            self._is_sound = may_step
        return may_step


# Small values of the host, brought to a device without a wait for what it still computes.
#
# `torch.tensor(..., device="cuda")`, and `.to` without `non_blocking`, wait until the GPU has done all that it was
# given before; a copy from memory that is not pinned may do so too. None of the three belongs into a training step.


def sent(values: torch.Tensor | NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """`values` on `device`, through pinned memory where that is a GPU; the host may change them at once.

    Where the device is a CPU, or they lie on it already, memory is shared.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    # A copy, even of what is pinned already: that belongs to someone who may write into it.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


@cache
def constant(values: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that are the same in every step, as deep as their tuples, sent once; nobody may write into them."""
    return torch.tensor(values, dtype=dtype, device=device)
