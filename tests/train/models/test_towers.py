"""The towers compared with open_clip's towers, with the same weights."""

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from open_clip.model import CLIP

from clipmill.train.config.model import Activation, Towers
from clipmill.train.models.attention import Attend, attend_naively, attend_with_sdpa
from clipmill.train.models.dual_encoder import SIZES, DualEncoder, size_of
from clipmill.train.models.text import CONTEXT_LENGTH, TextTower, load_tokenizer
from clipmill.train.models.transformer import Block, blocks_of
from tests.forked import forget, run_forked
from tests.train.models.small_towers import captions, clips, small_encoder, spread_out

OPEN_CLIPS_NAMES = {
    "s16": "ViT-S-16",
    "b32": "ViT-B-32",
    "b16": "ViT-B-16",
    "l16": "ViT-L-16",
    "l14": "ViT-L-14",
    "l14-336": "ViT-L-14-336",
}


@pytest.fixture(params=["gelu", "quick_gelu"])
def activation(request: pytest.FixtureRequest) -> Activation:
    chosen: Activation = request.param
    return chosen


@pytest.fixture
def theirs(activation: Activation, tmp_path: Path) -> CLIP:
    """open_clip's model of the small size, made from a configuration file as its users do."""
    name = f"small-{activation}"
    trunk = {"width": 32, "layers": 3}
    config = {
        "embed_dim": 24,
        "quick_gelu": activation == "quick_gelu",
        "vision_cfg": {**trunk, "image_size": 32, "patch_size": 8, "head_width": 8},
        "text_cfg": {**trunk, "heads": 4, "vocab_size": 100, "context_length": 12},
    }
    (tmp_path / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path)
    model = open_clip.create_model(name).double().eval()
    assert isinstance(model, CLIP)
    spread_out(model)
    return model


