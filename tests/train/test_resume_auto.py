"""`--resume auto`: one command line starts a run, and resumes it after it was killed."""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder, read_lines
from tests.tiers import nightly_beyond
from tests.train.distributed.runs import run_command
from tests.train.killed import killed_at
from tests.train.running import all_files, train, two_lines, weights_of

SMALL = "--preset tiny --num-frames 4 --size-px 32 --batch 4 --workers 1 --device cpu"
STEPS = "--warmup-steps 1 --steps 3 --checkpoint-every 1"
# For each task, flags that need random numbers and state.
COMMANDS = {
    "dual-encoder": "--init.pixel-mean 0.5 0.4 0.3 --loss.kind fastclip-v3",
    "classify": "--label action --towers.kind videomae --mixup 0.8 --cutmix 1 --dropout 0.1"
    " --optimizer.ema 0.9 --repeats 2 --augment.rand-ops 4 --augment.erase 0.5 --towers.drop-path 0.1",
    "mae": "--stride 2 --samples-per-chunk 2 --repeat masks --mask-ratio 0.5 --decoder-mask running-cell",
    "caption": "--decoder.name tiny --decoder.depth 1 --decoder.max-tokens 24 --decoder.vocabulary 280"
    " --captions-per-visit 2 --decoder.dropout 0.1 --microbatch 2",
}


def line(command: str, data_dir: Path, out: Path, *more: object) -> list[str]:
    """Return the command line."""
    words = f"{command} {SMALL} {STEPS} {COMMANDS[command]} --shards {data_dir} --out {out}".split()
    return [*words, *map(str, more), "--resume", "auto"]


# Numbers of the changes of names before which a run is killed: while its folder is made, before there are settings,
# before the first checkpoint, and after it. Until the first checkpoint, nothing depends on the task.
KILLED_AT = dict.fromkeys(COMMANDS, (30,)) | {"dual-encoder": (1, 2, 6, 20)}


@pytest.mark.parametrize("command", nightly_beyond(["dual-encoder"], COMMANDS))
def test_one_command_line_begins_a_run_and_goes_on_with_it_however_it_was_killed(
    moving: Path, tmp_path: Path, command: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(*line(command, moving, whole)) == 0
    for number in KILLED_AT[command]:
        status = killed_at(number, run_command, *line(command, moving, killed), folder=killed)
        assert status == -signal.SIGKILL, f"change {number}"
    assert all_checkpoints(RunFolder(killed).checkpoints)
    assert train(*line(command, moving, killed)) == 0
    expected = weights_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(killed).items())
    assert all_files(killed) == all_files(whole)
    assert [logged["step"] for logged in read_lines(RunFolder(killed).metrics)] == [1, 2, 3]


@pytest.fixture(scope="module")
def begun_run(moving: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "begun"
    assert train(*line("dual-encoder", moving, out)) == 0
    return out


def test_a_flag_or_preset_that_the_run_did_not_begin_with_is_named_with_both_values(
    moving: Path, begun_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*line("dual-encoder", moving, begun_run, "--lr", 0.5, "--seed", 3)) == 2
    error, hint = two_lines(capsys)
    assert f"--lr is 0.5, but the run in {begun_run} has 0.001; --seed is 3, not 0" in error
    assert "the run is complete: start a new run from its weights" in hint and "continue" not in hint
    preset = tmp_path / "preset.yaml"
    preset.write_text("weight_decay: 0.3\n")
    assert train(*line("dual-encoder", moving, begun_run, "--config", preset)) == 2
    error, hint = two_lines(capsys)
    assert "--weight-decay is 0.3, " in error and "has 0.1" in error and str(preset) in hint
    assert train(*line("mae", moving, begun_run)) == 2
    assert "is a run of train dual-encoder, not of train mae" in two_lines(capsys)[0]


def test_settings_that_do_not_shape_the_weights_may_be_others_and_those_left_out_are_the_runs(
    moving: Path, begun_run: Path, tmp_path: Path
) -> None:
    before = RunFolder(begun_run).metrics.read_bytes()
    config = tmp_path / "where.yaml"
    config.write_text(f"out: {begun_run}\n")
    assert train("dual-encoder", "--config", config, "--workers", 2, "--resume", "auto") == 0
    assert train(*line("dual-encoder", moving, begun_run)) == 0
    assert RunFolder(begun_run).metrics.read_bytes() == before, "a complete run takes no more steps"


def test_run_without_checkpoints_says_that_it_restarts_or_is_left_alone(
    moving: Path, begun_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(begun_run, tmp_path / "run")
    shutil.rmtree(RunFolder(run).checkpoints)
    assert train(*line("dual-encoder", moving, run, "--lr", 0.5)) == 2
    assert "has no checkpoint yet: use another --out, or remove the folder" in two_lines(capsys)[1]
    assert train(*line("dual-encoder", moving, run)) == 0
    assert (
        f"{run} has no checkpoint: training restarts at step 0, and replaces 3 logged steps" in capsys.readouterr().out
    )


def test_a_folder_that_holds_something_else_is_not_taken_for_a_run(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / ".tmp-notes.txt").write_text("mine")
    assert train(*line("dual-encoder", moving, out)) == 2
    assert two_lines(capsys)[0] == f"error: {out} contains other files, but no run"
    assert [path.name for path in out.iterdir()] == [".tmp-notes.txt"]


def test_without_auto_a_run_is_required_and_a_preset_has_to_agree_with_it(
    begun_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("dual-encoder", "--out", tmp_path / "none", "--resume") == 2
    assert "there is no run in" in two_lines(capsys)[0]
    begun_run = shutil.copytree(begun_run, tmp_path / "begun")
    shutil.rmtree(RunFolder(begun_run).require_checkpoint())  # a complete run cannot continue
    messages = []
    for resume in (("--resume",), ("--resume", "auto")):
        assert train("dual-encoder", "--out", begun_run, *resume, "--preset", "tiny") == 2
        messages.append(two_lines(capsys))
    error, hint = messages[0]
    assert messages[0] == messages[1] and f"the run in {begun_run} has 3; --batch is 64, not 4" in error
    assert "omit these flags, and any --preset" in hint and "is from preset tiny" in hint
