"""How long work takes: by CUDA events on a GPU, by CPU time elsewhere; and ways that take turns."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch


def seconds_of(work: Callable[[], object], *, device: torch.device, count: int = 1) -> float:
    """Mean seconds of `count` calls in a row.

    On a GPU the time between two events in its queue, so that a call that only fills the queue is timed by what the GPU
    does, and waiting for the GPU at the start and at the end is not counted. On a CPU the CPU time of this process,
    which other programs do not lengthen much.
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
    """Each way once a round, with the number of the round, from 0; the next round begins with the next way."""
    for number in range(num_rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name
