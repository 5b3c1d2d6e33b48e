"""Attention kernels: which one an implementation runs on given tensors, and how fast implementations are.

Nothing is inferred from version numbers: torch itself reports SDPA's choice (`torch._fused_sdp_choice`, which SDPA
calls), and xformers' dispatcher reports its own.

Shape suffixes: B batch, M tokens, H heads, K width of a head.
"""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipmill.train.models.attention import PREFERRED, Attend, Packing, pack, xformers_operators

_OF_SDPA = {
    SDPBackend.MATH: "math (all scores in memory)",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient (CUTLASS)",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.OVERRIDEABLE: "the device backend's own",
}


@dataclass(frozen=True)
class Kernel:
    """An attention kernel, by the distribution that contains it (torch, cuDNN, xformers, flash-attn, flash-attn-3)."""

    library: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.library}"


@dataclass(frozen=True)
class Kernels:
    """The kernels of one call; `backward` is None if no input requires a gradient."""

    forward: Kernel
    backward: Kernel | None

    def __str__(self) -> str:
        if self.backward is None or self.backward == self.forward:
            return str(self.forward)
        if self.backward.library == self.forward.library:
            return f"{self.forward.name} and {self.backward.name} of {self.forward.library}"
        return f"{self.forward}, backward {self.backward}"


def kernels_of(
    attention: str,
    q_BMHK: Tensor,
    k_BMHK: Tensor,
    v_BMHK: Tensor,
    *,
    causal: bool = False,
    packing: Packing | None = None,
) -> Kernels:
    """The kernels that an implementation (xformers, sdpa, flash, cudnn, naive) runs on the arguments of `Attend`.

    Raises NotImplementedError if it has none for them.
    """
    needs_gradient = any(x.requires_grad for x in (q_BMHK, k_BMHK, v_BMHK))
    if attention == "naive":
        kernel = Kernel("torch", "matrix products and softmax")
        return Kernels(kernel, kernel if needs_gradient else None)
    if attention == "xformers":
        forward, backward = xformers_operators(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)
        return Kernels(of_xformers(forward), None if backward is None else of_xformers(backward))
    if packing is not None:
        # SDPA is given packed sequences padded, or one length at a time.
        shape = (packing.num_sequences, packing.longest, *q_BMHK.shape[2:])
        q_BMHK, k_BMHK, v_BMHK = (x.new_zeros(shape).requires_grad_(x.requires_grad) for x in (q_BMHK, k_BMHK, v_BMHK))
    kernel = _of_sdpa(attention, q_BMHK, k_BMHK, v_BMHK, causal=causal or packing is not None)
    return Kernels(kernel, kernel if needs_gradient else None)


def of_xformers(operator: str) -> Kernel:
    """The kernel behind an operator's NAME (xformers 0.0.35: "fa2F@2.5.7-pt", "cutlassB-pt", "fa3F@pip_pkg")."""
    library = "xformers"
    if operator.endswith("-pt"):
        library = "torch"
    elif operator.startswith("fa2"):
        library = "flash-attn"
    elif operator.startswith("fa3"):
        library = "flash-attn-3"
    return Kernel(library, operator.removesuffix("-pt"))


def _of_sdpa(attention: str, q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool) -> Kernel:
    q_BHMK, k_BHMK, v_BHMK = (x.transpose(1, 2) for x in (q_BMHK, k_BMHK, v_BMHK))
    with sdpa_kernel(PREFERRED[attention], set_priority=True) if attention in PREFERRED else nullcontext():
        chosen = SDPBackend(torch._fused_sdp_choice(q_BHMK, k_BHMK, v_BHMK, is_causal=causal))
    if chosen == SDPBackend.ERROR:
        raise NotImplementedError(f"SDPA has no kernel for {tuple(q_BMHK.shape)} of {q_BMHK.dtype}")
    if chosen == SDPBackend.FLASH_ATTENTION:
        return Kernel("torch", _flash_name(q_BMHK.device))
    if chosen == SDPBackend.CUDNN_ATTENTION:
        return Kernel(f"cuDNN {cudnn_version()}", "fused attention")
    return Kernel("torch", _OF_SDPA[chosen])


def _flash_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "flash (CPU)"
    # torch 2.11 and later can register another implementation under the same name.
    current = getattr(nn.attention, "current_flash_attention_impl", lambda: None)()
    version = getattr(nn.attention, "_get_flash_version", lambda: "2")()
    return f"FlashAttention {re.sub('^FA', '', current) if current else version}"


def cudnn_version() -> str:
    """cuDNN's version, for example 9.26.0 (torch reports 92600)."""
    number = torch.backends.cudnn.version()
    if number is None:
        return "(not there)"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


# Speed of implementations at given shapes, measured in a second or less.
_LEAST_GAIN = 0.03  # smaller differences are measurement noise: the earlier candidate stays
_NUM_WARM_UPS = 3
_NUM_ROUNDS = 5
_NUM_CALLS = 5  # between two events, so that the GPU does not wait for the host, as in a training step


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The attention calls of a tower's blocks in a step.

    With the `lengths` of packed, causal sequences, `num_items` is 1 and `num_tokens` the sum of the lengths.
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
    """Forward and backward time of all blocks, by candidate, and the error of each candidate that failed."""

    milliseconds: dict[str, float]
    failed: dict[str, str]


def measure(
    candidates: Mapping[str, Attend], workloads: Sequence[Workload], *, dtype: torch.dtype, device: torch.device
) -> Speeds:
    """Time forward and backward passes, alternating between candidates; sums the medians of the workloads."""
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
    """The fastest candidate; a later one must be clearly faster to replace an earlier one."""
    best = next(iter(milliseconds))
    for name, its in milliseconds.items():
        if its < milliseconds[best] * (1 - _LEAST_GAIN):
            best = name
    return best


def _one_pass(attend: Attend, workload: Workload, *, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """A function that runs forward and backward attention of one block."""
    # As in the blocks, q, k and v are views of one product.
    shape = (workload.num_items, workload.num_tokens, 3, workload.num_heads, workload.head_width)
    generator = torch.Generator(device).manual_seed(0)  # a separate one, so that the run's random state is unchanged
    qkv = torch.randn(shape, generator=generator, device=device, dtype=dtype, requires_grad=True)
    packing = pack(workload.lengths, device=device) if workload.lengths else None
    apply = partial(attend, causal=packing is not None, packing=packing)

    def one_pass() -> None:
        qkv.grad = None
        out_BMHK = apply(*qkv.unbind(2))
        out_BMHK.backward(out_BMHK.detach())

    return one_pass


def _time_ms(one_pass: Callable[[], None], *, device: torch.device) -> float:
    """Milliseconds per pass, by the device's clock."""
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
