"""`train quickstart`: its proposal for tiny data, the command that it prints, and scripts, which it never asks."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import TEMPORARY_PREFIX
from clipmill.manifests.write import write_manifest
from clipmill.shards.dataset import set_current_variant
from clipmill.train.cli import app
from clipmill.train.commands import quickstart as commands
from clipmill.train.commands.training import parse
from clipmill.train.doctor.machine import examine_in_run
from clipmill.train.quickstart import choice
from clipmill.train.quickstart import plan as measurements
from clipmill.train.quickstart.choice import describe, survey
from clipmill.train.quickstart.plan import Plan, _held_out_clips, make_plan, propose
from clipmill.train.quickstart.request import Request
from clipmill.train.run.folder import RunFolder, read_lines
from tests.train.data.http_folder import HttpFolder
from tests.train.running import train
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

CPU = torch.device("cpu")
Quickstart = Callable[..., int]


@pytest.fixture(scope="module")
def plan(data_dir: Path) -> Plan:
    """Plan for a folder with nine captions for training and three held-out captions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(data_dir.parent)
        patch.setattr(commands, "_TRIAL_S", 0.0)
        patch.setattr(choice, "_FEWEST_STEPS", 1)
        return commands._plan([str(data_dir)], Request(minutes=0.001, device="cpu"))


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Quickstart:
    """Run the command in this process and in an empty folder, with short trials, and return its exit status."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> int:
        return train("quickstart", *arguments)

    return run


def note_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the settings of training runs instead of training."""
    settings_list: list[Any] = []
    monkeypatch.setattr(
        "clipmill.train.commands.launch.launch",
        lambda spec, settings, resume, provenance: settings_list.append(settings),
    )
    return settings_list


