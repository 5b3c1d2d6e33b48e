"""xformers' operators on the CPU, forward and backward, with the arguments that it gives to torch's kernels.

Shape suffixes: B batch, M queries, N keys, H heads, K width of a head. Packed sequences have no B: [M, H, K] or, for
the memory-efficient kernels, a B of 1.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

CALLS: Counter[str] = Counter()
_MAX_BLOCKS = 65_535


def require_grid(num_sequences: int, num_heads: int) -> None:
    """Raise what CUDA raises where a kernel of attention is launched for too many sequences or heads."""
    if max(num_sequences, num_heads) > _MAX_BLOCKS:
        raise RuntimeError(f"CUDA error: invalid configuration argument ({num_sequences} sequences, {num_heads} heads)")


_SDPA = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product(query: Tensor, *args: Any, **options: Any) -> Tensor:
    """torch's scaled_dot_product_attention with the limits of its fused kernels."""
    if query.is_cuda and query.ndim == 4:
        require_grid(*query.shape[:2])
    return _SDPA(query, *args, **options)


@cache
def emulation_of(func: Any) -> Callable[..., Any] | None:
    """The emulation of an operator; None if it has none."""
    return _OPERATORS.get(str(func._overloadpacket))


def _weights(q: Tensor, k: Tensor, *, causal: bool, scale: float) -> Tensor:
    scores = torch.einsum("bmhk,bnhk->bhmn", q, k) * scale
    if causal:
        assert scores.shape[-2] == scores.shape[-1]
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor]:
    return (torch.einsum("bhmn,bnhk->bmhk", _weights(q, k, causal=causal, scale=scale), v),)


def _backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, ...]:
    weights = _weights(q, k, causal=causal, scale=scale)
    products = torch.einsum("bmhk,bnhk->bhmn", grad, v)
    of_scores = weights * (products - (products * weights).sum(-1, keepdim=True)) * scale
    grad_q, grad_k = (torch.einsum(f"bhmn,{rows}", of_scores, x) for rows, x in (("bnhk->bmhk", k), ("bmhk->bnhk", q)))
    return grad_q, grad_k, torch.einsum("bhmn,bmhk->bnhk", weights, grad)


def _by_sequence(
    compute: Callable[..., tuple[Tensor, ...]],
    *tensors: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    causal: bool,
    scale: float | None,
) -> list[Tensor]:
    """`compute` in float32 for a batch, or for each of several packed sequences; results have the dtype of q."""
    q, k, v, *others = (x.float() for x in tensors)
    require_grid(len(q) if starts_q is None else len(starts_q) - 1, q.shape[-2])
    given: dict[str, Any] = {"causal": causal, "scale": q.shape[-1] ** -0.5 if scale is None else scale}
    if starts_q is None or starts_k is None:
        outputs = compute(q, k, v, *others, **given)
    else:
        parts = []
        rows_q, rows_k = ([slice(*pair) for pair in zip(x.tolist(), x.tolist()[1:])] for x in (starts_q, starts_k))  # noqa: B905 - pairs
        for of_q, of_k in zip(rows_q, rows_k, strict=True):
            parts.append(
                compute(q[None, of_q], k[None, of_k], v[None, of_k], *(x[None, of_q] for x in others), **given)
            )
        outputs = tuple(torch.cat([part[0] for part in side]) for side in zip(*parts, strict=True))
    return [x.to(tensors[0].dtype) for x in outputs]


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Any, starts_k: Any, used: Any, longest_q: int, longest_k: int,
    dropout: float, scale: float, causal: bool, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.stride(-1) == 1 and not dropout
    CALLS["flash forward"] += 1
    [out] = _by_sequence(_forward, q, k, v, starts_q=starts_q, starts_k=starts_k, causal=causal, scale=scale)
    packed, padded = [q.shape[1], q.shape[0]], [q.shape[0], q.shape[-2], q.shape[1]]
    return out, torch.zeros(padded if starts_q is None else packed), torch.zeros(2, dtype=torch.int64)


def _flash_backward(
    shares: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts_q: Any, starts_k: Any,
    longest_q: int, longest_k: int, dropout: float, scale: float, causal: bool, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    CALLS["flash backward"] += 1
    given = {"starts_q": starts_q, "starts_k": starts_k, "causal": causal, "scale": scale}
    return tuple(_by_sequence(_backward, q, k, v, grad, **given))


def _efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, dropout_p: float = 0.0, custom_mask_type: int = 0,
    compute_log_sumexp: bool = False, *, scale: float | None = None, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    CALLS["efficient forward"] += 1
    given = {"starts_q": cu_seqlens_q, "starts_k": cu_seqlens_k, "causal": custom_mask_type != 0, "scale": scale}
    if cu_seqlens_q is None:
        [out] = _by_sequence(_forward, query, key, value, **given)
        lse = torch.zeros(len(query), query.shape[2], -(-query.shape[1] // 32) * 32)
    else:
        out = _by_sequence(_forward, query[0], key[0], value[0], **given)[0][None]
        lse = torch.zeros(len(cu_seqlens_q) - 1, query.shape[2], int(max_seqlen_q))
    seed = torch.zeros((), dtype=torch.int64)
    return out, lse, seed, seed.clone(), 0, 0


def _efficient_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Any = None, out: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    logsumexp: Any = None, dropout_p: float = 0.0, philox_seed: Any = None, philox_offset: Any = None,
    custom_mask_type: int = 0, bias_requires_grad: bool = False, *, scale: float | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    CALLS["efficient backward"] += 1
    given = {"starts_q": cu_seqlens_q, "starts_k": cu_seqlens_k, "causal": custom_mask_type != 0, "scale": scale}
    tensors = (query, key, value, grad_out_)
    if cu_seqlens_q is not None:
        return (*(x[None] for x in _by_sequence(_backward, *(x[0] for x in tensors), **given)), torch.zeros(0))
    return (*_by_sequence(_backward, *tensors, **given), torch.zeros(0))


_OPERATORS: dict[str, Callable[..., Any]] = {
    "xformers_flash.flash_fwd": _flash_forward,
    "xformers_flash.flash_bwd": _flash_backward,
    "aten._efficient_attention_forward": _efficient_forward,
    "aten._efficient_attention_backward": _efficient_backward,
}
