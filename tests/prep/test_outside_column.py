"""A column of another package goes through every command (`tests/plugin_example`)."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clipmill_example.brightness import COLUMN

from clipmill.manifests.imported import import_object
from clipmill.prep.core.column import DeepCode
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant
from tests.conftest import ROOT
from tests.plugins import example_installed
from tests.prep.running import MARK, Process, Ran, contents, identities, processes, wait_until
from tests.prep.sets import LEN, ShardSet, flip, rerun
from tests.served import Commands, served

Prep = Callable[..., Ran]
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package is installed."""
    return example_installed(tmp_path_factory.mktemp("installed"))


def start(module: str, *arguments: object, **environment: str) -> "subprocess.Popen[str]":
    """`prep` as a program of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def program(installed: dict[str, str]) -> Iterator[Commands]:
    """Runs command lines in one program."""
    with served("prep", **installed) as commands:
        yield commands


@pytest.fixture
def run(program: Commands) -> Prep:
    """Runs a command line; fails when the exit status is not `status`."""

    def run(*arguments: object, status: int = 0) -> Ran:
        ran = Ran(*program(*arguments))
        assert ran.status == status, f"status {ran.status}\n{ran.stdout}\n{ran.stderr}"
        return ran

    return run


@pytest.fixture
def make(run: Prep) -> Make:
    """Runs `prep brightness --json` without Ray, and gives its summary."""

    def make(data: Path, *settings: object, status: int = 0, workers: int = 1) -> dict[str, Any]:
        flags = ("--engine", "processes", "--workers", workers, "--data", data, "--json", *settings)
        return run("brightness", *flags, status=status).summary

    return make


def stored(data: Path) -> dict[str, list[float]]:
    return {
        sample["__key__"]: np.frombuffer(sample["brightness.npy"][-4 * 60 :], np.float32).tolist()
        for sample in Variant.open(data, column="brightness").iterate()
    }


def brightness(content: bytes) -> np.ndarray:
    """The mean of every frame, with PyAV alone."""
    with av.open(BytesIO(content), "r", format="mp4") as container:
        return np.array([frame.to_ndarray(format="gray").mean() for frame in container.decode(video=0)], np.float32)


def is_worker(process: Process) -> bool:
    """Whether it may still write a shard."""
    return "multiprocessing.spawn" in " ".join(process.arguments)


def test_it_is_planned_made_and_looked_after(run: Prep, make: Make, shard_set: ShardSet) -> None:
    data = shard_set.data
    assert "nothing" not in run("plan", "brightness", "--data", data).stdout
    planned = run("plan", "brightness", "--data", data, "--json").summary
    assert (planned["shards"], planned["chunks"]) == ({"new": 2}, {"new": 5})
    made = make(data, workers=2)
    assert (made["num_shards_made"], made["num_chunks"], made["failures"]) == (2, 5, {})
    status = run("status", "--data", data, "--json").summary["columns"]["brightness"]
    assert status["current"] == made["variant"] and (status["to_make"], status["problems"]) == ({}, [])
    assert [variant["num_wanted"] for variant in status["variants"]] == [5]
    assert "nothing to measure: all shards are up to date" in run("brightness", "--data", data).stdout
    assert f"brightness {made['variant']} (current)" in run("status", "--data", data).stdout
    verified = run("verify", "--deep", "--data", data).stdout
    assert f"brightness {made['variant']}: 5 chunks in 2 shards" in verified
    assert "240 checked frames: OK" in verified
    shown = run("inspect", "--column", "brightness", "--data", data).stdout
    assert "every=1 video=h264" in shown and "5 chunks in 2 shards" in shown
    key = next(iter(stored(data)))
    one = run("inspect", key, "--column", "brightness", "--data", data, "--json").summary
    assert (one["key"], one["num_frames"], set(one["members"])) == (key, 60, {"brightness.npy"})
    assert (
        "nearest keys of this video"
        in run("inspect", f"{key[:-2]}99", "--column", "brightness", "--data", data, status=2).stderr
    )
    before = identities(data)
    again = make(data)
    assert (again["num_shards_made"], again["num_shards"]) == (0, 2) and identities(data) == before


def test_what_is_stored_is_what_the_chunks_show(make: Make, shard_set: ShardSet) -> None:
    make(shard_set.data)
    found = stored(shard_set.data)
    wanted = {sample["__key__"]: brightness(sample["mp4"]) for sample in Variant.open(shard_set.data).iterate()}
    assert list(found) == list(wanted)
    for key, array in wanted.items():
        np.testing.assert_array_equal(found[key][-len(array) :], array)


def test_damage_is_found_and_repaired_by_the_command_that_is_named(run: Prep, make: Make, shard_set: ShardSet) -> None:
    data = shard_set.data
    variant = make(data, "--every", 2)["variant"]
    whole = contents(data / "brightness")
    tar = next((data / "brightness" / variant).glob("000000-*.tar"))
    flip(tar, 600)
    ran = run("verify", "--column", "brightness", "--data", data, status=1)
    command = f"prep brightness --every 2 --data {data}"
    assert f"to repair, run: {command}" in ran.stderr
    assert command in run("status", "--data", data, status=1).stderr
    run(*command.split()[1:], "--engine", "processes")
    assert contents(data / "brightness") == whole


def test_a_sample_that_differs_from_its_row_is_found() -> None:
    row = {"num_frames": 3}
    assert (
        import_object(COLUMN.check_sample)(row, {"brightness.npy": b"none"}, "train").differences[0][0]
        == DeepCode.ARRAY_DIFFERS
    )


def test_a_failed_chunk_is_named_and_tried_again(run: Prep, make: Make, shard_set: ShardSet) -> None:
    data, tar = shard_set.data, shard_set.tar(0)
    sound = tar.read_bytes()
    flip(tar, shard_set.index(0).stat().st_size % 100 + 4000)
    made = make(data, status=1)
    assert made["failures"] == {"chunk_damaged": 1} and made["num_chunks"] == 4
    assert "1 x chunk_damaged of brightness" in run("status", "--data", data).stdout
    tar.write_bytes(sound)
    retried = run("retry", "--column", "brightness", "--engine", "processes", "--data", data, "--json").summary
    assert (retried["num_shards_made"], retried["num_chunks"], retried["failures"]) == (1, 5, {})


def test_a_changed_recipe_makes_a_variant_and_gc_drops_the_old_one(
    run: Prep, make: Make, prep: Prep, shard_set: ShardSet
) -> None:
    data = shard_set.data
    old = make(data)["variant"]
    new = make(data, "--every", 3)["variant"]
    assert old != new and current_variant(data, "brightness") == new
    foreign = data / "brightness" / "notes.txt"
    foreign.write_text("mine")
    gone = run("gc", "--data", data).stdout
    assert f"removed    brightness/{old}" in gone and "left       brightness/notes.txt" in gone
    assert not (data / "brightness" / old).exists() and foreign.exists()
    rerun(prep, shard_set, *LEN, "--crf", 30)  # clipmill without the column leaves it alone
    assert "stale" in run("status", "--data", data, "--json").stdout
    status = run("status", "--data", data, "--json").summary["columns"]["brightness"]
    assert "the current variant of video is" in status["stale_because"]
    assert "the current variant is stale" in run("gc", "--dry-run", "--data", data).stdout
    assert make(data, "--every", 3)["variant"] != new


def half_written(data: Path) -> list[str]:
    """Shards that are being written, in folders that may vanish while they are listed."""
    names = (name for _, _, names in os.walk(data / "brightness") for name in names)
    return [name for name in names if name.startswith(".tmp-") and name.endswith(".tar")]


def test_a_killed_run_is_finished_by_ray_with_the_same_bytes(
    make: Make, installed: dict[str, str], tmp_path: Path, shard_set: ShardSet
) -> None:
    mark, data = secrets.token_hex(8), tmp_path / "killed"
    shutil.copytree(shard_set.data, data)
    flags = ("brightness", "--data", data, "--workers", 1, "--json")
    killed = start("tests.prep.slow_brightness", *flags, "--engine", "processes", **{MARK: mark}, **installed)
    wait_until(lambda: half_written(data) or killed.poll() is not None, seconds=120)
    killed.send_signal(signal.SIGKILL)
    assert killed.communicate(timeout=60) and killed.returncode == -signal.SIGKILL, "it ended by itself"
    wait_until(lambda: not any(is_worker(process) for process in processes(mark)))
    assert not list(data.glob("brightness/*/commits/*.json"))
    assert current_variant(data, "brightness") is not None  # the first variant can be read while it grows
    again = start("clipmill.prep.cli", *flags, **{MARK: mark}, **installed)
    stdout, stderr = again.communicate(timeout=240)
    assert again.returncode == 0, stderr
    summary = Ran(0, stdout, stderr).summary
    assert (summary["num_shards"], summary["num_shards_made"], summary["failures"]) == (2, 2, {})
    wait_until(lambda: not list(processes(mark)))  # and their temporary files come and go no more
    make(shard_set.data)
    assert contents(data / "brightness") == contents(shard_set.data / "brightness")


def test_it_is_made_in_parts(make: Make, tmp_path: Path, shard_set: ShardSet) -> None:
    data = shard_set.data
    shutil.copytree(data, tmp_path / "whole")
    make(tmp_path / "whole")
    assert [make(data, "--part", part)["num_shards_made"] for part in ("2/2", "1/2")] == [1, 1]
    assert contents(data / "brightness") == contents(tmp_path / "whole" / "brightness")


def test_a_damaged_dataset_json_forgets_no_column(make: Make, prep: Prep, shard_set: ShardSet) -> None:
    variant = make(shard_set.data)["variant"]
    (shard_set.data / "dataset.json").write_text("{}")
    rerun(prep, shard_set, *LEN)
    assert current_variant(shard_set.data, "brightness") == variant
