"""Reconstructions of a masked autoencoder: from a model with known output, from a run, and on the results page."""

import base64
import html
import io
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.publish import publish_json
from clipmill.train.config.files import save_settings
from clipmill.train.data.batch import Batch
from clipmill.train.data.order import Cursor
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.video_vit import CubeGrid, VideoViTSize
from clipmill.train.models.videomae import predicted_cubes
from clipmill.train.report.results import write_page
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.mae.evaluation import Display, ReconstructionResult, evaluate_reconstruction, image_uri
from clipmill.train.tasks.mae.spec import MaeSettings
from clipmill.train.tasks.mae.task import MaskedClips, Masking, normalised_cubes
from tests.train.latents.written import Chunk
from tests.train.mae.test_mae_runs import noise, write_columns
from tests.train.running import train
from tests.train.test_report import HOSTILE, Tags, assert_own_scripts_only
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

SIZE = VideoViTSize(trunk=TransformerSize(width=8, depth=1, num_heads=1), patch_px=4, cube_frames=2)
MASKING = Masking(MaeSettings(mask_ratio=0.75, size_px=224), CubeGrid(2, 4, 4))
TINY = ("--model", "tiny", "--size-px", 64, "--num-frames", 4, "--stride", 2, "--mask-ratio", 0.75, "--workers", 1)


