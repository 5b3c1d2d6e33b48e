"""`train eval` from the command line: a run that was evaluated in the loop is scored with every protocol."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clipmill.manifests.formatting import percent
from clipmill.manifests.store import read_captions, read_videos
from clipmill.manifests.write import write_manifest
from clipmill.train.run.folder import RunFolder, read_lines
from tests.train.running import train


@pytest.fixture(scope="module")
def kitchen(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data with classes: the action is the verb, and the part of the video is the noun."""
    kitchen = tmp_path_factory.mktemp("kitchen")
    shutil.copytree(data_dir, kitchen, dirs_exist_ok=True)
    captions = read_captions(data_dir)
    kinds = [("begins", "middle", "end").index(text.split()[1]) for text in captions["text"].to_pylist()]
    captions = captions.drop(["caption_id"])
    captions = captions.append_column("label_verb", pa.array([kind // 2 for kind in kinds], pa.int32()))
    captions = captions.append_column("label_nouns", pa.array([[kind] for kind in kinds], pa.list_(pa.int32())))
    videos = read_videos(data_dir).select(["video_id", "source_id", "path", "split"])
    write_manifest(kitchen, "test", videos, captions)
    return kitchen


@pytest.fixture(scope="module")
def run(kitchen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "first"
    small = ["--model", "tiny", "--num-frames", 2, "--size-px", 32, "--batch", 4, "--steps", 2, "--workers", 1]
    evaluation = ["--evaluate.every", 1, "--evaluate.protocol", "mir", "--evaluate.split", "train"]
    averages = ["--optimizer.ema", "0.5"]
    assert train("dual-encoder", "--shards", kitchen, "--out", out, *small, *evaluation, *averages) == 0
    return out


def score(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    capsys.readouterr()
    assert train("eval", *arguments, "--json") == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_the_loop_and_the_command_find_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = read_lines(RunFolder(run).metrics)
    result = score(capsys, "mir", run, "--split", "train")
    for direction in ("average", "video_to_text", "text_to_video"):
        for name in ("mean_ap", "ndcg"):
            assert result[direction][name] == pytest.approx(lines[-1][f"train/{direction}_{name}"], abs=1e-6)  # type: ignore[index]
    # Three of the nine clips have the caption "it begins".
    assert result["coverage"] == "9 of 9 clips, 7 sentences"
    assert result["weights"] == "moving average of the weights, fp32"


def test_every_protocol_stands_beside_its_numbers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert train("eval", "mir", run, "--split", "train", "--clips", 2) == 0
    printed = capsys.readouterr().out
    for words in (
        "mAP",
        "nDCG",
        "average",
        "  chance",
        "T = 2 frames",
        "2 clips",
        "1 crop",
        "step 2",
        "computed from",
    ):
        assert words in printed
    (tmp_path / "templates.txt").write_text("{}\na video: {}\n")
    assert train("eval", "zero-shot", run, "--label", "verb", "--templates", tmp_path / "templates.txt") == 0
    printed = capsys.readouterr().out
    result = json.loads(RunFolder(run).evaluation("zero-shot-val-verb").read_bytes())
    # Chance is a guess between both classes; the majority baseline always predicts the more frequent class.
    assert result["chance"] == {"1": 0.5, "5": 1.0} and result["majority_baseline"]["top1"] > 0.5
    assert f"  majority baseline{percent(result['majority_baseline']['top1']):>13}" in printed
    assert "  chance" not in printed and "chance: a random class" in printed
    for words in ("top-1", "mean class", "2 classes of the captions' label_verb", "6 prompts: 2 templates, 3 names"):
        assert words in printed
    assert train("eval", "retrieval", run) == 0
    page = RunFolder(run).page.read_text()
    for title in ("Text-video retrieval", "Multi-instance retrieval", "Zero-shot classification", "mAP, % (train)"):
        assert title in page
    assert "train eval zero-shot" in page and "--clips 2" in page
    assert "<h2>By class: Zero-shot classification" in page and "Confusion matrix" in page
    for name in ("retrieval-val", "mir-train-2-clips"):
        examples = json.loads(RunFolder(run).evaluation(name).read_bytes())["examples"]
        clips = [clip for query in examples for clip in query["found"]]
        assert clips and all(clip["video"].startswith("data:video/mp4;base64,") for clip in clips)
    assert page.count("<video ") >= 2 and "media-src data:" in page


def test_a_part_of_a_split_is_incomplete_in_title_result_and_text(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_copy = shutil.copytree(run, tmp_path / "run")
    capsys.readouterr()
    assert train("eval", "mir", run_copy, "--split", "train", "--where", "'begins' in text") == 0
    message = "3 of 9 clips scored; not comparable with published numbers"
    printed = capsys.readouterr().out
    assert f"incomplete: {message}" in printed and "average (incomplete)" in printed
    incomplete = [
        json.loads(path.read_bytes())["incomplete"] for path in (run_copy / "evaluations").glob("mir-train*.json")
    ]
    assert message in incomplete
    assert "(EK-100 MIR, computed relevancy) (incomplete)" in RunFolder(run_copy).page.read_text()


def test_a_relevancy_of_another_split_names_both_shapes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "test.npy", np.eye(3))
    capsys.readouterr()
    assert train("eval", "mir", run, "--split", "train", "--relevancy", tmp_path / "test.npy") == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "3 clips x 3 sentences, but split 'train' has 9 x 7" in error and "--sentences" in hint


@pytest.mark.parametrize("clips", [0, -1])
def test_no_look_at_a_clip_is_a_mistake(run: Path, clips: int, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert train("eval", "retrieval", run, "--clips", clips) == 2
    stderr = capsys.readouterr().err
    assert f"--clips is {clips}" in stderr and "--clips must be from 1 to" in stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_frames: 2", "num_frames: 4", "--num-frames is 4, but {} has 2"),
        # All weights fit these settings.
        ("sampling: uniform", "sampling: lavila", "--sampling is lavila, but {} has uniform"),
        ("activation: null", "activation: quick_gelu", "--towers.activation is quick_gelu, but {} has None"),
    ],
)
def test_settings_that_were_changed_by_hand_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    settings = copy / "settings.yaml"
    assert old in settings.read_text()
    settings.write_text(settings.read_text().replace(old, new))
    capsys.readouterr()
    checkpoint = copy / "checkpoints" / "step_000002"
    for command in (("eval", "retrieval", copy, "--split", "train"), ("eval", "probe", copy, "--label", "verb")):
        assert train(*command) == 2
        error, hint = capsys.readouterr().err.splitlines()
        assert error == f"error: {message.format(checkpoint)}"
        assert f"restore the settings that the run was trained with; {settings} may have been changed by hand" in hint