def test_the_printed_command_is_accepted_and_has_the_settings_of_the_plan(
    plan: Plan, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_list = note_launches(monkeypatch)
    assert plan.arguments[0] == "train" and plan.command.startswith("train dual-encoder --shards ")
    parse(app, plan.arguments[1:])()
    assert settings_list == [plan.settings]
    assert (plan.settings.batch, plan.settings.split, plan.settings.model) == (4, "train", "tiny")
    num_steps = plan.settings.steps
    assert plan.settings.warmup_steps == num_steps // 10 and plan.settings.checkpoint_every == -(-num_steps // 4)
    assert plan.next_commands[0] == "train eval retrieval runs/quickstart"
    for command in plan.next_commands[:2]:
        app.parse_args(command.removeprefix("train "))


def test_captions_of_models_are_named_if_there_are_no_others(plan: Plan) -> None:
    (data_survey,) = plan.proposal.surveys
    assert data_survey.splits["train"].sources == ("test",)
    train = replace(data_survey.splits["train"], sources=("captioner@12", "vlm@ab"))
    proposal = propose(
        Request(device="cpu"),
        [replace(data_survey, splits={**data_survey.splits, "train": train})],
        plan.proposal.machine,
    )
    words = make_plan(proposal, plan.measurements).arguments
    assert words[words.index("--captions.sources") + 1] == "captioner@*=1,vlm@*=1"
    assert "--captions.sources" not in plan.arguments


def test_held_out_clips_are_not_more_than_their_captions(plan: Plan) -> None:
    (data_survey,) = plan.proposal.surveys
    splits = {**data_survey.splits, "val": replace(data_survey.splits["val"], num_captions=2)}
    surveys = (replace(data_survey, splits=splits),)
    assert _held_out_clips(replace(plan.proposal, surveys=surveys), "val").cautions() == ["only 2 clips"]


def test_the_plan_as_json_says_what_was_found_and_measured(
    plan: Plan, quickstart: Quickstart, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("clipmill.train.commands.quickstart._plan", lambda data, asked: plan)
    assert quickstart(data_dir, "--json") == 0
    plan_record = json.loads(capsys.readouterr().out)
    assert set(plan_record) == {
        *("data", "machine", "task", "preset", "split", "held_out", "batch", "steps", "epochs", "steps_reason"),
        *("minutes", "expected", "measured", "disk_bytes", "free_bytes", "out", "warnings", "argv", "command", "then"),
    }
    [data] = plan_record["data"]
    train, val = data["splits"]["train"], data["splits"]["val"]
    assert (train["num_videos"], train["num_chunks"], train["num_captions"]) == (3, 9, 9)
    assert (val["num_videos"], val["num_chunks"], val["num_captions"]) == (1, 3, 3)
    assert train["hours"] == pytest.approx(3 * 5.5 / 3600) and data["chunk_s"] == 2.0
    assert (plan_record["task"]["value"], plan_record["preset"]["value"], plan_record["held_out"]) == (
        "dual-encoder",
        "tiny",
        "val",
    )
    assert "metrics on split 'val' mean little: only 3 clips" in plan_record["warnings"]
    expected, measured = plan_record["expected"], plan_record["measured"]
    assert 0 < expected["least_s"] < expected["seconds"] < expected["most_s"]
    assert measured["num_samples"] == 9 and measured["num_steps"] >= 1 and measured["memory_bytes"] > 1e8
    assert plan_record["disk_bytes"] >= measured["checkpoint_bytes"]
    assert measured["checkpoint_s"] > 0
    assert list(tmp_path.iterdir()) == [] == list(data_dir.parent.glob(f"{TEMPORARY_PREFIX}*")), (
        "temporary files are left"
    )


def test_a_script_is_never_asked_and_a_person_is(
    plan: Plan, quickstart: Quickstart, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    settings_list, answers = note_launches(monkeypatch), iter(list[str]())
    monkeypatch.setattr("clipmill.train.commands.quickstart._plan", lambda data, asked: plan)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))  # StopIteration if a question is asked
    assert quickstart(data_dir) == 0
    printed = capsys.readouterr().out
    assert f"    {plan.command}\n" in printed and "--yes" in printed.splitlines()[-1] and not settings_list
    monkeypatch.setattr("clipmill.train.commands.quickstart._is_interactive", lambda: True)
    for answer, times in (("", 0), ("n", 0), ("y", 1)):
        answers = iter([answer])
        assert quickstart(data_dir) == 0
        assert settings_list == [plan.settings] * times, answer
    assert quickstart(data_dir, "--json") == 0 and len(settings_list) == 1


def test_with_yes_it_trains_and_says_where_the_page_is_and_what_comes_next(
    plan: Plan, quickstart: Quickstart, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("clipmill.train.commands.quickstart._plan", lambda data, asked: plan)
    assert quickstart(data_dir, "--yes") == 0
    lines = capsys.readouterr().out.splitlines()
    run = RunFolder(tmp_path / "runs" / "quickstart")
    assert run.page.is_file() and len(read_lines(run.metrics)) >= 1
    assert "next: train eval retrieval runs/quickstart" in lines
    assert "page: runs/quickstart/index.html" in lines and lines[-1].startswith("next: train search ")
    [checkpoint] = run.checkpoints.iterdir()
    size_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert plan.measurements.checkpoint_bytes == pytest.approx(size_bytes, rel=0.05)
    # The next run uses a different folder.
    assert propose_out(data_dir) == "runs/quickstart-2"


def propose_out(data_dir: Path) -> str:
    examined = examine_in_run(asked_device="cpu", device_type="cpu")
    proposal = propose(Request(device="cpu"), [survey(str(data_dir))], examined)
    return str(proposal.settings.out)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("DefaultCPUAllocator: full")])
