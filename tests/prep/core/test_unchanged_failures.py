"""Tests of failures that lie in a file: they fail one run, and later runs only count them until the file changes.

Also tests which command `prep status` recommends next.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.plan import ShardPlan, ShardState
from clipmill.prep.core.run import unchanged_failures
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.shards.commits import Commit, Failure, write_commit
from tests.prep.running import Ran, manifest, prep_here

LEN = ("--len", "1s", "--preset", "ultrafast", "--short-side", "32", "--engine", "processes", "--workers", 1)


@pytest.fixture
def videos(tmp_path: Path, write_video: Callable[..., Path]) -> Path:
    """Write a video, a truncated video and a text file."""
    whole = write_video(tmp_path / "videos" / "whole.mp4", seconds=1)
    (tmp_path / "videos" / "cut.mp4").write_bytes(whole.read_bytes()[:3000])
    (tmp_path / "videos" / "text.mp4").write_text("not a video")
    return tmp_path / "videos"


def test_every_failure_fails_one_run_and_the_nightly_runs_after_it_count_it(
    videos: Path, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    data = tmp_path / "data"

    def night(status: int, *flags: object) -> Ran:
        manifest(data, videos)
        return prep_here("chunk", "--data", data, *LEN, *flags, status=status)

    assert "failed: 2 of 3 videos;" in night(1).stderr
    ran = night(0)
    assert "not counted: 2 videos whose failures an earlier run reported" in ran.stderr
    assert "source_truncated" in ran.stdout and "source_unreadable" in ran.stdout
    assert night(0, "--json").summary["unchanged"] == 2
    write_video(videos / "more.mp4", seconds=1)
    night(0)
    (videos / "short.mp4").write_bytes((videos / "whole.mp4").read_bytes()[:2000])
    assert "failed: 1 of 5 videos;" in night(1).stderr
    night(0)
    (videos / "short.mp4").write_text("not a video either")
    assert "failed, within --max-failures 1: 1 of 5 videos" in night(0, "--max-failures", 1).stderr
    for _ in range(2):  # the retry was requested
        assert "failed: 3 of 5 videos;" in prep_here("retry", "--data", data, *LEN[-4:], status=1).stderr


def test_failures_that_can_pass_fail_every_run(tmp_path: Path) -> None:
    failures = [Failure(f"v{number}", None, str(code), "x") for number, code in enumerate(FailureCode)]
    (tmp_path / "commits").mkdir()
    write_commit(tmp_path, Commit("video", 0, "train", "ab", None, tuple(failures)))

    def unchanged_codes(state: ShardState, read_again: tuple[str, ...] = ()) -> set[str]:
        plan = [ShardPlan(0, "train", state, "", "ab", range(0), 1)]
        same_failures = unchanged_failures(failures, failures, variant_dir=tmp_path, shards=plan, read_again=read_again)
        return {failure.code for failure in same_failures}

    current = unchanged_codes(ShardState.CURRENT)
    assert {"source_truncated", "decode_errors", "source_missing"} <= current
    assert not current & {"timeout", "disk_full", "worker_lost", "endpoint_refused", "budget_spent"}
    assert current - unchanged_codes(ShardState.CHANGED) == {"source_missing", "source_unreadable"}
    assert not unchanged_codes(ShardState.RETRY)
    assert unchanged_codes(ShardState.CURRENT, ("v0",)) == current - {str(next(iter(FailureCode)))}


def test_status_has_no_next_training_while_a_plan_has_work(videos: Path, tmp_path: Path) -> None:
    data, table = tmp_path / "data", tmp_path / "captions.csv"

    def next_command() -> str:
        return prep_here("status", "--data", data).stdout.splitlines()[-1].removeprefix("next      ")

    train, repair = (
        f"train quickstart {data}",
        f"repair or replace the failed videos, then run: prep retry --data {data}",
    )

    def run(next_step: str, *, status: int = 0) -> None:
        ran = prep_here("chunk", "--data", data, *LEN, status=status)
        assert ran.stdout.splitlines()[-1] == f"next     {next_step}" and next_command() == next_step
        assert "nothing to do" in prep_here("plan", "--data", data, *LEN[:-4]).stdout

    table.write_text("video,text\nwhole,first\n")
    manifest(data, videos, "--captions", table)
    run(repair, status=1)  # two of three videos failed, so training on the third is not the next step
    table.write_text("video,text\nwhole,second\n")
    manifest(data, videos, "--captions", table)
    assert next_command().startswith("prep chunk ")
    run(repair)
    whole = (videos / "whole.mp4").read_bytes()
    (videos / "cut.mp4").write_bytes(whole)  # the file is repaired
    assert next_command().startswith("prep chunk ")
    run(train)
    (videos / "cut.mp4").unlink()
    manifest(data, videos, "--captions", table)
    assert next_command().startswith("prep chunk ")
    run(train)


def test_a_failure_that_can_pass_makes_the_same_command_the_next_one(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, program = tmp_path / "data", tmp_path / "ffmpeg"
    program.write_text(f'#!/bin/sh\nulimit -f 1\nexec {find_ffmpeg().path} "$@"\n')
    program.chmod(0o755)
    manifest(data, videos)
    monkeypatch.setenv("CLIPMILL_FFMPEG", str(program))
    ran = prep_here("chunk", "--data", data, *LEN, status=1)
    assert "file size limit" in ran.stdout
    command = f"prep chunk --len 1s --preset ultrafast --short-side 32 --data {data}"
    assert ran.stdout.splitlines()[-1] == f"next     {command}"
    assert prep_here("status", "--data", data).stdout.splitlines()[-1] == f"next      {command}"
