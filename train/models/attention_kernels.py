"""Which kernel of which library an implementation of attention runs, for tensors as they are.

Nothing is guessed from versions: SDPA's own choice is asked of torch (`torch._fused_sdp_choice`, which SDPA calls
itself), that of xformers of its dispatcher.

Shape suffixes: B batch, M tokens, H heads, K width of a head.
"""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from train.models.attention import PREFERRED, Attend, xformers_operators
from train.models.packing import Packing, pack

_OF_SDPA = {
    SDPBackend.MATH: "math (all scores in memory)",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient (CUTLASS)",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.OVERRIDEABLE: "that of the device's own backend",
}


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention.

    Attributes:
        library: the distribution that it is in (torch, cuDNN, xformers, flash-attn, flash-attn-3).
        name: the kernel, in the library's words.
        chosen_by: sdpa or xformers.
    """

    library: str
    name: str
    chosen_by: str

    def __str__(self) -> str:
        return f"{self.name} of {self.library}"


@dataclass(frozen=True)
class Kernels:
    """What a call of an implementation runs; `backward` is None where no gradient is asked for."""

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
    q_BMHK: torch.Tensor,
    k_BMHK: torch.Tensor,
    v_BMHK: torch.Tensor,
    *,
    causal: bool = False,
    packing: Packing | None = None,
) -> Kernels:
    """The kernels that an implementation (xformers, sdpa, flash, cudnn, naive) runs on these tensors.

    Args:
        causal, packing: as in train.models.attention.Attend.

    Raises:
        NotImplementedError: the implementation has none for such tensors.
    """
    needs_gradient = any(x.requires_grad for x in (q_BMHK, k_BMHK, v_BMHK))
    if attention == "naive":
        kernel = Kernel("torch", "matrix products and softmax", "naive")
        return Kernels(kernel, kernel if needs_gradient else None)
    if attention == "xformers":
        forward, backward = xformers_operators(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)
        return Kernels(of_xformers(forward), None if backward is None else of_xformers(backward))
    if packing is not None:
        # SDPA sees packed sequences padded, or those of one length at a time.
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
    return Kernel(library, operator.removesuffix("-pt"), "xformers")


def _of_sdpa(
    attention: str, q_BMHK: torch.Tensor, k_BMHK: torch.Tensor, v_BMHK: torch.Tensor, *, causal: bool
) -> Kernel:
    q_BHMK, k_BHMK, v_BHMK = (x.transpose(1, 2) for x in (q_BMHK, k_BMHK, v_BMHK))
    if attention in PREFERRED:
        with sdpa_kernel(PREFERRED[attention], set_priority=True):
            chosen = SDPBackend(torch._fused_sdp_choice(q_BHMK, k_BHMK, v_BHMK, is_causal=causal))
    else:
        chosen = SDPBackend(torch._fused_sdp_choice(q_BHMK, k_BHMK, v_BHMK, is_causal=causal))
    if chosen == SDPBackend.ERROR:
        raise NotImplementedError(f"SDPA has no kernel for {tuple(q_BMHK.shape)} of {q_BMHK.dtype}")
    if chosen == SDPBackend.FLASH_ATTENTION:
        return Kernel("torch", _flash_name(q_BMHK.device), "sdpa")
    if chosen == SDPBackend.CUDNN_ATTENTION:
        return Kernel(f"cuDNN {cudnn_version()}", "fused attention", "sdpa")
    return Kernel("torch", _OF_SDPA[chosen], "sdpa")


def _flash_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "flash (CPU)"
    # torch 2.11 and later can be given another implementation under the same name.
    current = getattr(nn.attention, "current_flash_attention_impl", lambda: None)()
    version = getattr(nn.attention, "_get_flash_version", lambda: "2")()
    return f"FlashAttention {re.sub('^FA', '', current) if current else version}"


def cudnn_version() -> str:
    """cuDNN's version, as 9.26.0; torch gives it as 92600."""
    number = torch.backends.cudnn.version()
    if number is None:
        return "(not there)"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


# How fast implementations of attention are on this device, at given shapes: a measurement of a second or less.
#
# Shape suffixes: B batch, M tokens, H heads, K width of a head.


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
