"""Attention kernels: which one an implementation runs on given tensors.

Nothing is inferred from version numbers: torch itself reports SDPA's choice (`torch._fused_sdp_choice`, which SDPA
calls), and xformers' dispatcher reports its own.

Shape suffixes: B batch, M tokens, H heads, K width of a head.
"""

import re
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipmill.train.models.attention import PREFERRED, Packing, xformers_operators

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


def why_no_operator(error: NotImplementedError) -> str:
    """The reasons in the error of xformers' dispatcher on one line: the first of each operator."""
    reasons: dict[str, str] = {}
    operator = ""
    for line in str(error).splitlines():
        if match := re.match(r"`(.+)` is not supported because:", line):
            operator = match[1]
        elif operator:
            # What is supported is a set, in another order each time.
            reasons.setdefault(operator, re.sub(r" \(supported: .*", "", line.strip()))
    # Operators without a library are of no help.
    told = [f"{name}: {reason}" for name, reason in reasons.items() if "wasn't built" not in reason]
    return "; ".join(["No operator found", *told])


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
