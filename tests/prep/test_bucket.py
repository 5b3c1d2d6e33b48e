"""`prep` with a data folder in a bucket of a real S3 server, through a proxy that delays, refuses and cuts answers.

A bucket ends with the same objects, byte for byte, as a local data folder has files.
"""

import secrets
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from manifests.storage.objects import open_objects
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.folders import contents_of
from tests.prep.running import MARK, contents, prep_here, processes, start, wait_until

LEN = ("--len", "500ms", "--preset", "ultrafast", "--short-side", 64, "--engine", "processes")
LATENTS = ("latents", "--vae", "tiny", "--size", 64, "--fps", 4, "--engine", "processes", "--workers", 1)
TEXT = ("text", "--clip", "tiny", "--engine", "processes", "--workers", 1)
CPU = ("--num-gpus", 0)
# Some of everything, all the time.
BAD_DAY = (
    Fault("error", every=5),
    Fault("cut", method="GET", every=6, skip=2),
    Fault("lost", method="PUT", every=7, skip=3),
    Fault("delay", every=3, delay_s=0.02),
)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two synthetic videos with captions, one of each split."""
    folder = tmp_path_factory.mktemp("bucket") / "videos"
    prep_here("manifest", *synthetic(folder), "--data", folder.with_name("first"))
    return folder


@pytest.fixture(scope="module")
def chunks(videos: Path) -> Path:
    """A local data folder with two shards of chunks."""
    data = videos.with_name("local")
    prep_here("manifest", *synthetic(videos), "--data", data)
    prep_here("chunk", *LEN, "--workers", 1, "--data", data)
    return data


@pytest.fixture(scope="module")
def columns(chunks: Path) -> Path:
    """The same with latents and text."""
    data = chunks.with_name("columns")
    shutil.copytree(chunks, data)
    for column in (LATENTS, TEXT):
        prep_here(*column, *CPU, "--data", data)
    return data


@pytest.fixture(autouse=True)
def _own_scratch(other_machine: Callable[[], Path]) -> None:
    other_machine()


def synthetic(videos: Path) -> tuple[object, ...]:
    """Arguments of `prep manifest`; the videos are made once."""
    return "synthetic", "--videos", 2, "--minutes", 0.1, "--out", videos


def test_a_killed_run_in_a_bucket_is_finished_by_another_machine(
    videos: Path, columns: Path, bucket: str, faults: Faults, other_machine: Callable[[], Path]
) -> None:
    data, mark = f"{bucket}/some/data", secrets.token_hex(8)
    prep_here("manifest", *synthetic(videos), "--data", data)
    faults.set(Fault("hang", method="PUT", path="/commits/", skip=1))
    run = start("chunk", *LEN, "--workers", 1, "--data", data, **{MARK: mark})
    wait_until(lambda: faults.seen().num_faults)
    status = prep_here("status", "--data", data).stdout
    assert f"in progress: written by process {run.pid} on " in status and "1 shard" in status
    run.send_signal(signal.SIGKILL)
    run.communicate()
    wait_until(lambda: not list(processes(mark)))
    keys = [info.key for info in open_objects(data).list()]
    assert sum("/commits/" in key for key in keys) == 1 and sum(key.endswith(".tar") for key in keys) == 2

    other_machine()
    faults.set(*BAD_DAY)
    for command in (("chunk", *LEN, "--workers", 2), (*LATENTS, *CPU), (*TEXT, *CPU), ("gc",), ("verify",)):
        prep_here(*command, "--data", data)
    assert faults.seen().num_faults > 20
    faults.set()
    prep_here("status", "--data", data)
    assert contents_of(data) == contents(columns)
    assert "nothing to remove" in prep_here("gc", "--data", data).stdout
