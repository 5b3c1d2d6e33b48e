"""Common interface to attention implementations: xformers or torch's kernels on CUDA, torch's kernels elsewhere.

Shape suffixes: B batch, M tokens, H heads, K width of a head; n sequences of the same length L.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipmill.manifests.errors import UserError
from clipmill.train.device.transfer import send

# Limits of one call to a GPU's attention kernel, and splitting of larger calls. B: sequences.

# Sequences and heads are the second and third grid dimensions of every fused kernel. CUDA limits these dimensions.
_MOST_BLOCKS = 65_535
# FlashAttention's backward pass counts the elements of a query gradient in 32 bits, padded to these multiples; packed
# sequences have padding in addition to their tokens.
_MOST_ELEMENTS, _PADDED_TOKENS, _PADDED_WIDTH = 2**31, 128, 64


def most_sequences(num_tokens: int, num_heads: int, head_width: int, *, packed: bool = False) -> int:
    """Return the number of sequences that a kernel can process in one call, at least 1.

    Args:
        num_tokens: Number of tokens per sequence; the average number if sequences are packed.
    """
    padded_tokens = num_tokens + _PADDED_TOKENS if packed else -(-num_tokens // _PADDED_TOKENS) * _PADDED_TOKENS
    padded_width = -(-head_width // _PADDED_WIDTH) * _PADDED_WIDTH
    return max(1, min(_MOST_BLOCKS, _MOST_ELEMENTS // (padded_tokens * padded_width * num_heads)))


def attend_in_parts(attend: Callable[[Tensor, Tensor, Tensor], Tensor], *qkv_BMHK: Tensor) -> Tensor:
    """Call `attend`, split by heads and batch if a GPU's kernel cannot process all of them in one call."""
    num_sequences, num_tokens, num_heads, head_width = qkv_BMHK[0].shape
    if qkv_BMHK[0].is_cuda:
        most = most_sequences(num_tokens, min(num_heads, _MOST_BLOCKS), head_width)
        for dim, size, limit in ((2, num_heads, _MOST_BLOCKS), (0, num_sequences, most)):
            if size > limit:
                parts = zip(*(x.split(limit, dim) for x in qkv_BMHK), strict=True)
                return torch.cat([attend_in_parts(attend, *part) for part in parts], dim)
    return attend(*qkv_BMHK)


# Packed sequences: sequences of different lengths, concatenated without padding into one row of tokens.
#
# Shape suffixes: N sequences, M tokens of all sequences, n sequences of the same length L.


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The layout of a row of packed sequences, as made by `pack`. Index tensors are int64.

    Attributes:
        lengths: Number of tokens of each sequence, at least 1.
        longest: Length of the longest sequence.
        sequence_M: Sequence of each token.
        position_M: Position of each token in its sequence, counted from 0.
        place_M: Index of each token in the flattened padded batch, [N * longest].
        end_N: Index of each sequence's last token.
    """

    lengths: tuple[int, ...]
    longest: int
    sequence_M: torch.Tensor
    position_M: torch.Tensor
    place_M: torch.Tensor
    end_N: torch.Tensor

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @cached_property
    def rows_by_length(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """Each length L that occurs, with the indices of the tokens of all sequences of this length: int64 [n * L]."""
        lengths_N = torch.tensor(self.lengths)
        begins_N = lengths_N.cumsum(0) - lengths_N
        tokens = {
            length: (begins_N[lengths_N == length][:, None] + torch.arange(length)).flatten()
            for length in sorted(set(self.lengths))
        }
        return tuple((length, send(tokens_nL, self.place_M.device)) for length, tokens_nL in tokens.items())

    @cached_property
    def prepared_values(self) -> dict[str, Any]:
        """Cache of values that an attention implementation computes from the lengths, once for all blocks, by name."""
        return {}


def pack(lengths: Sequence[int], *, device: torch.device) -> Packing:
    """Pack sequences of these lengths, with index tensors on `device`.

    Raises:
        ValueError: There are no sequences, or a sequence is empty.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"cannot pack sequences of lengths {list(lengths)}: each needs a token")
    longest = max(lengths)
    # Compute the indices on the host, and copy them in one transfer.
    lengths_N = torch.tensor(lengths)
    begins_N = lengths_N.cumsum(0) - lengths_N
    sequence_M = torch.repeat_interleave(torch.arange(len(lengths)), lengths_N)
    position_M = torch.arange(len(sequence_M)) - begins_N[sequence_M]
    end_N = lengths_N.cumsum(0) - 1
    places = torch.cat([sequence_M, position_M, sequence_M * longest + position_M, end_N])
    num_tokens = len(sequence_M)
    sequence_M, position_M, place_M, end_N = send(places, device).split([num_tokens] * 3 + [len(lengths)])
    indices = {"sequence_M": sequence_M, "position_M": position_M, "place_M": place_M, "end_N": end_N}
    return Packing(lengths=tuple(lengths), longest=longest, **indices)


