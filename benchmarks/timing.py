"""Timing with CUDA events on a GPU and CPU time elsewhere, and the order of turns."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch


def seconds_of(work: Callable[[], object], *, device: torch.device, count: int = 1) -> float:
    """Return the mean seconds of `count` successive calls.

    On a GPU this is the time between two CUDA events, so that an asynchronous call is timed by the GPU's work, and
    synchronization at the start and the end is excluded. On a CPU it is the CPU time of this process, which is little
    affected by other programs.
    """
    if device.type != "cuda":
        began_s = time.process_time()
        for _ in range(count):
            work()
        return (time.process_time() - began_s) / count
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1000 / count


def turns(names: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): each name once per round, with rounds from 0; each round starts with the next name."""
    for number in range(num_rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name