def under_our_names(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename weights of open_clip's CLIP to the names of clipmill's towers."""
    renamed = {}
    for name, tensor in theirs.items():
        if name in ("logit_scale", "attn_mask"):
            continue
        renamed[name.replace("visual.", "video.") if name.startswith("visual.") else f"text.{name}"] = tensor
    return renamed


def ours_with_weights_of(theirs: CLIP, towers: Towers, *, attend: Attend = attend_with_sdpa) -> DualEncoder:
    ours = small_encoder(towers, num_frames=1, attend=attend).eval()
    outcome = ours.load_state_dict(under_our_names(theirs.state_dict()), strict=False)
    assert (outcome.missing_keys, outcome.unexpected_keys) == (["video.temporal_embedding"], [])
    return ours


@pytest.mark.parametrize("attend", [attend_with_sdpa, attend_naively])
def test_one_frame_without_temporal_embedding_has_open_clips_image_features(
    theirs: CLIP, activation: Activation, attend: Attend
) -> None:
    ours = ours_with_weights_of(theirs, Towers(activation=activation), attend=attend)
    images = clips(5, 1)
    torch.testing.assert_close(ours.video(images), theirs.encode_image(images[:, :, 0]), atol=1e-12, rtol=0)
    unit = theirs.encode_image(images[:, :, 0], normalize=True)
    torch.testing.assert_close(ours.embed_video(images), unit, atol=1e-12, rtol=0)


@pytest.mark.parametrize("packed_text", [True, False])
def test_captions_have_open_clips_text_features(theirs: CLIP, activation: Activation, packed_text: bool) -> None:
    ours = ours_with_weights_of(theirs, Towers(activation=activation, packed_text=packed_text))
    tokens = captions(2, 5, 12, 5)
    torch.testing.assert_close(ours.embed_text(tokens), theirs.encode_text(tokens, normalize=True), atol=1e-12, rtol=0)


def test_the_wrong_activation_is_seen(theirs: CLIP, activation: Activation) -> None:
    other: Activation = "quick_gelu" if activation == "gelu" else "gelu"
    ours = ours_with_weights_of(theirs, Towers(activation=other))
    images = clips(2, 1)
    assert not torch.allclose(ours.video(images), theirs.encode_image(images[:, :, 0]), atol=1e-4)


@pytest.mark.parametrize("name", sorted(OPEN_CLIPS_NAMES))
def test_a_size_has_every_tensor_of_open_clips(name: str) -> None:
    with torch.device("meta"):
        theirs = open_clip.create_model(OPEN_CLIPS_NAMES[name], device="meta")
        image_px = 336 if name == "l14-336" else 224
        ours = DualEncoder(SIZES[name], image_px=image_px, num_frames=4, attend=attend_with_sdpa)
    expected = {key: tuple(value.shape) for key, value in under_our_names(theirs.state_dict()).items()}
    shapes = {key: tuple(value.shape) for key, value in ours.state_dict().items()}
    assert shapes.pop("video.temporal_embedding")[0] == 4
    assert shapes == expected
    assert isinstance(ours.text, TextTower)
    for their_trunk, our_trunk in (
        (theirs.visual.transformer, ours.video.transformer),
        (theirs.transformer, ours.text.transformer),
    ):
        our_block = blocks_of(our_trunk)[0]
        assert isinstance(our_block, Block)
        assert their_trunk.resblocks[0].attn.num_heads == our_block.attn.num_heads


def test_settings_change_what_a_name_stands_for() -> None:
    towers = Towers(tubelet=2, embedding_width=256, activation="quick_gelu", video_norm_eps=1e-6)
    size = size_of("l14", towers)
    assert (size.video.cube_frames, size.embedding_width, size.video.patch_px) == (2, 256, 14)
    assert (size.video.trunk.norm_eps, size.text.trunk.norm_eps) == (1e-6, 1e-5)
    assert size.video.trunk.activation == size.text.trunk.activation == "quick_gelu"
    assert size_of("b16", Towers()) == SIZES["b16"]
    with torch.device("meta"):
        model = DualEncoder(size, image_px=28, num_frames=2, attend=attend_with_sdpa, towers=towers)
    assert {module.eps for module in model.video.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_are_float32_of_unit_length_in_whatever_precision(dtype: torch.dtype) -> None:
    model = small_encoder().float()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        video, text = model(clips(3).float(), captions(3, 5, 12))
    for embedding in (video, text):
        assert embedding.dtype == torch.float32 and embedding.isfinite().all()
        torch.testing.assert_close(embedding.norm(dim=1), torch.ones(3))
    exact_video, exact_text = model.double()(clips(3), captions(3, 5, 12))
    assert (video.double() * exact_video).sum(dim=1).min() > 0.99
    assert (text.double() * exact_text).sum(dim=1).min() > 0.99


def test_the_tokenizer_wraps_pads_and_cuts() -> None:
    tokenize = load_tokenizer()
    ids = tokenize("A red circle moves left")
    assert ids.dtype == "int64" and ids.shape == (77,)
    assert ids[0] == 49406 and ids[6] == 49407 and not ids[7:].any()
    assert (ids == tokenize("  a RED circle moves   left")).all()
    long = tokenize("word " * 200)
    assert long[76] == 49407 and (long != 0).all()


def test_the_tokenizer_comes_without_the_rest_of_open_clip() -> None:
    others = {"open_clip", "timm", "torchvision", "transformers"}

    def work() -> None:
        forget("clipmill", *others)
        import_module("clipmill.train.models.text").load_tokenizer()("a word")
        assert not others & sys.modules.keys()

    assert run_forked(work) == (0, "")


def test_captions_have_the_tokens_of_open_clip_whatever_is_in_them() -> None:
    from open_clip.tokenizer import SimpleTokenizer

    theirs, ours = SimpleTokenizer(context_length=CONTEXT_LENGTH), load_tokenizer()
    ascii_only = [chr(code) for code in range(32, 127)]
    odd = ["\n", "\t", "\x00", "\x1b", "\x85", "\u3000", "\u00e9", "\ufb01", "\u201c", "\u0130", "\uff21", "\u4f60"]
    odd += ["&amp;amp;", "&lt;b&gt;", "<start_of_text>", "<end_of_text>", "'s", "'LL"]
    random = np.random.default_rng(0)
    texts = ["", " ", "a", "word " * 200, "a  b", "salt &amp; pepper", "&lt;b&gt; it"]
    for characters in (ascii_only, ascii_only + 5 * odd):
        texts += ["".join(random.choice(characters, random.integers(1, 120))) for _ in range(400)]
    for text in texts * 2:  # the second pass uses cached words
        assert ours(text).tolist() == theirs([text])[0].tolist(), repr(text)
