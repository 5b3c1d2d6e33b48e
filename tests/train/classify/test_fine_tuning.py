"""`train classify` with a tower pre-trained by `train mae`, and with VideoMAE's complete recipe."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from clipmill.train.config.model import Towers
from clipmill.train.losses.objective import Objective
from clipmill.train.models.attention import open_attention
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.transformer import blocks_of
from clipmill.train.optim.parameters import parameter_groups
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.classify.task import VideoClassifier
from clipmill.train.weights.conversion import IMAGENET_MEAN, IMAGENET_STD
from tests.train.latents.written import Chunk, Written, write_latents
from tests.train.running import losses, train, weights_of
from tests.train.tiny_data import Caption, write_captions

TINY = ("--model", "tiny", "--num-frames", 4, "--sampling", "stride", "--stride", 2, "--size-px", 32, "--workers", 1)
FEW = ("--batch", 6, "--lr", "2e-3", "--warmup-steps", 1)
STEPS = (*FEW, "--min-crop-area", 0.9)
RECIPE = (
    *("--mixup", 0.8, "--cutmix", 1.0, "--label-smoothing", 0.1, "--dropout", 0.1, "--repeats", 2),
    *("--augment.flip", 0.5, "--augment.rand-ops", 4, "--augment.erase", 0.5),
    *("--towers.drop-path", 0.1, "--optimizer.layer-decay", 0.75, "--optimizer.ema", 0.9),
)


def words(*flags: Any) -> list[Any]:
    """Return flags with their values; the last value of a repeated flag wins."""
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    return [word for pair in pairs.items() for word in pair]


def test_a_classifier_is_what_its_masked_autoencoder_was_and_learns_with_the_whole_recipe(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = tmp_path / "mae", tmp_path / "classes", tmp_path / "verbs"
    assert train("mae", "--shards", moving, *TINY, *FEW, "--steps", 1, "--out", first) == 0
    capsys.readouterr()
    still = ("--lr", "1e-9", "--steps", 1, "--shards", moving)
    flags = words(*TINY, *STEPS, *RECIPE, *still, "--init.weights", first, "--evaluate.every", 1)
    # The preset of a different kind of tower sets this flag.
    assert train("classify", *flags, "--towers.temporal", "random", "--out", second) == 0
    printed = capsys.readouterr().out
    assert "not used, because a classifier has no such parts: the decoder and its mask token" in printed
    assert "the encoder's last norm (video.ln_post)" in printed and "28 of 28 tensors" in printed
    assert "36 of 37 captions of split 'train', 4 of 4 classes (class); " in printed
    assert "2 samples of each clip per epoch" in printed

    settings = yaml.safe_load(RunFolder(second).settings.read_text())
    towers, init = settings["towers"], settings["init"]
    assert (towers["kind"], towers["tubelet"], towers["video_norm_eps"]) == ("videomae", 2, 1e-12)
    assert (tuple(init["pixel_mean"]), tuple(init["pixel_std"])) == (IMAGENET_MEAN, IMAGENET_STD)
    theirs, ours = weights_of(first), weights_of(second)
    shared = [name for name in theirs if name in ours]
    assert len(shared) == 28 and all(name.startswith("video.") for name in shared)
    assert max((theirs[name] - ours[name]).abs().max().item() for name in shared) < 1e-6
    assert ours.keys() - theirs.keys() == {"fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias"}

    assert train("eval", "classification", second, "--clips", 5, "--crops", 3, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert "5 clips x 3 crops along the longer side, 32 px, mean of their probabilities" in result["clip"]
    assert result["num_samples"] == 12 and "moving average" in result["weights"]

    # A classifier for other classes keeps the tower and the feature norm.
    flags = words(*TINY, *STEPS, *still, "--label", "verb", "--init.weights", second)
    assert train("classify", *flags, "--out", third) == 0
    assert "not used, because a classifier has no such parts: a classifier's last layer" in capsys.readouterr().out
    assert weights_of(third)["head.weight"].shape == (2, 128)
    assert (weights_of(third)["fc_norm.weight"] - ours["fc_norm.weight"]).abs().max() < 1e-6

    larger = words(*TINY, *STEPS, *still, "--size-px", 64, "--init.weights", first)
    assert train("classify", *larger, "--out", tmp_path / "larger") == 0
    printed = capsys.readouterr().out
    assert (
        "positions are indices of cubes in frames of 32 px" in printed and "(use --size-px 32 to avoid this)" in printed
    )

    for mistake, message in (
        (("--init.weights", first, "--towers.kind", "clip"), "the weights belong to a VideoMAE tower (videomae)"),
        (
            ("--init.weights", first, "--model", "s16"),
            "the video tower has 4 heads, but the video tower of the model has 6",
        ),
        (("--init.weights", first, "--num-frames", 3), "--num-frames 3 is not a multiple of 2"),
        (("--init.weights", first, "--towers.tubelet", 4), "use --towers.tubelet 2, the number of frames per cube"),
        (("--repeats", 0), "--repeats is 0"),
        (("--input", "latents", "--augment.flip", 0.5), "--augment.flip applies to pixels"),
        (("--input", "latents", "--repeats", 2), "because latents are not decoded"),
    ):
        assert train("classify", *words(*TINY, *STEPS, *still, *mistake), "--out", tmp_path / "none") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_parts_of_a_batch_change_nothing_of_the_recipe(moving: Path, tmp_path: Path) -> None:
    flags = ("--shards", moving, *TINY, *STEPS, *RECIPE, "--towers.kind", "videomae")
    # These draws differ between microbatches: dropout of the last features, and dropped blocks.
    drawn = ("--dropout", 0, "--towers.drop-path", 0, "--precision", "fp32", "--steps", 4)
    for name, more in (("whole", ()), ("parts", ("--microbatch", 4))):
        assert train("classify", *words(*flags, *drawn, *more), "--out", tmp_path / name) == 0
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.nightly
def test_latents_are_classified_as_their_masked_autoencoder_saw_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir, first, second = tmp_path / "data", tmp_path / "mae", tmp_path / "classes"
    captions = [
        Caption(video, 5.0 * place, 5.0 * place + 4, "x", labels={"label_class": name})
        for video in ("a", "b", "c")
        for place, name in enumerate(("rises", "falls", "rests"))
    ]
    write_captions(data_dir, {"a": "train", "b": "train", "c": "val"}, captions)
    write_latents(Written(data_dir), [[Chunk("a", 0, 60), Chunk("b", 0, 60)], [Chunk("c", 0, 60)]])
    tiny = ("--shards", data_dir, "--input", "latents", "--model", "tiny", "--num-frames", 8, "--batch", 4)
    assert train("mae", *tiny, "--mask-ratio", 0.5, "--steps", 1, "--out", first) == 0
    few = (*tiny, "--sampling", "stride", "--warmup-steps", 1, "--steps", 3, "--init.weights", first)
    mixed = ("--mixup", 0.8, "--cutmix", 1.0, "--evaluate.every", 3, "--microbatch", 3)
    assert train("classify", *few, *mixed, "--out", second) == 0
    printed = capsys.readouterr().out
    assert "28 of 28 tensors" in printed and "6 segments" in printed
    assert "covers 80% of a segment on average" in printed
    assert read_lines(RunFolder(second).metrics)[-1].keys() >= {"val/class_top1"}
    assert train("eval", "classification", second, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_samples"] == 3 and "8 frames of latents from a 5s segment, consecutive" in result["clip"]
    assert train("eval", "classification", second, "--clips", 5) == 2
    assert "5 clips x 1 crops apply to frames in pixels, not to latents" in capsys.readouterr().err
    assert train("classify", *words(*few, "--num-frames", 40), "--out", tmp_path / "none") == 2
    assert "--num-frames is 40, but a segment of 5s has only 20 frames" in capsys.readouterr().err


def test_learning_rates_fall_by_layer_and_only_matrices_decay() -> None:
    towers = Towers(kind="videomae")
    attention = open_attention("sdpa", device_type="cpu")
    model = VideoClassifier(
        size_of("tiny", towers).video,
        towers=towers,
        image_px=32,
        num_frames=4,
        num_classes=3,
        dropout=0.0,
        attend=attention.attend,
    )
    groups = parameter_groups(model, Objective(), weight_decay=0.05, layer_decay=0.75, adapts_all=False)
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    depth = 2
    assert len(blocks_of(model)) == depth
    for name, parameter in model.named_parameters():
        # VideoMAE numbers the cube embedding 0, block b (from 0) b + 1, and everything after the blocks depth + 1.
        layer = depth + 1
        if name.startswith("video.conv1."):
            layer = 0
        elif name.startswith("video.transformer.resblocks."):
            layer = int(name.split(".")[3]) + 1
        group = group_of[id(parameter)]
        assert group["lr_scale"] == pytest.approx(0.75 ** (depth + 1 - layer)), name
        assert group["weight_decay"] == (0.05 if parameter.ndim > 1 else 0.0), name
    assert {"video.conv1.bias", "video.transformer.resblocks.0.attn.q_bias", "fc_norm.weight", "head.bias"} <= {
        name for name, parameter in model.named_parameters() if parameter.ndim == 1
    }
