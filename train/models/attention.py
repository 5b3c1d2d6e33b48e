"""The one interface to attention: xformers or torch's own kernels on CUDA, torch's elsewhere.

Shape suffixes: B batch, M tokens, H heads, K width of a head; n sequences of the same length L.
"""

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from manifests.errors import UserError
from train.models.packing import Packing

AttentionChoice = Literal["auto", "xformers", "sdpa", "flash", "cudnn", "naive"]
# Kernels of SDPA that may be asked for by name, and what computes a shape that they do not support.
_OTHERWISE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PREFERRED = {"flash": _OTHERWISE, "cudnn": [SDPBackend.CUDNN_ATTENTION, *_OTHERWISE]}


class Attend(Protocol):
    """softmax(q k^T / sqrt(K)) v, for each head.

    Args:
        causal: a token sees itself and those before it.
        packing: the tokens are those of several sequences (B is 1), and a token sees its own sequence only; for causal
            attention.
    """

    def __call__(
        self,
        q_BMHK: torch.Tensor,
        k_BMHK: torch.Tensor,
        v_BMHK: torch.Tensor,
        *,
        causal: bool = False,
        packing: Packing | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class AttentionBackend:
    """The implementation that was chosen, and why."""

    name: str
    reason: str
    attend: Attend


def open_attention(choice: AttentionChoice, *, device_type: str, compiles: bool = False) -> AttentionBackend:
    """Chooses an implementation for a device (`cpu`, `cuda`), without measuring (see train.engine.attention_choice).

    Args:
        compiles: the model goes through torch.compile, which sees into SDPA and not into xformers.

    Raises:
        UserError: xformers, or a kernel of a GPU, was asked for and cannot be used.
    """
    if choice == "naive":
        return AttentionBackend("naive", "asked for by --attention naive, to compare", attend_naively)
    if choice == "sdpa":
        return AttentionBackend("sdpa", "asked for by --attention sdpa", attend_with_sdpa)
    if choice in ("xformers", *PREFERRED) and device_type != "cuda":
        raise UserError(
            f"{choice} has no attention for a {device_type.upper()} (asked for by --attention {choice})",
            hint="use --attention sdpa, or --device cuda",
        )
    if choice in PREFERRED:
        return AttentionBackend(choice, f"asked for by --attention {choice}", attend_preferring(choice))
    if device_type != "cuda":
        return AttentionBackend("sdpa", f"xformers has no attention for a {device_type.upper()}", attend_with_sdpa)
    if choice == "auto" and compiles:
        return AttentionBackend("sdpa", "--compile sees into it, and not into xformers", attend_with_sdpa)
    try:
        load_xformers()
    except ImportError as error:
        if choice == "xformers":
            raise UserError(
                f"xformers cannot be imported: {error} (asked for by --attention xformers)",
                hint="install it, or use --attention sdpa",
            ) from error
        return AttentionBackend("sdpa", f"xformers cannot be imported: {error}", attend_with_sdpa)
    reason = "asked for by --attention xformers" if choice == "xformers" else "the device is a cuda one"
    return AttentionBackend("xformers", reason, attend_with_xformers)


@cache
def load_xformers() -> str | None:
    """Loads xformers; returns why its own compiled library cannot be loaded, or None where it is.

    That library has kernels of 2:4 sparsity and none of attention (docs/models.md), so a run is not troubled with the
    warning; `train doctor` prints it. xformers' attention runs torch's kernels, and yet refuses every GPU where the
    library is not there: it is told that it may. Whether torch's kernels take the arguments that xformers gives them,
    it checks apart from that (xformers.ops.fmha.torch_attention_compat).

    Raises:
        ImportError: xformers is not installed, or does not suit this torch.
    """
    logging.getLogger("xformers").setLevel(logging.ERROR)
    import xformers.ops  # noqa: F401

    error: BaseException | None = getattr(import_module("xformers._cpp_lib"), "_cpp_library_load_exception", None)
    if error is not None and torch.version.cuda is not None:
        vars(import_module("xformers.ops.fmha.common"))["_built_with_cuda"] = True
    # The cause of the cause names the library that is missing.
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return None if error is None else str(error)


def attend_preferring(kernel: str) -> Attend:
    """`attend_with_sdpa` with one of `PREFERRED` first; shapes that it does not support go to torch's other kernels."""

    def attend(
        q_BMHK: torch.Tensor,
        k_BMHK: torch.Tensor,
        v_BMHK: torch.Tensor,
        *,
        causal: bool = False,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        with sdpa_kernel(PREFERRED[kernel], set_priority=True):
            return attend_with_sdpa(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)

    return attend


def attend_with_sdpa(
    q_BMHK: torch.Tensor,
    k_BMHK: torch.Tensor,
    v_BMHK: torch.Tensor,
    *,
    causal: bool = False,
    packing: Packing | None = None,
) -> torch.Tensor:
    """`Attend` by torch.nn.functional.scaled_dot_product_attention; [B, M, H, K] in and out."""
    if packing is not None:
        # A compiled block must not depend on which lengths a batch has, as a loop over them does; and a GPU has done
        # the padded work before as many kernels as there are lengths are begun.
        is_padded = torch.compiler.is_compiling() or q_BMHK.is_cuda
        attend = _attend_padded if is_padded else _attend_by_length
        return attend(attend_with_sdpa, q_BMHK, k_BMHK, v_BMHK, packing)
    out_BHMK = functional.scaled_dot_product_attention(
        q_BMHK.transpose(1, 2), k_BMHK.transpose(1, 2), v_BMHK.transpose(1, 2), is_causal=causal
    )
    return out_BHMK.transpose(1, 2)


def attend_with_xformers(
    q_BMHK: torch.Tensor,
    k_BMHK: torch.Tensor,
    v_BMHK: torch.Tensor,
    *,
    causal: bool = False,
    packing: Packing | None = None,
) -> torch.Tensor:
    """`Attend` by xformers.ops.memory_efficient_attention; [B, M, H, K] in and out."""
    load_xformers()
    from xformers import ops

    bias = _xformers_bias(q_BMHK.device, causal=causal, packing=packing)
    out_BMHK: torch.Tensor = ops.memory_efficient_attention(q_BMHK, k_BMHK, v_BMHK, attn_bias=bias)
    return out_BMHK


def _xformers_bias(device: torch.device, *, causal: bool, packing: Packing | None) -> Any:
    from xformers import ops

    if packing is None:
        return ops.LowerTriangularMask() if causal else None
    bias = packing.prepared.get("xformers")
    if bias is None:
        bias = ops.fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens(list(packing.lengths), device=device)
        packing.prepared["xformers"] = bias
    return bias


def xformers_operators(
    q_BMHK: torch.Tensor,
    k_BMHK: torch.Tensor,
    v_BMHK: torch.Tensor,
    *,
    causal: bool = False,
    packing: Packing | None = None,
) -> tuple[str, str | None]:
    """Names of the operators that `attend_with_xformers` runs, forward and backward (None without gradients).

    It asks the functions that memory_efficient_attention itself dispatches by (xformers.ops.fmha.dispatch).

    Raises:
        NotImplementedError: none supports such tensors.
    """
    load_xformers()
    from xformers.ops.fmha import dispatch
    from xformers.ops.fmha.common import Inputs

    bias = _xformers_bias(q_BMHK.device, causal=causal, packing=packing)
    inputs = Inputs(query=q_BMHK, key=k_BMHK, value=v_BMHK, attn_bias=bias)
    needs_gradient = any(x.requires_grad for x in (q_BMHK, k_BMHK, v_BMHK))
    forward = dispatch._dispatch_fw(inputs, needs_gradient)
    if not needs_gradient:
        return forward.NAME, None
    # Only of several sequences do packed and padded sums of exponents differ.
    is_packed = forward.VARLEN_LSE_PACKED if packing is not None and packing.num_sequences > 1 else None
    return forward.NAME, dispatch._dispatch_bw(inputs, is_packed).NAME


def attend_naively(
    q_BMHK: torch.Tensor,
    k_BMHK: torch.Tensor,
    v_BMHK: torch.Tensor,
    *,
    causal: bool = False,
    packing: Packing | None = None,
) -> torch.Tensor:
    """`Attend` as it is written down, with every score in memory: what the others are measured against."""
    if packing is not None:
        return _attend_padded(attend_naively, q_BMHK, k_BMHK, v_BMHK, packing)
    num_tokens, head_width = q_BMHK.shape[1], q_BMHK.shape[3]
    scores_BHMM = torch.einsum("bmhk,bnhk->bhmn", q_BMHK * head_width**-0.5, k_BMHK)
    if causal:
        later_MM = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q_BMHK.device).triu(1)
        scores_BHMM = scores_BHMM.masked_fill(later_MM, -torch.inf)
    # Autocast has softmax in float32; its result is what it was given, as the fused kernels keep it.
    weights_BHMM = scores_BHMM.softmax(-1).to(v_BMHK.dtype)
    return torch.einsum("bhmn,bnhk->bmhk", weights_BHMM, v_BMHK)


def _attend_padded(
    attend: Attend, q_1MHK: torch.Tensor, k_1MHK: torch.Tensor, v_1MHK: torch.Tensor, packing: Packing
) -> torch.Tensor:
    """Causal attention of packed sequences as of padded ones: no token sees the padding, which comes after it."""
    num_sequences, longest = packing.num_sequences, packing.longest

    def padded(x_1MHK: torch.Tensor) -> torch.Tensor:
        empty = x_1MHK.new_zeros(num_sequences * longest, *x_1MHK.shape[2:])
        return empty.index_copy(0, packing.place_M, x_1MHK[0]).unflatten(0, (num_sequences, longest))

    out_BLHK = attend(padded(q_1MHK), padded(k_1MHK), padded(v_1MHK), causal=True)
    return out_BLHK.flatten(0, 1).index_select(0, packing.place_M)[None]


def _attend_by_length(
    attend: Attend, q_1MHK: torch.Tensor, k_1MHK: torch.Tensor, v_1MHK: torch.Tensor, packing: Packing
) -> torch.Tensor:
    """Causal attention of packed sequences, those of one length at a time: one long one does not cost the others."""
    outs, wheres = [], []
    for length, where in packing.rows_by_length:
        q_nLHK, k_nLHK, v_nLHK = (
            x[0].index_select(0, where).unflatten(0, (-1, length)) for x in (q_1MHK, k_1MHK, v_1MHK)
        )
        outs.append(attend(q_nLHK, k_nLHK, v_nLHK, causal=True).flatten(0, 1))
        wheres.append(where)
    out_MHK = torch.cat(outs)
    return torch.zeros_like(out_MHK).index_copy(0, torch.cat(wheres), out_MHK)[None]
