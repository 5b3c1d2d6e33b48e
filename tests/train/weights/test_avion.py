"""Weights of AVION and LaViLa, synthesised under their names and compared with forward passes written out here.

The towers below use only torch's functions. Names, shapes, activations and eps are those of the published code.
"""

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Init
from clipmill.train.weights.open_clip import MISTYPED_MEAN
from clipmill.train.weights.source import Source
from clipmill.train.weights.sources import open_weights
from tests.train.weights import small
from tests.train.weights.small import ignore_line, loaded_weights, our_model, tokens

NUM_FRAMES = 4
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Names:
    """Names that a project gives to the parts of a block."""

    qkv_weight: str = "attn.in_proj_weight"
    qkv_bias: str = "attn.in_proj_bias"
    out: str = "attn.out_proj"
    fc1: str = "mlp.c_fc"
    fc2: str = "mlp.c_proj"
    ln_1: str = "ln_1"
    ln_2: str = "ln_2"


PLAIN = Names()
FLASH = Names(qkv_weight="attn.Wqkv.weight", qkv_bias="attn.Wqkv.bias", fc1="mlp.fc1", fc2="mlp.fc2")
TIMM = Names("attn.qkv.weight", "attn.qkv.bias", "attn.proj", "mlp.fc1", "mlp.fc2", "norm1", "norm2")