AttentionChoice = Literal["auto", "xformers", "sdpa", "flash", "cudnn", "naive"]
# Selectable SDPA kernels by name, each followed by the fallbacks for shapes that it does not support.
_FALLBACKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PREFERRED = {"flash": _FALLBACKS, "cudnn": [SDPBackend.CUDNN_ATTENTION, *_FALLBACKS]}


class Attend(Protocol):
    """softmax(q k^T / sqrt(K)) v for each head. Arguments and result are [B, M, H, K].

    Args:
        causal: True to let each token attend only to itself and to earlier tokens.
        packing: Layout of the packed sequences that the tokens belong to; B is then 1. A token attends only to its own
            sequence, and attention is causal.
    """

    def __call__(
        self, q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
    ) -> Tensor: ...


@runtime_checkable
class HasHeads(Protocol):
    """A module that calls an `Attend` with heads of width `head_width`."""

    attend: Attend
    head_width: int


@dataclass(frozen=True)
class AttentionBackend:
    """The selected implementation and the reason for the choice."""

    name: str
    reason: str
    attend: Attend


def open_attention(choice: AttentionChoice, *, device_type: str, compiles: bool = False) -> AttentionBackend:
    """Select an implementation for a device (`cpu`, `cuda`): by name or, for "auto", xformers on a GPU, otherwise SDPA.

    Args:
        compiles: True if the model is compiled by torch.compile, which can trace SDPA but not xformers.

    Raises:
        UserError: xformers or a GPU kernel was requested, but is not available.
    """
    if choice == "naive":
        return AttentionBackend("naive", "requested by --attention naive, to compare", attend_naively)
    if choice == "sdpa":
        return AttentionBackend("sdpa", "requested by --attention sdpa", attend_with_sdpa)
    if choice in ("xformers", *PREFERRED) and device_type != "cuda":
        raise UserError(
            f"{choice} has no attention for a {device_type.upper()} (requested by --attention {choice})",
            hint="use --attention sdpa, or --device cuda",
            flags=("--attention",),
        )
    if choice in PREFERRED:
        return AttentionBackend(choice, f"requested by --attention {choice}", attend_preferring(choice))
    if device_type != "cuda":
        return AttentionBackend("sdpa", f"xformers has no attention for a {device_type.upper()}", attend_with_sdpa)
    if choice == "auto" and compiles:
        return AttentionBackend("sdpa", "--compile can trace it, unlike xformers", attend_with_sdpa)
    try:
        load_xformers()
    except ImportError as error:
        if choice == "xformers":
            raise UserError(
                f"xformers cannot be imported: {error} (requested by --attention xformers)",
                hint="install it, or use --attention sdpa",
                flags=("--attention",),
            ) from error
        return AttentionBackend("sdpa", f"xformers cannot be imported: {error}", attend_with_sdpa)
    if choice == "xformers":
        return AttentionBackend("xformers", "requested by --attention xformers", attend_with_xformers)
    return AttentionBackend("xformers", "the device is a GPU", attend_with_xformers_or_sdpa)


# xformers release whose dispatcher and operators the tests cover, and the name of its flag for "compiled with CUDA".
_TESTED, _BUILT = "0.0.35", "_built_with_cuda"


