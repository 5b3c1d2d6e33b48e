"""`load_model`: embeddings of clips and texts, features of other towers, identities, and rejected input."""

from pathlib import Path

import numpy as np
import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.identity import normalisation_of
from clipmill.train.inference import load_model
from tests.train.inference.conftest import SMALL
from tests.train.running import train


def frames(num_clips: int = 2, *, num_frames: int = 4, height: int = 32, width: int = 32) -> np.ndarray:
    """Return random clips, uint8 RGB."""
    shape = (num_clips, num_frames, height, width, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_clips_and_texts_of_a_run_are_embedded_with_unit_length(runs: dict[str, Path]) -> None:
    model = load_model(runs["dual-encoder"])
    video_BE, text_BE = model.encode_video(frames()), model.encode_text(["a square", "it moves", "up"])
    assert video_BE.shape == (2, 128) and text_BE.shape == (3, 128)
    assert video_BE.dtype == text_BE.dtype == torch.float32
    for rows in (video_BE, text_BE):
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    assert model.encode_text([]).shape == model.encode_video(frames(0)).shape == (0, 128)
    assert "step 3" in model.description and "moving average" in model.description
    assert model.encode_video(frames(), tokens=True).shape == (2, 1 + 4 * 4, 128)


def test_a_model_says_what_it_is_and_how_cosines_become_logits(
    runs: dict[str, Path], moving: Path, tmp_path: Path
) -> None:
    model = load_model(runs["dual-encoder"], device="cpu")
    assert repr(model).startswith("<LoadedModel of train dual-encoder, ") and "parameters on cpu: " in repr(model)
    assert str(runs["dual-encoder"]) in repr(model) and "T = 4 frames" in repr(model)
    assert model.logit_scale == pytest.approx(1 / 0.07, rel=0.05) and model.logit_bias is None
    exported = tmp_path / "exported"
    assert train("export", runs["dual-encoder"], "--format", "hf", "--out", exported) == 0
    assert load_model(exported).logit_scale == pytest.approx(model.logit_scale)
    sigmoid = ("--loss.kind", "siglip", "--out", tmp_path / "siglip", *SMALL.split())
    assert train("dual-encoder", "--shards", moving, *sigmoid) == 0
    model = load_model(tmp_path / "siglip")
    assert model.logit_scale == pytest.approx(10, rel=0.05) and model.logit_bias == pytest.approx(-10, rel=0.05)
    mae = load_model(runs["mae"])
    assert mae.logit_scale is None and mae.logit_bias is None


def test_frames_of_another_shape_are_cropped_and_resized(runs: dict[str, Path]) -> None:
    model = load_model(runs["dual-encoder"])
    wide = frames(height=32, width=64)
    torch.testing.assert_close(model.encode_video(wide), model.encode_video(wide[:, :, :, 16:48]))
    assert model.encode_video(frames(height=40, width=50)).shape == (2, 128)
    clips = (torch.from_numpy(frames()).float() / 255).permute(0, 4, 1, 2, 3)
    mean, std = (torch.tensor(numbers)[:, None, None, None] for numbers in normalisation_of(model.settings))
    torch.testing.assert_close(model.encode_video((clips - mean) / std), model.encode_video(frames()))


def test_a_batch_of_the_loader_is_embedded_as_in_an_evaluation(runs: dict[str, Path]) -> None:
    model = load_model(runs["dual-encoder"])
    task = model.opened.task
    for loaded in task.samples("val", World()).evaluation_batches():
        video_BE, _ = model.model(*task.inputs(loaded.batch, is_training=False))
        assert torch.equal(model.encode_video(loaded.batch), video_BE)


@pytest.mark.parametrize(("task", "num_tokens"), [("mae", 8), ("classify", 8), ("caption", 17)])
def test_towers_without_text_give_features_and_tokens(runs: dict[str, Path], task: str, num_tokens: int) -> None:
    model = load_model(runs[task])
    assert model.encode_video(frames()).shape == (2, 128)
    assert model.encode_video(frames(), tokens=True).shape == (2, num_tokens, 128)
    assert model.encode_video(frames(0)).shape == (0, 128)
    assert model.encode_video(frames(0, height=40), tokens=True).shape == (0, num_tokens, 128)
    with pytest.raises(UserError, match="has no text tower") as error:
        model.encode_text(["a square"])
    assert "dual encoder" in str(error.value.hint)


def test_more_frames_interpolate_the_temporal_embedding_and_say_so(runs: dict[str, Path]) -> None:
    model = load_model(runs["dual-encoder"], num_frames=16, size_px=48)
    assert model.encode_video(frames(num_frames=16, height=48, width=48)).shape == (2, 128)
    assert any("interpolated along time" in line for line in model.remarks)
    assert any("bicubic" in line for line in model.remarks)
    assert len(model.model.video.temporal_embedding) == 16  # type: ignore[union-attr, arg-type]


def test_an_identity_is_that_of_weights_and_of_how_clips_are_shown(runs: dict[str, Path]) -> None:
    identity = load_model(runs["dual-encoder"]).identity
    assert identity == load_model(runs["dual-encoder"]).identity
    others = [load_model(path).identity for path in runs.values()]
    others += [
        load_model(runs["dual-encoder"], **changed).identity for changed in ({"num_frames": 8}, {"sampling": "uniform"})
    ]  # type: ignore[arg-type]
    assert len({identity, *others}) == 6


def test_what_a_model_cannot_take_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(runs["dual-encoder"])
    for wrong, words in (
        (frames(num_frames=5), "5 frames"),
        (frames()[0], "not .B, T, H, W, 3."),
        (torch.zeros(2, 3, 5, 32, 32), "have shape"),
    ):
        with pytest.raises(UserError, match=words):
            model.encode_video(wrong)
    for wrong, words in (
        ("a square", "the single string"),
        (None, "not None"),
        ([1], "contains 1"),
        (b"a", "contains 97"),
    ):
        with pytest.raises(UserError, match=words):
            model.encode_text(wrong)  # type: ignore[arg-type]
    for wrong in (None, "a square"):
        with pytest.raises(UserError, match="encode_video takes clips"):
            model.encode_video(wrong)  # type: ignore[arg-type]
    for name, value in (("device", "tpu"), ("num_frames", "4"), ("size_px", 32.0), ("sampling", "every")):
        with pytest.raises(UserError, match=f"{name} is"):
            load_model(tmp_path / "nothing", **{name: value})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="num_frames 5 is not a multiple of 2"):
        load_model(runs["mae"], num_frames=5)
    with pytest.raises(UserError, match="size_px 40 is not a multiple of 16"):
        load_model(runs["mae"], size_px=40)
