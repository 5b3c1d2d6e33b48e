"""Weights of open_clip and OpenAI: the model computes the same function, and the export is bit-identical."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Init, Towers
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import DualEncoder, size_of
from clipmill.train.weights.conversion import SourceFacts
from clipmill.train.weights.open_clip import from_open_clip, to_open_clip
from clipmill.train.weights.source import Source
from clipmill.train.weights.sources import fetch_tag, open_weights
from tests.train.weights.small import (
    OPEN_CLIP_CONFIG,
    ignore_line,
    images,
    loaded_weights,
    open_clip_model,
    our_model,
    tokens,
)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_clip_model("small-clip", tmp_path_factory.mktemp("configs"))


def open_source(path: Path | str, **settings: Any) -> Source:
    source = open_weights(Init(weights=str(path), **settings))
    assert source is not None
    return source


def assert_same_features(ours: DualEncoder, theirs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(
            ours.video(images()[:, :, None]), theirs.encode_image(images()), atol=2e-5, rtol=2e-5
        )
        assert ours.text is not None
        torch.testing.assert_close(ours.text(tokens()), theirs.encode_text(tokens()), atol=2e-5, rtol=2e-5)


def as_state_dict(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(state, path)


def as_safetensors(state: dict[str, torch.Tensor], path: Path) -> None:
    save_file(state, path)


def as_training_checkpoint(state: dict[str, torch.Tensor], path: Path) -> None:
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 3, "name": "run", "state_dict": wrapped, "optimizer": {"state": {}, "param_groups": []}}, path)


def as_legacy_file(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("write", [as_state_dict, as_safetensors, as_training_checkpoint, as_legacy_file])
def test_our_towers_compute_what_open_clips_do(theirs: Any, tmp_path: Path, write: Any) -> None:
    path = tmp_path / "weights"
    write(theirs.state_dict(), path)
    ours = our_model()
    torch.nn.init.zeros_(ours.video.temporal_embedding)
    loaded = loaded_weights(ours, open_source(path), say=ignore_line)
    assert_same_features(ours, theirs)
    assert loaded.logit_scale == pytest.approx(theirs.logit_scale.item())
    assert [(change.kind, change.name) for change in loaded.fitted.changes] == [("created", "video.temporal_embedding")]
    assert loaded.fitted.num_copied == len(ours.state_dict()) - 1


def test_weights_go_there_and_back_bit_by_bit(theirs: Any) -> None:
    state = theirs.state_dict()
    back = to_open_clip(from_open_clip(state).tensors)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_text_tower_of_its_own_is_known_too(tmp_path: Path) -> None:
    theirs = open_clip_model("small-custom", tmp_path, custom_text=True)
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    ours = our_model()
    torch.nn.init.zeros_(ours.video.temporal_embedding)
    loaded_weights(ours, open_source(tmp_path / "w.pt"), say=ignore_line)
    assert_same_features(ours, theirs)


def test_a_folder_says_activation_norms_and_normalisation(theirs: Any, tmp_path: Path) -> None:
    save_file(theirs.state_dict(), tmp_path / "open_clip_model.safetensors")
    config = {
        "model_cfg": {**OPEN_CLIP_CONFIG, "quick_gelu": True},
        "preprocess_cfg": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.1]},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    facts = open_source(tmp_path).facts
    assert (facts.activation, facts.video_eps, facts.mean) == ("quick_gelu", 1e-5, (0.5, 0.4, 0.3))
    assert (facts.video_heads, facts.text_heads) == (4, 3)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("vision_cfg", "pool_type", "avg"),
        ("vision_cfg", "final_ln_after_pool", True),
        ("text_cfg", "no_causal_mask", True),
        ("text_cfg", "pool_type", "last"),
        ("text_cfg", "act_kwargs", {"approximate": "tanh"}),
    ],
)
def test_what_our_towers_do_not_compute_is_refused(
    theirs: Any, tmp_path: Path, part: str, name: str, value: object
) -> None:
    save_file(theirs.state_dict(), tmp_path / "open_clip_model.safetensors")
    config = {**OPEN_CLIP_CONFIG, part: {**OPEN_CLIP_CONFIG[part], name: value}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    with pytest.raises(UserError, match=f"{part}.{name} is"):
        open_source(tmp_path)


def test_another_number_of_heads_is_refused_though_the_shapes_fit(theirs: Any, tmp_path: Path) -> None:
    save_file(theirs.state_dict(), tmp_path / "open_clip_model.safetensors")
    vision = {**OPEN_CLIP_CONFIG["vision_cfg"], "head_width": 32}
    config = {"model_cfg": {**OPEN_CLIP_CONFIG, "vision_cfg": vision}, "preprocess_cfg": {}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="video tower has 2 heads, but the video tower of the model has 4"):
        loaded_weights(our_model(), open_source(tmp_path), say=ignore_line)


def test_openais_sizes_among_the_tensors_say_quick_gelu(tmp_path: Path) -> None:
    theirs = open_clip_model("small-openai", tmp_path, quick_gelu=True)
    sizes = {name: torch.tensor(value) for name, value in (("input_resolution", 32), ("context_length", 12))}
    state = {**theirs.state_dict(), **sizes, "vocab_size": torch.tensor(99)}
    torch.save(
        {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()},
        tmp_path / "w",
    )
    source = open_source(tmp_path / "w")
    assert "OpenAI" in source.title and source.facts.activation == "quick_gelu"
    ours = our_model(activation="quick_gelu")
    torch.nn.init.zeros_(ours.video.temporal_embedding)
    loaded_weights(ours, source, say=ignore_line)
    with torch.no_grad():
        theirs.half().float()
    assert_same_features(ours, theirs)


def test_a_tag_comes_from_open_clip(theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(theirs.state_dict(), tmp_path / "cached.safetensors")
    monkeypatch.setattr("open_clip.pretrained.download_pretrained", lambda entry: str(tmp_path / "cached.safetensors"))
    messages: list[str] = []
    fetch_tag(Init(weights="ViT-B-16:openai"), say=messages.append)
    source = open_weights(Init(weights="ViT-B-16:openai"))
    assert source is not None and source.facts.activation == "quick_gelu" and source.facts.video_heads == 12
    assert "open_clip's cache, or downloading it" in messages[0]


def test_an_unknown_tag_lists_those_there_are() -> None:
    with pytest.raises(UserError, match="no weights with this name and tag") as caught:
        open_source("ViT-B-16:laion9b")
    assert "openai" in str(caught.value.hint)


def test_without_a_network_the_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(entry: object) -> str:
        raise FileNotFoundError("Failed to download file (open_clip_model.safetensors)")

    monkeypatch.setattr("open_clip.pretrained.download_pretrained", fail)
    with pytest.raises(UserError, match="ViT-B-16:openai is not in the cache and cannot be downloaded") as caught:
        open_source("ViT-B-16:openai")
    assert "network" in str(caught.value.hint)


@pytest.mark.nightly
def test_the_towers_of_vit_b_16_are_open_clips_at_their_full_size() -> None:
    import open_clip

    theirs = open_clip.create_model("ViT-B-16-quickgelu").eval()
    size = size_of("b16", Towers(activation="quick_gelu"))
    ours = DualEncoder(size, image_px=224, num_frames=1, attend=attend_with_sdpa).eval()
    source = Source(title="ViT-B-16", converted=from_open_clip(theirs.state_dict()), facts=SourceFacts())
    loaded_weights(ours, source, say=ignore_line)
    picture = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    ids = open_clip.get_tokenizer("ViT-B-16-quickgelu")(["a person washes a cup"])
    assert ours.text is not None
    with torch.no_grad():
        torch.testing.assert_close(ours.video(picture[:, :, None]), theirs.encode_image(picture), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.text(ids), theirs.encode_text(ids), atol=1e-5, rtol=1e-4)
