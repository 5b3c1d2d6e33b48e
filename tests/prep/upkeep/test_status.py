"""Tests of `prep status`: the state of the data, its problems, and the next step."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from clipmill.manifests.publish import publish_bytes
from clipmill.manifests.store import SPANS_FILE, read_videos
from clipmill.prep.core.data_folder import column_lock
from clipmill.prep.core.shard_result import RUNNING_FOLDER, Heartbeat
from clipmill.prep.core.tables import read_table_file, write_table_file
from clipmill.prep.sources.table import PROBES
from clipmill.prep.upkeep.status import ColumnStatus, Status, VariantStatus, status_text
from clipmill.shards.commits import Commit, Failure, commit_path, read_commit, write_commit
from tests.prep.running import Ran, manifest
from tests.prep.sets import LEN, ShardSet, rerun

Prep = Callable[..., Ran]


def test_a_set_is_told_in_numbers(prep: Prep, shard_set: ShardSet) -> None:
    status = prep("status", "--data", shard_set.data, "--json").summary
    video = status["columns"]["video"]
    (variant,) = video["variants"]
    assert video["current"] == variant["name"] == shard_set.variant.name
    assert (variant["num_samples"], variant["num_shards"], variant["num_wanted"]) == (5, 2, 5)
    assert round(variant["hours"] * 3600, 6) == 8.0
    assert variant["size_bytes"] == sum(path.stat().st_size for path in shard_set.variant.rglob("*") if path.is_file())
    videos = status["videos"]
    assert (videos["num_videos"], videos["num_usable"], videos["num_captions"]) == (3, 2, 3)
    assert videos["unusable"] == {"source_unreadable": 1}
    listed = [json.loads(line) for line in Path(video["failures_file"]).read_text().splitlines()]
    assert [failure["video_id"] for failure in listed] == ["text"]


def test_the_text_says_the_same(prep: Prep, shard_set: ShardSet) -> None:
    text = prep("status", "--data", shard_set.data).stdout
    for part in ("3: 2 usable, 1 unusable", "5 chunks in 2 shards", "1 x source_unreadable", "failures.jsonl"):
        assert part in text
    assert text.splitlines()[-1] == f"next      train quickstart {shard_set.data}", (
        "one video failed, but the others suffice"
    )


def test_each_stage_names_the_next_step(prep: Prep, shard_set: ShardSet, tmp_path: Path) -> None:
    (tmp_path / "no videos").mkdir()
    # The command can be copied even if the path of the folder contains spaces.
    shown = f"prep manifest folder VIDEOS --data '{tmp_path / 'no videos'}'"
    assert shown in prep("status", "--data", tmp_path / "no videos").stdout
    before = tmp_path / "before"
    before.mkdir()
    (shard_set.data / "manifest").rename(before / "manifest")
    text = prep("status", "--data", before).stdout
    assert "3 not probed yet" in text
    assert "next      prep chunk" in text
    # Chunks are listed even without a manifest.
    assert "5 chunks" in prep("status", "--data", shard_set.data).stdout


def test_a_variant_whose_folder_was_deleted_is_not_replaced_by_the_default(prep: Prep, shard_set: ShardSet) -> None:
    name = shard_set.variant.name
    shutil.rmtree(shard_set.variant)
    last = prep("status", "--data", shard_set.data).stdout.splitlines()[-1]
    assert last == f"next      prep chunk with the settings of {name} (its folder is missing)"


def test_no_data_folder_is_an_error(prep: Prep, tmp_path: Path) -> None:
    assert "none does not exist" in prep("status", "--data", tmp_path / "none", status=2).error
    (tmp_path / "loop").symlink_to("loop")
    assert "its symbolic links form a loop" in prep("status", "--data", tmp_path / "loop", status=2).error
    for command in ("status", "chunk"):
        assert (
            f"--data '{tmp_path / 'no folder'}'\n" in prep(command, "--data", tmp_path / "no folder", status=2).stderr
        )


def test_missing_and_damaged_shards_fail_with_a_command_that_mends_them(prep: Prep, shard_set: ShardSet) -> None:
    shard_set.tar(0).unlink()
    shard_set.index(0).unlink()
    publish_bytes(commit_path(shard_set.variant, 1), b"{}")
    (shard_set.variant / "commits.arrow").unlink()  # the table knows the duration of a shard without its index
    ran = prep("status", "--data", shard_set.data, status=1)
    assert "missing   shard 000000" in ran.stdout
    assert "corrupt   shard 000001" in ran.stdout
    assert "in 1 shard, 0 s of video, not counting 1 unreadable shard, " in ran.stdout
    assert "2 shards are missing or damaged" in ran.stderr
    command = ran.stderr.partition("to repair, run: prep chunk ")[2].split()
    assert command == ["--len", "2s", "--preset", "ultrafast", "--short-side", "96", "--data", str(shard_set.data)]
    summary = rerun(prep, shard_set, *command[:-2])
    assert (summary["variant"], summary["num_shards_made"]) == (shard_set.variant.name, 2)
    prep("status", "--data", shard_set.data)


def test_a_running_command_is_seen_with_how_far_it_is(prep: Prep, shard_set: ShardSet) -> None:
    (shard_set.variant / "contents.json").unlink()  # the state of a first run
    commit_path(shard_set.variant, 0).unlink()
    with column_lock(shard_set.data), Heartbeat(shard_set.variant, 0, num_chunks=3) as beat:
        beat._written_s = 0.0
        beat.show(2)
        ran = prep("status", "--data", shard_set.data)
        (variant,) = prep("status", "--data", shard_set.data, "--json").summary["columns"]["video"]["variants"]
    assert "in progress: 4 of 5 chunks (80%)" in ran.stdout
    assert variant["num_running"] == 2
    assert list((shard_set.variant / RUNNING_FOLDER).iterdir()) == []
    assert "in progress" not in prep("status", "--data", shard_set.data).stdout


def test_a_command_that_was_killed_is_not_in_progress(prep: Prep, shard_set: ShardSet) -> None:
    (shard_set.variant / "contents.json").unlink()
    commit_path(shard_set.variant, 0).unlink()
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    lock = shard_set.data / ".lock"
    with Heartbeat(shard_set.variant, 0, num_chunks=3):
        lock.write_text(f"process {killed.pid} on another-machine\n")
        assert "in progress" in prep("status", "--data", shard_set.data).stdout
        lock.write_text(f"process {os.getpid()} on {os.uname().nodename}\n")
        assert "in progress" in prep("status", "--data", shard_set.data).stdout
        lock.write_text(f"process {killed.pid} on {os.uname().nodename}\n")
        stdout = prep("status", "--data", shard_set.data).stdout
    assert "in progress" not in stdout and f"next      prep chunk --len {LEN[1]}" in stdout


def test_parts_that_have_stopped_are_not_in_progress_though_heartbeats_are_left(
    prep: Prep, shard_set: ShardSet
) -> None:
    (shard_set.variant / "contents.json").unlink()  # the state of a first run
    commit_path(shard_set.variant, 0).unlink()
    killed = subprocess.Popen([sys.executable, "-S", "-c", ""])
    killed.wait()
    lock = shard_set.data / ".video.part-1-of-2.lock"

    def status_with(holder: str, *, silent_s: float = 0.0) -> str:
        lock.write_text(holder)
        touched_s = time.time() - silent_s
        os.utime(lock, (touched_s, touched_s))
        return prep("status", "--data", shard_set.data).stdout

    with Heartbeat(shard_set.variant, 0, num_chunks=3):
        assert "in progress" in status_with(f"process {os.getpid()} on {os.uname().nodename}\nh264\n")
        assert "in progress" in status_with("process 7 on another-node\nh264\n")
        with lock.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "in progress" in status_with("process 7 on another-node\nh264\n", silent_s=10)
        for stopped in (
            status_with("process 7 on another-node\nh264\n", silent_s=10),
            status_with(f"process {killed.pid} on {os.uname().nodename}\nh264\n"),
            status_with(""),
        ):
            assert "in progress" not in stopped and "shards to make: 1 missing" in stopped
            assert f"next      prep chunk --len {LEN[1]}" in stopped


def test_a_source_that_went_away_is_told_apart_from_an_unusable_one(prep: Prep, shard_set: ShardSet) -> None:
    path = shard_set.data / "probes.parquet"
    table = read_table_file(path, schema=PROBES)
    rows = table.to_pylist()
    codes = ["source_missing" if row["path"].endswith("long.mp4") else row["code"] for row in rows]
    column = table.schema.get_field_index("code")
    write_table_file(path, table.set_column(column, table.schema.field("code"), pa.array(codes)))
    videos = prep("status", "--data", shard_set.data, "--json").summary["videos"]
    assert (videos["num_usable"], videos["lost"]) == (2, {"source_missing": 1})


def test_status_and_plan_count_the_seconds_that_captions_of_other_splits_show(
    prep: Prep, shard_set: ShardSet, tmp_path: Path
) -> None:
    table = tmp_path / "captions.csv"
    rows = ["long,a,0,2.5,train", "long,b,2.5,3,test", "long,c,3,5,val", "short,d,,,val"]
    table.write_text("\n".join(["video,text,begin_s,end_s,split", *rows]))
    videos = Path(read_videos(shard_set.data)["path"][0].as_py()).parent
    ran = prep("manifest", "folder", videos, "--captions", table, "--data", shard_set.data, status=None)
    assert "val 1 video with 2 captions" in ran.stdout and "test 0 videos with 1 caption" in ran.stdout
    # The chunks have 2, 2 and 1 s. Only half a second of the second chunk remains, which is too short.
    line = "train: 3.0 s of 2 chunks belong to captions of other splits; training without captions omits them"
    assert f"splits    {line}" in prep("status", "--data", shard_set.data).stdout
    assert f"splits   {line}" in prep("plan", "--data", shard_set.data, *LEN).stdout
    for command in (("status",), ("plan", *LEN)):
        values = prep(*command, "--data", shard_set.data, "--json").summary
        assert values["of_other_splits"] == {"train": {"seconds": 3.0, "num_chunks": 2}}


def test_captions_with_times_after_the_end_of_their_video_are_counted(
    prep: Prep, shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shard_set.data / "probes.parquet"
    table = read_table_file(path, schema=PROBES)
    assert prep("status", "--data", shard_set.data, "--json").summary["videos"]["num_captions_beyond"] == 0
    ends = [4.0 if row["path"].endswith("long.mp4") else row["end_s"] for row in table.to_pylist()]
    column = table.schema.get_field_index("end_s")
    write_table_file(path, table.set_column(column, table.schema.field("end_s"), pa.array(ends)))
    expected = "3\n          1 begins after the end of the video"
    assert expected in (text := prep("status", "--data", shard_set.data).stdout) and "more than a second" not in text
    ends = [
        1.9 if row["path"].endswith("short.mp4") else end_s for row, end_s in zip(table.to_pylist(), ends, strict=True)
    ]
    write_table_file(path, table.set_column(column, table.schema.field("end_s"), pa.array(ends)))
    expected += (
        ": not used in training\n          1 ends more than a second after the end of the video: used up to the "
    )
    text = prep("status", "--data", shard_set.data).stdout
    assert expected in text
    named = [line.strip() for line in text.splitlines() if "_after_end: " in line]
    assert [line.partition(" s, in a video of ")[0].split(": ")[1] for line in named] == [
        "begins_after_end",
        "ends_after_end",
    ]
    first = prep("status", "--data", shard_set.data, "--json").summary["videos"]["first_captions_beyond"]
    assert [f"{row['name']}: {row['code']}: {row['message']}" for row in first] == named
    assert "in a video of 4 s: " in named[0] and "in a video of 1.9 s: " in named[1]
    (shard_set.data / "manifest" / SPANS_FILE).write_bytes(b"x")
    assert "after the end" not in prep("status", "--data", shard_set.data, status=2).stdout


def test_failures_are_named_by_every_command(prep: Prep, shard_set: ShardSet) -> None:
    videos = shard_set.data.parent / "named like videos"
    videos.mkdir()
    for number in range(7):
        (videos / f"bad{number}\x1b[31m.mp4").write_text("not a video")
    manifest(shard_set.data, videos, "--dataset", "bad")
    failure = Failure("long", "long_000002000", "decode_errors", "frame 3\nis damaged")
    commit = read_commit(commit_path(shard_set.variant, 0))
    write_commit(shard_set.variant, Commit(**{**vars(commit), "failures": (failure,)}))
    ran = prep("chunk", "--data", shard_set.data, *LEN, "--engine", "processes", "--workers", 2, status=1)
    of_status = prep("status", "--data", shard_set.data).stdout
    for shown in (ran.stdout, of_status):
        (line,) = [line for line in shown.splitlines() if "source_unreadable: " in line and "text.mp4" in line]
        assert line.strip().startswith("text: source_unreadable: ")
        assert "long_000002000: decode_errors: frame 3 is damaged" in shown
        assert f"and 4 more; complete list: {shard_set.variant / 'failures.jsonl'}" in shown
        assert "\x1b" not in shown
    again = prep("retry", "--data", shard_set.data, "--only", "decode_errors", "--engine", "processes", status=1)
    assert "decode_errors" not in again.stdout and "text: source_unreadable" in again.stdout
    column = prep("status", "--data", shard_set.data, "--json").summary["columns"]["video"]
    assert [failure["code"] for failure in column["first_failures"]] == ["source_unreadable"] * 5
    summary = rerun(prep, shard_set, *LEN)
    assert summary["first_failures"] == column["first_failures"]
    assert summary["failures_file"] == column["failures_file"]


def test_failures_that_may_be_gone_are_tried_again_before_training(prep: Prep, shard_set: ShardSet) -> None:
    commit = read_commit(commit_path(shard_set.variant, 0))
    repair = "repair or replace the failed videos, then run: prep retry"  # the text file failed, too: two of three
    for code, command in (("decode_errors", repair), ("disk_full", "prep chunk --len 2s")):
        failure = Failure("long", "long_000002000", code, "why")
        write_commit(shard_set.variant, Commit(**{**vars(commit), "failures": (failure,)}))
        assert prep("status", "--data", shard_set.data).stdout.splitlines()[-1].startswith(f"next      {command} ")


def test_lost_sources_are_named(prep: Prep, shard_set: ShardSet) -> None:
    path = shard_set.data / "probes.parquet"
    rows = read_table_file(path, schema=PROBES).to_pylist()
    lost = [{**row, "code": "source_missing", "message": "gone"} if "long" in row["path"] else row for row in rows]
    write_table_file(path, pa.Table.from_pylist(lost, schema=PROBES))
    assert "long.mp4: gone" in prep("status", "--data", shard_set.data).stdout


def test_the_next_step_keeps_the_settings_of_a_set_without_chunks(prep: Prep, tmp_path: Path) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    videos.mkdir()
    (videos / "text.mp4").write_text("not a video")
    manifest(data, videos)
    ran = prep("chunk", "--len", "1s", "--data", data, "--engine", "processes", status=1)
    repair = f"repair or replace the failed videos, then run: prep retry --data {data}"
    assert f"next     {repair}\n" in ran.stdout and f"next      {repair}\n" in prep("status", "--data", data).stdout
    assert "nothing to do until the sources can be read" in prep("plan", "--len", "1s", "--data", data).stdout
    # The command stays the same if no variant is current. Without the recipe, there is no guess.
    (data / "dataset.json").unlink()
    assert f"next      prep chunk --len 1s --data {data}" in prep("status", "--data", data).stdout
    next(data.glob("video/*/recipe.json")).write_text("{")
    assert "--len" not in prep("status", "--data", data).stdout


def test_stale_stands_under_the_variant_that_is(tmp_path: Path) -> None:
    def variant(name: str, *, is_current: bool) -> VariantStatus:
        return VariantStatus(name, is_current, 1, 1, 1, 0.0, {}, None, None)

    variants = [variant("new", is_current=True), variant("old", is_current=False)]
    latents = ColumnStatus("latents", variants, stale_because="made from x", to_make={"changed": 2})
    columns = {"video": ColumnStatus("video"), "latents": latents, "text": ColumnStatus("text")}
    lines = status_text(Status(tmp_path, None, columns)).splitlines()
    parts = ("new (current)", "stale: ", "to make: ", "old")
    order = [next(row for row, line in enumerate(lines) if part in line) for part in parts]
    assert order == sorted(order)


def test_shards_that_no_run_came_to_are_told_with_the_command_that_makes_them(prep: Prep, shard_set: ShardSet) -> None:
    (shard_set.variant / "contents.json").unlink()  # the state of a run that was killed before its first end
    commit_path(shard_set.variant, 1).unlink()
    stdout = prep("status", "--data", shard_set.data).stdout
    assert "shards to make: 1 missing" in stdout and f"next      prep chunk --len {LEN[1]}" in stdout
