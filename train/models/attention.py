"""The one door of attention: xformers on CUDA, torch elsewhere.

Shape suffixes: B batch, M tokens, H heads, K width of a head.
"""

import logging
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.nn import functional

from manifests.errors import UserError

AttentionChoice = Literal["auto", "xformers", "sdpa"]


class Attend(Protocol):
    """softmax(q k^T / sqrt(K)) v, for each head; with `causal`, a token sees itself and those before it."""

    def __call__(
        self, q_BMHK: torch.Tensor, k_BMHK: torch.Tensor, v_BMHK: torch.Tensor, *, causal: bool = False
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class AttentionDoor:
    """The implementation that was chosen, and why."""

    name: str
    reason: str
    attend: Attend


def open_attention(choice: AttentionChoice, *, device_type: str) -> AttentionDoor:
    """Chooses an implementation for a device (`cpu`, `cuda`).

    Raises:
        UserError: xformers was asked for and cannot be used.
    """
    if choice == "sdpa":
        return AttentionDoor("sdpa", "asked for by --attention sdpa", attend_with_sdpa)
    # Loading xformers logs complaints about its compiled parts, which the kernels used here do without.
    logging.getLogger("xformers").setLevel(logging.ERROR)
    if choice == "xformers" and device_type != "cuda":
        raise UserError(
            f"xformers has no attention for a {device_type} (asked for by --attention xformers)",
            hint="use --attention sdpa, or --device cuda",
        )
    if device_type != "cuda":
        return AttentionDoor("sdpa", f"xformers has no attention for a {device_type}", attend_with_sdpa)
    try:
        import xformers.ops  # noqa: F401
    except ImportError as error:
        if choice == "xformers":
            raise UserError(
                f"xformers cannot be imported: {error} (asked for by --attention xformers)",
                hint="install it, or use --attention sdpa",
            ) from error
        return AttentionDoor("sdpa", f"xformers cannot be imported: {error}", attend_with_sdpa)
    reason = "asked for by --attention xformers" if choice == "xformers" else "the device is a cuda one"
    return AttentionDoor("xformers", reason, attend_with_xformers)


def attend_with_sdpa(
    q_BMHK: torch.Tensor, k_BMHK: torch.Tensor, v_BMHK: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """`Attend` by torch.nn.functional.scaled_dot_product_attention; [B, M, H, K] in and out."""
    out_BHMK = functional.scaled_dot_product_attention(
        q_BMHK.transpose(1, 2), k_BMHK.transpose(1, 2), v_BMHK.transpose(1, 2), is_causal=causal
    )
    return out_BHMK.transpose(1, 2)


def attend_with_xformers(
    q_BMHK: torch.Tensor, k_BMHK: torch.Tensor, v_BMHK: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """`Attend` by xformers.ops.memory_efficient_attention; [B, M, H, K] in and out."""
    from xformers import ops

    bias = ops.LowerTriangularMask() if causal else None
    out_BMHK: torch.Tensor = ops.memory_efficient_attention(q_BMHK, k_BMHK, v_BMHK, attn_bias=bias)
    return out_BMHK
