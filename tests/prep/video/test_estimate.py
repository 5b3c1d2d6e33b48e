"""Tests of the estimate of a plan, which encodes parts of some videos, against the actual cost of the chunks."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.sources import remote
from clipmill.prep.video import plan_report as estimate_module
from clipmill.prep.video import staging
from clipmill.prep.video.column import Recipe
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.plan import Workload
from clipmill.prep.video.plan_report import (
    EncodeTrial,
    Estimate,
    add_wall_time,
    estimate,
    estimate_lines,
    factor_range,
)
from tests.prep.running import Ran

Prep = Callable[..., Ran]
SETTINGS = Recipe().settings()


@pytest.fixture
def data(prep: Prep, tmp_path: Path) -> Path:
    """Create a data folder with two videos of 8 s, and one that was truncated after it was probed."""
    videos = tmp_path / "videos"
    videos.mkdir()
    for name, size in (("small", "160x90"), ("large", "320x180"), ("cut", "320x180")):
        source = f"testsrc2=size={size}:rate=25:duration=8"
        command = [find_ffmpeg().path, "-loglevel", "error", "-f", "lavfi", "-i", source]
        command += ["-g", "25", "-preset", "ultrafast"]
        subprocess.run([*command, str(videos / f"{name}.mp4")], check=True)
    prep("manifest", "folder", videos, "--data", tmp_path / "data")
    prep("plan", "--data", tmp_path / "data")
    content = (videos / "cut.mp4").read_bytes()
    (videos / "cut.mp4").write_bytes(content[:100])
    return tmp_path / "data"


def test_a_plan_measures_this_machine_and_these_videos(
    prep: Prep, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    quick = ("--preset", "ultrafast", "--data")
    planned = prep("plan", *quick, data, "--json").summary["estimate"]
    assert planned["num_trials"] == 2, "a video that cannot be encoded must be omitted"
    for name in ("core_hours", "size_bytes"):
        low, high = planned[f"{name}_range"]
        assert 0 < low < planned[name] < high
    assert list(scratch.iterdir()) == [], "trials must not leave files"
    made = prep("chunk", *quick, data, "--engine", "processes", "--max-failures", "1", "--json").summary
    # The chunks cover 8 s of each of two videos; the estimate also counts the third video.
    assert planned["size_bytes"] / 4 < made["num_bytes_written"] < planned["size_bytes"] * 4
    text = prep("plan", *quick, data, "--bitrate", "200k").stdout
    assert re.search(r"measured by encoding 5 s of \d video", text) and " to " in text and "None" not in text


@pytest.mark.nightly
def test_the_size_lies_in_the_range_though_one_video_takes_more_than_the_others(prep: Prep, tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    for name in "abcd":  # selected by size, the trials would miss b
        strength = 60 if name == "b" else 2
        pattern = f"noise=alls={strength}:allf=t:all_seed=1"  # without a seed, every run draws different noise
        source = f"testsrc=size=64x64:rate=10:duration=5,{pattern}"
        command = [find_ffmpeg().path, "-loglevel", "error", "-f", "lavfi", "-i", source, "-preset", "ultrafast"]
        subprocess.run([*command, str(tmp_path / f"videos/{name}.mp4")], check=True)
    prep("manifest", "folder", tmp_path / "videos", "--data", tmp_path / "data")
    settings = ("--data", tmp_path / "data", "--preset", "ultrafast", "--json")
    low, high = prep("plan", *settings).summary["estimate"]["size_bytes_range"]
    assert low < prep("chunk", "--engine", "processes", "--workers", 1, *settings).summary["num_bytes_written"] < high


def workload(*, seconds: float = 10.0) -> Workload:
    return Workload(*(np.full(2, value) for value in (seconds, 640.0, 360.0, 25.0)))


def test_an_estimate_is_scaled_by_what_the_trials_cost() -> None:
    work = workload()
    plain = estimate(work, settings=SETTINGS)
    per_s, bytes_per_s = plain.core_hours * 3600 / work.seconds.sum(), plain.size_bytes / work.seconds.sum()
    trials = [
        EncodeTrial(row, core_s=factor * per_s, size_bytes=factor * bytes_per_s) for row, factor in ((0, 2), (1, 4))
    ]
    estimate_s = estimate(work, trials, settings=SETTINGS)
    assert estimate_s.core_hours == pytest.approx(3 * plain.core_hours) and estimate_s.num_trials == 2
    assert estimate_s.core_hours_range == pytest.approx((2 * plain.core_hours, 4 * plain.core_hours))
    assert estimate_s.size_bytes_range == pytest.approx((2 * plain.size_bytes, 4 * plain.size_bytes))
    assert (plain.core_hours_range, plain.size_bytes_range) == (None, None)
    # Trials do not change a size that follows from a bitrate.
    known = estimate(work, trials, settings=replace(SETTINGS, crf=None, bitrate="8k"))
    assert (known.size_bytes, known.size_bytes_range) == (20_000.0, None)
    assert known.core_hours_range == pytest.approx((2 * plain.core_hours, 4 * plain.core_hours))
    # Chunks of other videos in the variant give the mean, and the trials give the range.
    mean = 3.5 * plain.size_bytes / work.seconds.sum()
    known = estimate(work, trials, settings=SETTINGS, bytes_per_second=mean)
    assert known.size_bytes == pytest.approx(3.5 * plain.size_bytes)
    assert known.size_bytes_range == pytest.approx((2 * plain.size_bytes, 4.2 * plain.size_bytes))


def test_one_video_still_gives_a_range() -> None:
    assert factor_range([3.0], [2.0]) == pytest.approx((1.5, 1.2, 1.8))


@pytest.mark.parametrize(
    ("cost", "first"),
    [
        ({"core_hours": 3.0, "core_hours_range": (2.0, 4.0)}, "estimate 2.0 to 4.0 h of CPU time for 9.0 h of video"),
        ({"core_hours": 1.0, "core_hours_range": (0.5, 1.5)}, "estimate 30.0 min to 1.5 h of CPU time"),
        ({"core_hours": 1.0}, "estimate 1.0 h of CPU time for 9.0 h of video; 1 GB"),
        (
            {"core_hours": 1.0, "size_bytes_range": (8e8, 2e9)},
            "estimate 1.0 h of CPU time for 9.0 h of video; 800 MB",
        ),
    ],
)
def test_ranges_are_written_with_their_units(cost: dict[str, Any], first: str) -> None:
    [line, *_] = estimate_lines(Estimate(size_bytes=1e9, video_hours=9.0, **cost))
    assert line.startswith(first)


def test_what_else_is_running_is_told_apart() -> None:
    cost = Estimate(core_hours=3.0, size_bytes=1.0, video_hours=1.0, core_hours_range=(2.0, 4.0))
    [_, free] = estimate_lines(add_wall_time(cost, num_cores=2, num_shards=16, load=0.0))
    assert free.strip() == "1.0 to 2.0 h on the 2 cores of this machine"
    [_, busy] = estimate_lines(add_wall_time(cost, num_cores=2, num_shards=16, load=2.0))
    assert (
        busy.strip()
        == "1.0 to 2.0 h on the 2 cores of this machine, up to 4.0 h alongside the other processes that are running now"
    )


def test_a_busy_machine_and_few_shards_take_longer() -> None:
    cost = Estimate(core_hours=3.0, size_bytes=1.0, video_hours=1.0, core_hours_range=(2.0, 4.0))
    free = add_wall_time(cost, num_cores=2, num_shards=16, load=0.0)
    assert free.wall_hours_range == pytest.approx((1.0, 2.0))
    assert add_wall_time(cost, num_cores=2, num_shards=16, load=2.0).wall_hours_range == pytest.approx((1.0, 4.0))
    # The third shard waits for a worker while one core is idle.
    assert add_wall_time(cost, num_cores=2, num_shards=3, load=0.0).wall_hours_range == pytest.approx((1.0, 8 / 3))
    assert add_wall_time(cost, num_cores=8, num_shards=1, load=0.0).wall_hours_range == pytest.approx((2.0, 4.0))


@pytest.mark.nightly
def test_sources_in_a_bucket_are_tried_as_local_ones_are_or_the_plan_says_why_not(
    prep: Prep, data: Path, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(staging, "_locked_root", None)
    remote._open_bucket.cache_clear()
    objects = open_objects(bucket)
    for name in ("small", "large"):
        objects.write(f"videos/{name}.mp4", (tmp_path / "videos" / f"{name}.mp4").read_bytes())
    prep("manifest", "folder", f"{bucket}/videos", "--data", tmp_path / "remote")
    quick = ("--preset", "ultrafast", "--data", tmp_path / "remote")
    planned = prep("plan", *quick, "--json").summary["estimate"]
    assert planned["num_trials"] == 2 and planned["size_bytes_range"] and not planned["lacking_trials"]
    monkeypatch.setattr(estimate_module, "_MAX_COPY_BYTES", 1000)
    text = prep("plan", *quick).stdout
    assert f"all trials were omitted: {bucket}/videos/" in text and "a plan copies at most 1" in text
    assert staging._locked_root is not None
    os.close(staging._locked_root[2])  # the sweeper removes the copies
