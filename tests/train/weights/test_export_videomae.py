"""Masked autoencoders and their classifiers, exported to transformers and VideoMAE and read back, by command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import VideoMAEForPreTraining, VideoMAEForVideoClassification, VideoMAEImageProcessor

from clipmill.manifests.errors import UserError
from clipmill.train.commands.export import export_run
from clipmill.train.config.files import load_settings
from clipmill.train.tasks.mae.spec import MaeSettings
from clipmill.train.weights.videomae import to_videomae
from tests.train.latents.written import Chunk, Written, write_latents
from tests.train.running import train, weights_of
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard
from tests.train.weights.small import ignore_line, loaded_weights
from tests.train.weights.small_videomae import (
    assert_same_reconstruction,
    clips,
    open_source,
    our_autoencoder,
    our_classifier,
    tiny_size,
)

SMALL = (
    "--model",
    "tiny",
    "--num-frames",
    "4",
    "--size-px",
    "32",
    "--batch",
    "4",
    "--workers",
    "1",
    "--sampling",
    "uniform",
)
MASKS = ("--mask-ratio", "0.5", "--decoder-depth", "2")
MAE = (*SMALL, *MASKS, "--optimizer.lr-batch", "4")
LATENTS = (*MASKS, "--input", "latents", "--segment", "2s", "--model", "tiny", "--num-frames", "4", "--batch", "4")
STILL = ("--steps", "1", "--lr", "1e-9")  # the step is too small to change a weight by much
SIDE = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four chunks of videos with two shapes, and their latents, [8, 4, 8, 8] per segment."""
    folder = tmp_path_factory.mktemp("shapes")
    videos = {"a": "train", "b": "train"}
    captions = [
        Caption(name, begin_s, begin_s + 2.0, "x", labels={"label_shape": shape})
        for name, shape in (("a", "a disc"), ("b", "a star"))
        for begin_s in (0.0, 2.0)
    ]
    write_shard(folder, 0, [sample for name in videos for sample in chunks_of(name, 40)], split="train")
    write_captions(folder, videos, captions)
    write_latents(Written(folder), [[Chunk(name, 0, 16, frame=(4, 8, 8)) for name in videos]])
    return folder


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of two pre-training steps with custom normalisation and eps."""
    out = tmp_path_factory.mktemp("runs") / "mae"
    flags = ("--init.pixel-mean", "0.42", "0.46", "0.41", "--towers.video-norm-eps", "1e-9")
    assert train("mae", "--shards", data, "--out", out, *MAE, *flags, "--steps", "2", "--lr", "1e-2") == 0
    return out


def from_pretrained(kind: Any, folder: Path) -> Any:
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def test_transformers_reconstructs_what_the_run_does_and_the_run_comes_back(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    assert train("export", run, "--format", "hf", "--out", out) == 0
    ours = our_autoencoder(size=tiny_size(1e-9), image_px=SIDE)
    weights = weights_of(run)
    ours.load_state_dict(weights)
    assert_same_reconstruction(ours, from_pretrained(VideoMAEForPreTraining, out), clips(side=SIDE))
    processor = VideoMAEImageProcessor.from_pretrained(out)
    assert list(processor.image_mean) == [0.42, 0.46, 0.41] and processor.crop_size["height"] == SIDE
    source = open_source(out)
    assert (source.facts.video_eps, source.facts.mean) == (1e-9, (0.42, 0.46, 0.41))
    back = our_autoencoder(size=tiny_size(1e-9), image_px=SIDE)
    assert loaded_weights(back, source, say=ignore_line).fitted.changes == ()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.state_dict().items())


def test_the_authors_format_holds_tensors_alone_and_says_what_it_does_not_hold(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    assert train("export", run, "--format", "videomae", "--out", out) == 0
    printed = capsys.readouterr().out
    assert (
        "layer norms with eps 1e-06, but this run uses 1e-09" in printed
        and "normalises pixels differently from VideoMAE" in printed
    )
    state = torch.load(out / "checkpoint.pth", weights_only=True)["model"]
    assert {"encoder.blocks.1.attn.q_bias", "decoder.blocks.1.mlp.fc2.weight", "mask_token"} <= state.keys()
    expected = to_videomae(weights_of(run))
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    back = our_autoencoder(size=tiny_size(1e-9), image_px=SIDE)
    assert loaded_weights(back, open_source(out), say=ignore_line).fitted.changes == ()


@pytest.mark.parametrize("start", [pytest.param("run", marks=pytest.mark.nightly), "folder"])
def test_pre_training_goes_on_from_weights(data: Path, run: Path, tmp_path: Path, start: str) -> None:
    weights = run
    if start == "folder":
        weights = tmp_path / "exported"
        export_run(run, form="hf", out=weights, say=ignore_line)
    out = tmp_path / "second"
    assert train("mae", "--shards", data, "--out", out, *MAE, *STILL, "--init.weights", weights) == 0
    first, second = weights_of(run), weights_of(out)
    assert all(torch.allclose(second[name], first[name], atol=1e-7) for name in first)
    settings = load_settings(out / "settings.yaml", MaeSettings)
    assert (settings.towers.kind, settings.towers.tubelet, settings.towers.video_norm_eps) == ("videomae", 2, 1e-9)
    assert settings.init.pixel_mean == (0.42, 0.46, 0.41)


def test_a_classifier_starts_from_a_folder_and_leaves_as_one(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrained, out, exported = tmp_path / "pretrained", tmp_path / "classes", tmp_path / "exported"
    export_run(run, form="hf", out=pretrained, say=ignore_line)
    flags = ("--shards", data, "--label", "shape", *SMALL, "--init.weights", pretrained)
    assert train("classify", *flags, "--out", out, *STILL) == 0
    first, weights = weights_of(run), weights_of(out)
    tower = [name for name in weights if name.startswith("video.")]
    assert tower and all(torch.allclose(weights[name], first[name], atol=1e-7) for name in tower)

    assert train("export", out, "--format", "hf", "--out", exported) == 0
    theirs = from_pretrained(VideoMAEForVideoClassification, exported)
    assert theirs.config.id2label == {0: "a disc", 1: "a star"} and theirs.config.label2id["a star"] == 1
    size = tiny_size(1e-9)
    ours = our_classifier(size=size, num_classes=2, image_px=SIDE)
    ours.load_state_dict(weights)
    video = clips(side=SIDE)
    with torch.no_grad():
        logits = theirs.double()(video.transpose(1, 2)).logits
        torch.testing.assert_close(ours.double()(video), logits, rtol=1e-10, atol=1e-10)

    # Pre-training continues from the tower, with a new decoder.
    mae = ("mae", "--shards", data, *MAE, *STILL, "--init.weights", exported, "--out", tmp_path / "mae")
    capsys.readouterr()
    assert train(*mae) == 2
    assert "--init.allow 'decoder.*' 'fc_norm.*' 'head.*' 'video.ln_post.*'" in capsys.readouterr().err
    assert train(*mae, "--init.allow", "decoder.*", "fc_norm.*", "head.*", "video.ln_post.*") == 0
    on = weights_of(tmp_path / "mae")
    assert all(torch.allclose(on[name], weights[name], atol=1e-7) for name in tower)

    # A new classifier starts from the classifier, in the authors' format too. The feature norm is copied, but the head
    # is new.
    export_run(out, form="videomae", out=tmp_path / "theirs", say=ignore_line)
    assert "blocks.0.attn.q_bias" in torch.load(tmp_path / "theirs" / "checkpoint.pth", weights_only=True)["model"]
    again = tmp_path / "again"
    assert train("classify", *flags[:-1], tmp_path / "theirs", "--out", again, *STILL) == 0
    assert torch.allclose(weights_of(again)["fc_norm.weight"], weights["fc_norm.weight"], atol=1e-7)


@pytest.mark.nightly
def test_latents_have_a_place_in_transformers_format(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, exported = tmp_path / "latents", tmp_path / "exported"
    begin = ("mae", "--shards", data, "--steps", "1")
    assert train(*begin, "--out", out, *LATENTS) == 0
    assert train("export", out, "--format", "hf", "--out", exported) == 0
    assert not (exported / "preprocessor_config.json").exists()
    config = json.loads((exported / "config.json").read_text())
    assert (config["num_channels"], config["image_size"], config["patch_size"]) == (4, 8, 2)
    ours = our_autoencoder(size=replace(tiny_size(1e-12), num_channels=4, patch_px=2), image_px=8)
    ours.load_state_dict(weights_of(out))
    theirs = from_pretrained(VideoMAEForPreTraining, exported)
    assert_same_reconstruction(ours, theirs, clips(side=8, channels=4))

    capsys.readouterr()
    for source in (out, exported):
        assert train(*begin, "--out", tmp_path / "no", *MAE, "--init.weights", source) == 2
        error, hint = capsys.readouterr().err.splitlines()
        assert "does not fit the model" in error and "they take 4 channels, but the model takes 3" in hint
    assert train(*begin, "--out", tmp_path / "no", *LATENTS, "--init.weights", run) == 2
    assert "they take 3 channels, but the model takes 4" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    # Older runs do not record values that cannot be read from the tensors.
    (out / "run.json").write_text(json.dumps({"task": "mae"}))
    with pytest.raises(UserError, match="requires the size of the latents"):
        export_run(out, form="hf", out=tmp_path / "no", say=ignore_line)


def test_what_a_format_cannot_hold_is_refused(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "classes"
    assert train("classify", "--shards", data, "--label", "shape", *SMALL, "--out", out, "--steps", "1") == 0
    capsys.readouterr()
    for arguments, error, hint in (
        ((run, "--format", "open_clip"), "--format open_clip cannot store a masked", "hf or videomae"),
        ((run, "--format", "onnx"), "--format onnx cannot store a masked", "hf or videomae"),
        ((run, "--format", "tflite"), "there is no format tflite (--format)", "use one of open_clip, hf, timm, torch"),
        ((run, "--format", "hf", "--frame-embedding", "zero"), "--frame-embedding applies only to dual", "omit"),
        ((out, "--format", "hf"), "is a classifier with CLIP's tower, which --format hf does not support", "videomae"),
    ):
        assert train("export", *arguments, "--out", tmp_path / "no") == 2
        printed = capsys.readouterr().err.splitlines()
        assert len(printed) == 2 and error in printed[0] and hint in printed[1], printed
    assert not (tmp_path / "no").exists()
