"""`train eval`, `export` and `caption-video` take runs, exported folders, files of other projects and tags alike."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.train.weights.small import our_model
from tests.train.weights.test_export import run_train
from train.inference.model import load_model
from train.run.folder import RunFolder

# What differs between results of one and the same model: names of the weights, not what they compute.
OF_THE_NAME = {"source", "shards", "is_own_data", "step", "weights", "command", "all_said"}
EVALUATIONS: dict[str, list[tuple[str, ...]]] = {
    "dual-encoder": [
        ("retrieval",),
        ("retrieval", "--clips", "2"),
        ("zero-shot", "--label", "verb"),
        ("probe", "--label", "verb", "--neighbours", "5"),
    ],
    "classify": [("classification", "--clips", "2"), ("probe", "--label", "noun", "--neighbours", "5")],
    "mae": [("reconstruction",), ("probe", "--label", "verb", "--neighbours", "5")],
    "caption": [("caption", "--decoding.method", "beam", "--decoding.max-tokens", "6")],
}
FORMATS = [
    ("dual-encoder", "open_clip"),
    ("dual-encoder", "hf"),
    ("classify", "hf"),
    ("classify", "videomae"),
    ("mae", "hf"),
    ("mae", "videomae"),
    ("caption", "hf"),
]


def scored(capsys: pytest.CaptureFixture[str], kind: str, weights: object, *flags: object) -> dict[str, Any]:
    capsys.readouterr()
    assert run_train("eval", kind, weights, *flags, "--json") == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def same(result: dict[str, Any]) -> dict[str, Any]:
    """A result without the names of the weights."""
    return {name: value for name, value in result.items() if name not in OF_THE_NAME}


@pytest.fixture(scope="module")
def exports(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Every format of every run."""
    folder = tmp_path_factory.mktemp("exports")
    for task, form in FORMATS:
        assert run_train("export", runs[task], "--format", form, "--out", folder / task / form) == 0
    return {(task, form): folder / task / form for task, form in FORMATS}


@pytest.mark.parametrize("task", EVALUATIONS)
def test_scores_of_a_run_and_of_its_exports_are_equal_to_the_digit(
    runs: dict[str, Path],
    exports: dict[tuple[str, str], Path],
    moving: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
) -> None:
    for kind, *flags in EVALUATIONS[task]:
        own = scored(capsys, kind, runs[task], *flags)
        for form in (form for name, form in FORMATS if name == task):
            its = scored(capsys, kind, exports[task, form], "--shards", moving, *flags)
            assert same(its) == same(own), (kind, form)
            assert its["source"] == str(exports[task, form]) and its["step"] is None


@pytest.mark.parametrize(("task", "form"), FORMATS)
def test_an_export_has_the_identity_of_its_run(
    runs: dict[str, Path], exports: dict[tuple[str, str], Path], task: str, form: str
) -> None:
    assert load_model(exports[task, form]).identity == load_model(runs[task]).identity


