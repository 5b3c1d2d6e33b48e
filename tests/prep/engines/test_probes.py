"""Tests of probes in the workers of an engine: their results equal local probes, whatever happens to a worker."""

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.engines import Check
from clipmill.prep.engines.processes import ProcessEngine
from clipmill.prep.sources import probe_processes
from clipmill.prep.sources.probe_processes import Run, divide, probe_group
from clipmill.prep.sources.table import probe_sources
from clipmill.prep.video.ffmpeg import find_ffmpeg
from tests.prep.sources.test_readers import end_waiting, leasable, lease, readers
from tests.train.data.http_folder import HttpFolder

__all__ = ["leasable"]


def on_workers(check: Check | None = None) -> Run:
    """Run probes in two worker processes."""
    return lambda tasks: ProcessEngine(num_workers=2).run(probe_group, tasks, check=check)


def worker_readers() -> list[int]:
    """Return the readers of this process's workers."""
    return [reader for worker in multiprocessing.active_children() for reader in readers(int(worker.pid or 0))]


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit tasks to two sources, so that a few sources make many tasks."""
    monkeypatch.setattr(probe_processes, "MAX_SOURCES", 2)


@pytest.mark.usefixtures("small_tasks")
def test_probes_of_workers_are_those_of_one_process(
    tmp_path: Path, write_video: Callable[..., Path], bucket: str
) -> None:
    """If a worker has no access to the bucket, the worker is at fault, not the sources."""
    good = write_video(tmp_path / "videos" / "good.mp4", seconds=1)
    stream, cut = good.with_name("stream.ts"), good.with_name("cut.mp4")
    subprocess.run([find_ffmpeg().path, "-v", "error", "-i", good, "-c", "copy", stream], check=True)
    cut.write_bytes(good.read_bytes()[:-100])
    objects = open_objects(bucket)
    for path in (good, stream, cut):
        objects.write(path.name, path)
    web = HttpFolder(good.parent)
    names = [good.name, stream.name, cut.name, "gone.mp4"]
    paths = pa.chunked_array([[f"{place}/{name}" for place in (good.parent, bucket, web.address) for name in names]])
    (tmp_path / "here").mkdir()
    here = probe_sources(tmp_path / "here", paths, num_workers=2)
    assert here["code"].to_pylist() == [None, None, "source_truncated", "source_missing"] * 3

    for folder, check in (("there", None), ("refused", forget_the_server)):
        (tmp_path / folder).mkdir()
        probes = probe_sources(tmp_path / folder, paths, num_workers=2, run=on_workers(check))
        assert probes.equals(here), probes.to_pylist()
    web.close()


def forget_the_server() -> None:
    del os.environ["AWS_ALLOW_HTTP"]


@pytest.mark.usefixtures("small_tasks")
def test_a_source_whose_reader_is_killed_in_a_worker_is_read_by_the_command(
    leasable: Path, write_video: Callable[..., Path]
) -> None:
    held = write_video(leasable / "held.mp4", seconds=1)
    others = [write_video(leasable / f"{number}.mp4", seconds=1) for number in range(3)]
    paths = pa.chunked_array([[str(path) for path in (held, *others)]])
    tables: list[pa.Table] = []
    probing = threading.Thread(
        target=lambda: tables.append(probe_sources(leasable, paths, num_workers=2, run=on_workers()))
    )
    with lease(held):
        probing.start()
        for _ in range(3):  # once next to other sources, and twice alone
            end_waiting(signal.SIGKILL, worker_readers)
        end_waiting(signal.SIGKILL, lambda: readers(os.getpid()))
    probing.join(timeout=60)
    assert tables[0]["code"].to_pylist() == [None] * 4


def test_tasks_hold_every_source_once_and_no_more_than_fits() -> None:
    big = probe_processes.MAX_BYTES
    sizes = [1] * 130 + [big // 2, big // 2, 3 * big, 1, big]
    tasks = divide([str(size) for size in sizes], sizes)
    assert [list(task.indices) for task in tasks] == [
        list(range(64)),
        list(range(64, 128)),
        [128, 129, 130],
        [131],
        [132],
        [133],
        [134],
    ]
    assert [path for task in tasks for path in task.paths] == [str(size) for size in sizes]
