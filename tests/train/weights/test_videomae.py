"""Weights of VideoMAE in the formats of transformers and the authors: same function, and bit-identical export."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clipmill.manifests.errors import UserError
from clipmill.train.weights.sources import detect_format
from clipmill.train.weights.videomae import from_hf_videomae, from_videomae, to_hf_videomae, to_videomae
from tests.train.weights.small import ignore_line, loaded_weights
from tests.train.weights.small_videomae import (
    SIZE,
    State,
    assert_same_reconstruction,
    clips,
    hf_autoencoder,
    hf_classifier,
    open_source,
    our_autoencoder,
    our_classifier,
    public,
)


@pytest.fixture(scope="module")
def autoencoder() -> Any:
    return hf_autoencoder()


@pytest.fixture(scope="module")
def folder(autoencoder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    autoencoder.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier() -> Any:
    return hf_classifier()


@pytest.fixture(scope="module")
def classifier_folder(classifier: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetuned")
    classifier.save_pretrained(folder)
    return folder


def same(ours: State, theirs: State) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_bias_of_keys_which_changes_no_output_is_left_aside(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    keys = [name for name in state if name.endswith(".attention.attention.key.weight")]
    biases = {name.replace(".weight", ".bias"): torch.randn(state[name].shape[0]) for name in keys}
    converted, plain = (from_hf_videomae(of) for of in ({**state, **biases}, state))
    assert keys and set(converted.ignored) == biases.keys()
    assert not converted.unknown and same(converted.tensors, plain.tensors)


def test_our_autoencoder_reconstructs_what_transformers_does(folder: Path) -> None:
    source = open_source(folder)
    facts = source.facts
    assert "Hugging Face's VideoMAE" in source.title and (source.kind, source.tubelet) == ("videomae", 2)
    assert (facts.activation, facts.video_eps, facts.video_heads, facts.decoder_heads) == ("gelu", 1e-12, 4, 2)
    assert facts.mean is None and facts.std is None  # no processor states it; the settings report the default
    ours = our_autoencoder()
    assert loaded_weights(ours, source, say=ignore_line).fitted.changes == ()
    assert_same_reconstruction(ours, hf_autoencoder(), clips())


def test_our_classifier_computes_what_transformers_does(classifier_folder: Path) -> None:
    ours = our_classifier()
    assert loaded_weights(ours, open_source(classifier_folder), say=ignore_line).fitted.changes == ()
    with torch.no_grad():
        logits = hf_classifier().double()(clips().transpose(1, 2)).logits
        torch.testing.assert_close(ours.double()(clips()), logits, rtol=1e-10, atol=1e-10)


def test_latents_of_four_channels_and_cubes_of_one_frame_are_the_same_too(tmp_path: Path) -> None:
    theirs = hf_autoencoder(num_channels=4, tubelet_size=1, patch_size=2, image_size=8)
    theirs.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert source.facts.mean is None and source.tubelet is None
    ours = our_autoencoder(size=replace(SIZE, num_channels=4, cube_frames=1, patch_px=2), image_px=8)
    assert loaded_weights(ours, source, say=ignore_line).fitted.changes == ()
    assert_same_reconstruction(ours, theirs, clips(side=8, channels=4))
    state = load_file(tmp_path / "model.safetensors")
    assert same(to_hf_videomae(from_hf_videomae(state).tensors), state)


@pytest.mark.parametrize("kind", ["pre-trained", "fine-tuned"])
def test_weights_go_there_and_back_bit_by_bit(folder: Path, classifier_folder: Path, kind: str) -> None:
    state = load_file((folder if kind == "pre-trained" else classifier_folder) / "model.safetensors")
    ours = from_hf_videomae(state)
    assert not ours.unknown and same(to_hf_videomae(ours.tensors), state)
    # The authors' names map to the same tensors.
    theirs = from_videomae(public(state))
    assert not theirs.unknown and same(theirs.tensors, ours.tensors)
    assert same(to_videomae(theirs.tensors), public(state))


def test_the_names_are_those_that_are_published(folder: Path, classifier_folder: Path) -> None:
    names = public(load_file(folder / "model.safetensors")).keys()
    block = ["norm1.weight", "attn.q_bias", "attn.v_bias", "attn.qkv.weight", "attn.proj.bias", "mlp.fc2.weight"]
    assert names >= {f"encoder.blocks.2.{name}" for name in block} | {f"decoder.blocks.1.{name}" for name in block}
    assert names >= {"encoder.patch_embed.proj.bias", "encoder.norm.weight", "encoder_to_decoder.weight", "mask_token"}
    assert names >= {"decoder.norm.bias", "decoder.head.weight"} and "encoder_to_decoder.bias" not in names
    names = public(load_file(classifier_folder / "model.safetensors")).keys()
    assert names >= {"patch_embed.proj.weight", "blocks.0.attn.q_bias", "fc_norm.bias", "head.weight"}


@pytest.mark.parametrize("inner", ["model", "module"])
def test_the_authors_checkpoints_are_read_with_what_else_they_hold(
    autoencoder: Any, folder: Path, tmp_path: Path, inner: str
) -> None:
    state = public(load_file(folder / "model.safetensors"))
    args = argparse.Namespace(model="pretrain_videomae_base_patch16_224", mask_ratio=0.9)
    torch.save({inner: state, "epoch": 799, "args": args, "optimizer": {"step": 3}}, tmp_path / "checkpoint.pth")
    source = open_source(tmp_path / "checkpoint.pth")
    assert source.title.endswith("(VideoMAE)") and source.facts.video_eps == 1e-6
    ours = our_autoencoder()
    assert loaded_weights(ours, source, say=ignore_line).fitted.changes == ()
    # eps is not a tensor: a tower with 1e-12 computes what transformers' tower with 1e-12 computes.
    assert_same_reconstruction(ours, hf_autoencoder(), clips())


def test_old_and_new_names_of_the_biases_are_read(autoencoder: Any, folder: Path, tmp_path: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    assert "videomae.encoder.layer.0.attention.attention.q_bias" in saved
    in_memory = autoencoder.state_dict()
    assert "videomae.encoder.layer.0.attention.attention.query.bias" in in_memory
    assert same(from_hf_videomae(in_memory).tensors, from_hf_videomae(saved).tensors)


def test_a_bare_encoder_is_one_too(autoencoder: Any, tmp_path: Path) -> None:
    autoencoder.videomae.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    expected = from_hf_videomae(autoencoder.state_dict()).tensors
    video = {name: tensor for name, tensor in expected.items() if name.startswith("video.")}
    assert same(source.converted.tensors, video) and not source.converted.unknown


def test_other_pictures_and_other_lengths_need_no_change(folder: Path) -> None:
    ours = our_autoencoder(image_px=32, num_frames=16)
    assert loaded_weights(ours, open_source(folder), say=ignore_line).fitted.changes == ()
    longer = hf_autoencoder(image_size=32, num_frames=16)
    assert_same_reconstruction(ours, longer, clips(side=32, num_frames=16))


def test_a_configuration_of_videomae_v2_is_read(classifier_folder: Path, tmp_path: Path) -> None:
    state = public(load_file(classifier_folder / "model.safetensors"))
    save_file(
        {f"model.{name}": tensor for name, tensor in state.items() if "head" not in name},
        tmp_path / "model.safetensors",
    )
    model = {"embed_dim": 32, "num_heads": 4, "layer_norm_eps": 1e-5, "init_values": 0.0, "cos_attn": False}
    config: dict[str, Any] = {"model_type": "VideoMAEv2_Base", "model_config": model}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_source(tmp_path)
    assert source.title.endswith("(VideoMAE)")
    assert (source.facts.video_heads, source.facts.video_eps) == (4, 1e-5)
    assert source.facts.mean is None  # no processor states it
    config["model_config"]["cos_attn"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cos_attn is True, which clipmill's towers do not support"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "the activation is 'relu'"),
        ({"qv_bias": False}, "queries and values have no bias"),
        ({"model_type": "vivit"}, "the model type 'vivit' is not supported"),
    ],
)
def test_other_models_are_refused(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        open_source(tmp_path)


def test_what_a_preprocessor_says_is_what_pictures_are_normalised_by(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.2, 0.1]}')
    assert open_source(tmp_path).facts.mean == (0.5, 0.4, 0.3)


def test_a_pre_training_without_a_last_norm_is_remarked_on(folder: Path, tmp_path: Path) -> None:
    hf_autoencoder(use_mean_pooling=True, norm_pix_loss=False).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert [remark.partition(" (")[0] for remark in source.facts.remarks] == [
        "they were pre-trained without a layer norm after the encoder",
        "they were pre-trained to predict unnormalised pixels",
    ]
    assert not any("train mae" in remark for remark in source.facts.remarks)  # a different command may use them
    with pytest.raises(UserError, match=r"2 missing \(video.ln_post.weight, video.ln_post.bias\)"):
        loaded_weights(our_autoencoder(), source, say=ignore_line)
    loaded_weights(our_autoencoder(), source, allow=("video.ln_post.*",), say=ignore_line)


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (["videomae.layernorm.weight"], "hf_videomae"),
        (["embeddings.patch_embeddings.projection.weight", "encoder.layer.0.output.dense.bias"], "hf_videomae"),
        (["mask_token", "encoder.blocks.0.norm1.bias"], "videomae"),
        (["patch_embed.proj.weight", "blocks.0.norm1.bias", "fc_norm.weight"], "videomae"),
    ],
)
def test_names_tell_the_format(names: list[str], form: str) -> None:
    assert detect_format(names).name == form


@pytest.mark.parametrize(
    "names",
    [
        ["cls_token", "patch_embed.proj.weight", "blocks.0.norm1.bias"],
        ["embeddings.cls_token", "embeddings.patch_embeddings.projection.weight"],
    ],
)
def test_other_transformers_of_the_same_names_are_not_taken_for_it(names: list[str]) -> None:
    with pytest.raises(UserError, match="not the weights of a CLIP, VideoMAE or TimeSformer in a known"):
        detect_format(names)
