"""Tests of mapped files that lose their pages while they are read."""

import faulthandler
import mmap
import os
import signal
import threading
import zlib
from pathlib import Path

import pytest

from clipmill.manifests import mapped_files
from clipmill.manifests.mapped_files import map_arrow_file, report_lost_pages
from clipmill.shards.index import IndexBuilder, index_bytes, index_schema, open_index
from tests.forked import run_forked

SIZE = 16 * mmap.PAGESIZE


def index_at(path: Path) -> Path:
    builder = IndexBuilder(index_schema(["mp4"], fields=[]))
    for row in range(SIZE // 32):
        builder.append({"key": f"a_{row:09d}", "mp4_offset": 512 * row, "mp4_size": 1, "mp4_crc32": row})
    path.write_bytes(index_bytes(builder.table()))
    return path


def test_an_index_that_is_cut_while_it_is_open_ends_the_process_with_its_name(tmp_path: Path) -> None:
    path = index_at(tmp_path / "000000\u202e.index.arrow")

    def read() -> None:
        mapped_files._previous_action = None  # other tests of this process may have changed its signal handlers
        index = open_index(path)
        os.truncate(path, 0)
        index["mp4_crc32"].to_numpy().sum()

    status, stderr = run_forked(read)
    assert status == 1
    assert stderr.splitlines()[0].startswith(
        f"failed: {tmp_path}/000000\\u202e.index.arrow became unreadable while in use"
    )
    assert stderr.splitlines()[1].startswith("hint: prep verify")


@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads_without_the_interpreter_lock_may_meet_the_lost_page(tmp_path: Path, num_threads: int) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(bytes(SIZE))

    def read() -> None:
        mapped_files._previous_action = None
        content = map_arrow_file(path).read_buffer()
        os.truncate(path, mmap.PAGESIZE)
        threads = [threading.Thread(target=zlib.crc32, args=(content,)) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    status, stderr = run_forked(read)
    assert status == 1 and set(stderr.splitlines()[::2]) == {
        f"failed: {path} became unreadable while in use: another program truncated it, or its disk failed or is full"
    }


def test_an_error_of_the_bus_that_is_of_no_file_ends_the_process_as_before() -> None:
    def send() -> None:
        faulthandler.disable()  # pytest's fault handler would print the stack
        mapped_files._previous_action = None
        report_lost_pages()
        report_lost_pages()
        signal.raise_signal(signal.SIGBUS)

    assert run_forked(send)[0] == -signal.SIGBUS
