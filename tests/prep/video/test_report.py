"""Tests of plans and `prep status`: they state what is missing, why, and which command makes it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from clipmill.prep.video.ffmpeg import find_ffmpeg
from tests.prep.running import chunk, manifest, messages, prep_here


def test_what_failed_is_named_with_what_tries_it_again(tmp_path: Path, write_video: Callable[..., Path]) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    write_video(videos / "good.mp4", seconds=2)
    bad = write_video(videos / "bad.mp4", seconds=2)
    content = bytearray(bad.read_bytes())
    begin = content.index(b"mdat") + 3000
    content[begin : begin + 1500] = bytes(1500)
    bad.write_bytes(content)
    manifest(data, videos)
    flags, line = ("--data", data, "--len", "1s"), f"prep retry --data {data}"
    ran = prep_here("chunk", *flags, "--engine", "processes", "--workers", "1", status=1)
    assert messages(ran.stderr)[-1].startswith("failed: 1 span in 1 of 2 videos; failures are listed in ")

    plan = prep_here("plan", *flags).stdout
    assert "missing  chunks, because of 1 earlier failure: 1 x decode_errors\n         bad_000000000: decode" in plan
    assert f"         `{line}` retries them\n" in plan and plan.splitlines()[-1] == f"next     {line}"
    assert prep_here("plan", *flags, "--json").summary["next"] == line
    explained = prep_here("plan", *flags, "--explain", "bad").stdout.splitlines()
    assert explained[1].endswith("current: chunks of the video are missing") and "decode_errors" in explained[2]
    assert explained[-1].endswith(f"`{line}` retries them")
    assert prep_here("plan", *flags, "--explain", "good").stdout.splitlines()[1].endswith("current: up to date")

    (videos / "good.mp4").unlink()
    plan = prep_here("plan", *flags).stdout
    lost = "1 source that can no longer be read (source_missing); existing chunks are kept"
    assert f"lost     {lost}\n         good: source_missing: {videos / 'good.mp4'}: no such file\n" in plan
    status = prep_here("status", "--data", data).stdout
    assert (
        "videos    2: 2 usable, including 1 that can no longer be read\n" in status and f"lost      {lost}\n" in status
    )


def test_a_plan_waits_for_sources_without_which_nothing_can_be_done(
    tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    video, data = write_video(tmp_path / "videos" / "video.mp4", seconds=1), tmp_path / "data"
    manifest(data, video.parent)
    flags = ("--data", data, "--len", "1s")
    prep_here("plan", *flags)
    video.unlink()
    prep_here("chunk", *flags, "--engine", "processes", "--workers", "1", status=1)
    lines = prep_here("plan", *flags).stdout.splitlines()
    assert lines[-1] == "nothing to do until the sources can be read again"
    assert "         `prep chunk` retries them as soon as the source can be read" in lines


def test_a_plan_names_the_sources_that_are_read_twice(tmp_path: Path, write_video: Callable[..., Path]) -> None:
    good = write_video(tmp_path / "videos/good.mp4", seconds=1)
    for name, flags in (("a.mkv", ()), ("b.ts", ()), ("c.mp4", ("-movflags", "frag_keyframe+empty_moov"))):
        command = [find_ffmpeg().path, "-v", "error", "-i", good, "-c", "copy", *flags, good.with_name(name)]
        subprocess.run(command, check=True)
    manifest(data := tmp_path / "data", good.parent)
    first, again = (prep_here("plan", "--data", data, "--json").summary for _ in range(2))
    twice = {name: first[name] for name in ("num_read_twice", "read_twice_bytes", "first_read_twice")}
    sizes = [good.with_name(name).stat().st_size for name in ("a.mkv", "b.ts", "c.mp4")]
    assert twice == {"num_read_twice": 3, "read_twice_bytes": sum(sizes), "first_read_twice": ["a", "b", "c"]}
    assert twice.items() <= again.items(), "a plan that reads no source again counts other sources"
    text = prep_here("plan", "--data", data).stdout
    assert "twice    3 videos without an index (MKV, TS and others), " in text and "each read takes " in text
    chunk(data, "--preset", "ultrafast")
    assert prep_here("plan", "--data", data, "--preset", "ultrafast", "--json").summary["num_read_twice"] == 0
