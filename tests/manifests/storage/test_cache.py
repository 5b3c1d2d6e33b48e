"""Tests of the bounded cache: its limit, least recent use, maps, other processes, damage and kills."""

import mmap
import multiprocessing
import os
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.storage.cache import DamagedCopy, NoRoom, ObjectCache


def writing(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def put(cache: ObjectCache, name: str, content: bytes, *, used_s: int | None = None) -> None:
    held = cache.get(name, size_bytes=len(content), fetch=writing(content), sha256=sha256(content).hexdigest())
    assert held is not None
    with held:
        assert held.path.read_bytes() == content
    if used_s is not None:
        os.utime(held.path, (used_s, used_s))


def test_the_least_recently_used_copies_go_first(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_bytes=30)
    for number, name in enumerate("abc"):
        put(cache, name, bytes(10), used_s=100 + number)
    copy = cache.find("a", size_bytes=10)  # this makes "a" the most recently used copy
    assert copy is not None
    copy.close()
    put(cache, "d", bytes(10))
    assert sorted(cache.names()) == ["a", "c", "d"] and cache.held_bytes == 30


def test_a_copy_in_use_or_mapped_is_not_evicted(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_bytes=mmap.PAGESIZE)
    content = os.urandom(mmap.PAGESIZE)
    held = cache.get("a", size_bytes=len(content), fetch=writing(content))
    assert held is not None
    mapped = mmap.mmap(held.descriptor, 0, prot=mmap.PROT_READ)
    for _ in range(2):  # the second time, only the map is left
        with pytest.raises(NoRoom, match="bytes are free or unused"):
            put(cache, "b", bytes(10))
        held.close()
    assert mapped[:] == content
    mapped.close()
    put(cache, "b", bytes(10))
    assert cache.names() == ["b"]


def test_an_object_is_fetched_once_by_threads_and_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    fetched, gate = context.Value("i", 0), context.Event()

    def fetch(path: Path) -> None:
        gate.wait(30)
        with fetched.get_lock():
            fetched.value += 1
        path.write_bytes(b"content")

    def work() -> None:
        held = ObjectCache(tmp_path, limit_bytes=100).get("a", size_bytes=7, fetch=fetch)
        assert held is not None and held.path.read_bytes() == b"content"

    workers: list[Any] = [context.Process(target=work) for _ in range(2)]
    workers += [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    cache = ObjectCache(tmp_path, limit_bytes=100)
    gate.set()
    for worker in workers:
        worker.join(60)
    assert fetched.value == 1 and all(getattr(worker, "exitcode", 0) == 0 for worker in workers)
    assert cache.names() == ["a"]


def test_who_does_not_wait_is_told_that_another_is_fetching(tmp_path: Path) -> None:
    cache, begun, gate = ObjectCache(tmp_path, limit_bytes=100), threading.Event(), threading.Event()

    def fetch(path: Path) -> None:
        begun.set()
        gate.wait(30)
        path.write_bytes(b"content")

    thread = threading.Thread(target=lambda: cache.get("a", size_bytes=7, fetch=fetch))
    thread.start()
    assert begun.wait(30)
    assert cache.get("a", size_bytes=7, fetch=fetch, waits=False) is None
    with pytest.raises(NoRoom):  # downloads in progress take space too
        put(cache, "b", bytes(95))
    gate.set()
    thread.join(30)
    assert cache.get("a", size_bytes=7, fetch=fetch, waits=False) is not None


@pytest.mark.parametrize(
    ("content", "message"), [(b"cont", "received 4 of 7 bytes"), (b"contend", "differs from the committed")]
)
def test_what_was_not_asked_for_is_no_copy(tmp_path: Path, content: bytes, message: str) -> None:
    cache = ObjectCache(tmp_path, limit_bytes=100)
    with pytest.raises(DamagedCopy, match=message):
        cache.get("a", size_bytes=7, fetch=writing(content), sha256=sha256(b"content").hexdigest())
    assert not list((tmp_path / "objects").iterdir())


def test_a_copy_of_another_size_is_fetched_again(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_bytes=100)
    put(cache, "a", b"content")
    os.truncate(tmp_path / "objects" / "a", 3)
    assert cache.find("a", size_bytes=7) is None
    put(cache, "a", b"content")


def test_a_killed_download_takes_no_room_for_long(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_bytes=10)
    context = multiprocessing.get_context("fork")
    begun = context.Event()

    def fetch(path: Path) -> None:
        path.write_bytes(bytes(8))
        begun.set()
        threading.Event().wait(60)

    process = context.Process(target=lambda: cache.get("a", size_bytes=8, fetch=fetch))
    process.start()
    assert begun.wait(30)
    process.kill()
    process.join(30)
    assert len(list((tmp_path / "objects").iterdir())) == 1
    put(cache, "b", bytes(10))
    assert [path.name for path in (tmp_path / "objects").iterdir()] == ["b"]
    assert not list((tmp_path / "locks").glob("room-*"))


def test_claims_are_bounded_and_noted_once(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_bytes=100)
    assert cache.claim({"a": 60}) and cache.claim({"a": 60})
    assert not cache.claim({"b": 50}, only_if_it_fits=True)
    with pytest.raises(NoRoom, match="110 bytes must fit into the cache"):
        cache.claim({"b": 50})


def test_the_limit_follows_from_the_free_disk(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    assert cache.is_derived and cache.limit_bytes > 0
