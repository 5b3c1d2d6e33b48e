"""Time calls with CUDA events on a GPU, or with CPU time on a CPU, and rotate the order of turns."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch


def seconds_of(work: Callable[[], object], *, device: torch.device, count: int = 1) -> float:
    """Return the mean time of `count` successive calls in seconds.

    On a GPU, this is the time between two CUDA events, which covers the work of asynchronous calls on the GPU, without
    the synchronization at the start and the end. On a CPU, it is the CPU time of this process, which other programs
    hardly affect.
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
    """Yield (round, name) with each name once per round, from round 0. Each round starts with the next name."""
    for number in range(num_rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name