class Known(nn.Module):
    """Model that predicts a multiple of the targets."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, video: torch.Tensor, masked: torch.Tensor, *, num_masked: int) -> torch.Tensor:
        numbers = predicted_cubes(masked, count=num_masked)
        return self.factor * normalised_cubes(video, numbers, cube_frames=2, patch_px=4)


def evaluate_model(model: nn.Module, num_clips: int = 40, **changes: Any) -> ReconstructionResult:
    """Evaluate random clips in two batches, after a batch that consists of a failed sample."""
    video = torch.rand(num_clips, 3, 4, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    parts = torch.arange(num_clips).split(max(num_clips - 5, 1)) if num_clips else ()
    failure = FailedSample(99, "broken", "undecodable", "no picture in it")
    batches = [
        LoadedBatch(Batch(input="pixels", position=part, key=[f"clip {n}" for n in part.tolist()]), (), Cursor(0))
        for part in parts
    ]
    batches.insert(0, LoadedBatch(Batch(), (failure,), Cursor(0)))
    clips = MaskedClips(inputs=lambda batch, rows: video[batch["position"][rows]], masking=MASKING, size=SIZE, std=None)
    given: dict[str, Any] = {
        "display": Display({3, 39}, (0, 2), lambda clips: clips / 2 + 0.5),
        "autocast": nullcontext,
        "device": torch.device("cpu"),
    }
    return evaluate_reconstruction(model, batches, clips, **(given | changes))


def test_the_loss_is_the_mean_over_all_samples_beside_that_of_flat_cubes() -> None:
    flat_loss = 31 / 32  # for 32 values with an unbiased variance of 1
    for factor in (1.0, 0.0, 0.5, 2.0):
        outcome = evaluate_model(Known(factor))
        assert outcome.loss == pytest.approx((1 - factor) ** 2 * flat_loss, abs=1e-5)
        assert outcome.flat_loss == pytest.approx(flat_loss, abs=1e-5)
        assert outcome.num_samples == 40 and [failure.key for failure in outcome.failed] == ["broken"]


def test_masks_of_an_evaluation_are_those_of_the_samples_whatever_their_batch() -> None:
    def masks(clips: ReconstructionResult) -> list[Any]:
        return [(clip.masked == round(0.5 * 255)).all(-1) for clip in clips.clips]

    first, second = evaluate_model(Known(1.0)), evaluate_model(Known(1.0), num_clips=52)
    assert [clip.sample for clip in first.clips] == [3, 39] and first.clips[0].key == "clip 3"
    for ours, theirs in zip(masks(first), masks(second), strict=True):
        assert np.array_equal(ours, theirs) and ours.mean() == pytest.approx(0.75, abs=0.02)
    assert not np.array_equal(*masks(first))


def test_visible_pixels_are_shown_as_they_are_and_hidden_ones_change() -> None:
    clip = evaluate_model(Known(1.0)).clips[0]
    is_hidden = (clip.masked != clip.original).any(-1)
    assert clip.filled.shape == (2, 16, 16, 3) and clip.filled.dtype == np.uint8
    assert np.array_equal(clip.filled[~is_hidden], clip.original[~is_hidden])
    assert (clip.filled[is_hidden] != clip.original[is_hidden]).any()


def test_weights_that_have_diverged_and_data_that_cannot_be_decoded_are_named() -> None:
    with pytest.raises(FailedWork, match="the weights have diverged"):
        evaluate_model(Known(float("nan")))
    with pytest.raises(FailedWork, match=r"no clip could be decoded \(1 failed\)"):
        evaluate_model(Known(1.0), num_clips=0)


def picture_of(uri: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))


def test_small_pictures_lose_nothing() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert np.array_equal(picture_of(image_uri(frame)), frame)
    assert image_uri(np.zeros((224, 224, 3), np.uint8)).startswith("data:image/jpeg")


def test_a_run_ends_with_pictures_of_held_out_clips(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    steps = ("--steps", 2, "--batch", 4, "--warmup-steps", 0)
    assert train("mae", "--shards", data_dir, *TINY, *steps, "--out", run.path) == 0
    path = run.evaluation("reconstruction-val")
    result = json.loads(path.read_text())
    assert (result["split"], result["num_samples"], result["step"], result["failed"]) == ("val", 3, 2, [])
    assert result["mask"].startswith("the same 12 of 16 patches at all 2 time steps") and result["share_hidden"] == 0.75
    # The chunk has 20 frames of 0.1 s, starting at 2 s. The clip has 4 frames with stride 2 from its middle.
    assert [clip["key"] for clip in result["shown"]] == ["d_000000000", "d_000002000", "d_000004000"]
    assert (result["shown"][1]["begin_s"], result["shown"][1]["end_s"]) == pytest.approx((2.6, 3.3))
    original, masked = (picture_of(result["shown"][0][name][1]) for name in ("original", "masked"))
    assert original.shape == (64, 64, 3)
    assert np.mean((masked == 128).all(-1)) == pytest.approx(0.75, abs=0.05)
    page = run.page.read_text()
    assert page.count("<h2>Reconstructions</h2>") == 1 and page.count('aria-label="4 frames: reconstruction, d_') == 3
    assert "Data wait" not in page and "waiting for data" in page and "retrieval examples" not in page

    path.unlink()
    capsys.readouterr()
    assert train("eval", "reconstruction", run.path, "--shards", data_dir, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert "shown" not in again and again["loss"] == pytest.approx(result["loss"], rel=1e-6)
    assert train("eval", "reconstruction", run.path, "--split", "train", "--max-samples", 5) == 0
    assert "explained" in capsys.readouterr().out
    assert json.loads(run.evaluation("reconstruction-train").read_text())["num_samples"] == 5  # every second of 9 clips
    assert train("eval", "reconstruction", run.path, "--max-samples", 0) == 2
    assert "--max-samples is 0" in capsys.readouterr().err

    run_address, other = path.read_bytes(), tmp_path / "other <b>"
    write_shard(other, 0, chunks_of("elsewhere", 20), split="val")
    write_captions(other, {"elsewhere": "val"}, [Caption("elsewhere", 0, 1, "text")])
    assert train("eval", "reconstruction", run.path, "--shards", other) == 0
    assert f"of {other}, which is not the run's own data" in capsys.readouterr().out
    (result_path,) = (path for path in run.results() if path.name.startswith("reconstruction-val-other-b-"))
    assert json.loads(result_path.read_text())["shards"] == str(other) and json.loads(run_address)["shards"] == str(
        data_dir
    )
    assert path.read_bytes() == run_address
    page, marked = run.page.read_text(), "of other data: " + html.escape(str(other))
    assert page.count(marked) == 2  # beside the numbers and the images of the other data
    assert 0 < page.index("<h2>Reconstructions</h2>") < page.index("elsewhere_000000000")
    assert page.rindex("3 clips, 75.0 % masked") < page.index(marked) < page.rindex("1 clip, 75.0 % masked")

    overview = tmp_path / "index.html"
    assert train("overview", run.path, "--out", overview) == 0
    # The overview repeats only the number, because the images belong to the run's own data.
    assert overview.read_text().count("data: " + html.escape(str(other))) == 1
    for result_file in run.results():
        if result_file != result_path:
            result_file.unlink()
    assert train("overview", run.path, "--out", overview) == 0
    assert overview.read_text().count("data: " + html.escape(str(other))) == 2


def test_a_split_to_look_at_that_no_video_has_is_refused_before_the_first_step(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*TINY, "--steps", 1, "--batch", 2, "--out", tmp_path / "run")
    assert train("mae", "--shards", data_dir, *flags, "--evaluate.split", "nosplit") == 2
    error = capsys.readouterr().err
    assert "no videos of split 'nosplit'" in error and "a split of this manifest: train, val" in error
    assert not (tmp_path / "run").exists()


def test_where_nothing_is_held_out_clips_of_training_are_shown_and_the_page_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir, run = tmp_path / "data", RunFolder(tmp_path / "run")
    write_shard(data_dir, 0, chunks_of("only", 40), split="train")
    write_captions(data_dir, {"only": "train"}, [Caption("only", 0, 1, "text")])
    assert train("mae", "--shards", data_dir, *TINY, "--steps", 1, "--batch", 2, "--out", run.path) == 0
    assert "reconstruction: split train (the training split)" in capsys.readouterr().out
    assert json.loads(run.evaluation("reconstruction-train").read_text())["num_samples"] == 2
    assert "train (the training split), because val cannot be used" in run.page.read_text()


def test_latents_are_shown_in_false_colours(tmp_path: Path) -> None:
    data_dir, run = write_columns(tmp_path / "data"), RunFolder(tmp_path / "run")
    flags = ("--input", "latents", "--model", "tiny", "--mask-ratio", 0.5, "--num-frames", 4, "--segment", "2s")
    assert train("mae", "--shards", data_dir, *flags, "--steps", 1, "--batch", 2, "--out", run.path) == 0
    result = json.loads(run.evaluation("reconstruction-train").read_text())
    assert result["has_few_pixels"] and "False colours" in result["picture_rule"] and result["num_samples"] == 4
    shown = result["shown"][1]  # the second segment of 8 frames, whose middle 4 frames last one second, from 2.5 s on
    assert (shown["key"], shown["begin_s"], shown["end_s"]) == ("a_000000000", 2.5, 3.5)
    latents = noise(Chunk("a", 0, 20, frame=(4, 8, 8)))[10:14, :3].astype(np.float32).transpose(0, 2, 3, 1)
    expected = np.clip((latents + 2) / 4, 0, 1) * 255
    for frame, uri in zip(expected, shown["original"], strict=True):
        assert np.abs(picture_of(uri) - frame).max() <= 0.51
    assert 'class="frames pixels"' in run.page.read_text()


def test_nothing_from_outside_becomes_markup(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    save_settings(MaeSettings(split=HOSTILE), run.settings)
    publish_json(run.facts, {"task": "mae", "data": HOSTILE})
    words = (
        "split",
        "split_chosen",
        "weights",
        "data",
        "variant",
        "clip",
        "mask",
        "protocol",
        "picture_rule",
        "command",
    )
    uris = [image_uri(np.zeros((2, 2, 3), np.uint8))]
    clip = {"key": HOSTILE, "begin_s": 0.0, "end_s": 1.0, "loss": 0.5}
    result = {
        **dict.fromkeys(words, HOSTILE),
        **{"evaluation": "reconstruction", "step": 3, "num_samples": 7, "loss": 0.5, "flat_loss": 1.0},
        **{"share_hidden": 0.9, "has_few_pixels": True},
        "failed": [{"position": 1, "key": HOSTILE, "reason": "undecodable", "detail": HOSTILE}],
        "shown": [{**clip, **dict.fromkeys(("original", "masked", "filled"), uris)}],
    }
    run.write_evaluation("reconstruction-val", result)
    write_page(run)
    page = run.page.read_text()
    tags = Tags()
    tags.feed(page)
    assert_own_scripts_only(page)
    assert page.count("&lt;script&gt;") >= 13
    assert tags.loaded == uris * 3 and "50.0 %" in page
