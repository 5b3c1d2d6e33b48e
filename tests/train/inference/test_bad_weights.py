"""Incomplete models, models of a different task, and damaged models are reported before anything is computed."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from clipmill.manifests.errors import UserError
from clipmill.train.evaluation import opening
from clipmill.train.inference import load_model
from clipmill.train.run.folder import RunFolder
from tests.train.running import train


def error_and_hint(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    """Return the error and the hint of a command that exits with 2."""
    capsys.readouterr()
    assert train(*arguments) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error.startswith("error: ") and hint.startswith("hint: ")
    return error, hint


@pytest.fixture(scope="module")
def exported_clip(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "clip"
    assert train("export", runs["dual-encoder"], "--format", "hf", "--out", out) == 0
    return out


def test_weights_of_another_task_than_a_protocol_scores_are_refused(
    runs: dict[str, Path], exported_clip: Path, moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error, hint = error_and_hint(capsys, "eval", "retrieval", runs["mae"])
    assert "is a run of train mae, not of train dual-encoder" in error
    assert hint == "hint: evaluations of train mae: probe, reconstruction"
    error, hint = error_and_hint(capsys, "eval", "reconstruction", exported_clip, "--shards", moving)
    assert f"{exported_clip} holds weights of train dual-encoder, not of train mae" in error
    assert hint.startswith("hint: evaluations of train dual-encoder: ") and "retrieval" in hint
    plain = tmp_path / "plain"
    shutil.copytree(exported_clip, plain, ignore=shutil.ignore_patterns("clipmill"))
    error, hint = error_and_hint(capsys, "eval", "caption", plain, "--shards", moving)
    assert "not the weights of a complete model for train caption" in error and "TimeSformer and GPT-2" in hint
    error, _ = error_and_hint(capsys, "caption-video", plain, plain)
    assert "not the weights of a complete model for train caption" in error or "no videos" in error


def test_a_protocol_that_needs_a_part_that_the_weights_lack_says_so(
    runs: dict[str, Path], moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, bare = tmp_path / "out", tmp_path / "bare.safetensors"
    assert train("export", runs["mae"], "--format", "videomae", "--out", out) == 0
    state = torch.load(out / "checkpoint.pth", weights_only=True)["model"]
    save_file(
        {name: tensor for name, tensor in state.items() if name.startswith("encoder.") and ".norm." not in name}, bare
    )
    error, hint = error_and_hint(capsys, "eval", "reconstruction", bare, "--shards", moving)
    assert "has no decoder, which this evaluation needs" in error and "train eval probe" in hint
    shown = ("--num-frames", 4, "--size-px", 32)  # replaces the defaults of 16 and 224 for such a file
    assert train("eval", "probe", bare, "--shards", moving, "--label", "verb", "--neighbours", 5, *shown) == 0
    tower = load_model(bare)
    assert tower.model.video.ln_post is None and "encoder" not in tower.description  # type: ignore[union-attr]

    assert train("export", runs["classify"], "--format", "videomae", "--out", tmp_path / "classes") == 0
    file = tmp_path / "classes" / "checkpoint.pth"
    error, _ = error_and_hint(capsys, "eval", "classification", file, "--shards", moving)
    assert "has no names of its classes" in error


def test_what_is_no_weights_is_named(
    runs: dict[str, Path], moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.pt").write_bytes(b"")

    class Program:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return open, (str(tmp_path / "ran"),)

    (tmp_path / "program.pt").write_bytes(pickle.dumps({"state_dict": Program()}))
    save_file({"layer.weight": torch.zeros(3, 3)}, tmp_path / "other.safetensors")
    for name, words in (
        ("none", "there is no run in"),
        ("empty", "there is no run in"),
        ("nothing.pt", "is empty"),
        ("program.pt", "was not loaded"),
        ("other.safetensors", "not the weights of a CLIP, VideoMAE or TimeSformer"),
        ("ViT-B-16:nowhere", "open_clip has no weights with this name and tag"),
    ):
        weights = name if ":" in name else tmp_path / name
        for command in (
            ("eval", "retrieval", weights, "--shards", moving),
            ("export", weights, "--format", "hf", "--out", tmp_path / "out"),
        ):
            error, _ = error_and_hint(capsys, *command)
            assert words in error, error
        with pytest.raises(UserError, match=words):
            load_model(weights)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_half_a_checkpoint_is_refused(
    runs: dict[str, Path], exported_clip: Path, moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half, run, lacking = tmp_path / "half", tmp_path / "run", tmp_path / "lacking"
    for copy in (half, lacking):
        shutil.copytree(exported_clip, copy, ignore=shutil.ignore_patterns("clipmill", "video_extras*"))
    content = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(content[: len(content) // 2])
    error, _ = error_and_hint(capsys, "eval", "retrieval", half, "--shards", moving)
    assert "damaged or truncated" in error
    state = load_file(lacking / "model.safetensors")
    del state["vision_model.post_layernorm.weight"]
    save_file(state, lacking / "model.safetensors", {"format": "pt"})
    error, _ = error_and_hint(capsys, "eval", "retrieval", lacking, "--shards", moving)
    assert "does not fit the model" in error and "ln_post" in error
    shutil.copytree(runs["dual-encoder"], run, ignore=shutil.ignore_patterns("step_*"))
    for command in (("eval", "retrieval", run), ("export", run, "--format", "hf", "--out", tmp_path / "out")):
        assert "has no checkpoint yet" in error_and_hint(capsys, *command)[0]


def test_an_export_whose_weights_have_changed_is_not_taken_for_its_run(
    exported_clip: Path, moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(exported_clip, other, ignore=shutil.ignore_patterns("video_extras*"))
    state = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in state.items()}, other / "model.safetensors", {"format": "pt"})
    error, hint = error_and_hint(capsys, "eval", "retrieval", other, "--shards", moving)
    assert "does not belong to model.safetensors" in error and "delete" in hint
    shutil.rmtree(other / "clipmill")
    assert train("eval", "retrieval", other, "--shards", moving) == 0


def test_an_export_whose_other_files_have_changed_or_are_missing_is_refused(
    exported_clip: Path, moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score = ("eval", "retrieval", tmp_path / "other", "--shards", moving)
    record = tmp_path / "other" / "clipmill"

    def edit_file(name: str, before: str, after: str) -> None:
        text = (tmp_path / "other" / name).read_text()
        assert before in text
        (tmp_path / "other" / name).write_text(text.replace(before, after))

    for name, before, after in (
        ("clipmill/settings.yaml", "num_frames: 4", "num_frames: 5"),
        ("clipmill/run.json", "dual-encoder", "mae"),
        ("config.json", '"num_attention_heads": ', '"num_attention_heads":  '),
    ):
        shutil.copytree(exported_clip, tmp_path / "other")
        edit_file(name, before, after)
        error, hint = error_and_hint(capsys, *score)
        assert f"{name} has changed since the export" in error and f"delete {record}" in hint
        shutil.rmtree(tmp_path / "other")
    for name in ("video_extras.safetensors", "clipmill/settings.yaml", "clipmill/run.json"):
        shutil.copytree(exported_clip, tmp_path / "other")
        (tmp_path / "other" / name).unlink()
        error, _ = error_and_hint(capsys, *score)
        assert f"{name} was exported, but is missing" in error
        shutil.rmtree(tmp_path / "other")
    shutil.copytree(exported_clip, tmp_path / "other")
    (record / "files.json").unlink()
    assert "files.json cannot be read" in error_and_hint(capsys, *score)[0]
    shutil.rmtree(record)
    assert train(*score) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 5}, "the video tower of the weights has 2 blocks, but the configuration says 5"),
        ({"num_attention_heads": 12, "hidden_size": 768}, "has width 128, but the configuration says 12 heads"),
    ],
)
def test_weights_of_another_size_than_their_configuration_are_refused(
    exported_clip: Path, tmp_path: Path, changes: dict[str, int], words: str
) -> None:
    folder = tmp_path / "clip"
    shutil.copytree(exported_clip, folder, ignore=shutil.ignore_patterns("clipmill", "video_extras*"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        load_model(folder)


def test_weights_of_another_embedding_width_are_not_half_random(
    runs: dict[str, Path], exported_clip: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(exported_clip, other, ignore=shutil.ignore_patterns("clipmill", "video_extras*"))
    state = load_file(other / "model.safetensors")
    state["text_projection.weight"] = state["text_projection.weight"][:64].contiguous()
    save_file(state, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="text_projection would have random values"):
        load_model(other)


def test_what_only_a_run_has_is_asked_of_other_weights(
    runs: dict[str, Path], exported_clip: Path, moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error, _ = error_and_hint(capsys, "eval", "retrieval", exported_clip)
    assert "--shards is missing" in error and "is not a run" in error
    error, _ = error_and_hint(capsys, "eval", "retrieval", runs["dual-encoder"], "--out", tmp_path)
    assert "--out is" in error and "are written into" in error
    error, _ = error_and_hint(
        capsys,
        "export",
        exported_clip,
        "--format",
        "hf",
        "--out",
        tmp_path / "x",
        "--checkpoint",
        tmp_path / "step_000003",
    )
    assert "--checkpoint is" in error
    for flags, words in (
        (("--num-frames", 0), "--num-frames is 0"),
        (("--size-px", 40), "cannot be cut into patches"),
        (("--sampling", "never"), "never"),
    ):
        assert words in error_and_hint(capsys, "eval", "retrieval", exported_clip, "--shards", moving, *flags)[0]


def test_a_damaged_line_is_found_before_anything_is_computed(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(runs["dual-encoder"], run.path)
    with run.metrics.open("a") as file:
        file.write("{half\n")

    def fail_to_open(*_: object, **__: object) -> None:
        raise AssertionError("the weights must not be opened")

    monkeypatch.setattr(opening, "open_for", fail_to_open)
    error, hint = error_and_hint(capsys, "eval", "retrieval", run.path)
    assert "line 4" in error and "is damaged" in error and "remove that line" in hint


def test_a_run_is_scored_from_any_working_directory(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").symlink_to(moving)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    small = "--model tiny --size-px 32 --num-frames 2 --workers 1 --batch 4 --steps 1 --device cpu"
    assert train("dual-encoder", "--shards", "data", "--out", "run", *small.split()) == 0
    assert RunFolder(tmp_path / "run").data_facts("data")["is_own_data"]
    monkeypatch.chdir(tmp_path / "elsewhere")
    for shards in ((), ("--shards", "../data"), ("--shards", moving)):
        assert train("eval", "retrieval", "../run", *shards) == 0
    assert [path.stem for path in RunFolder(tmp_path / "run").results()] == ["retrieval-val"]


def test_damaged_settings_are_named_alike_on_resuming_and_scoring(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(runs["dual-encoder"], run.path)
    text = run.settings.read_text()
    cuts = [text.index("size_px") + 4, text.index("size_px"), text.index("size_px: 32") + len("size_px: 3")]
    for damaged in (*(text[:cut] for cut in cuts), text.replace("model: tiny", "model: huge")):
        run.settings.write_text(damaged)
        assert error_and_hint(capsys, "dual-encoder", "--resume", "--out", run.path) == error_and_hint(
            capsys, "eval", "retrieval", run.path
        )
    assert json.loads(run.facts.read_text())["task"] == "dual-encoder"