def test_exports_are_converted_to_the_other_format_and_back(
    runs: dict[str, Path], exports: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    for task, first, second, file in (
        ("dual-encoder", "open_clip", "hf", "model.safetensors"),
        ("mae", "videomae", "hf", "model.safetensors"),
    ):
        out = tmp_path / task
        assert run_train("export", exports[task, first], "--format", second, "--out", out) == 0
        here, there = load_file(out / file), load_file(exports[task, second] / file)
        assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
        assert (out / "config.json").read_text() == (exports[task, second] / "config.json").read_text()
        assert load_model(out).identity == load_model(runs[task]).identity


def test_a_run_of_4_frames_is_scored_with_16_in_one_command(
    runs: dict[str, Path], moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["dual-encoder"], run, ignore=shutil.ignore_patterns("evaluations"))
    plain = scored(capsys, "retrieval", run)
    capsys.readouterr()
    assert run_train("eval", "retrieval", run, "--num-frames", 16) == 0
    printed = capsys.readouterr().out
    assert "4 x 128 -> 16 x 128" in printed and "interpolated along time" in printed
    assert "overrides: --num-frames 16, unlike in training" in printed and "T = 16 frames" in printed
    results = {path.stem: json.loads(path.read_text()) for path in RunFolder(run).results()}
    assert results["retrieval-val"]["text_to_video"] == plain["text_to_video"]
    assert results["retrieval-val-16-frames"]["overrides"] == {"num_frames": 16}
    assert "--num-frames 16" in results["retrieval-val-16-frames"]["command"]
    page = RunFolder(run).page.read_text()
    assert "unlike in training" in page
    # What the training had is no override.
    assert "overrides" not in scored(capsys, "retrieval", run, "--num-frames", 4)["overrides"]
    assert len(RunFolder(run).results()) == 2
    for flags, name in ((("--sampling", "uniform"), "uniform"), (("--size-px", 48), "48px")):
        assert scored(capsys, "retrieval", run, *flags)["overrides"]
        assert RunFolder(run).evaluation(f"retrieval-val-{name}").is_file()


@pytest.mark.parametrize("task", ["classify", "mae", "caption"])
def test_other_models_are_shown_more_and_larger_frames_too(
    runs: dict[str, Path],
    exports: dict[tuple[str, str], Path],
    moving: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
) -> None:
    kind, *flags = EVALUATIONS[task][0]
    run = tmp_path / "run"
    shutil.copytree(runs[task], run)
    more = ("--num-frames", 8, "--size-px", 48)
    own = scored(capsys, kind, run, *flags, *more)
    its = scored(capsys, kind, exports[task, "hf"], "--shards", moving, *flags, *more)
    assert same(own) == same(its) and "T = 8 frames" in own["clip"] and "48 px" in own["clip"]
    assert [path.stem.endswith("-8-frames-48px") for path in RunFolder(run).results()].count(True) == 1


def test_results_of_other_weights_are_written_where_the_user_says(
    exports: dict[tuple[str, str], Path], moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = exports["dual-encoder", "hf"], tmp_path / "scores"
    printed = scored(capsys, "retrieval", folder, "--shards", moving, "--out", out)
    assert json.loads((out / "retrieval-val.json").read_text()).items() >= printed.items()
    scored(capsys, "retrieval", folder, "--shards", moving, "--out", out)
    other = exports["dual-encoder", "open_clip"]
    assert run_train("eval", "retrieval", other, "--shards", moving, "--out", out) == 2
    assert "is the result of other weights or data" in capsys.readouterr().err
    scored(capsys, "caption", exports["caption", "hf"], "--shards", moving, "--out", out)
    assert {path.name for path in out.iterdir()} >= {"captions-val.json", "captions-val.coco.json", "captions-val.html"}


def foreign(exports: dict[tuple[str, str], Path], task: str, form: str, folder: Path) -> Path:
    """An export without the record of its run and what an image tower lacks: as another program would have saved it."""
    shutil.copytree(exports[task, form], folder)
    shutil.rmtree(folder / "clipmill")
    (folder / "video_extras.safetensors").unlink(missing_ok=True)
    return folder


def test_folders_of_other_programs_are_read_by_their_configuration(
    exports: dict[tuple[str, str], Path], moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, ((task, form), path) in enumerate(exports.items()):
        if form == "videomae":
            continue
        folder = foreign(exports, task, form, tmp_path / str(number))
        kind, *flags = EVALUATIONS[task][0]
        if task == "classify":
            # config.json names the classes, and no label: clips that have a `class`.
            assert run_train("eval", kind, folder, "--shards", moving, *flags) == 2
            assert "class" in capsys.readouterr().err
            kind, *flags = EVALUATIONS[task][1]
        result = scored(capsys, kind, folder, "--shards", moving, *flags)
        assert "32 px" in result["clip"] and f"T = {4} frames" in result["clip"], path
        model = load_model(folder)
        assert model._normalisation[0] == (0.42, 0.46, 0.41) and "1e-4" not in model.description


def test_a_file_of_avion_is_scored_by_all_protocols_of_a_dual_encoder(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from train.config.model import Towers
    from train.models.dual_encoder import size_of

    model = our_model(num_frames=4, size=size_of("tiny", Towers()))
    theirs = {"visual.image_projection": model.video.proj}
    for name, tensor in model.state_dict().items():
        if name != "video.proj":
            theirs[name.replace("video.", "visual.", 1).replace("text.", "textual.", 1)] = tensor
    file = tmp_path / "avion.pt"
    torch.save({"state_dict": {f"module.{name}": one for name, one in theirs.items()}, "epoch": 3}, file)
    result = scored(capsys, "retrieval", file, "--shards", moving, "--num-frames", 16)
    assert "AVION" in result["weights"] and "T = 16 frames" in result["clip"] and result["overrides"]
    assert scored(capsys, "zero-shot", file, "--shards", moving, "--label", "noun")["num_clips"] > 0