def test_what_does_not_fit_is_tried_with_fewer_clips(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    tried, messages, most = list[int](), list[str](), 2

    def take(steps: Any, opened: Any, **others: Any) -> Any:
        tried.append(opened.settings.batch)
        if opened.settings.batch > most:
            raise error
        return plan.measurements.steps

    monkeypatch.setattr("gc.collect", lambda: 0)
    monkeypatch.setattr(measurements, "take_steps", take)
    monkeypatch.setattr(measurements, "_checkpoint_s", lambda steps, opened: 0.0)
    how: Any = {"device": CPU, "seconds": 0.0, "began_s": 0.0, "say": messages.append}
    measured = measurements.measure(plan.proposal.spec, plan.proposal.settings, **how)
    assert tried == [4, 2] and messages == ["4 clips do not fit into memory; trying 2"]
    assert (measured.batch, measured.num_halved) == (2, 1)
    most = 0
    with pytest.raises(UserError, match="not even a batch of 2 clips"):
        measurements.measure(plan.proposal.spec, plan.proposal.settings, **how)
    monkeypatch.setattr(measurements, "take_steps", lambda *others, **more: (_ for _ in ()).throw(RuntimeError("x")))
    with pytest.raises(RuntimeError, match="x"):
        measurements.measure(plan.proposal.spec, plan.proposal.settings, **how)


def folder_without_chunks(path: Path, *, num_videos: int) -> Path:
    ids = [f"v{number}" for number in range(num_videos)]
    videos = pa.table({"video_id": ids, "source_id": ids, "path": ids, "split": ["train"] * num_videos})
    columns = {
        "video_id": pa.dictionary(pa.int32(), pa.string()),
        "begin_s": pa.float64(),
        "end_s": pa.float64(),
        "text": pa.string(),
    }
    captions = pa.table({name: pa.array([], kind) for name, kind in columns.items()})
    captions = captions.append_column("source", pa.array([], pa.string()).dictionary_encode())
    write_manifest(path, "test", videos, captions)
    return path


def test_what_cannot_be_trained_on_is_refused_with_what_to_do(tmp_path: Path, data_dir: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").touch()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").touch()
    cases = {
        str(tmp_path / "gone"): ("there is no folder", "prep manifest folder VIDEOS"),
        str(tmp_path / "file"): ("is a file", "prep manifest"),
        str(tmp_path / "nothing"): ("is empty", "prep chunk --data"),
        str(tmp_path / "videos"): ("it has no manifest", f"prep manifest folder {tmp_path / 'videos'}"),
        str(folder_without_chunks(tmp_path / "manifest", num_videos=2)): ("has no video chunks", "prep chunk"),
        str(tmp_path / "{000..003}.tar"): ("names image tars or video tars, but train", "use the data folder"),
    }
    latents = folder_without_chunks(tmp_path / "latents", num_videos=2)
    set_current_variant(latents, "latents", "tiny")
    set_current_variant(latents, "video", "gone")
    cases[str(latents)] = (
        "has no video chunks, only latents",
        f"train mae --shards {latents} --preset mae-latents",
    )
    for address, (why, hint) in cases.items():
        with pytest.raises(UserError, match=why) as refused:
            survey(address)
        assert hint in (refused.value.hint or ""), address


def test_videos_that_failed_and_their_captions_do_not_count(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", 40), split="train")
    spans = [Caption(video, 0.0, 1.0, "x") for video in ("a", "failed", "failed")]
    write_captions(tmp_path, dict.fromkeys(("a", "failed"), "train"), spans)
    data_survey = survey(str(tmp_path))
    split = data_survey.splits["train"]
    assert (split.num_videos, split.num_without, split.num_captions) == (1, 1, 1)
    assert describe(data_survey)[1] == "split train: 1 video, 2 chunks, 4 s, 1 caption; 1 video without chunks"


def test_flags_that_contradict_data_or_each_other_are_refused(
    quickstart: Quickstart, data_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    for flags, why in (
        (["--yes", "--json"], "--yes runs the command, but --json only prints"),
        (["--minutes", "0"], "--minutes 0"),
        (["--task", "classify"], "the captions have no labels"),
        (["--label", "shape"], "--label shape has no effect, because train dual-encoder needs no labels"),
        (["--preset", "huge"], "'huge' is not a preset of train dual-encoder"),
        (["--out", "out"], "out exists and is not empty"),
    ):
        assert quickstart(data_dir, "--device", "cpu", *flags) == 2
        assert why in capsys.readouterr().err


def test_a_data_folder_at_an_address_is_looked_at_as_a_local_one(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with closing(HttpFolder(data_dir.parent)) as served:
        here, remote_survey = survey(str(data_dir)), survey(f"{served.address}/{data_dir.name}")
    assert (remote_survey.splits, remote_survey.columns, remote_survey.chunk_s) == (
        here.splits,
        here.columns,
        here.chunk_s,
    )
