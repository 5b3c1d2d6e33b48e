"""How fast implementations of attention are on this device, at given shapes: a measurement of a second or less.

Shape suffixes: B batch, M tokens, H heads, K width of a head.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from train.models.attention import Attend
from train.models.packing import pack

# A gain below this is within what two measurements differ by: the earlier candidate stays.
_LEAST_GAIN = 0.03
_NUM_WARM_UPS = 3
_NUM_ROUNDS = 5
# Calls between two events, so that a GPU does not wait for the host, as in a training step.
_NUM_CALLS = 5


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The attention of the blocks of a tower.

    Attributes:
        lengths: of packed sequences, causal; `num_items` is 1 and `num_tokens` their sum then.
        num_blocks: how often a model does it in a step.
    """

    num_items: int
    num_tokens: int
    num_heads: int
    head_width: int
    num_blocks: int
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        packed = " packed" if self.lengths else ""
        return f"{self.num_items} x {self.num_tokens}{packed} tokens, {self.num_heads} heads of {self.head_width}"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What a measurement found.

    Attributes:
        milliseconds: of all blocks, forward and backward, by candidate.
        failed: why a candidate cannot do it.
    """

    milliseconds: dict[str, float]
    failed: dict[str, str]


def measure(
    candidates: Mapping[str, Attend], workloads: Sequence[Workload], *, dtype: torch.dtype, device: torch.device
) -> Speeds:
    """Measures forward and backward passes, candidates in turns; the medians of the workloads add up."""
    totals, failed = dict.fromkeys(candidates, 0.0), dict[str, str]()
    for workload in workloads:
        passes: dict[str, Callable[[], None]] = {}
        for name, attend in candidates.items():
            if name in failed:
                continue
            one_pass = _one_pass(attend, workload, dtype=dtype, device=device)
            try:
                for _ in range(_NUM_WARM_UPS):
                    one_pass()
                _time_ms(one_pass, device=device)
            except RuntimeError as error:  # no kernel for it, or no memory; NotImplementedError is one too
                failed[name] = str(error).strip().splitlines()[0]
            else:
                passes[name] = one_pass
        times: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(_NUM_ROUNDS):
            for name, one_pass in passes.items():
                times[name].append(_time_ms(one_pass, device=device))
        for name, its in times.items():
            totals[name] += workload.num_blocks * statistics.median(its)
    return Speeds(milliseconds={name: total for name, total in totals.items() if name not in failed}, failed=failed)


def fastest(milliseconds: Mapping[str, float]) -> str:
    """The fastest candidate; an earlier one stays where a later one is not clearly faster."""
    best = next(iter(milliseconds))
    for name, its in milliseconds.items():
        if its < milliseconds[best] * (1 - _LEAST_GAIN):
            best = name
    return best


def _one_pass(attend: Attend, workload: Workload, *, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """A function that does the attention of one block forward and backward."""
    num_items, num_tokens = workload.num_items, workload.num_tokens
    # As the blocks have it: q, k and v are views of one product.
    shape = (num_items, num_tokens, 3, workload.num_heads, workload.head_width)
    generator = torch.Generator(device).manual_seed(0)  # its own: the run's random numbers stay as they are
    qkv = torch.randn(shape, generator=generator, device=device, dtype=dtype, requires_grad=True)
    packing = pack(workload.lengths, device=device) if workload.lengths else None
    apply = partial(attend, causal=packing is not None, packing=packing)

    def one_pass() -> None:
        qkv.grad = None
        out_BMHK = apply(*qkv.unbind(2))
        out_BMHK.backward(out_BMHK.detach())

    return one_pass


def _time_ms(one_pass: Callable[[], None], *, device: torch.device) -> float:
    """Milliseconds of a pass, by the device's own clock."""
    if device.type != "cuda":
        begin_s = time.perf_counter()
        one_pass()
        return 1000 * (time.perf_counter() - begin_s)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_NUM_CALLS):
        one_pass()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / _NUM_CALLS
