"""The share of time for which the interpreter lock is held, measured inside the process without root or a debugger.

CPython keeps the state of the lock as an int in a structure of its runtime:

    unsigned long interval;  PyThreadState *last_holder;  int locked;        (CPython 3.11 to 3.13, Python/ceval_gil.c)

The place is found by its neighbours: the switch interval, which can be set to a telling number, and the thread state of
the thread that looks. NumPy then sums that one int a few hundred million times, in a loop that does not hold the lock
itself: the sum over the number of reads is the share. It takes a core of its own while it runs. What a thread holds
while the operating system has taken the processor away from it counts as held, so the machine must be quiet.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_TELLING_INTERVAL_US = 4321
_RTLD_DL_SYMENT = 1
_READS = 200_000_000  # a fraction of a second
_IS_HELD = 0.5  # of the time, by a thread that computes; on a machine that has other work, too


@dataclass(frozen=True)
class InterpreterLock:
    """The int that is 1 while a thread of this process holds the lock."""

    state: NDArray[np.int32]

    def held_share(self, num_reads: int) -> float:
        """Of the time that so many reads take (about a nanosecond each); the caller does not hold it meanwhile."""
        same = np.lib.stride_tricks.as_strided(self.state, shape=(num_reads,), strides=(0,))
        return int(np.add.reduce(same, dtype=np.int32)) / num_reads

    def held_share_for(self, seconds: float) -> float:
        """As `held_share`, over about so many seconds."""
        begin_s, shares = time.perf_counter(), []
        while time.perf_counter() - begin_s < seconds:
            shares.append(self.held_share(_READS))
        return float(np.mean(shares))


def find_interpreter_lock() -> InterpreterLock:
    """The lock of this process.

    Raises:
        LookupError: it is not where CPython 3.11 to 3.13 has it, or there is none (free-threaded builds).
    """
    is_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    if not is_enabled():
        raise LookupError("this Python runs without an interpreter lock")
    begin, end = _runtime_range()
    ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
    own_state = ctypes.pythonapi.PyThreadState_Get()
    words = np.ctypeslib.as_array((ctypes.c_uint64 * ((end - begin) // 8)).from_address(begin))
    with _switch_interval(_TELLING_INTERVAL_US / 1e6):
        found = np.flatnonzero((words[:-2] == _TELLING_INTERVAL_US) & (words[1:-1] == own_state)) + 2
    places = [begin + 8 * place for place in found.tolist()]
    for place in places:
        lock = InterpreterLock(np.ctypeslib.as_array((ctypes.c_int32 * 1).from_address(place)))
        if lock.state[0] == 1 and _follows_a_busy_thread(lock):
            return lock
    raise LookupError(f"no lock among {len(places)} places of the runtime of {sys.implementation.name} {sys.version}")


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


class _Symbol(ctypes.Structure):
    """Elf64_Sym of elf.h."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_uint8),
        ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


def _runtime_range() -> tuple[int, int]:
    """Addresses of the runtime's structure: exactly it, since what is mapped behind it may go while it is read."""
    begin = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    info, symbol = (ctypes.c_void_p * 4)(), ctypes.POINTER(_Symbol)()
    # dlfcn.h of glibc; the info is a Dl_info, which is not looked at.
    dladdr1 = ctypes.CDLL(None).dladdr1
    found = dladdr1(ctypes.c_void_p(begin), info, ctypes.byref(symbol), ctypes.c_int(_RTLD_DL_SYMENT))
    if not found or not symbol:
        raise LookupError("the size of the runtime's structure is not known")
    return begin, begin + int(symbol.contents.size) // 8 * 8


@contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
