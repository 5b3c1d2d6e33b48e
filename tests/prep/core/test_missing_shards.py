"""Tests of what a run reports about shards that are missing at its end, whatever happened to the workers."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.run import Summary, execute
from clipmill.prep.core.shard_result import ShardResult, stop_result
from clipmill.prep.video.column import Recipe, resolve
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.plan_inputs import chunk_job, make_plan
from clipmill.prep.video.worker import ShardTask, make_shard
from clipmill.shards.commits import commit_path
from clipmill.shards.dataset import current_variant
from tests.prep.here import Here
from tests.prep.running import Ran, manifest
from tests.prep.sets import LEN, ShardSet

Prep = Callable[..., Ran]


@pytest.fixture
def data(tmp_path: Path, write_video: Callable[..., Path]) -> Path:
    """Create five videos of one second each, with two of them per shard."""
    for number in range(5):
        write_video(tmp_path / "videos" / f"{number}.mp4", seconds=1, first_number=1000 * number)
    manifest(tmp_path / "data", tmp_path / "videos")
    return tmp_path / "data"


def run(
    data: Path,
    make: Callable[[ShardTask], ShardResult],
    monkeypatch: pytest.MonkeyPatch,
    *,
    per_shard: int = 2,
    lag_limit_s: float = 0.0,
) -> Summary:
    monkeypatch.setattr("clipmill.prep.video.spans.MIN_SHARDS", 1)
    monkeypatch.setattr("clipmill.prep.video.spans.MAX_SHARD_CHUNKS", per_shard)
    monkeypatch.setattr("clipmill.prep.video.spans.SPAN_CHUNKS", 1)
    recipe = resolve(Recipe(len="1s", preset="ultrafast", short_side=32), ffmpeg_version=find_ffmpeg().version)
    job = chunk_job(make_plan(data, recipe))
    return execute(replace(job, make=make, lag_limit_s=lag_limit_s), Here())


def listed_failures(data: Path, summary: Summary) -> list[dict[str, Any]]:
    path = data / "video" / summary.variant / "failures.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_worker_that_wrote_elsewhere_is_not_believed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"

    def astray(task: ShardTask) -> ShardResult:
        if task.shard_id != 1:
            return make_shard(task)
        elsewhere.mkdir()
        return make_shard(replace(task, variant_dir=elsewhere))

    summary = run(data, astray, monkeypatch)
    assert (summary.num_shards, summary.num_shards_made, summary.num_chunks, summary.num_encoded) == (2, 2, 3, 3)
    assert summary.failures_by_code() == {FailureCode.SHARD_MISSING: 2} and summary.num_failed_videos == 2
    assert [failure["code"] for failure in listed_failures(data, summary)] == ["shard_missing"] * 2
    assert "no commit for this plan" in summary.failures[0].message and str(data) in summary.failures[0].message
    summary = run(data, make_shard, monkeypatch)
    assert (summary.num_shards_made, summary.num_chunks, summary.failures) == (1, 5, [])


def test_a_commit_without_its_tar_is_a_missing_shard(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(task: ShardTask) -> ShardResult:
        result = make_shard(task)
        if task.shard_id == 0:
            next(task.variant_dir.glob("000000-*.tar")).unlink()
        return result

    summary = run(data, lossy, monkeypatch)
    assert summary.failures_by_code() == {FailureCode.SHARD_MISSING: 2} and summary.num_shards_made == 2


def test_a_shard_that_was_given_up_is_a_failure_of_all_of_its_videos(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_shard(task: ShardTask) -> ShardResult:
        return stop_result(task, FailureCode.OUT_OF_MEMORY, "gone") if task.shard_id == 0 else make_shard(task)

    summary = run(data, lose_shard, monkeypatch)
    assert summary.failures_by_code() == {FailureCode.OUT_OF_MEMORY: 2} and summary.num_failed_videos == 2
    assert summary.gave_up is None


def test_a_run_that_full_disks_ended_names_what_it_did_not_try(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(task: ShardTask) -> ShardResult:
        return stop_result(task, FailureCode.DISK_FULL, "full")

    summary = run(data, full, monkeypatch, per_shard=1)
    assert summary.failures_by_code() == {FailureCode.DISK_FULL: 3, FailureCode.SHARD_MISSING: 2}
    assert summary.num_failed_videos == 5 and "disk was full" in (summary.gave_up or "")


def test_no_budget_covers_a_run_that_ended_early(prep: Prep, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(job: object, engine: object, **_: object) -> Summary:
        return Summary("h264", gave_up="the disk was full for 3 shards in a row")

    monkeypatch.setattr("clipmill.prep.video.work.execute", gives_up)
    ran = prep("chunk", "--data", data, "--engine", "processes", "--max-failures", "100%", "--len", "1s", status=1)
    assert "the disk was full for 3 shards in a row" in ran.stderr


def test_a_worker_makes_no_folder_of_a_variant(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmount_and_make(task: ShardTask) -> ShardResult:
        moved = task.variant_dir.rename(task.variant_dir.with_name("moved"))
        try:
            return make_shard(task)
        finally:
            assert not task.variant_dir.exists(), "a worker created the folder of the variant"
            moved.rename(task.variant_dir)

    summary = run(data, unmount_and_make, monkeypatch)
    assert summary.failures_by_code() == {FailureCode.IO_ERROR: 5}
    assert all("the variant folder does not exist" in failure.message for failure in summary.failures)


def test_a_variant_in_which_everything_failed_takes_the_place_of_none(prep: Prep, shard_set: ShardSet) -> None:
    before = current_variant(shard_set.data, "video")
    flags = ("--bitrate", "99999999M", "--engine", "processes", *LEN)
    prep("chunk", "--data", shard_set.data, *flags, status=1)
    assert current_variant(shard_set.data, "video") == before


def test_a_commit_that_becomes_visible_late_is_awaited(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = tmp_path / "late"

    def lagging(task: ShardTask) -> ShardResult:
        result = make_shard(task)
        if task.shard_id == 1:
            commit_path(task.variant_dir, 1).rename(late)
        return result

    summary = run(data, lagging, monkeypatch, lag_limit_s=0.1)
    assert summary.failures_by_code() == {FailureCode.SHARD_MISSING: 2} and summary.num_shards == 2
    assert "waiting up to 0.1 s for 1 shard in " in capsys.readouterr().err

    late.unlink()
    appearing = Event()

    def appear() -> None:
        appearing.wait()
        late.rename(commit_path(data / "video" / summary.variant, 1))

    thread = Thread(target=appear)
    thread.start()
    write = sys.stderr.write

    def note_message(text: str) -> int:
        if "waiting up to" in text:  # other lines show progress, which a busy machine may write earlier
            appearing.set()
        return write(text)

    monkeypatch.setattr(sys.stderr, "write", note_message)
    summary = run(data, lagging, monkeypatch, lag_limit_s=60)
    thread.join()
    assert (summary.num_shards, summary.num_chunks, summary.failures) == (3, 5, [])
    assert summary.num_shards_made == 1 and len(listed_failures(data, summary)) == 0