@cache
def load_xformers() -> str | None:
    """Load xformers; return the reason why its compiled library failed to load, or None if it loaded.

    The library contains only kernels for 2:4 sparsity, and no attention (docs/models.md). Its warning is therefore
    suppressed in runs, and shown by `train doctor`. xformers' attention uses torch's kernels, but it rejects every GPU
    if the library is missing, so this function sets the flag that it checks. xformers checks separately whether torch's
    kernels accept its arguments (xformers.ops.fmha.torch_attention_compat).

    Raises:
        ImportError: xformers is not installed, does not match this torch, or lacks the flag.
    """
    logging.getLogger("xformers").setLevel(logging.ERROR)
    import xformers.ops

    error: BaseException | None = getattr(import_module("xformers._cpp_lib"), "_cpp_library_load_exception", None)
    if error is not None and torch.version.cuda is not None:
        names = vars(import_module("xformers.ops.fmha.common"))
        if _BUILT not in names:
            raise ImportError(
                f"xformers {xformers.__version__} has no xformers.ops.fmha.common.{_BUILT}, which clipmill sets "
                f"because its compiled library does not load with torch {torch.__version__}: install xformers {_TESTED}"
            )
        names[_BUILT] = True
    # The innermost cause mentions the missing library.
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return None if error is None else str(error)


def attend_preferring(kernel: str) -> Attend:
    """Return `attend_with_sdpa` with a preferred kernel (`PREFERRED`), and fallbacks for shapes it does not support."""

    def attend(
        q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
    ) -> Tensor:
        with sdpa_kernel(PREFERRED[kernel], set_priority=True):
            return attend_with_sdpa(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)

    return attend


def attend_with_sdpa(
    q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
) -> Tensor:
    """Compute `Attend` with torch.nn.functional.scaled_dot_product_attention."""
    if packing is not None:
        # A compiled block must not depend on the lengths in a batch, so it cannot loop over lengths. On a GPU, padding
        # is faster than launching one kernel per length.
        is_padded = torch.compiler.is_compiling() or q_BMHK.is_cuda
        attend = _attend_padded if is_padded else _attend_by_length
        return attend(attend_with_sdpa, q_BMHK, k_BMHK, v_BMHK, packing)
    return attend_in_parts(partial(_scaled_dot_product, is_causal=causal), q_BMHK, k_BMHK, v_BMHK)


def attend_masked(q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, mask_MM: Tensor) -> Tensor:
    """Attend only where `mask_MM` is True, by scaled_dot_product_attention."""
    return attend_in_parts(partial(_scaled_dot_product, attn_mask=mask_MM), q_BMHK, k_BMHK, v_BMHK)


def _scaled_dot_product(q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, **options: Any) -> Tensor:
    q_BHMK, k_BHMK, v_BHMK = q_BMHK.transpose(1, 2), k_BMHK.transpose(1, 2), v_BMHK.transpose(1, 2)
    return functional.scaled_dot_product_attention(q_BHMK, k_BHMK, v_BHMK, **options).transpose(1, 2)


