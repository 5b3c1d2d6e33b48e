"""Tests of readers' marks: a variant has a mark as long as it is in use, however its reader ends.

The clocks of the machines have no influence.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clipmill.manifests.storage.mounting import open_data
from clipmill.manifests.storage.objects import Objects, open_objects
from clipmill.shards import marks
from clipmill.shards.marks import (
    EXPIRY_S,
    READERS_FOLDER,
    RUN_EXPIRY_S,
    Readers,
    enable_marks,
    exclude_new_readers,
    keep_marks,
    leave_mark,
    list_readers,
    mark_run,
    remove_unused_marks,
)
from tests.forked import run_forked
from tests.object_storage.faults import Fault, Faults

NEW = "h265-other-89abcdef"


@dataclass
class Folder:
    """Data folder as a training process and as `prep` commands see it, locally or in a bucket."""

    path: Path
    objects: Objects | None

    def variant(self, name: str = "h264-test-01234567") -> Path:
        return self.path / "video" / name

    def readers(self) -> Readers:
        return list_readers(self.of_prep())

    def of_prep(self) -> Path:
        return self.path if self.objects is None else open_data(self.objects.url)

    def marks(self) -> list[str]:
        """Return the file names of all marks."""
        if self.objects is not None:
            return [info.key for info in self.objects.list(READERS_FOLDER) if not info.key.endswith("/.lock")]
        return [str(path.relative_to(self.path)) for path in (self.path / READERS_FOLDER).glob("?*.lock")]

    def change(self, **entries: object) -> None:
        """Change entries of the only mark."""
        (name,) = self.marks()
        content = (self.path / name).read_bytes() if self.objects is None else self.objects.read(name)
        changed = json.dumps({**json.loads(content), **entries}).encode()
        if self.objects is None:
            (self.path / name).write_bytes(changed)
        else:
            self.objects.write(name, changed)

    def expire(self, patch: pytest.MonkeyPatch, *, age_s: float) -> None:
        """Set the age of the only mark according to the clock of the storage."""
        if self.objects is None:
            (name,) = self.marks()
            touched_s = time.time() - age_s
            os.utime(self.path / name, (touched_s, touched_s))
        else:
            now_s = marks.BucketMarks.now_s
            patch.setattr(marks.BucketMarks, "now_s", lambda of_bucket: now_s(of_bucket) + age_s)


@pytest.fixture(params=["local", "bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    objects = open_objects(f"{request.getfixturevalue('bucket')}/data") if request.param == "bucket" else None
    path = tmp_path / "data"
    path.mkdir()
    yield Folder(path, objects)
    remove_unused_marks()


def text_of(readers: Readers) -> list[str]:
    return [reader.text.partition(" since")[0] for reader in readers.active]


def test_a_variant_has_a_mark_as_long_as_it_is_in_use(folder: Folder) -> None:
    assert leave_mark(folder.variant()) is None, "prep must read without marks"
    enable_marks(folder.path, folder.objects)
    first, second = leave_mark(folder.variant()), leave_mark(folder.variant())
    assert first is not second and len(folder.marks()) == 1
    assert text_of(folder.readers()) == [f"process {os.getpid()} on {os.uname().nodename}"]
    assert folder.readers().find("video", folder.variant().name) and not folder.readers().find("video", NEW)
    del first
    remove_unused_marks()
    assert len(folder.marks()) == 1
    with keep_marks():
        del second
        leave_mark(folder.variant(NEW))
        remove_unused_marks()
        assert [reader.variants for reader in folder.readers().active] == [{"video": NEW}]
    assert folder.marks() == []


@pytest.mark.parametrize("clock_s", [-3600, 3600])
def test_a_reader_on_another_machine_counts_until_its_mark_expires_whatever_its_clock_says(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, clock_s: float
) -> None:
    now_s = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now_s() + clock_s)
        enable_marks(folder.path, folder.objects)
        user = leave_mark(folder.variant())
    folder.change(machine="other", holder="process 7 on node1")
    assert text_of(folder.readers()) == ["process 7 on node1"]
    with monkeypatch.context() as patch:
        folder.expire(patch, age_s=EXPIRY_S + 60)
        readers = folder.readers()
        assert not readers.active and [reader.name for reader in readers.ended] == folder.marks()
    folder.change(machine="other")
    remove_unused_marks(renews=True)
    assert text_of(folder.readers()) == [f"process {os.getpid()} on {os.uname().nodename}"] or folder.objects is None
    assert len(folder.readers().active) == 1 and user is not None


def test_a_removed_mark_returns_when_it_is_renewed(folder: Folder) -> None:
    """For example, the reader's machine was suspended, and `prep gc` considered the reader dead."""
    enable_marks(folder.path, folder.objects)
    user = leave_mark(folder.variant())
    (name,) = folder.marks()
    if folder.objects is None:
        (folder.path / name).unlink()
    else:
        folder.objects.delete(name)
    remove_unused_marks(renews=True)
    assert folder.marks() == [name] and user is not None


def test_a_reader_that_is_killed_counts_no_more_and_its_end_removes_no_mark_of_another(tmp_path: Path) -> None:
    folder = Folder(tmp_path, None)
    enable_marks(tmp_path)
    user = leave_mark(folder.variant())

    def read_and_die() -> None:
        leave_mark(folder.variant(NEW))
        os.kill(os.getpid(), signal.SIGKILL)

    def read_and_end() -> None:
        leave_mark(folder.variant(NEW))
        marks._remove_marks()

    assert run_forked(read_and_die)[0] == -signal.SIGKILL
    assert run_forked(read_and_end)[0] == 0
    readers = folder.readers()
    assert [reader.variants for reader in readers.active] == [{"video": folder.variant().name}] and user is not None
    assert [reader.variants for reader in readers.ended] == [{"video": NEW}]


