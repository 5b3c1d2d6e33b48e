"""Tests of writes that end at any moment.

Readers see the manifest before or after the write, and the repeated write produces the bytes of an undisturbed one.
"""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.caption_spans import open_stored_captions
from clipmill.manifests.errors import UserError
from clipmill.manifests.store import (
    CAPTIONS_FILE,
    MAPPED_FILES,
    REJECTED_LIST,
    TABLE_FILES,
    captions_path,
    open_captions,
    read_captions,
    read_rejected_rows,
    read_videos,
)
from tests.conftest import ROOT
from tests.manifests.test_store import Reading, file_hashes, ids_by_text, reading_of, write

FIRST = ["one", "two", "three"]


class Killed(BaseException):
    """Simulated end of the process."""


@pytest.fixture
def readings(tmp_path: Path) -> list[Reading]:
    """Return two states of a dataset: the second has an additional first caption, and lacks another caption."""
    texts = [FIRST, ["zero", "one", "three"]]
    return [
        reading_of(tmp_path, ["v", "w"], [("v", 0.0, 1.0 + number, text) for number, text in enumerate(captions)])
        for captions in texts
    ]


def stop_at(point: int, patch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Raise `error` instead of the `point`-th flush, rename or removal from now on."""
    counter = itertools.count()

    def guard(do: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if next(counter) == point:
                raise error
            return do(*arguments, **options)

        return run

    for name in ("fsync", "replace", "rename", "unlink"):
        patch.setattr(os, name, guard(getattr(os, name)))


def interrupt_write(data: Path, reading: Reading, *, point: int, error: BaseException) -> bool:
    """Write until the given point; return False if the write ended before it."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(point, patch, error)
        try:
            write(data, reading)
        except type(error):
            return True
    return False


def tables(data: Path) -> list[list[dict[str, Any]]] | None:
    """Return the content of the three tables, or None if there is no manifest."""
    try:
        with open_captions(data) as file:
            assert file.read().num_rows == read_captions(data).num_rows
        assert captions_path(data).is_file()
        stored = open_stored_captions(data)
        stored.verify()
        assert stored.texts.to_pylist() == read_captions(data)["text"].to_pylist()
        return [read(data).to_pylist() for read in (read_videos, read_captions, read_rejected_rows)]
    except UserError as error:
        assert "no manifest" in str(error)
        return None


def test_a_first_write_that_ends_anywhere_is_none_until_it_is_whole(tmp_path: Path, readings: list[Reading]) -> None:
    """Interrupt the write with a kill and a full disk in turn."""
    write(tmp_path / "undisturbed", readings[0])
    states = set()
    for point in itertools.count():
        data, error = tmp_path / str(point), (Killed(), OSError(errno.ENOSPC, "no space"))[point % 2]
        if not interrupt_write(data, readings[0], point=point, error=error):
            break
        states.add(tables(data) is None)
        write(data, readings[0])
        assert ids_by_text(data) == {text: number for number, text in enumerate(FIRST)}
        assert file_hashes(data) == file_hashes(tmp_path / "undisturbed"), f"stopped at point {point}"
    assert point > 10 and states == {True, False}


def test_the_old_manifest_stays_readable_until_the_new_one_counts(tmp_path: Path, readings: list[Reading]) -> None:
    """Interrupt the write with a kill and a disk error in turn."""
    before, undisturbed = tmp_path / "before", tmp_path / "undisturbed"
    write(before, readings[0])
    shutil.copytree(before, undisturbed)
    write(undisturbed, readings[1])
    old, new = tables(before), tables(undisturbed)
    seen = []
    for point in itertools.count():
        data, error = tmp_path / str(point), (Killed(), OSError(errno.EIO, "input/output error"))[point % 2]
        shutil.copytree(before, data)
        if not interrupt_write(data, readings[1], point=point, error=error):
            break
        seen.append(tables(data))
        assert seen[-1] in (old, new)
        if point // 2 % 2:
            write(data, readings[1])
            assert file_hashes(data) == file_hashes(undisturbed), f"stopped at point {point}"
        else:
            # A different write after the interrupted one starts from the valid state.
            write(data, readings[0])
            assert sorted(file_hashes(data)) == sorted(["manifest.json", REJECTED_LIST, *TABLE_FILES, *MAPPED_FILES])
    assert old in seen and new in seen


def test_a_killed_process_leaves_the_old_manifest(tmp_path: Path, readings: list[Reading]) -> None:
    videos, captions = tmp_path / "videos", tmp_path / "captions.csv"
    videos.mkdir()
    (videos / "v.mp4").write_bytes(b"x")
    captions.write_text("video,text\nv,first\n")
    data = tmp_path / "data"
    # The program kills itself with SIGKILL once the second of its tables is on the disk.
    program = (
        "import itertools, os, sys\n"
        "from pathlib import Path\n"
        "from clipmill.prep.cli import main\n"
        "count, replace = itertools.count(1), os.replace\n"
        "def dying(*names, **options):\n"
        "    replace(*names, **options)\n"
        f"    if next(count) == 2: os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        "os.replace = dying\n"
        "main()\n"
    )
    command = ["manifest", "folder", str(videos), "--captions", str(captions), "--data", str(data)]
    killed = subprocess.run([sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(list((data / "manifest").glob("caption*-*"))) == 2
    subprocess.run([sys.executable, "-m", "clipmill.prep.cli", *command], cwd=ROOT, capture_output=True, check=True)
    assert ids_by_text(data) == {"first": 0}
    assert sorted(path.name for path in (data / "manifest").iterdir()) == sorted(
        ["manifest.json", REJECTED_LIST, *TABLE_FILES, *MAPPED_FILES]
    )


def test_half_a_first_write_of_an_older_version_does_not_count(tmp_path: Path, readings: list[Reading]) -> None:
    """Older versions published the captions under their plain name before the manifest listed them."""
    write(tmp_path / "undisturbed", readings[0])
    (tmp_path / "data" / "manifest").mkdir(parents=True)
    shutil.copy(tmp_path / "undisturbed" / "manifest" / CAPTIONS_FILE, tmp_path / "data" / "manifest" / CAPTIONS_FILE)
    write(tmp_path / "data", readings[0])
    assert file_hashes(tmp_path / "data") == file_hashes(tmp_path / "undisturbed")
