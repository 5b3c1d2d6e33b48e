"""Common interface to attention implementations: xformers or torch's kernels on CUDA, torch's kernels elsewhere.

Shape suffixes: B batch, M tokens, H heads, K width of a head, L tokens of a sequence.
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

# Limits of one call to an attention kernel on a GPU, and the splitting of larger calls. B is the number of sequences.

# Sequences and heads are the second and third grid dimensions of every fused kernel. CUDA limits these dimensions.
_MAX_BLOCKS = 65_535
# FlashAttention's backward pass pads tokens and width to these multiples, and then indexes the elements of a query
# gradient with 32 bits. Packed sequences are padded even if their length is a multiple.
_MAX_ELEMENTS, _PADDED_TOKENS, _PADDED_WIDTH = 2**31, 128, 64


def max_sequences(num_tokens: int, num_heads: int, head_width: int, *, packed: bool = False) -> int:
    """Return the maximum number of sequences that a kernel can process in one call, at least 1.

    Args:
        num_tokens: Number of tokens per sequence; the average number if sequences are packed.
        num_heads: Number of heads.
        head_width: Width of a head.
        packed: True if the sequences are packed.
    """
    padded_tokens = num_tokens + _PADDED_TOKENS if packed else -(-num_tokens // _PADDED_TOKENS) * _PADDED_TOKENS
    padded_width = -(-head_width // _PADDED_WIDTH) * _PADDED_WIDTH
    return max(1, min(_MAX_BLOCKS, _MAX_ELEMENTS // (padded_tokens * padded_width * num_heads)))


def attend_in_parts(attend: Callable[[Tensor, Tensor, Tensor], Tensor], *qkv_BMHK: Tensor) -> Tensor:
    """Call `attend` once, or on several parts if a GPU kernel cannot process all heads and sequences in one call."""
    num_sequences, num_tokens, num_heads, head_width = qkv_BMHK[0].shape
    if qkv_BMHK[0].is_cuda:
        batch_limit = max_sequences(num_tokens, min(num_heads, _MAX_BLOCKS), head_width)
        for dim, size, limit in ((2, num_heads, _MAX_BLOCKS), (0, num_sequences, batch_limit)):
            if size > limit:
                parts = zip(*(x.split(limit, dim) for x in qkv_BMHK), strict=True)
                return torch.cat([attend_in_parts(attend, *part) for part in parts], dim)
    return attend(*qkv_BMHK)


# Packed sequences: sequences of different lengths, concatenated without padding into one row of tokens.
#
# Shape suffixes: N sequences, M tokens of all sequences, n sequences of the same length L.


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Layout of a row of packed sequences, created by `pack`. Index tensors are int64.

    Attributes:
        lengths: Number of tokens of each sequence, at least 1.
        longest: Length of the longest sequence.
        sequence_M: Index of each token's sequence.
        position_M: Position of each token in its sequence, from 0.
        slot_M: Index of each token in the flattened padded batch, [N * longest].
        end_N: Index of each sequence's last token.
    """

    lengths: tuple[int, ...]
    longest: int
    sequence_M: torch.Tensor
    position_M: torch.Tensor
    slot_M: torch.Tensor
    end_N: torch.Tensor

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @cached_property
    def tokens_by_length(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """Each length L in the row, with the indices of all tokens in sequences of this length, int64 [n * L]."""
        lengths_N = torch.tensor(self.lengths)
        starts_N = lengths_N.cumsum(0) - lengths_N
        tokens = {
            length: (starts_N[lengths_N == length][:, None] + torch.arange(length)).flatten()
            for length in sorted(set(self.lengths))
        }
        return tuple((length, send(tokens_nL, self.slot_M.device)) for length, tokens_nL in tokens.items())

    @cached_property
    def cached_values(self) -> dict[str, Any]:
        """Cache of values that implementations derive from the lengths once for all layers, by implementation."""
        return {}


def pack(lengths: Sequence[int], *, device: torch.device) -> Packing:
    """Return the layout of packed sequences with these lengths, with index tensors on `device`.

    Raises:
        ValueError: There are no sequences, or a sequence is empty.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"cannot pack sequences of lengths {list(lengths)}: each sequence needs at least one token")
    longest = max(lengths)
    # Compute the indices on the host, and copy them in one transfer.
    lengths_N = torch.tensor(lengths)
    starts_N = lengths_N.cumsum(0) - lengths_N
    sequence_M = torch.repeat_interleave(torch.arange(len(lengths)), lengths_N)
    position_M = torch.arange(len(sequence_M)) - starts_N[sequence_M]
    end_N = lengths_N.cumsum(0) - 1
    all_indices = torch.cat([sequence_M, position_M, sequence_M * longest + position_M, end_N])
    num_tokens = len(sequence_M)
    sequence_M, position_M, slot_M, end_N = send(all_indices, device).split([num_tokens] * 3 + [len(lengths)])
    indices = {"sequence_M": sequence_M, "position_M": position_M, "slot_M": slot_M, "end_N": end_N}
    return Packing(lengths=tuple(lengths), longest=longest, **indices)


AttentionChoice = Literal["auto", "xformers", "sdpa", "flash", "cudnn", "naive"]
# SDPA kernels that --attention can select, each followed by fallbacks for shapes that it does not support.
_FALLBACKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SDPA_KERNELS = {"flash": _FALLBACKS, "cudnn": [SDPBackend.CUDNN_ATTENTION, *_FALLBACKS]}


class Attend(Protocol):
    """Attention function, which returns softmax(q k^T / sqrt(K)) v for each head.

    All tensors are [B, M, H, K]. M of keys and values may differ from M of queries, unless the attention is causal.

    Args:
        causal: True to let each token attend only to itself and to earlier tokens.
        packing: Layout of the packed sequences that the tokens belong to; B is then 1. A token attends only to itself
            and to earlier tokens of its sequence.
    """

    def __call__(
        self, q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
    ) -> Tensor: ...


@runtime_checkable
class HasHeads(Protocol):
    """Module that calls an `Attend` with heads of width `head_width`."""

    attend: Attend
    head_width: int


@dataclass(frozen=True)
class AttentionBackend:
    """Selected attention implementation, with the reason for its selection."""

    name: str
    reason: str
    attend: Attend


def open_attention(choice: AttentionChoice, *, device_type: str, compiles: bool = False) -> AttentionBackend:
    """Select an attention implementation by name. "auto" selects xformers on a GPU if it is usable, otherwise SDPA.

    Args:
        choice: Value of --attention.
        device_type: Type of the device, `cpu` or `cuda`.
        compiles: True if the model is compiled by torch.compile, which can trace SDPA but not xformers.

    Raises:
        UserError: xformers or a GPU kernel was requested, but is not available.
    """
    if choice == "naive":
        return AttentionBackend("naive", "requested by --attention naive", attend_naively)
    if choice == "sdpa":
        return AttentionBackend("sdpa", "requested by --attention sdpa", attend_with_sdpa)
    if choice in ("xformers", *SDPA_KERNELS) and device_type != "cuda":
        raise UserError(
            f"--attention {choice} does not support a {device_type.upper()}",
            hint="use --attention sdpa, or --device cuda",
            flags=("--attention",),
        )
    if choice in SDPA_KERNELS:
        return AttentionBackend(choice, f"requested by --attention {choice}", attend_with_kernel(choice))
    if device_type != "cuda":
        return AttentionBackend("sdpa", f"xformers has no attention for a {device_type.upper()}", attend_with_sdpa)
    if choice == "auto" and compiles:
        return AttentionBackend("sdpa", "--compile can trace SDPA, but not xformers", attend_with_sdpa)
    try:
        load_xformers()
    except ImportError as error:
        if choice == "xformers":
            raise UserError(
                f"--attention xformers cannot import xformers: {error}",
                hint="install xformers, or use --attention sdpa",
                flags=("--attention",),
            ) from error
        return AttentionBackend("sdpa", f"xformers cannot be imported: {error}", attend_with_sdpa)
    if choice == "xformers":
        return AttentionBackend("xformers", "requested by --attention xformers", attend_with_xformers)
    return AttentionBackend("xformers", "the device is a GPU", attend_with_xformers_or_sdpa)


# Release of xformers whose dispatcher and operators the tests cover, and its flag for a build with CUDA.
_TESTED_VERSION, _BUILD_FLAG = "0.0.35", "_built_with_cuda"


@cache
def load_xformers() -> str | None:
    """Load xformers. Return the reason why its compiled library failed to load; None if the library loaded.

    The library contains only kernels for 2:4 sparsity, none for attention (docs/models.md). Runs therefore suppress the
    warning about the library, and `train doctor` shows it. xformers' attention uses torch's kernels, but rejects every
    GPU if the library is missing, so this function sets the flag that xformers checks. xformers checks separately
    whether torch's kernels accept its arguments (xformers.ops.fmha.torch_attention_compat).

    Raises:
        ImportError: xformers is not installed, does not match this version of torch, or lacks the flag.
    """
    logging.getLogger("xformers").setLevel(logging.ERROR)
    import xformers.ops

    error: BaseException | None = getattr(import_module("xformers._cpp_lib"), "_cpp_library_load_exception", None)
    if error is not None and torch.version.cuda is not None:
        names = vars(import_module("xformers.ops.fmha.common"))
        if _BUILD_FLAG not in names:
            raise ImportError(
                f"xformers {xformers.__version__} has no xformers.ops.fmha.common.{_BUILD_FLAG}, which clipmill sets "
                f"because the compiled library of xformers does not load with torch {torch.__version__}: install "
                f"xformers {_TESTED_VERSION}"
            )
        names[_BUILD_FLAG] = True
    # The innermost cause mentions the missing library.
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return None if error is None else str(error)


def attend_with_kernel(kernel: str) -> Attend:
    """Return `attend_with_sdpa`, restricted to the kernel of this name in `SDPA_KERNELS` and to its fallbacks."""

    def attend(
        q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
    ) -> Tensor:
        with sdpa_kernel(SDPA_KERNELS[kernel], set_priority=True):
            return attend_with_sdpa(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)

    return attend


def attend_with_sdpa(
    q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
) -> Tensor:
    """Implement `Attend` with torch.nn.functional.scaled_dot_product_attention."""
    if packing is not None:
        # A compiled block must not depend on the lengths in a batch, so it cannot loop over them. On a GPU, padding is
        # faster than launching one kernel per length.
        is_padded = torch.compiler.is_compiling() or q_BMHK.is_cuda
        attend = _attend_padded if is_padded else _attend_by_length
        return attend(attend_with_sdpa, q_BMHK, k_BMHK, v_BMHK, packing)
    return attend_in_parts(partial(_scaled_dot_product, is_causal=causal), q_BMHK, k_BMHK, v_BMHK)


def attend_masked(q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, mask_MM: Tensor) -> Tensor:
    """Attend only where `mask_MM` is True, with scaled_dot_product_attention."""
    return attend_in_parts(partial(_scaled_dot_product, attn_mask=mask_MM), q_BMHK, k_BMHK, v_BMHK)


def _scaled_dot_product(q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, **options: Any) -> Tensor:
    q_BHMK, k_BHMK, v_BHMK = q_BMHK.transpose(1, 2), k_BMHK.transpose(1, 2), v_BMHK.transpose(1, 2)
    return functional.scaled_dot_product_attention(q_BHMK, k_BHMK, v_BHMK, **options).transpose(1, 2)


def attend_with_xformers(
    q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
) -> Tensor:
    """Implement `Attend` with xformers.ops.memory_efficient_attention."""
    load_xformers()
    from xformers import ops

    # Splitting a packed row would require new offsets. SDPA pads the row instead, and can split the padded batch.
    if packing is not None and packing.num_sequences > max_sequences(
        -(-q_BMHK.shape[1] // packing.num_sequences), *q_BMHK.shape[2:], packed=True
    ):
        return attend_with_sdpa(q_BMHK, k_BMHK, v_BMHK, packing=packing)
    bias = _xformers_bias(causal=causal, packing=packing)
    return attend_in_parts(partial(ops.memory_efficient_attention, attn_bias=bias), q_BMHK, k_BMHK, v_BMHK)


# Cache: True if xformers has a kernel, keyed by all properties that its dispatcher considers, except lengths.
_HAS_KERNEL: dict[tuple[Any, ...], bool] = {}


def attend_with_xformers_or_sdpa(
    q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
) -> Tensor:
    """Call `attend_with_xformers`, or `attend_with_sdpa` if xformers has no kernel for the head width or precision.

    The choice is made for each call, because a model may have heads of several widths.
    """
    needs_gradient = any(x.requires_grad for x in (q_BMHK, k_BMHK, v_BMHK))
    key = (q_BMHK.device, q_BMHK.dtype, q_BMHK.shape[3], causal, packing is None, needs_gradient)
    if key not in _HAS_KERNEL:
        try:
            xformers_operators(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)
            _HAS_KERNEL[key] = True
        except NotImplementedError:
            _HAS_KERNEL[key] = False
    attend = attend_with_xformers if _HAS_KERNEL[key] else attend_with_sdpa
    return attend(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)


def _xformers_bias(*, causal: bool, packing: Packing | None) -> Any:
    from xformers import ops

    if packing is None:
        return ops.LowerTriangularMask() if causal else None
    bias = packing.cached_values.get("xformers")
    if bias is None:
        # Compute the offsets on the device. xformers would compute them on the host, and copy them.
        bias = ops.fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens(
            list(packing.lengths), device=torch.device("cpu")
        )
        begin_N1 = functional.pad(packing.end_N + 1, (1, 0)).int()
        bias.q_seqinfo.seqstart = bias.k_seqinfo.seqstart = begin_N1
        packing.cached_values["xformers"] = bias
    return bias


def xformers_operators(
    q_BMHK: Tensor, k_BMHK: Tensor, v_BMHK: Tensor, *, causal: bool = False, packing: Packing | None = None
) -> tuple[str, str | None]:
    """Return the forward and backward operators that `attend_with_xformers` uses; backward is None without gradients.

    xformers' own dispatcher chooses the operators. It raises NotImplementedError if no operator supports the tensors.
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
    """Implement `Attend` with the complete score matrix in memory, as a reference for the other implementations."""
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
    """Pad packed sequences at the end, and attend within them. Causal attention never reaches the padding."""
    num_sequences, longest = packing.num_sequences, packing.longest

    def pad(x_1MHK: Tensor) -> Tensor:
        empty = x_1MHK.new_zeros(num_sequences * longest, *x_1MHK.shape[2:])
        return empty.index_copy(0, packing.slot_M, x_1MHK[0]).unflatten(0, (num_sequences, longest))

    out_BLHK = attend(pad(q_1MHK), pad(k_1MHK), pad(v_1MHK), causal=True)
    return out_BLHK.flatten(0, 1).index_select(0, packing.slot_M)[None]


def _attend_by_length(attend: Attend, q_1MHK: Tensor, k_1MHK: Tensor, v_1MHK: Tensor, packing: Packing) -> Tensor:
    """Attend within packed sequences, with one call per length, so that no padding is needed."""
    outs, row_indices = [], []
    for length, rows in packing.tokens_by_length:
        q_nLHK, k_nLHK, v_nLHK = (
            x[0].index_select(0, rows).unflatten(0, (-1, length)) for x in (q_1MHK, k_1MHK, v_1MHK)
        )
        outs.append(attend(q_nLHK, k_nLHK, v_nLHK, causal=True).flatten(0, 1))
        row_indices.append(rows)
    out_MHK = torch.cat(outs)
    return torch.zeros_like(out_MHK).index_copy(0, torch.cat(row_indices), out_MHK)[None]
