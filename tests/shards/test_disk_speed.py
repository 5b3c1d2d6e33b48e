"""Tests of the disk speed measurement: reads are counted, and files are read or written."""

import os
from functools import partial
from pathlib import Path

import pytest

from clipmill.shards.disk_speed import drop_cache, measure_file, measure_folder, measure_reads


def test_reads_are_timed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], list[int]()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def read(number: int) -> int:
        order.append(number)
        now[0] += 10.0 if number == 9 else 1.0
        return 100

    reads = [partial(read, number) for number in range(10)]
    whole = measure_reads(reads, seconds=1e9)
    assert order == list(range(10)) and whole.num_reads == 10
    assert (whole.bytes_per_s, whole.read_s, whole.slow_read_s) == pytest.approx((1000 / 19, 1.0, 10.0))
    assert measure_reads(reads, seconds=3.0).num_reads == 4, "no read may start after the time limit"
    assert measure_reads(reads, seconds=-1.0).num_reads == 1, "the first read must always count"
    assert measure_reads(reads[:2], seconds=4.5, repeats=True).num_reads == 5
    order.clear()
    assert measure_reads(reads[:8], seconds=1e9, num_threads=3).num_reads == 8 and sorted(order) == list(range(8))


def test_what_cannot_be_read_is_raised_from_any_thread() -> None:
    def refuse() -> int:
        raise OSError("gone")

    for num_threads in (1, 4):
        with pytest.raises(OSError, match="gone"):
            measure_reads([lambda: 1, refuse], num_threads=num_threads)


def test_a_file_is_read_and_a_folder_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "tar"
    path.write_bytes(os.urandom(1 << 20))
    drop_cache(path)
    with path.open("rb", buffering=0) as file:
        speed = measure_file(file.fileno())
    assert speed is not None and speed.read_bytes_per_s > 0 and speed.piece_ms > 0 and speed.write_bytes_per_s is None
    path.write_bytes(bytes(1000))
    with path.open("rb", buffering=0) as file:
        assert measure_file(file.fileno()) is None, "the file is too small to measure"
    written = measure_folder(tmp_path)
    assert written.write_bytes_per_s and written.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == [path]
