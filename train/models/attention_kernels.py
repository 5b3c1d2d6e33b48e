"""Which kernel of which library an implementation of attention runs, for tensors as they are.

Nothing is guessed from versions: SDPA's own choice is asked of torch (`torch._fused_sdp_choice`, which SDPA calls
itself), that of xformers of its dispatcher.

Shape suffixes: B batch, M tokens, H heads, K width of a head.
"""

import re
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from train.models.attention import PREFERRED, xformers_operators
from train.models.packing import Packing

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
