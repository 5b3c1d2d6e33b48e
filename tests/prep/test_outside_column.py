"""Tests of a column from another package (`tests/plugin_example`): its content, and the programs that find it.

`columns/` tests its commands together with the commands of all columns.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from clipmill_example.brightness import COLUMN

from clipmill.manifests.plugins import import_object
from clipmill.prep.core.column import DeepCode
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant
from tests.conftest import ROOT
from tests.plugins import example_installed
from tests.prep.here import make_here
from tests.prep.running import MARK, Process, Ran, contents, processes, wait_until
from tests.prep.sets import ShardSet


@pytest.fixture(scope="module")
def plugin_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which the package is installed."""
    return example_installed(tmp_path_factory.mktemp("installed"))


def start(module: str, *arguments: object, **environment: str) -> "subprocess.Popen[str]":
    """Start `prep` as a separate program."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stored_values_by_key(data: Path) -> dict[str, list[float]]:
    return {
        sample["__key__"]: np.frombuffer(sample["brightness.npy"][-4 * 60 :], np.float32).tolist()
        for sample in Variant.open(data, column="brightness").iterate()
    }


def brightness(content: bytes) -> np.ndarray:
    """Compute the mean of every frame with PyAV."""
    with av.open(BytesIO(content), "r", format="mp4") as container:
        return np.array([frame.to_ndarray(format="gray").mean() for frame in container.decode(video=0)], np.float32)


def is_worker(process: Process) -> bool:
    """Return True if the process may still write a shard."""
    return "multiprocessing.spawn" in " ".join(process.arguments)


def test_what_is_stored_is_what_the_chunks_show(shard_set: ShardSet) -> None:
    make_here(COLUMN, shard_set.data)
    values_by_key = stored_values_by_key(shard_set.data)
    expected = {sample["__key__"]: brightness(sample["mp4"]) for sample in Variant.open(shard_set.data).iterate()}
    assert list(values_by_key) == list(expected)
    for key, array in expected.items():
        np.testing.assert_array_equal(values_by_key[key][-len(array) :], array)


def test_a_sample_that_differs_from_its_row_is_found() -> None:
    row = {"brightness_frames": 3}
    assert (
        import_object(COLUMN.check_sample)(row, {"brightness.npy": b"none"}, "train").differences[0][0]
        == DeepCode.ARRAY_DIFFERS
    )


def half_written(data: Path) -> list[str]:
    """Return the shards that are being written, in folders that may vanish while they are listed."""
    names = (name for _, _, names in os.walk(data / "brightness") for name in names)
    return [name for name in names if name.startswith(".tmp-") and name.endswith(".tar")]


@pytest.mark.nightly
def test_a_killed_run_is_finished_by_the_next_with_the_same_bytes(
    plugin_environment: dict[str, str], tmp_path: Path, shard_set: ShardSet
) -> None:
    mark, data = secrets.token_hex(8), tmp_path / "killed"
    shutil.copytree(shard_set.data, data)
    flags = ("brightness", "--data", data, "--workers", 1, "--json")
    killed = start("tests.prep.slow_brightness", *flags, "--engine", "processes", **{MARK: mark}, **plugin_environment)
    wait_until(lambda: half_written(data) or killed.poll() is not None, seconds=120)
    killed.send_signal(signal.SIGKILL)
    assert killed.communicate(timeout=60) and killed.returncode == -signal.SIGKILL, "the run ended before it was killed"
    wait_until(lambda: not any(is_worker(process) for process in processes(mark)))
    assert not list(data.glob("brightness/*/commits/*.json"))
    assert current_variant(data, "brightness") is not None  # the first variant can be read while it grows
    again = start("clipmill.prep.cli", *flags, **{MARK: mark}, **plugin_environment)
    stdout, stderr = again.communicate(timeout=240)
    assert again.returncode == 0, stderr
    summary = Ran(0, stdout, stderr).summary
    assert (summary["num_shards"], summary["num_shards_made"], summary["failures"]) == (2, 2, {})
    wait_until(lambda: not list(processes(mark)))  # until then, their temporary files come and go
    whole = start("clipmill.prep.cli", "brightness", "--data", shard_set.data, "--workers", 1, **plugin_environment)
    assert whole.wait(timeout=240) == 0
    assert contents(data / "brightness") == contents(shard_set.data / "brightness")
