"""Low-rank adapters: same outputs and gradients as peft, in every kind of block, and after merging."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from clipmill.train.config.model import Target, Towers
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.captioner import Captioner, Gpt2, gpt2_size
from clipmill.train.models.dual_encoder import SIZES, DualEncoder, size_of
from clipmill.train.models.timesformer import TimeSformer
from clipmill.train.models.transformer import (
    Block,
    LowRank,
    TransformerSize,
    add_adapters,
    merge_adapters,
    remove_adapters,
)
from clipmill.train.models.videomae import VideoMAEEncoder

WIDTH, RANK, ALPHA = 16, 3, 6


def adapt(tower: nn.Module, *, targets: tuple[Target, ...] = ("attention", "mlp")) -> Any:
    """Convert a tower to float64, and add adapters with nonzero weights."""
    tower.double()
    add_adapters(tower, rank=RANK, scale=ALPHA / RANK, targets=targets)
    generator = torch.Generator().manual_seed(1)
    for module in tower.double().modules():
        if isinstance(module, LowRank):
            module.B.data.normal_(generator=generator).mul_(0.1)
    return tower


def captioner() -> Captioner:
    towers = Towers(kind="timesformer")
    video = TimeSformer(size_of("tiny", towers).video, image_px=32, num_frames=2, attend=attend_with_sdpa)
    blocks: Any = video.transformer.resblocks
    for block in blocks:
        nn.init.normal_(block.time_proj.weight, std=0.1)  # zero in a new tower, which would hide a mistake
    decoder = Gpt2(gpt2_size("tiny", vocabulary_size=20, context_length=8), attend=attend_with_sdpa)
    return Captioner(video, decoder)


def test_outputs_and_gradients_are_those_of_peft() -> None:
    """A block of transformers' CLIP has separate layers with separate adapters for q, k and v."""
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=2, hidden_act="gelu", attention_dropout=0.0
    )
    config._attn_implementation = "sdpa"  # the other implementation computes the softmax in float32
    theirs: Any = CLIPEncoderLayer(config).double()
    ours: Any = Block(TransformerSize(width=WIDTH, depth=1, num_heads=2), attend=attend_with_sdpa).double()
    qkv = qkv_of(theirs)
    ours.attn.in_proj_weight.data.copy_(torch.cat([layer.weight for layer in qkv]))
    ours.attn.in_proj_bias.data.copy_(torch.cat([layer.bias for layer in qkv]))
    for our_layer, its in (
        (ours.attn.out_proj, theirs.self_attn.out_proj),
        (ours.mlp.c_fc, theirs.mlp.fc1),
        (ours.mlp.c_proj, theirs.mlp.fc2),
        (ours.ln_1, theirs.layer_norm1),
        (ours.ln_2, theirs.layer_norm2),
    ):
        our_layer.load_state_dict(its.state_dict())
    names = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    peft_config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, lora_dropout=0.0)
    model: Any = nn.ModuleDict({"layer": theirs})
    with_adapters: Any = peft.get_peft_model(model, peft_config)
    adapt(ours)
    # The adapter of the fused projection corresponds to one matrix A for all three layers.
    fused = [
        (layer, ours.attn.lora.A, rows) for layer, rows in zip(qkv_of(theirs), ours.attn.lora.B.chunk(3), strict=True)
    ]
    single = [
        (its, our_layer.lora.A, our_layer.lora.B)
        for its, our_layer in (
            (theirs.self_attn.out_proj, ours.attn.out_proj),
            (theirs.mlp.fc1, ours.mlp.c_fc),
            (theirs.mlp.fc2, ours.mlp.c_proj),
        )
    ]
    for its, own_a, own_b in fused + single:
        its.lora_A["default"].weight.data.copy_(own_a)
        its.lora_B["default"].weight.data.copy_(own_b)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    out, their_out = ours(x), with_adapters.base_model.model["layer"](x, attention_mask=None)
    their_out = their_out[0] if isinstance(their_out, tuple) else their_out
    torch.testing.assert_close(out, their_out, rtol=0, atol=1e-12)
    out.square().sum().backward()
    their_out.square().sum().backward()

    def gradients(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad

    for its, own_a, own_b in single:
        torch.testing.assert_close((own_a.grad, own_b.grad), gradients(its), rtol=1e-10, atol=1e-12)
    of_a, of_b = zip(*(gradients(its) for its, _, _ in fused), strict=True)
    its_fused = sum(of_a), torch.cat(of_b)
    torch.testing.assert_close((ours.attn.lora.A.grad, ours.attn.lora.B.grad), its_fused, rtol=1e-10, atol=1e-12)
    assert all(parameter.grad is None for name, parameter in ours.named_parameters() if "lora" not in name)


def qkv_of(layer: Any) -> tuple[Any, ...]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj


TOWERS: dict[str, Callable[[], nn.Module]] = {
    "clip": lambda: DualEncoder(SIZES["tiny"], image_px=32, num_frames=2, attend=attend_with_sdpa),
    "videomae": lambda: VideoMAEEncoder(
        size_of("tiny", Towers(kind="videomae")).video, image_px=32, num_frames=2, attend=attend_with_sdpa
    ),
    "timesformer and gpt2": captioner,
}


@pytest.mark.parametrize("targets", [("attention",), ("mlp",), ("attention", "mlp")])
@pytest.mark.parametrize("name", TOWERS)
def test_merged_weights_compute_the_same(name: str, targets: tuple[Target, ...]) -> None:
    torch.manual_seed(0)
    model = adapt(TOWERS[name](), targets=targets).eval()
    video = torch.randn(2, 3, 2, 32, 32, dtype=torch.float64)
    inputs: Any = {
        "clip": (video, torch.tensor([[1, 2, 3, 9], [1, 9, 0, 0]])),
        "videomae": (video,),
        "timesformer and gpt2": (video, torch.randint(20, (2, 5))),
    }[name]
    outputs = model(*inputs)
    kinds = {
        name.rpartition(".lora.")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora." in name
    }
    of_attention = {"attn", "out_proj", *({"time_attn", "time_proj", "cross_attn", "q_proj", "kv_proj"} & kinds)}
    assert kinds == {
        *(of_attention if "attention" in targets else ()),
        *({"c_fc", "c_proj"} if "mlp" in targets else ()),
    }
    whole = merge_adapters(model.state_dict(), scale=ALPHA / RANK)
    remove_adapters(model)
    plain = model(*inputs)
    assert model.state_dict().keys() == whole.keys()
    model.load_state_dict(whole)
    again = model(*inputs)
    for before, other, after in zip(
        *(output if isinstance(output, tuple) else (output,) for output in (outputs, plain, again)), strict=True
    ):
        assert (before - other).abs().max() > 1e-3
        torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


def test_a_decoder_with_adapters_writes_the_same_token_by_token() -> None:
    torch.manual_seed(0)
    model = adapt(captioner()).eval()
    video, tokens = torch.randn(1, 3, 2, 32, 32, dtype=torch.float64), torch.randint(20, (1, 5))
    logits = model(video, tokens)
    cache = model.start(video, num_tokens=5)
    for at in range(5):
        torch.testing.assert_close(model.step(tokens[:, at : at + 1], cache), logits[:, at], rtol=0, atol=1e-12)


def test_new_adapters_change_nothing() -> None:
    torch.manual_seed(0)
    model = captioner().eval()
    video, tokens = torch.randn(1, 3, 2, 32, 32), torch.randint(20, (1, 5))
    before = model(video, tokens)
    add_adapters(model, rank=2, scale=1.0, targets=("attention", "mlp"))
    torch.testing.assert_close(model(video, tokens), before, rtol=0, atol=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(name.endswith((".lora.A", ".lora.B")) for name in trained)


def test_a_language_model_keeps_its_adapters_when_those_of_the_tower_are_merged() -> None:
    """transformers stores GPT-2 matrices as [I, O], so a product of the wrong orientation would fit a square matrix."""
    parts = ("weight", "lora_A.default.weight", "lora_B.default.weight")
    names = [f"{layer}.{part}" for layer in ("video.model.proj", "decoder.h.0.attn.c_proj") for part in parts]
    tensors = {name: torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(names)}
    merged = merge_adapters(tensors, scale=2.0)
    assert merged.keys() == {"video.model.proj.weight", *names[3:]}
    assert all(merged[name] is tensors[name] for name in names[3:])
    W, A, B = (tensors[name] for name in names[:3])
    torch.testing.assert_close(merged[names[0]], W + 2 * B @ A)
