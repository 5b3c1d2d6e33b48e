"""Which kernels an implementation of attention runs, by name: what torch's profiler saw, and what xformers chose."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_MANY = 4
# What stands for a kernel among torch's operators: these are what a backend of SDPA, or xformers, calls.
_OPERATORS = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention", "xformers")
# Written out, attention is made of these.
_FORMULA = ("softmax", "bmm")


@dataclass(frozen=True)
class Seen:
    """What a profiled call ran.

    Attributes:
        kernels: of the device, those that took longest first; empty on a CPU, and where the driver shows none.
        operators: of torch, in the order of their first call.
    """

    kernels: tuple[str, ...]
    operators: tuple[str, ...]


def kernels_of(run: Callable[[], object], *, device: torch.device) -> Seen:
    """Runs something once under the profiler."""
    run()  # what is loaded or tuned at the first call is not meant
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    spent_us: Counter[str] = Counter()
    operators: dict[str, None] = {}
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            if not event.name.startswith(("Memcpy", "Memset")):
                spent_us[event.name] += event.time_range.elapsed_us()
        elif any(word in event.name for word in _OPERATORS + _FORMULA):
            operators[event.name] = None
    named = [operator for operator in operators if any(word in operator for word in _OPERATORS)]
    return Seen(tuple(name for name, _ in spent_us.most_common(_MANY)), tuple(named or operators))


def xformers_operators(q_BMHK: torch.Tensor, *, causal: bool, lengths: Sequence[int] | None) -> tuple[str, str]:
    """Names of the operators that xformers dispatches to, forward and backward.

    Args:
        lengths: of packed sequences, whose attention is causal.

    Raises:
        NotImplementedError: it has none for these inputs; the message says why.
    """
    from xformers.ops import LowerTriangularMask, fmha

    bias = LowerTriangularMask() if causal else None
    if lengths is not None:
        bias = fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens(list(lengths), device=q_BMHK.device)
    inputs = fmha.Inputs(query=q_BMHK, key=q_BMHK, value=q_BMHK, attn_bias=bias)
    forward = fmha.dispatch._dispatch_fw(inputs, needs_gradient=True)
    backward = fmha.dispatch._dispatch_bw(inputs, forward.VARLEN_LSE_PACKED)
    return forward.NAME, backward.NAME
