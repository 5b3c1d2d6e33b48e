"""`train dual-encoder --input latents --text-tower frozen`: a run without decoding and without a text tower."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from clipmill.train.data.frame_sampling import spread_frames
from clipmill.train.device.random import draw_uniform
from clipmill.train.run.checkpoint import latest_checkpoint, read_weights
from clipmill.train.run.folder import RunFolder, read_lines
from tests.train.latents.columns import COLUMNS, FLAGS, WIDTH, write_columns
from tests.train.latents.test_checksums import flip
from tests.train.running import losses, train

STEPS = ("--batch", "8", "--lr", "1e-3", "--warmup-steps", "2")


def test_it_learns_what_the_stored_embeddings_say(
    columns: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert train("dual-encoder", "--shards", columns, "--out", out, *FLAGS, *STEPS, "--steps", 40) == 0
    losses_found = losses(out)
    assert np.mean(losses_found[-5:]) < 0.5 * np.mean(losses_found[:5])
    capsys.readouterr()
    assert train("eval", "retrieval", out, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text_to_video"]["num_queries"] == 8 and result["video_to_text"]["num_queries"] == 48
    assert result["video_to_text"]["recall"]["1"] > 0.9  # chance is 0.125
    assert "latents from a 2s segment" in result["clip"]
    page = RunFolder(out).page.read_text()
    assert "&lt;pattern&gt; of 3" in page and "<pattern>" not in page
    assert page.count("data:image/jpeg") >= 8


def test_a_run_has_no_text_tower_and_needs_no_chunks(columns: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train("dual-encoder", "--shards", columns, "--out", out, *FLAGS, *STEPS, "--steps", 2) == 0
    path = latest_checkpoint(RunFolder(out).checkpoints)
    assert path is not None
    names = read_weights(path)
    assert not [name for name in names if name.startswith("text.")]
    assert names["video.conv1.weight"].shape[1:] == (4, 2, 2) and names["video.proj"].shape[1] == WIDTH
    assert not (columns / "video").exists()


@pytest.mark.nightly
def test_latents_train_a_text_tower_too_without_a_column_of_text(
    columns: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data_dir = tmp_path / "run", tmp_path / "data"
    data_dir.mkdir()
    for name in ("manifest", "latents", "dataset.json"):
        (data_dir / name).symlink_to(columns / name)
    flags = ["trained" if flag == "frozen" else flag for flag in FLAGS]
    flags = [*flags, *STEPS, "--steps", "60"]
    assert train("dual-encoder", "--shards", data_dir, "--out", out, *flags) == 0
    losses_found = losses(out)
    assert np.mean(losses_found[-5:]) < 0.6 * np.mean(losses_found[:5])
    capsys.readouterr()
    assert train("eval", "retrieval", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["video_to_text"]["recall"]["1"] > 0.3  # chance is 0.125


def test_damaged_latents_are_named_and_never_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    write_columns(data_dir)
    flip(data_dir, column="latents", key="train3_000006000")
    flip(data_dir, column="text", key="train5")
    flip(data_dir, column="latents", key="val2_000000000")
    out = tmp_path / "run"
    flags = ("dual-encoder", "--shards", data_dir, *FLAGS, *STEPS, "--steps", 12)
    assert train(*flags, "--out", out) == 0
    failed = read_lines(RunFolder(out).failures)
    assert {(line["key"], line["reason"]) for line in failed} == {
        (key, "checksum") for key in ("train3_000006000", "train5_000000000", "train5_000006000")
    }
    capsys.readouterr()
    assert train("eval", "retrieval", out, "--json") == 1
    failed = json.loads(capsys.readouterr().out)["failed"]
    assert [(failure["key"], failure["reason"]) for failure in failed] == [("val2_000000000", "checksum")] * 3
    assert train(*flags, "--out", tmp_path / "strict", "--max-failures", 2) == 1
    assert "3 samples failed, more than --max-failures 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ((*FLAGS, "--captions.min-relevancy", "0.1"), "not for segments of latents"),
        ((*FLAGS, "--captions.sources", "human=1"), "no caption of this manifest has the source 'human'"),
        (("--text-tower", "frozen", "--model", "tiny"), "has no video shards"),
        ((*COLUMNS, "--segment", "2s", "--num-frames", "9"), "but a segment of 2s has only 8 frames"),
        ((*COLUMNS, "--segment", "0.3s"), "a segment of '0.3s' is 1.2 frames"),
        ((*COLUMNS, "--segment", "two"), "'two' is not a segment length"),
        ((*FLAGS, "--split", "test"), "has no videos of split 'test'"),
    ],
)
def test_settings_that_do_not_fit_are_two_lines_and_leave_nothing(
    columns: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    part: str,
) -> None:
    assert train("dual-encoder", "--shards", columns, "--out", tmp_path / "run", *flags) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]  # a slow machine prints its progress first
    assert error.startswith("error: ") and part in error and hint.startswith("hint: ")
    assert not (tmp_path / "run").exists()


def test_frames_are_spread_over_the_segment() -> None:
    segments = torch.arange(20.0).reshape(1, 20, 1, 1, 1).expand(400, -1, -1, -1, -1)
    assert spread_frames(segments, num_frames=4, offset_BK=None)[7].flatten().tolist() == [2, 7, 12, 17]
    assert spread_frames(segments, num_frames=20, offset_BK=None)[7].flatten().tolist() == list(range(20))
    within = draw_uniform(np.arange(400), 4, seed=3, purpose="frames")
    drawn = spread_frames(segments, num_frames=4, offset_BK=within).reshape(400, 4)
    for part in range(4):
        assert set(drawn[:, part].tolist()) == set(range(5 * part, 5 * part + 5))
    # The frames of a segment do not depend on the other segments of its batch.
    again = draw_uniform(np.arange(400)[::-1][:9], 4, seed=3, purpose="frames")
    assert (again == within[::-1][:9]).all() and abs(within.mean() - 0.5) < 0.02
    assert not (draw_uniform(np.arange(400), 4, seed=4, purpose="frames") == within).any()
