"""Runs on several data folders: what they record, how they resume, and what they evaluate."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.config.files import load_settings
from clipmill.train.engine.rank_consistency import _content
from clipmill.train.run.checkpoint import all_checkpoints, read_metadata
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from tests.train.mixture.folders import NEAR
from tests.train.plane import ONE
from tests.train.running import train, two_lines
from tests.train.tiny_data import write_captions

SMALL = ("--model", "tiny", "--num-frames", 2, "--size-px", 32, "--batch", 6, "--workers", 1, "--device", "cpu")
STEPS = ("--warmup-steps", 1, "--lr", 1e-3, "--steps", 4, "--checkpoint-every", 2)
SHOWN = ("--captions.sources", "test=1")
BEST = ("--best", "far/text_to_video_r5")


def shards(*folders: Path) -> tuple[object, ...]:
    return tuple(word for folder in folders for word in ("--shards", folder))


@pytest.fixture(scope="module")
def finished_run(near: Path, far: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run with a loss that keeps per-sample state, an evaluation in the loop, and captions weighted by source."""
    out = tmp_path_factory.mktemp("runs") / "mixed"
    words = ("dual-encoder", *shards(near, far), "--mix", "2,1", *SMALL, *STEPS, *SHOWN, "--loss.kind", "fastclip-v3")
    assert train(*words, "--evaluate.every", 3, "--out", out, *BEST) == 0
    return out


def test_a_run_records_its_folders_and_counts_their_samples(finished_run: Path, near: Path, far: Path) -> None:
    run = RunFolder(finished_run)
    lines = read_lines(run.metrics)
    assert [line["sources"] for line in lines] == [{"near": 4 * step, "far": 2 * step} for step in range(1, 5)]
    assert {"near/text_to_video_r1", "far/text_to_video_r1"} <= lines[-1].keys()
    facts = run.read_facts()
    assert [(source["name"], source["shards"], source["num_samples"]) for source in facts["sources"]] == [
        ("near", str(near), 6),
        ("far", str(far), 4),
    ]
    assert "each visited 1.11 times per epoch" in facts["data"] and "0.833 times" in facts["data"]
    assert facts["evaluations"]["far"]["is_part_of_own_data"]
    page = run.page.read_text()
    assert "<h2>Data folders</h2>" in page and f"{near}: 6 of 6 captions" in page and "66.7 %" in page
    settings = load_settings(run.settings, DualEncoderSettings)
    assert settings.shards == (str(near), str(far)) and settings.mix == "2,1"
    assert settings == replace(settings, shards=settings.folders)


def test_the_best_checkpoint_is_chosen_by_a_metric_of_one_folder(
    finished_run: Path, near: Path, far: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in read_lines(RunFolder(finished_run).metrics) if BEST[1] in line]
    assert [line["step"] for line in lines] == [3, 4]
    stored = all_checkpoints(RunFolder(finished_run).checkpoints)
    assert max(lines, key=lambda line: line[BEST[1]])["step"] in stored and read_metadata(stored[3]).numbers
    words = ("dual-encoder", *shards(near, far), *SMALL, *STEPS, "--evaluate.every", 1, "--out", tmp_path / "run")
    assert train(*words, "--best", "val/text_to_video_r5") == 2
    error, hint = two_lines(capsys)
    assert "--best val/text_to_video_r5 is not a metric of the evaluation" in error and BEST[1] in hint


