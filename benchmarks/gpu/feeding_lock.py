"""Fraction of time that the interpreter lock (GIL) is held, measured inside the process without root or a debugger.

CPython keeps the state of the lock as an int in a structure of its runtime:

    unsigned long interval;  PyThreadState *last_holder;  int locked;        (CPython 3.11 to 3.13, Python/ceval_gil.c)

Its address is found by the neighbouring fields: the switch interval, which is set to a distinctive value, and the
thread state of the searching thread. NumPy then sums that one int a few hundred million times, in a loop that does not
hold the lock itself: the sum divided by the number of reads is the fraction. This occupies one core. If the operating
system preempts a thread that holds the lock, this time counts as held, so the machine must be idle otherwise.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_TELLING_INTERVAL_US = 4321
_MAX_BYTES = 1 << 21
_READS = 200_000_000  # a fraction of a second
_IS_HELD = 0.5  # minimum fraction for a thread that computes, even on a machine with other load


@dataclass(frozen=True)
class InterpreterLock:
    """The int that is 1 while a thread of this process holds the lock."""

    state: NDArray[np.int32]

    def held_share(self, num_reads: int) -> float:
        """Return the fraction over that many reads (about 1 ns each); the caller does not hold the lock meanwhile."""
        same = np.lib.stride_tricks.as_strided(self.state, shape=(num_reads,), strides=(0,))
        return int(np.add.reduce(same, dtype=np.int32)) / num_reads

    def held_share_for(self, seconds: float) -> float:
        """Like `held_share`, over approximately this number of seconds."""
        begin_s, shares = time.perf_counter(), []
        while time.perf_counter() - begin_s < seconds:
            shares.append(self.held_share(_READS))
        return float(np.mean(shares))


def find_interpreter_lock() -> InterpreterLock:
    """Find the lock of this process.

    Raises:
        LookupError: it is not laid out as in CPython 3.11 to 3.13, or does not exist (free-threaded builds).
    """
    is_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    if not is_enabled():
        raise LookupError("this Python has no global interpreter lock")
    ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
    own_state = ctypes.pythonapi.PyThreadState_Get()
    begin = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    with _switch_interval(_TELLING_INTERVAL_US / 1e6):
        words = _memory_from(begin)
    found = np.flatnonzero((words[:-2] == _TELLING_INTERVAL_US) & (words[1:-1] == own_state)) + 2
    places = [begin + 8 * place for place in found.tolist()]
    for place in places:
        lock = InterpreterLock(np.ctypeslib.as_array((ctypes.c_int32 * 1).from_address(place)))
        if lock.state[0] == 1 and _follows_a_busy_thread(lock):
            return lock
    raise LookupError(
        f"lock not found at {len(places)} addresses in the runtime of {sys.implementation.name} {sys.version}"
    )


def _follows_a_busy_thread(lock: InterpreterLock) -> bool:
    stops = threading.Event()

    def compute() -> None:
        while not stops.is_set():
            pass

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        return lock.held_share(_READS) > _IS_HELD
    finally:
        stops.set()
        thread.join()


def _memory_from(begin: int) -> NDArray[np.uint64]:
    """Read the words of this process's memory from an address on, up to the readable end and at most `_MAX_BYTES`.

    The memory is read as a file, which returns an error for unmapped pages; direct access would crash the process.
    """
    content = bytearray()
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        memory.seek(begin)
        with suppress(OSError):
            while len(content) < _MAX_BYTES and (part := memory.read(4096)):
                content += part
    return np.frombuffer(bytes(content[: len(content) // 8 * 8]), np.uint64)


@contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
