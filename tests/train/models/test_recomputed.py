"""Recomputed, compiled, half-precision and sharded blocks give the results of ordinary blocks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from clipmill.train.config.model import Towers
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.captioner import Gpt2Block
from clipmill.train.models.dual_encoder import DualEncoder
from clipmill.train.models.space_time import SpaceTimeBlock
from clipmill.train.models.timesformer import DividedBlock
from clipmill.train.models.transformer import Block, Stack, TransformerSize, blocks_of, compile_blocks
from tests.train.models.small_towers import captions, clips, gradients, small_encoder

CAPTIONS = captions(2, 5, 12, 7)
LEFT_OUT = {"patch_dropout": 0.5, "drop_path": 0.3}


def step(
    model: DualEncoder, *, captions_BL: torch.Tensor = CAPTIONS, seed: int = 0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a loss and its gradients, with all random numbers drawn from `seed`."""
    torch.manual_seed(seed)
    video, text = model.train()(clips(4), captions_BL)
    loss = ((video @ text.T) ** 2).sum()
    return loss, gradients(model, loss)


@pytest.mark.parametrize("packed_text", [True, False])
def test_checkpointed_blocks_give_the_same_gradients_with_parts_left_out(packed_text: bool) -> None:
    plain = small_encoder(Towers(packed_text=packed_text, **LEFT_OUT))  # type: ignore[arg-type]
    twice = small_encoder(Towers(packed_text=packed_text, activation_checkpointing=True, **LEFT_OUT))  # type: ignore[arg-type]
    calls = count_calls(twice)
    torch.testing.assert_close(step(twice), step(plain), atol=0, rtol=0)
    assert calls == [2] * 6
    assert not torch.equal(step(plain, seed=0)[0], step(plain, seed=1)[0])


@pytest.mark.parametrize(("dropout", "keeps"), [(0.0, False), (0.1, True)])
def test_generator_states_are_kept_only_where_something_is_drawn(
    dropout: float, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = 0
    get_state = torch.get_rng_state

    def count() -> torch.Tensor:
        nonlocal states
        states += 1
        return get_state()

    size = TransformerSize(width=16, depth=2, num_heads=2)
    stack = Stack(Gpt2Block(size, attend=attend_with_sdpa, dropout=dropout) for _ in range(2))
    stack.checkpoint()
    tokens, video = torch.randn(2, 3, 16, requires_grad=True), torch.randn(2, 4, 16)
    monkeypatch.setattr(torch, "get_rng_state", count)
    stack.train()(tokens, video).sum().backward()
    assert (states > 0) == keeps


def count_calls(model: DualEncoder) -> list[int]:
    """Return a list of the number of calls of each block, which is updated with each call."""
    blocks = blocks_of(model)
    calls = [0] * len(blocks)

    def count(number: int) -> None:
        calls[number] += 1

    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: count(number))
    return calls


def test_without_gradients_nothing_is_computed_twice() -> None:
    model = small_encoder(Towers(activation_checkpointing=True))
    calls = count_calls(model)
    with torch.no_grad():
        model(clips(2), captions(2, 3))
    assert calls == [1] * 6


def test_checkpointed_blocks_keep_less() -> None:
    def kept_bytes(towers: Towers) -> int:
        model = small_encoder(towers)
        addresses = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.nbytes if tensor.untyped_storage().data_ptr() not in addresses else 0
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.video(clips(2))
        return kept

    assert kept_bytes(Towers(activation_checkpointing=True)) < kept_bytes(Towers()) / 5


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.nightly
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_are_whole_graphs_that_all_of_them_share(backend: str) -> None:
    towers = Towers(activation_checkpointing=True, temporal="random", **LEFT_OUT)  # type: ignore[arg-type]
    plain, compiled = small_encoder(towers), small_encoder(towers)
    names = list(compiled.state_dict())
    compile_blocks(compiled, backend=backend, fullgraph=True)
    assert list(compiled.state_dict()) == names
    for lengths in ((2, 5, 12, 7), (3, 4, 5, 6), (12, 12, 11, 2)):
        outcome = step(compiled, captions_BL=captions(*lengths))
        torch.testing.assert_close(outcome, step(plain, captions_BL=captions(*lengths)), atol=1e-11, rtol=0)
    # There are graphs for clips, for captions of one total length and for captions of any length, not one for each
    # block and batch.
    assert counters["stats"]["unique_graphs"] <= 4
    assert not counters["graph_break"]
    with torch.no_grad():
        evaluated = [model.eval()(clips(2), captions(4, 9)) for model in (compiled, plain)]
    torch.testing.assert_close(*evaluated, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_finite_and_close_in_half_precision(dtype: torch.dtype) -> None:
    towers = Towers(activation_checkpointing=True, **LEFT_OUT)  # type: ignore[arg-type]
    exact_loss, exact = step(small_encoder(towers))
    model = small_encoder(towers).float()
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=dtype):
        # The draws equal those in float64, because the dtypes of drawn cubes and branches do not depend on the model.
        video, text = model.train()(clips(4).float(), CAPTIONS)
        loss = ((video @ text.T) ** 2).sum()
    gradients_found = gradients(model, loss)
    for name, gradient in gradients_found.items():
        assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name
    assert loss.item() == pytest.approx(exact_loss.item(), rel=0.2)
    flat = torch.cat([gradients_found[name].flatten().double() for name in exact])
    expected = torch.cat([gradient.flatten() for gradient in exact.values()])
    assert torch.nn.functional.cosine_similarity(flat, expected, dim=0) > 0.9


def test_the_units_of_a_model_are_its_blocks() -> None:
    blocks = blocks_of(small_encoder())
    assert len(blocks) == 6 and all(isinstance(block, Block) for block in blocks)


@pytest.mark.parametrize("kind", [Block, Gpt2Block, DividedBlock, SpaceTimeBlock])
def test_no_tokens_of_a_block_are_cast_in_half_precision(kind: Any) -> None:
    """Parameters are cast. Layer norms take bfloat16 tokens and compute their statistics in float32 internally."""
    casts: list[torch.Size] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].dtype != kwargs.get("dtype", args[0].dtype):
                casts.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    size = TransformerSize(width=16, depth=2, num_heads=2)
    frames = {} if kind in (Block, Gpt2Block) else {"num_frames": 4}
    block = kind(size, attend=attend_with_sdpa, **frames, **({"dropout": 0.0} if kind is Gpt2Block else {}))
    tokens, video = torch.randn(2, 13, 16).bfloat16().requires_grad_(), torch.randn(2, 5, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), Casts():
        out = block(tokens, *([video] if kind is Gpt2Block else []))
        out.backward(torch.ones_like(out))
    assert out.dtype == torch.bfloat16
    assert casts and set(casts) <= {parameter.shape for parameter in block.parameters()} | {(32, 16), (32,)}