def test_a_run_goes_on_with_its_weights_and_folders_only(
    finished_run: Path, near: Path, far: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert train("dual-encoder", "--resume", "--out", finished_run, "--mix", "1,1") == 2
    assert "--mix is 1,1" in two_lines(capsys)[0]
    assert train("dual-encoder", "--resume", "--out", finished_run, *shards(far, near)) == 2
    assert "the data are now: mixture of 2 data folders" in two_lines(capsys)[0]
    assert train("dual-encoder", "--resume", "auto", "--out", finished_run, *shards(near), *BEST) == 2
    assert f"--shards lists 1 data folder, but the run in {finished_run} has 2: {near}, {far}" in two_lines(capsys)[0]


def test_each_folder_is_evaluated_with_the_settings_of_the_run(
    finished_run: Path, near: Path, far: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert train("eval", "retrieval", finished_run, "--json") == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["shards"] for result in results] == [str(near), str(far)]
    assert all(result["is_part_of_own_data"] for result in results)
    last = read_lines(RunFolder(finished_run).metrics)[-1]
    for name, result in zip(("near", "far"), results, strict=True):
        assert last[f"{name}/text_to_video_r1"] == result["text_to_video"]["recall"]["1"]
    assert len(RunFolder(finished_run).results()) == 2
    assert str(far) in RunFolder(finished_run).page.read_text()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("mae --samples-per-chunk 2", marks=pytest.mark.nightly),
        "classify --label motion --repeats 2 --evaluate.every 2",
        pytest.param(
            "caption --decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_other_tasks_train_on_mixtures(
    near: Path, far: Path, tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    given = (*words.split(), *shards(near, far), *SMALL, "--warmup-steps", 1, "--steps", 2, "--out", out)
    assert train(*given) == 0
    stdout = capsys.readouterr().out
    assert "mixture of 2 data folders" in stdout and "each visited once per epoch" in stdout
    assert "samples: " in stdout and " of near, " in stdout
    run = RunFolder(out)
    assert sum(read_lines(run.metrics)[-1]["sources"].values()) == 12
    if words.startswith("mae"):
        assert [path.name.rpartition("-")[0] for path in run.results()] == [
            "reconstruction-val-far",
            "reconstruction-val-near",
        ]
    if words.startswith("classify"):
        assert run.read_facts()["classes"]["names"] == ["down", "left", "up"]
        assert {"near/motion_top1", "far/motion_top1"} <= read_lines(run.metrics)[-1].keys()


def test_ranks_compare_the_content_of_each_folder(near: Path, far: Path) -> None:
    class Named:
        variant_name, fingerprint = "v", "f" * 64

    settings = DualEncoderSettings(shards=(str(near), str(far)))
    named: Any = Named()
    assert {"manifest of near", "manifest of far", "column video of far"} <= _content(
        named, settings, columns=("video",)
    ).keys()
    assert ONE.size == 1


@pytest.mark.parametrize(
    ("given", "error", "hint"),
    [
        ({"shards": ("/x/a", "/x/a")}, "--shards names /x/a twice", "--mix"),
        ({"shards": ("/x/a", "/x/b/../a")}, "--shards names /x/b/../a and /x/a, but they are the same folder", "--mix"),
        ({"shards": ("/x/a", "/x/b"), "mix": "1"}, "--mix 1 has 1 weight for 2 data folders", "as 1,1"),
        ({"shards": ("/x/a", "/x/b"), "mix": "1,1,1"}, "--mix 1,1,1 has 3 weights for 2 data folders", "as 1,1"),
        ({"shards": ("/x/a", "/x/b"), "mix": "0,1"}, "--mix 0,1: '0' is not a number above 0", "above 0"),
        ({"shards": ("/x/a", "/x/b"), "mix": "-2,1"}, "--mix -2,1: '-2' is not a number above 0", "omit"),
    ],
)
def test_bad_mixtures_are_named(given: dict[str, Any], error: str, hint: str) -> None:
    with pytest.raises(UserError) as raised:
        DualEncoderSettings(**given)
    assert str(raised.value) == error and hint in str(raised.value.hint)


def test_what_cannot_be_mixed_is_said(
    near: Path, far: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    out = ("--out", tmp_path / "run", *SMALL)
    assert train("dual-encoder", "--shards", near, "--mix", "2,1", *out) == 2
    assert two_lines(capsys)[0].endswith(f"--mix is 2,1, which has no effect: --shards {near} is one folder")
    assert train("dual-encoder", *shards(near, tmp_path / "none"), *out) == 2
    assert f"there is no data folder {tmp_path / 'none'}" in two_lines(capsys)[0]
    tar = next(far.rglob("*.tar"))
    assert train("dual-encoder", *shards(near), "--shards", tar, *out) == 2
    problem, hint = two_lines(capsys)
    assert f"--shards names {tar}, but video tars cannot be mixed" in problem
    assert "use image tars or data folders, or train only on the video tars" in hint
    assert train("classify", "--label", "motion", *shards(near, data_dir), *out) == 2
    assert f"the captions of {data_dir} have no column label_motion" in two_lines(capsys)[0]
    assert train("dual-encoder", *shards(near, far), "--split", "test", *out) == 2
    assert f"{near} has no videos of split 'test'" in two_lines(capsys)[0]
    assert train("bench", *shards(near, far)) == 2
    error, hint = two_lines(capsys)
    assert "train bench measures one data folder" in error and f"--shards {near}" in hint
    assert not (tmp_path / "run").exists()


def test_a_folder_of_a_mixture_that_cannot_be_evaluated_is_named_and_the_others_are_evaluated(
    finished_run: Path, near: Path, far: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, incomplete = shutil.copytree(finished_run, tmp_path / "run"), shutil.copytree(near, tmp_path / "near")
    write_captions(incomplete, {video.name: video.split.replace("val", "test") for video in NEAR}, [])
    settings = (run / "settings.yaml").read_text()
    (run / "settings.yaml").write_text(settings.replace(f"{near}\n", f"{incomplete}\n"))
    capsys.readouterr()
    assert train("eval", "retrieval", run) == 2
    output = capsys.readouterr()
    error, hint = output.err.splitlines()[-2:]
    assert error.startswith(f"error: {incomplete} was not evaluated: ") and "'val'" in error
    assert hint.startswith("hint: the run's other data folders were evaluated") and f"{far}" in output.out
