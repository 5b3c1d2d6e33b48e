"""Tests that parts of a run (`--part K/N`) divide the probing and get the probes of one command.

This holds whatever happens to a part.
"""

import multiprocessing
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clipmill.manifests import locks
from clipmill.manifests.storage import mirrors
from clipmill.manifests.storage.working_copy import WorkingCopy
from clipmill.prep.core import parts
from clipmill.prep.core.data_folder import PROBES_FILE
from clipmill.prep.core.parts import Part, register_part
from clipmill.prep.core.tables import write_table_file
from clipmill.prep.sources import probe_parts, probe_processes
from clipmill.prep.sources.probe_parts import num_shares, probe_in_parts
from clipmill.prep.sources.table import SHARES_FOLDER, FileStates, probe_sources, read_probes, share_files, stat_files
from clipmill.prep.video.ffmpeg import find_ffmpeg
from tests.prep.running import wait_until
from tests.prep.sources.test_readers import leasable, lease
from tests.tiers import nightly_beyond

__all__ = ["leasable"]


@pytest.fixture
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a share per source, and parts that soon check the shares of other parts again."""
    monkeypatch.setattr(probe_parts, "MAX_SOURCES", 1)
    monkeypatch.setattr(parts, "TOUCH_INTERVAL_S", 0.1)
    monkeypatch.setattr(locks, "_TRY_INTERVAL_S", 0.02)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the sources that this process passes to its readers, by name."""
    names: Counter[str] = Counter()
    probe_each = probe_processes.probe_each

    def probe_and_count(paths: list[str], **options: object) -> object:
        names.update(Path(path).name for path in paths)
        return probe_each(paths, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(probe_processes, "probe_each", probe_and_count)
    return names


@pytest.fixture
def paths(leasable: Path, write_video: Callable[..., Path]) -> pa.ChunkedArray:
    """Write six sources: good ones with and without an index, a truncated one, and a missing one."""
    videos = leasable / "videos"
    good = [write_video(videos / f"{name}.mp4", seconds=1) for name in ("held", "a", "b")]
    stream, cut = videos / "stream.mkv", videos / "cut.mp4"
    subprocess.run([find_ffmpeg().path, "-v", "error", "-i", good[1], "-c", "copy", stream], check=True)
    cut.write_bytes(good[1].read_bytes()[:-100])
    return pa.chunked_array([[str(path) for path in (*good, stream, cut, videos / "gone.mp4")]])


def probe_as(part: str, data: Path, paths: pa.ChunkedArray) -> pa.Table:
    """Probe the sources as a part does, and start to make shards."""
    with register_part(data, Part.parse(part), column="video") as run:
        table = probe_sources(data, paths, num_workers=1, divide=partial(probe_in_parts, part_run=run))
        run.agree("a", where=None)
        run.begin()
        return table


def in_one_command(folder: Path, paths: pa.ChunkedArray) -> pa.Table:
    """Return the probes of a command without `--part`."""
    (folder / "alone").mkdir()
    return probe_sources(folder / "alone", paths, num_workers=1)


def claim(data: Path, part: str) -> str:
    """Return the share that a part has recorded."""
    return locks.holder_of(data / f".video.part-{part.replace('/', '-of-')}.lock").rpartition("\n")[2]


@pytest.mark.usefixtures("small_shares")
@pytest.mark.parametrize("place", nightly_beyond(["disk"], ["disk", "bucket"]))
def test_parts_read_each_source_once_and_have_the_probes_of_one_command(
    place: str, leasable: Path, paths: pa.ChunkedArray, reads: Counter[str], request: pytest.FixtureRequest
) -> None:
    folders = [leasable / "data"] * 2
    if place == "bucket":
        request.getfixturevalue("monkeypatch").setattr(mirrors, "_mounted", {})
        folders = [leasable / "data", leasable / "data-2"]
    for folder in dict.fromkeys(folders):
        folder.mkdir()
        if place == "bucket":
            mirrors.mount(copy := WorkingCopy(request.getfixturevalue("bucket"), folder))
            copy.sync()
    with ThreadPoolExecutor(2) as pool:
        with lease(leasable / "videos/held.mp4"):
            first = pool.submit(probe_as, "1/2", folders[0], paths)
            wait_until(lambda: reads["held.mp4"] == 1)
            second = pool.submit(probe_as, "2/2", folders[1], paths)
            wait_until(lambda: {*reads} == {"held.mp4", "a.mp4", "b.mp4", "stream.mkv", "cut.mp4"})
        tables = [first.result(), second.result()]
    assert set(reads.values()) == {1}, reads
    alone = in_one_command(leasable, paths)
    for table, folder in zip(tables, folders, strict=True):
        assert table.equals(alone), table.to_pylist()
        mirrors.refresh(folder)
        assert read_probes(folder).equals(alone) and not share_files(folder)


@pytest.mark.usefixtures("small_shares")
def test_the_share_of_a_part_that_is_killed_while_it_probes_is_read_by_another(
    leasable: Path, paths: pa.ChunkedArray
) -> None:
    (data := leasable / "data").mkdir()
    with ThreadPoolExecutor(1) as pool:
        with lease(leasable / "videos/held.mp4"):
            killed = multiprocessing.get_context("fork").Process(target=probe_as, args=("1/2", data, paths))
            killed.start()
            wait_until(lambda: claim(data, "1/2") == "share 0")
            other = pool.submit(probe_as, "2/2", data, paths)
            wait_until(lambda: len(share_files(data)) == 5)
            killed.kill()
            killed.join()
            wait_until(lambda: claim(data, "2/2") == "share 0")
        table = other.result()
    assert table.equals(in_one_command(leasable, paths))


def test_results_of_parts_are_used_by_any_command_unless_they_are_outdated_or_know_less(
    leasable: Path, paths: pa.ChunkedArray, reads: Counter[str]
) -> None:
    (data := leasable / "data").mkdir()
    before = probe_sources(data, paths.slice(0, 1), num_workers=1)
    (leasable / "videos/held.mp4").unlink()
    shares = in_one_command(leasable, paths)
    (data / SHARES_FOLDER).mkdir()
    write_table_file(data / SHARES_FOLDER / "0-of-2.parquet", shares)
    (data / SHARES_FOLDER / "1-of-2.parquet").write_bytes(b"damaged")
    (data / SHARES_FOLDER / "notes.txt").touch()
    os.utime(leasable / "videos/b.mp4", ns=(0, 0))
    reads.clear()
    table = probe_sources(data, paths, num_workers=1)
    assert {**reads} == {"b.mp4": 1}
    assert table["code"].to_pylist() == ["source_missing", None, None, None, "source_truncated", "source_missing"]
    assert table["fingerprint"][0] == before["fingerprint"][0], "the facts of the vanished source are lost"
    assert [path.name for path in (data / SHARES_FOLDER).iterdir()] == ["notes.txt"]
    reads.clear()
    (data / PROBES_FILE).unlink()
    write_table_file(data / SHARES_FOLDER / "0-of-2.parquet", shares.replace_schema_metadata({b"probe_rules": b"0"}))
    probe_sources(data, paths, num_workers=1)
    assert "a.mp4" in reads, "results by other rules were used"


def test_the_number_of_shares_follows_from_files_and_parts(leasable: Path, paths: pa.ChunkedArray) -> None:
    many = FileStates(np.full(1000, 1 << 20), np.zeros(1000, np.int64), {})
    assert num_shares(stat_files(paths, num_threads=1), num_parts=16) == 1
    assert num_shares(many, num_parts=16) == 16 and num_shares(many, num_parts=1) == 8
    many.size_bytes[:20] = 10 * probe_parts.MAX_BYTES
    assert num_shares(many, num_parts=16) == 128
    none = stat_files(pa.chunked_array([[]], pa.string()), num_threads=1)
    assert num_shares(none, num_parts=16) == 1