@pytest.mark.parametrize("content", [b"", b'{"holder"', b"[]", b'{"variants": 3}', b'{"variants": {}, "run": 5}', None])
def test_a_mark_that_cannot_be_read_keeps_every_variant(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / READERS_FOLDER).mkdir()
    mark = tmp_path / READERS_FOLDER / "0123456789abcdef.lock"
    if content is None:
        mark.mkdir()
    else:
        mark.write_bytes(content)
    (tmp_path / READERS_FOLDER / "notes.txt").write_bytes(b"mine")
    (tmp_path / READERS_FOLDER / ".lock").touch()
    (reader,) = list_readers(tmp_path).find("video", NEW)
    assert "unknown reader" in reader.text and f"{READERS_FOLDER}/{mark.name} cannot be read" in reader.text
    os.utime(mark, (0, time.time() - RUN_EXPIRY_S - 60))
    assert not list_readers(tmp_path).active and len(list_readers(tmp_path).ended) == 1


def test_a_folder_that_takes_no_mark_is_read_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / READERS_FOLDER).write_bytes(b"")
    for _ in range(2):
        enable_marks(tmp_path)
        assert leave_mark(tmp_path / "video" / NEW) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert f"note: reader marks cannot be written to {tmp_path} (" in line and "--keep" in line


@pytest.mark.parametrize("place", ["bucket", "web server"])
def test_a_place_that_may_not_be_written_is_read_with_a_line(
    place: str, bucket: str, faults: Faults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.set(Fault("error", method="PUT", status=403, code="AccessDenied"))
    enable_marks(tmp_path, open_objects(f"{bucket}/data" if place == "bucket" else "https://127.0.0.1:1/data"))
    assert leave_mark(tmp_path / "video" / NEW) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "note: reader marks cannot be written to " in line and "--keep" in line


def test_a_bucket_that_does_not_answer_holds_up_no_other_folder(bucket: str, faults: Faults, tmp_path: Path) -> None:
    remote, local = Folder(tmp_path / "remote", open_objects(f"{bucket}/data")), Folder(tmp_path / "local", None)
    local.path.mkdir()
    with keep_marks():
        enable_marks(remote.path, remote.objects)
        user = leave_mark(remote.variant())
        faults.set(Fault("hang"))
        renewal = threading.Thread(target=remove_unused_marks, kwargs={"renews": True}, daemon=True)
        renewal.start()
        deadline = time.monotonic() + 10
        while faults.seen().num_faults == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        enable_marks(local.path)
        assert leave_mark(local.variant()) is not None and len(local.marks()) == 1
        assert renewal.is_alive() and user is not None
        faults.set()
    renewal.join()


def test_a_mark_waits_until_variants_have_been_removed(tmp_path: Path) -> None:
    code = (
        "from clipmill.shards.marks import *; folder = Path(sys.argv[1]); "
        "enable_marks(folder); leave_mark(folder / 'video/x')"
    )
    with exclude_new_readers(tmp_path) as readers:
        assert not readers.active and readers.now_s == pytest.approx(time.time(), abs=60)
        # Use a new interpreter, because a fork would hold the lock too.
        reader = subprocess.Popen([sys.executable, "-c", code, tmp_path], stderr=subprocess.PIPE, text=True)
        assert reader.stderr is not None and "waiting for prep gc" in reader.stderr.readline()
        assert not Folder(tmp_path, None).marks()
    assert reader.wait(60) == 0 and reader.stderr.read() == ""
    assert not Folder(tmp_path, None).marks(), "the mark must be removed when the process exits"


@pytest.fixture
def run(folder: Folder, tmp_path: Path) -> Callable[..., object]:
    """Return a function that marks the variant of a run."""
    enable_marks(folder.path, folder.objects)
    facts = tmp_path / "run" / "run.json"
    facts.parent.mkdir()
    facts.write_text(json.dumps({marks.TOKEN_FACT: "1234"}))
    return lambda: mark_run(facts, "1234", {folder.path: {"video": NEW}})


def stop(run: Callable[..., object]) -> None:
    with pytest.raises(KeyboardInterrupt), run():  # type: ignore[attr-defined]
        raise KeyboardInterrupt


def test_a_run_has_a_mark_until_it_is_finished(folder: Folder, run: Callable[..., object], tmp_path: Path) -> None:
    for _ in range(2):
        stop(run)
        (reader,) = folder.readers().find("video", NEW)
        assert reader.is_run and f"unfinished run {tmp_path / 'run'} (last start 20" in reader.text
    with run():  # type: ignore[attr-defined]
        assert len(folder.marks()) == 1
    assert folder.marks() == []


def test_a_run_that_was_removed_counts_no_more(
    folder: Folder, run: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(run)
    facts = tmp_path / "run" / "run.json"
    for damaged in (b"{", b"[]"):
        facts.write_bytes(damaged)
        assert folder.readers().active, "a damaged run must count as a run"
    facts.write_text(json.dumps({marks.TOKEN_FACT: "another run"}))
    assert not folder.readers().active and folder.readers().ended
    facts.unlink()
    assert not folder.readers().active
    # A folder that is missing on this machine may exist on the machine of the run.
    folder.change(holder="process 7 on node1")
    assert folder.readers().active
    folder.expire(monkeypatch, age_s=RUN_EXPIRY_S + 60)
    assert not folder.readers().active