def attend_with_xformers(
    q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
) -> Tensor:
    """Compute `Attend` with xformers.ops.memory_efficient_attention."""
    load_xformers()
    from xformers import ops

    # A packed row cannot be split without new offsets. SDPA pads the row, and can split the padded batch.
    if packing is not None and packing.num_sequences > most_sequences(
        -(-q_BMHK.shape[1] // packing.num_sequences), *q_BMHK.shape[2:], packed=True
    ):
        return attend_with_sdpa(q_BMHK, k_BMHK, v_BMHK, packing=packing)
    bias = _xformers_bias(causal=causal, packing=packing)
    return attend_in_parts(partial(ops.memory_efficient_attention, attn_bias=bias), q_BMHK, k_BMHK, v_BMHK)


# Cached results of the search for xformers kernels, by all properties that its dispatcher considers except lengths.
_HAS_KERNEL: dict[tuple[Any, ...], bool] = {}


def attend_with_xformers_or_sdpa(
    q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
) -> Tensor:
    """Call `attend_with_xformers`, or `attend_with_sdpa` if xformers has no kernel for the head width or precision.

    A model may have heads of several widths, so each call makes this choice.
    """
    needs_gradient = any(x.requires_grad for x in (q_BMHK, k_BMHK, v_BMHK))
    kind = (q_BMHK.device, q_BMHK.dtype, q_BMHK.shape[3], causal, packing is None, needs_gradient)
    if kind not in _HAS_KERNEL:
        try:
            xformers_operators(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)
            _HAS_KERNEL[kind] = True
        except NotImplementedError:
            _HAS_KERNEL[kind] = False
    attend = attend_with_xformers if _HAS_KERNEL[kind] else attend_with_sdpa
    return attend(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)


def _xformers_bias(*, causal: bool, packing: Packing | None) -> Any:
    from xformers import ops

    if packing is None:
        return ops.LowerTriangularMask() if causal else None
    bias = packing.prepared_values.get("xformers")
    if bias is None:
        # Compute the offsets on the device from the packing; xformers would copy them to the device.
        bias = ops.fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens(
            list(packing.lengths), device=torch.device("cpu")
        )
        begin_N1 = functional.pad(packing.end_N + 1, (1, 0)).int()
        bias.q_seqinfo.seqstart = bias.k_seqinfo.seqstart = begin_N1
        packing.prepared_values["xformers"] = bias
    return bias


def xformers_operators(
    q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
) -> tuple[str, str | None]:
    """Return the operators that `attend_with_xformers` uses, forward and backward (None without gradients).

    xformers' own dispatcher chooses them. It raises NotImplementedError if no operator supports these tensors.
    """
    load_xformers()
    from xformers.ops.fmha import dispatch
    from xformers.ops.fmha.common import Inputs

    bias = _xformers_bias(causal=causal, packing=packing)
    inputs = Inputs(query=q_BMHK, key=k_BMHK, value=v_BMHK, attn_bias=bias)
    needs_gradient = any(x.requires_grad for x in (q_BMHK, k_BMHK, v_BMHK))
    forward = dispatch._dispatch_fw(inputs, needs_gradient)
    if not needs_gradient:
        return forward.NAME, None
    # Packed and padded log-sum-exp values differ only if there are several sequences.
    is_packed = forward.VARLEN_LSE_PACKED if packing is not None and packing.num_sequences > 1 else None
    return forward.NAME, dispatch._dispatch_bw(inputs, is_packed).NAME


def attend_naively(
    q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
) -> Tensor:
    """Compute `Attend` with the complete score matrix in memory: the reference for the other implementations."""
    if packing is not None:
        return _attend_padded(attend_naively, q_BMHK, k_BMHK, v_BMHK, packing)
    num_tokens, head_width = q_BMHK.shape[1], q_BMHK.shape[3]
    scores_BHMM = torch.einsum("bmhk,bnhk->bhmn", q_BMHK * head_width**-0.5, k_BMHK)
    if causal:
        later_MM = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q_BMHK.device).triu(1)
        scores_BHMM = scores_BHMM.masked_fill(later_MM, -torch.inf)
    # Autocast computes softmax in float32. Cast back, as the fused kernels do.
    weights_BHMM = scores_BHMM.softmax(-1).to(v_BMHK.dtype)
    return torch.einsum("bhmn,bnhk->bmhk", weights_BHMM, v_BMHK)


def _attend_padded(attend: Attend, q_1MHK: Tensor, k_1MHK: Tensor, v_1MHK: Tensor, packing: Packing) -> Tensor:
    """Pad packed sequences, and attend within them. Padding is at the end, so that no token attends to it."""
    num_sequences, longest = packing.num_sequences, packing.longest

    def pad(x_1MHK: Tensor) -> Tensor:
        empty = x_1MHK.new_zeros(num_sequences * longest, *x_1MHK.shape[2:])
        return empty.index_copy(0, packing.place_M, x_1MHK[0]).unflatten(0, (num_sequences, longest))

    out_BLHK = attend(pad(q_1MHK), pad(k_1MHK), pad(v_1MHK), causal=True)
    return out_BLHK.flatten(0, 1).index_select(0, packing.place_M)[None]


def _attend_by_length(attend: Attend, q_1MHK: Tensor, k_1MHK: Tensor, v_1MHK: Tensor, packing: Packing) -> Tensor:
    """Attend within packed sequences, with one call per length, so that no padding is needed."""
    outs, row_indices = [], []
    for length, rows in packing.rows_by_length:
        q_nLHK, k_nLHK, v_nLHK = (
            x[0].index_select(0, rows).unflatten(0, (-1, length)) for x in (q_1MHK, k_1MHK, v_1MHK)
        )
        outs.append(attend(q_nLHK, k_nLHK, v_nLHK, causal=True).flatten(0, 1))
        row_indices.append(rows)
    out_MHK = torch.cat(outs)
    return torch.zeros_like(out_MHK).index_copy(0, torch.cat(row_indices), out_MHK)[None]
