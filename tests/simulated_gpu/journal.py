"""What happens on the simulated device: waits, copies that are pending, and memory that is used too early."""

import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Note:
    """Something that happened in a step (0 outside of steps), and the place in clipmill that caused it.

    Attributes:
        is_of_caller: Whether the main thread did it, which launches the steps.
    """

    step: int
    what: str
    where: str
    is_of_caller: bool = True

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} at {self.where}"


@dataclass(eq=False)
class Copy:
    """A copy that is pending on a stream.

    Attributes:
        source: Tensor of the CPU that is read, or that is written if `arrives` is given.
        content: Content of the source when the copy was made.
        arrives: Values that the source gets when the copy ends.
    """

    source: torch.Tensor
    content: torch.Tensor
    where: str
    stream: tuple[int, int]
    arrives: torch.Tensor | None = None


@dataclass
class Journal:
    """What happened on the device.

    Attributes:
        step: Number of the current step of training.
        waits: Places where the host waited for the device.
        pageable: Copies to the device from memory that is not pinned.
        copies: All copies to the device that did not wait.
        races: Memory that was changed or used too early.
        devices: GPUs that had tensors.
    """

    step: int = 0
    waits: list[Note] = field(default_factory=list)
    pageable: list[Note] = field(default_factory=list)
    copies: list[Note] = field(default_factory=list)
    races: list[Note] = field(default_factory=list)
    devices: set[int] = field(default_factory=set)
    pending: list[Copy] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)

    def note(self, notes: list[Note], what: str) -> None:
        """Append a note with the place of the caller; threads beside the main one keep no steps."""
        is_of_caller = threading.current_thread() is threading.main_thread()
        notes.append(Note(self.step if is_of_caller else 0, what, place(), is_of_caller))

    def begin(self, copy: Copy) -> None:
        """A copy becomes pending. Until then nothing may be pending that fills the same memory."""
        with self._lock:
            if copy.arrives is not None and any(
                other.arrives is not None and other.source.data_ptr() == copy.source.data_ptr()
                for other in self.pending
            ):
                self.note(self.races, "memory was filled by a copy while another copy to it was pending")
            self.pending.append(copy)

    def finish(self, copies: list[Copy] | None = None, *, stream: tuple[int, int] | None = None) -> None:
        """End copies: some, those of a stream, or all. Their sources must be as they were."""
        with self._lock:
            for copy in [*self.pending]:
                if (copies is None or copy in copies) and (stream is None or copy.stream == stream):
                    self.pending.remove(copy)
                    if copy.arrives is not None:
                        copy.source.copy_(copy.arrives)
                    elif not _same(copy.source, copy.content):
                        self.races.append(
                            Note(self.step, "memory was refilled while a copy from it was pending", copy.where)
                        )


def _same(first: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        torch.equal(first.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        if first.ndim
        else bool(first == other)
    )


def place() -> str:
    """File and line of the innermost frame in clipmill's packages."""
    frame: Any = sys._getframe(1)
    outermost = "?"
    while frame is not None:
        name = frame.f_code.co_filename
        for package in ("/train/", "/prep/"):
            if package in name and "/tests/" not in name and "site-packages" not in name:
                return f"{package[1:]}{name.rpartition(package)[2]}:{frame.f_lineno}"
        if (
            "/tests/" in name
            and "/simulated_gpu/device.py" not in name
            and "/simulated_gpu/journal.py" not in name
            and outermost == "?"
        ):
            outermost = f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return outermost