def block_shapes(prefix: str, width: int, names: Names) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block's tensors."""
    shapes: dict[str, tuple[int, ...]] = {names.qkv_weight: (3 * width, width), names.qkv_bias: (3 * width,)}
    for name, (rows, columns) in {
        names.out: (width, width),
        names.fc1: (4 * width, width),
        names.fc2: (width, 4 * width),
    }.items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name in (names.ln_1, names.ln_2):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def text_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    width = small.TEXT_WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (small.VOCABULARY, width),
        "positional_embedding": (small.CONTEXT, width),
        "ln_final.weight": (width,),
        "ln_final.bias": (width,),
        "text_projection": (width, small.EMBEDDING),
    }
    for number in range(small.DEPTH):
        shapes |= block_shapes(f"transformer.resblocks.{number}", width, PLAIN)
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def fill(shapes: dict[str, tuple[int, ...]]) -> State:
    generator = torch.Generator().manual_seed(3)
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def avion_state(names: Names, *, is_conv_a_matrix: bool, num_frames: int = NUM_FRAMES) -> State:
    """Make a small state dict in the layout of `CLIP_VITB16(num_frames=4, ...)`."""
    width = small.WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "visual.class_embedding": (width,),
        "visual.positional_embedding": (1 + (small.IMAGE_PX // small.PATCH_PX) ** 2, width),
        "visual.conv1.weight": (width, 3, small.PATCH_PX, small.PATCH_PX),
        "visual.image_projection": (width, small.EMBEDDING),
        "logit_scale": (),
    }
    if num_frames > 1:
        shapes["visual.temporal_embedding"] = (num_frames, width)
    for name in ("ln_pre", "ln_post"):
        shapes |= {f"visual.{name}.weight": (width,), f"visual.{name}.bias": (width,)}
    for number in range(small.DEPTH):
        shapes |= block_shapes(f"visual.transformer.resblocks.{number}", width, names)
    state = fill(shapes | text_shapes("textual."))
    if is_conv_a_matrix:
        state["visual.conv1.weight"] = state["visual.conv1.weight"].flatten(1)
    return state


def block(
    x_BLD: torch.Tensor, state: State, prefix: str, names: Names, *, heads: int, act: Any, eps: float, mask: Any
) -> Any:
    """Compute a pre-norm block, step by step."""

    def get(name: str) -> torch.Tensor:
        return state[f"{prefix}.{name}"]

    b, n, d = x_BLD.shape
    normed = functional.layer_norm(x_BLD, (d,), get(f"{names.ln_1}.weight"), get(f"{names.ln_1}.bias"), eps)
    q, k, v = (normed @ get(names.qkv_weight).T + get(names.qkv_bias)).chunk(3, dim=-1)
    q, k, v = (tensor.reshape(b, n, heads, d // heads).transpose(1, 2) for tensor in (q, k, v))
    scores = q @ k.transpose(2, 3) / (d // heads) ** 0.5
    mixed = ((scores + mask).softmax(-1) @ v).transpose(1, 2).reshape(b, n, d)
    x_BLD = x_BLD + mixed @ get(f"{names.out}.weight").T + get(f"{names.out}.bias")
    normed = functional.layer_norm(x_BLD, (d,), get(f"{names.ln_2}.weight"), get(f"{names.ln_2}.bias"), eps)
    inner = act(normed @ get(f"{names.fc1}.weight").T + get(f"{names.fc1}.bias"))
    return x_BLD + inner @ get(f"{names.fc2}.weight").T + get(f"{names.fc2}.bias")


def avion_video(clips_BCTHW: torch.Tensor, state: State, names: Names) -> torch.Tensor:
    """Compute AVION's encode_image: GELU, eps 1e-6, tokens of all frames in one sequence.

    The temporal embedding of a frame is added to all its patches.
    """
    state = {name.removeprefix("visual."): tensor for name, tensor in state.items()}
    kernel = state["conv1.weight"].reshape(small.WIDTH, 3, small.PATCH_PX, small.PATCH_PX)
    frames = [
        functional.conv2d(clips_BCTHW[:, :, t], kernel, stride=small.PATCH_PX).flatten(2).transpose(1, 2)
        for t in range(clips_BCTHW.shape[2])
    ]
    positions = state["positional_embedding"]
    rows = [frame + positions[1:] + state["temporal_embedding"][t] for t, frame in enumerate(frames)]
    first = (state["class_embedding"] + positions[0]).expand(len(clips_BCTHW), 1, -1)
    x = torch.cat([first, *rows], dim=1)
    x = functional.layer_norm(x, x.shape[-1:], state["ln_pre.weight"], state["ln_pre.bias"], 1e-6)
    for number in range(small.DEPTH):
        prefix = f"transformer.resblocks.{number}"
        x = block(x, state, prefix, names, heads=small.HEADS, act=functional.gelu, eps=1e-6, mask=0.0)
    x = functional.layer_norm(x[:, 0], x.shape[-1:], state["ln_post.weight"], state["ln_post.bias"], 1e-6)
    return x @ state["image_projection"]


def text_features(ids_BL: torch.Tensor, state: State, prefix: str, act: Any) -> torch.Tensor:
    """Compute CLIP's text tower, with eps 1e-5."""
    state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    x = state["token_embedding.weight"][ids_BL] + state["positional_embedding"]
    mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1).to(x.dtype)
    for number in range(small.DEPTH):
        name = f"transformer.resblocks.{number}"
        x = block(x, state, name, PLAIN, heads=small.TEXT_HEADS, act=act, eps=1e-5, mask=mask)
    x = functional.layer_norm(x, x.shape[-1:], state["ln_final.weight"], state["ln_final.bias"], 1e-5)
    return x[torch.arange(len(x)), ids_BL.argmax(1)] @ state["text_projection"]


def double(state: State) -> State:
    return {name: tensor.double() for name, tensor in state.items()}


def clips(num_frames: int) -> torch.Tensor:
    shape = (2, 3, num_frames, small.IMAGE_PX, small.IMAGE_PX)
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def training_checkpoint(state: State) -> dict[str, Any]:
    """Make a checkpoint like the ones that AVION's and LaViLa's scripts save.

    It has DDP's prefixes, a Namespace of arguments and a NumPy score.
    """
    return {
        "epoch": 5,
        "state_dict": {f"module.{name}": tensor for name, tensor in state.items()},
        "optimizer": {"state": {}, "param_groups": [{"lr": 3e-5}]},
        "scaler": {"scale": 65536.0},
        "best_acc1": np.float64(33.2),
        "args": Namespace(model="CLIP_VITB16", clip_length=4, output_dir="exp", lr=3e-5),
    }


def open_source(path: Path, **settings: Any) -> Source:
    source = open_weights(Init(weights=str(path), **settings))
    assert source is not None
    return source


@pytest.mark.parametrize(("names", "is_conv_a_matrix"), [(PLAIN, False), (FLASH, False), (FLASH, True)])
def test_our_towers_compute_what_avions_do(tmp_path: Path, names: Names, is_conv_a_matrix: bool) -> None:
    state = avion_state(names, is_conv_a_matrix=is_conv_a_matrix)
    torch.save(training_checkpoint(state), tmp_path / "checkpoint_best.pt")
    source = open_source(tmp_path / "checkpoint_best.pt")
    facts = source.facts
    assert (facts.activation, facts.video_eps, facts.text_eps) == ("gelu", 1e-6, 1e-5)
    ours = our_model(activation="gelu", video_eps=1e-6, num_frames=NUM_FRAMES)
    loaded = loaded_weights(ours, source, say=ignore_line)
    assert loaded.fitted.changes == () and loaded.logit_scale == pytest.approx(state["logit_scale"].item())
    ours = ours.double()
    assert ours.text is not None
    expected = avion_video(clips(NUM_FRAMES), double(state), names)
    torch.testing.assert_close(ours.video(clips(NUM_FRAMES)), expected, atol=1e-9, rtol=0)
    text = text_features(tokens(), double(state), "textual.", functional.gelu)
    torch.testing.assert_close(ours.text(tokens()), text, atol=1e-9, rtol=0)


def test_projections_beside_the_towers_are_found_too(tmp_path: Path) -> None:
    state = avion_state(PLAIN, is_conv_a_matrix=False)
    state["image_projection"] = state.pop("visual.image_projection")
    state["text_projection"] = state.pop("textual.text_projection")
    torch.save(state, tmp_path / "w.pt")
    assert (
        loaded_weights(our_model(num_frames=NUM_FRAMES), open_source(tmp_path / "w.pt"), say=ignore_line).fitted.changes
        == ()
    )


def test_more_frames_interpolate_the_temporal_embedding(tmp_path: Path) -> None:
    state = avion_state(FLASH, is_conv_a_matrix=False)
    torch.save(state, tmp_path / "w.pt")
    ours = our_model(num_frames=16)
    loaded = loaded_weights(ours, open_source(tmp_path / "w.pt"), say=ignore_line)
    (change,) = loaded.fitted.changes
    assert (change.kind, change.old, change.new) == ("resized", (4, small.WIDTH), (16, small.WIDTH))
    # AVION's inflate_positional_embeds resizes bilinearly over (T, D); D does not change.
    old = state["visual.temporal_embedding"]
    expected = functional.interpolate(old[None, None], size=(16, small.WIDTH), mode="bilinear")[0, 0]
    torch.testing.assert_close(ours.video.temporal_embedding.data, expected)


def test_the_mistyped_red_mean_is_part_of_the_weights(tmp_path: Path) -> None:
    torch.save(avion_state(PLAIN, is_conv_a_matrix=False), tmp_path / "w.pt")
    facts = open_source(tmp_path / "w.pt").facts
    assert facts.mean == MISTYPED_MEAN
    assert facts.mean[0] * 255 == pytest.approx(108.3272985) and facts.mean[1] * 255 == pytest.approx(116.7460125)
    assert facts.std is not None and facts.std[0] * 255 == pytest.approx(68.5005327)
    assert "108.33" in facts.remarks[0] and "GELU" in facts.remarks[0]


def lavila_state() -> State:
    """Make a small state dict in the layout of `CLIP_OPENAI_TIMESFORMER_BASE(num_frames=4)`."""
    width = small.WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "visual.cls_token": (1, 1, width),
        "visual.pos_embed": (1, 1 + (small.IMAGE_PX // small.PATCH_PX) ** 2, width),
        "visual.temporal_embed": (1, NUM_FRAMES, width),
        "visual.patch_embed.proj.weight": (width, 3, small.PATCH_PX, small.PATCH_PX),
        "image_projection": (width, small.EMBEDDING),
        "logit_scale": (),
    }
    for name in ("ln_pre", "norm"):
        shapes |= {f"visual.{name}.weight": (width,), f"visual.{name}.bias": (width,)}
    for number in range(small.DEPTH):
        prefix = f"visual.blocks.{number}"
        shapes |= block_shapes(prefix, width, TIMM)
        shapes |= {f"{prefix}.norm3.weight": (width,), f"{prefix}.norm3.bias": (width,)}
        shapes |= {f"{prefix}.timeattn.qkv.weight": (3 * width, width), f"{prefix}.timeattn.qkv.bias": (3 * width,)}
        shapes |= {f"{prefix}.timeattn.proj.weight": (width, width), f"{prefix}.timeattn.proj.bias": (width,)}
    return fill(shapes | text_shapes(""))


def test_lavilas_time_attention_has_no_place_and_is_not_dropped_in_silence(tmp_path: Path) -> None:
    torch.save(training_checkpoint(lavila_state()), tmp_path / "clip.pt")
    messages: list[str] = []
    with pytest.raises(UserError, match=r"12 unexpected \(visual.blocks.0.norm3.weight"):
        loaded_weights(our_model(num_frames=NUM_FRAMES), open_source(tmp_path / "clip.pt"), say=messages.append)
    assert any("visual.blocks.*.timeattn.qkv.weight (2 tensors)" in line and "UNEXPECTED" in line for line in messages)


def test_lavilas_space_and_text_are_loaded_where_the_user_says_so(tmp_path: Path) -> None:
    state = lavila_state()
    torch.save(training_checkpoint(state), tmp_path / "clip.pt")
    source = open_source(tmp_path / "clip.pt")
    assert (source.facts.activation, source.facts.video_eps, source.facts.mean) == ("quick_gelu", 1e-6, MISTYPED_MEAN)
    allow = ("visual.blocks.*.timeattn.*", "visual.blocks.*.norm3.*")
    ours = our_model(activation="quick_gelu", video_eps=1e-6, num_frames=NUM_FRAMES)
    loaded = loaded_weights(ours, source, allow=allow, say=ignore_line)
    assert {change.why.split()[0] for change in loaded.fitted.changes} == {"allowed"}
    ours = ours.double()
    assert ours.text is not None

    def act(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)

    torch.testing.assert_close(ours.text(tokens()), text_features(tokens(), double(state), "", act), atol=1e-9, rtol=0)
    # For one frame, and with a time attention that adds nothing, TimeSformer equals an image tower.
    state_double = double(state)
    x = functional.conv2d(clips(1)[:, :, 0], state_double["visual.patch_embed.proj.weight"], stride=small.PATCH_PX)
    x = torch.cat([state_double["visual.cls_token"].expand(2, 1, -1), x.flatten(2).transpose(1, 2)], dim=1)
    x = x + state_double["visual.pos_embed"]
    x = torch.cat([x[:, :1], x[:, 1:] + state_double["visual.temporal_embed"][:, :1]], dim=1)
    x = functional.layer_norm(
        x, x.shape[-1:], state_double["visual.ln_pre.weight"], state_double["visual.ln_pre.bias"], 1e-6
    )
    for number in range(small.DEPTH):
        x = block(x, state_double, f"visual.blocks.{number}", TIMM, heads=small.HEADS, act=act, eps=1e-6, mask=0.0)
    x = functional.layer_norm(
        x[:, 0], x.shape[-1:], state_double["visual.norm.weight"], state_double["visual.norm.bias"], 1e-6
    )
    single = our_model(activation="quick_gelu", video_eps=1e-6, num_frames=1)
    loaded_weights(single, source, allow=allow, say=ignore_line)
    single = single.double()
    with torch.no_grad():
        single.video.temporal_embedding.copy_(state_double["visual.temporal_embed"][0, :1])
    torch.testing.assert_close(single.video(clips(1)), x @ state_double["image_projection"], atol=1e-9, rtol=0)


def lavila_video(clips_BCTHW: torch.Tensor, state: State) -> torch.Tensor:
    """Compute LaViLa's encode_image token by token, with explicit masks for attention over time and over space."""
    state = {name.removeprefix("visual."): tensor for name, tensor in state.items()}
    num_frames, kernel = clips_BCTHW.shape[2], state["patch_embed.proj.weight"]
    frames = [
        functional.conv2d(clips_BCTHW[:, :, t], kernel, stride=small.PATCH_PX).flatten(2).transpose(1, 2)
        for t in range(num_frames)
    ]
    positions = state["pos_embed"][0]
    rows = [frame + positions[1:] + state["temporal_embed"][0, t] for t, frame in enumerate(frames)]
    x = torch.cat([(state["cls_token"][0] + positions[:1]).expand(len(clips_BCTHW), 1, -1), *rows], dim=1)
    x = functional.layer_norm(x, x.shape[-1:], state["ln_pre.weight"], state["ln_pre.bias"], 1e-5)
    num_patches, d = frames[0].shape[1:]
    place = torch.arange(num_frames * num_patches)
    patch, frame = place % num_patches, place // num_patches

    def attend(x: torch.Tensor, norm: str, name: str, group: torch.Tensor) -> torch.Tensor:
        """Compute attention in which the class token sees all tokens.

        A patch sees the class token and the patches of its group.
        """
        normed = functional.layer_norm(x, (d,), state[f"{norm}.weight"], state[f"{norm}.bias"], 1e-6)
        q, k, v = (normed @ state[f"{name}.qkv.weight"].T + state[f"{name}.qkv.bias"]).chunk(3, dim=-1)
        heads = (len(x), -1, small.HEADS, d // small.HEADS)
        q, k, v = (tensor.reshape(heads).transpose(1, 2) for tensor in (q, k, v))
        sees = torch.ones(len(place) + 1, len(place) + 1, dtype=torch.bool)
        sees[1:, 1:] = group[:, None] == group[None]
        scores = (q @ k.transpose(2, 3) / (d // small.HEADS) ** 0.5).masked_fill(~sees, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return mixed @ state[f"{name}.proj.weight"].T + state[f"{name}.proj.bias"]

    for number in range(small.DEPTH):
        its = f"blocks.{number}"
        timed = x + attend(x, f"{its}.norm3", f"{its}.timeattn", patch)
        x = x + attend(timed, f"{its}.norm1", f"{its}.attn", frame)
        normed = functional.layer_norm(x, (d,), state[f"{its}.norm2.weight"], state[f"{its}.norm2.bias"], 1e-6)
        inner = normed @ state[f"{its}.mlp.fc1.weight"].T + state[f"{its}.mlp.fc1.bias"]
        inner = inner * torch.sigmoid(1.702 * inner)
        x = x + inner @ state[f"{its}.mlp.fc2.weight"].T + state[f"{its}.mlp.fc2.bias"]
    x = functional.layer_norm(x[:, 0], (d,), state["norm.weight"], state["norm.bias"], 1e-6)
    return x @ state["image_projection"]


def test_a_divided_tower_computes_what_lavilas_does(tmp_path: Path) -> None:
    state = lavila_state()
    torch.save(training_checkpoint(state), tmp_path / "clip.pt")
    divided = replace(small.SIZE, video=replace(small.SIZE.video, is_divided=True))
    ours = our_model(activation="quick_gelu", video_eps=1e-6, num_frames=NUM_FRAMES, size=divided)
    assert loaded_weights(ours, open_source(tmp_path / "clip.pt"), say=ignore_line).fitted.changes == ()
    expected = lavila_video(clips(NUM_FRAMES), double(state))
    torch.testing.assert_close(ours.double().video(clips(NUM_FRAMES)), expected, atol=1e-9, rtol=0)
