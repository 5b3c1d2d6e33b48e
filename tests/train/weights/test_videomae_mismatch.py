"""Weights of VideoMAE that do not fit, and the settings that fitting weights imply."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import DualEncoderTowers, Towers
from clipmill.train.tasks.classify.spec import ClassifySettings
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import effective_settings
from clipmill.train.tasks.mae.spec import MaeSettings
from clipmill.train.weights.open_clip import to_open_clip
from clipmill.train.weights.source import effective_clip_settings
from tests.train.weights.small import ignore_line, loaded_weights, our_model
from tests.train.weights.small_videomae import (
    DECODER_DEPTH,
    SIZE,
    State,
    hf_autoencoder,
    hf_classifier,
    open_source,
    our_autoencoder,
    public,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    hf_autoencoder().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetuned")
    hf_classifier().save_pretrained(folder)
    return folder


def refusal(model: torch.nn.Module, state: State, path: Path) -> tuple[str, str]:
    torch.save(state, path / "w.pth")
    with pytest.raises(UserError) as caught:
        loaded_weights(model, open_source(path / "w.pth"), say=ignore_line)
    return str(caught.value), str(caught.value.hint)


def test_what_does_not_fit_says_why_and_what_to_do(folder: Path, classifier_folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "model.safetensors")
    error, hint = refusal(our_autoencoder(decoder_depth=1), state, tmp_path)
    assert "decoder with width 16 and 2 blocks" in error and "decoder with width 16 and 1 block" in error
    assert hint == f"use --decoder-depth {DECODER_DEPTH}, as in the weights"
    hf_autoencoder(decoder_num_attention_heads=4).save_pretrained(tmp_path / "heads")
    with pytest.raises(UserError, match="the decoder has 4 heads, but the decoder of the model has 2") as caught:
        loaded_weights(our_autoencoder(), open_source(tmp_path / "heads"), say=ignore_line)
    assert "use the weights in a task without a decoder" in str(caught.value.hint)
    of_latents = our_autoencoder(size=replace(SIZE, num_channels=4, patch_px=2), image_px=8)
    error, hint = refusal(of_latents, state, tmp_path)
    assert "patches of 3 x 2 x 8 x 8; model: " in error and "patches of 4 x 2 x 2 x 2" in error
    assert "they take 3 channels, but the model takes 4" in hint and "--input" in hint
    error, hint = refusal(our_autoencoder(), load_file(classifier_folder / "model.safetensors"), tmp_path)
    patterns = "--init.allow 'decoder.*' 'fc_norm.*' 'head.*' 'video.ln_post.*'"
    assert hint.startswith(f"use {patterns}")
    allow = tuple(patterns.replace("'", "").split()[1:])
    loaded_weights(our_autoencoder(), open_source(classifier_folder), allow=allow, say=ignore_line)
    # The config.json of the classifier states the number of heads of a decoder; these sizes are not the defaults.
    path = classifier_folder / "config.json"
    config = json.loads(path.read_text()) | {"decoder_num_attention_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(classifier_folder / "model.safetensors")
    with pytest.raises(UserError) as caught:
        loaded_weights(our_autoencoder(), open_source(tmp_path), say=ignore_line)
    assert str(caught.value.hint).startswith(f"use {patterns}")
    loaded_weights(our_autoencoder(), open_source(tmp_path), allow=allow, say=ignore_line)


KEY = "videomae.encoder.layer.1.attention.attention.key.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: {name: tensor for name, tensor in state.items() if name != KEY},
            r"1 missing \(video.transformer.resblocks.1.attn.in_proj_weight\); 2 unexpected",
        ),
        (
            lambda state: {
                name: tensor for name, tensor in public(state).items() if name != "encoder.blocks.1.attn.q_bias"
            },
            r"1 missing \(video.transformer.resblocks.1.attn.q_bias\)",
        ),
        (
            lambda state: public(state) | {"encoder.blocks.0.gamma_1": torch.ones(32)},
            r"1 unexpected \(encoder.blocks.0",
        ),
        (lambda state: state | {"mask_token": torch.ones(1, 1, 8)}, r"1 with a different shape \(mask_token\)"),
        (
            lambda state: public(state) | {"encoder.pos_embed": torch.ones(1, 8, 32)},
            r"1 unexpected \(encoder.pos_embed\)",
        ),
    ],
)
def test_a_damaged_or_extended_state_is_no_start(
    folder: Path, tmp_path: Path, change: Callable[[State], State], message: str
) -> None:
    error, _ = refusal(our_autoencoder(), change(load_file(folder / "model.safetensors")), tmp_path)
    assert re.search(message, error), error


def test_heads_that_show_in_no_shape_are_compared(tmp_path: Path) -> None:
    for changes, title in (
        ({"num_attention_heads": 8}, "the video tower has 8 heads, but the video tower of the model has 4"),
        ({"decoder_num_attention_heads": 4}, "the decoder has 4 heads, but the decoder of the model has 2"),
    ):
        hf_autoencoder(**changes).save_pretrained(tmp_path)
        with pytest.raises(UserError, match=title):
            loaded_weights(our_autoencoder(), open_source(tmp_path), say=ignore_line)


def test_settings_become_what_the_weights_were_trained_with(folder: Path) -> None:
    source = open_source(folder)
    mae = effective_clip_settings(MaeSettings(size_px=32), source, say=ignore_line)
    assert (mae.towers.kind, mae.towers.tubelet, mae.towers.video_norm_eps) == ("videomae", 2, 1e-12)
    assert mae.towers.activation == "gelu" and mae.init.pixel_mean == (0.485, 0.456, 0.406)
    classify = effective_clip_settings(ClassifySettings(size_px=32), source, say=ignore_line)
    assert vars(classify.towers) == vars(mae.towers) and classify.init.pixel_std == (0.229, 0.224, 0.225)
    # The effective values are set without weights, too.
    alone = effective_clip_settings(MaeSettings(size_px=32), None, say=ignore_line)
    assert alone.towers.kind == "videomae" and alone.init.pixel_mean == (0.485, 0.456, 0.406)
    assert effective_clip_settings(ClassifySettings(), None, say=ignore_line) == ClassifySettings()
    with pytest.raises(UserError, match="--num-frames 3 is not a multiple of 2"):
        effective_clip_settings(ClassifySettings(num_frames=3), source, say=ignore_line)


def test_kinds_of_towers_are_named_where_they_differ(folder: Path, tmp_path: Path) -> None:
    torch.save(to_open_clip(our_model().state_dict()), tmp_path / "clip.pt")
    clip, videomae = open_source(tmp_path / "clip.pt"), open_source(folder)
    of_clip, of_videomae = "a CLIP tower (clip)", "a VideoMAE tower (videomae)"
    plain, leave = Towers(kind="clip"), "use weights of the same kind, or omit --towers.kind"
    for effective, settings, source, in_weights, here, hint in (
        (
            effective_clip_settings,
            MaeSettings(),
            clip,
            of_clip,
            of_videomae,
            "use weights of the kind videomae",
        ),
        (
            effective_settings,
            DualEncoderSettings(),
            videomae,
            of_videomae,
            of_clip,
            "use weights of the kind clip",
        ),
        (effective_clip_settings, ClassifySettings(towers=plain), videomae, of_videomae, of_clip, leave),
        (effective_clip_settings, ClassifySettings(towers=Towers(kind="videomae")), clip, of_clip, of_videomae, leave),
    ):
        with pytest.raises(UserError) as caught:
            effective(settings, source, say=ignore_line)  # type: ignore[arg-type]
        assert f"the weights belong to {in_weights}, but the model has {here}" in str(caught.value)
        assert (caught.value.hint or "").startswith(hint)
    with pytest.raises(UserError, match=r"--towers\.kind is videomae, a tower that train dual-encoder does not"):
        effective_settings(DualEncoderSettings(towers=DualEncoderTowers(kind="videomae")), None, say=ignore_line)
