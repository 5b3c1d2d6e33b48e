"""Every implementation of attention compared with the formula on a CPU, and the choice of an implementation.

The tests for GPUs are in tests/gpu.
"""

import sys
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.train.models.attention import (
    Attend,
    attend_naively,
    attend_with_sdpa,
    max_sequences,
    open_attention,
    pack,
)
from clipmill.train.models.space_time import attend_short, sequences_per_tile
from tests.forked import forget, run_forked

LENGTHS = (3, 1, 7, 3, 2, 7)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, may_see: torch.Tensor) -> torch.Tensor:
    """Compute attention explicitly; `may_see` [M, M] marks the keys (columns) that a query (row) sees."""
    scores = torch.einsum("bmhk,bnhk->bhmn", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhmn,bnhk->bmhk", scores.masked_fill(~may_see, -torch.inf).softmax(-1), v)


def masks(num_tokens: int) -> dict[bool, torch.Tensor]:
    """Return the mask of visible tokens for attention that is causal (True) or not (False)."""
    everything = torch.ones(num_tokens, num_tokens, dtype=torch.bool)
    return {False: everything, True: everything.tril()}


def own_past(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the mask of visible tokens for packed causal sequences."""
    return torch.block_diag(*(torch.ones(length, length) for length in lengths)).tril().bool()


def random_qkv(dtype: torch.dtype, *, num_items: int = 2, num_tokens: int = 17, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_items, num_tokens, 3, 16)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    return [tensor.requires_grad_() for tensor in drawn]


def values_and_gradients(out: torch.Tensor, qkv: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), qkv)]


@pytest.mark.parametrize("attend", [attend_with_sdpa, attend_naively])
@pytest.mark.parametrize("causal", [False, True])
def test_torchs_ways_compute_the_formula(attend: Attend, causal: bool) -> None:
    qkv = random_qkv(torch.float64)
    values = values_and_gradients(attend(*qkv, causal=causal), qkv)
    expected = values_and_gradients(formula(*qkv, may_see=masks(17)[causal]), qkv)
    torch.testing.assert_close(values, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("attend", [attend_with_sdpa, attend_naively])
@pytest.mark.parametrize("lengths", [LENGTHS, (4, 4, 4), (5,), (1, 1)])
def test_a_packed_token_sees_its_own_sequence_up_to_itself(attend: Attend, lengths: tuple[int, ...]) -> None:
    qkv = random_qkv(torch.float64, num_items=1, num_tokens=sum(lengths))
    packing = pack(lengths, device=torch.device("cpu"))
    values = values_and_gradients(attend(*qkv, causal=True, packing=packing), qkv)
    expected = values_and_gradients(formula(*qkv, may_see=own_past(lengths)), qkv)
    torch.testing.assert_close(values, expected, atol=1e-12, rtol=0)


@pytest.mark.nightly
def test_compiled_sdpa_of_packed_tokens_is_the_same_whatever_the_lengths() -> None:
    compiled = torch.compile(attend_with_sdpa, backend="aot_eager", fullgraph=True)
    for lengths in (LENGTHS, (9, 4, 4, 2, 1, 1), (77, 1, 1, 1, 1, 1), (5, 6, 7, 8, 9, 10)):
        qkv = random_qkv(torch.float64, num_items=1, num_tokens=sum(lengths))
        packing = pack(lengths, device=torch.device("cpu"))
        values = values_and_gradients(compiled(*qkv, causal=True, packing=packing), qkv)
        expected = values_and_gradients(attend_with_sdpa(*qkv, causal=True, packing=packing), qkv)
        torch.testing.assert_close(values, expected, atol=1e-12, rtol=0)


def test_a_packing_knows_where_each_token_stands() -> None:
    packing = pack((2, 3, 1), device=torch.device("cpu"))
    assert packing.sequence_M.tolist() == [0, 0, 1, 1, 1, 2]
    assert packing.position_M.tolist() == [0, 1, 0, 1, 2, 0]
    assert packing.slot_M.tolist() == [0, 1, 3, 4, 5, 6]
    by_length = [
        (length, where.tolist()) for length, where in pack((2, 1, 2), device=torch.device("cpu")).tokens_by_length
    ]
    assert by_length == [(1, [2]), (2, [0, 1, 3, 4])]
    with pytest.raises(ValueError, match="each sequence needs at least one token"):
        pack((2, 0), device=torch.device("cpu"))


def test_a_cpu_gets_sdpa_and_is_told_why() -> None:
    attention = open_attention("auto", device_type="cpu")
    assert (attention.name, attention.attend) == ("sdpa", attend_with_sdpa)
    assert "CPU" in attention.reason
    assert open_attention("sdpa", device_type="cuda").name == "sdpa"


def test_a_compiled_model_gets_what_the_compiler_sees_into() -> None:
    attention = open_attention("auto", device_type="cuda", compiles=True)
    assert attention.name == "sdpa" and "--compile" in attention.reason


def test_naive_attention_is_there_to_compare() -> None:
    assert open_attention("naive", device_type="cpu").attend is attend_naively


def test_xformers_on_a_cpu_is_refused_in_words() -> None:
    with pytest.raises(UserError, match="--attention xformers does not support a CPU") as caught:
        open_attention("xformers", device_type="cpu")
    assert "--attention sdpa" in (caught.value.hint or "")


def test_a_cpu_run_never_loads_xformers() -> None:
    def work() -> None:
        forget("clipmill", "xformers")
        import_module("clipmill.train.models.attention").open_attention("auto", device_type="cpu")
        assert "xformers" not in sys.modules

    assert run_forked(work) == (0, "")


@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("per_tile", [None, 2, 6])
def test_short_sequences_side_by_side_are_those_one_by_one(
    per_tile: int | None, dtype: torch.dtype, tolerance: float, has_first: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 6, 4, 3, 16)] * 3 + [(2, 1, 3, 16)] * 2
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k, v, *first = inputs = [x.to(dtype).requires_grad_() for x in drawn]
    of_all = (first[0], first[1]) if has_first else None
    result = attend_short(attend_with_sdpa, q, k, v, extra_key_value=of_all, num_per_tile=per_tile)
    rows = []
    for item, number in product(range(2), range(6)):
        seen = [x[item, number] for x in (k, v)]
        if of_all is not None:
            seen = [torch.cat([x[item], rest]) for x, rest in zip(of_all, seen, strict=True)]
        rows.append(attend_naively(q[item, number][None], *(x[None] for x in seen)))
    inputs = inputs if has_first else inputs[:3]
    expected = values_and_gradients(torch.cat(rows).view(q.shape), inputs)
    torch.testing.assert_close(values_and_gradients(result, inputs), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_frames", [4, 8, 16])
def test_the_frames_of_several_patches_fill_a_tile(num_frames: int) -> None:
    for num_patches in (196, 256, 576):
        number = sequences_per_tile(num_patches, num_frames)
        assert num_patches % number == 0 and 0.85 * 64 <= number * num_frames <= 64
    number = sequences_per_tile(196, num_frames)
    rows = number * num_frames
    cells = (
        f"{num_frames}",
        f"{num_frames} ({num_frames / 128:.0%})",
        f"{number}",
        f"{rows} ({rows / 64:.0%})",
        f"{196 // number} instead of 196",
    )
    row = f"| {' | '.join(cells)} |".replace("%", " %")
    assert row in (Path(__file__).parents[3] / "docs/models.md").read_text().splitlines()


def test_sequences_that_fit_in_no_tile_together_are_computed_one_by_one() -> None:
    assert [sequences_per_tile(*sizes) for sizes in ((196, 33), (196, 200), (197, 8))] == [1, 1, 1]


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "packed", "most"),
    [
        (1, 1, 8, False, 65_535),  # limit of a dimension of CUDA's grid
        (785, 12, 64, False, 3_120),  # 32-bit indices for gradients of 896 tokens, 12 heads and 64 values each
        (3_137, 12, 64, False, 873),
        (128, 8, 64, False, 32_768),
        (128, 8, 80, False, 16_384),
        (13, 8, 64, True, 29_746),  # padding in addition to the tokens
        (10**6, 4_096, 64, False, 1),
    ],
)
def test_no_call_has_more_sequences_than_kernels_can_count(
    tokens: int, heads: int, width: int, packed: bool, most: int
) -> None:
    assert max_sequences(tokens, heads, width, packed=packed) == most
