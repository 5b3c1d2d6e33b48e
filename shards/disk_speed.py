"""Measure the speed of disks and buckets, for `prep advise`, `train doctor`, `train bench` and `train quickstart`.

Reads from the page cache say nothing about a disk, so the pages of a file are dropped first (posix_fadvise).
Non-blocking reads (RWF_NOWAIT) then show whether the kernel has dropped the pages.
"""

import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

_BLOCK, _NUM_BLOCKS = 1 << 22, 12
_PIECE, _NUM_PIECES = 1 << 16, 64
_FILE_S, _READING_S, _MOST_BYTES = 2.0, 3.0, 4 << 30

Read = Callable[[], int]  # function that reads bytes, and returns their number


@dataclass(frozen=True, kw_only=True)
class ReadSpeed:
    """Speed of a series of reads.

    Attributes:
        bytes_per_s: Bytes per second, all threads together.
        read_s, slow_read_s: Median and 95th percentile of the time per read, in seconds.
        num_reads: Number of reads.
    """

    bytes_per_s: float
    read_s: float
    slow_read_s: float
    num_reads: int


def read_speed(
    reads: Sequence[Read], *, num_threads: int = 1, seconds: float = _READING_S, repeats: bool = False
) -> ReadSpeed:
    """Measure the speed of `reads`. Threads run them in order until `seconds` have passed, but run at least one.

    Args:
        repeats: Start over after the last read.

    Raises:
        OSError, Damaged: A read failed.
    """
    lock, taken_s, sizes = threading.Lock(), list[float](), list[int]()
    num_begun, began_s = 0, time.perf_counter()

    def read_on() -> None:
        nonlocal num_begun
        while True:
            with lock:
                number, num_begun = num_begun, num_begun + 1
            is_late = time.perf_counter() - began_s > seconds or sum(sizes) > _MOST_BYTES
            if (number and is_late) or (number >= len(reads) and not repeats):
                return
            begin_s = time.perf_counter()
            size = reads[number % len(reads)]()
            taken_s.append(time.perf_counter() - begin_s)
            sizes.append(size)

    with ThreadPoolExecutor(num_threads) as pool:
        for future in [pool.submit(read_on) for _ in range(num_threads)]:
            future.result()
    # With a single thread, the time between two reads does not count.
    wall_s, ranked = sum(taken_s) if num_threads == 1 else time.perf_counter() - began_s, sorted(taken_s)
    return ReadSpeed(
        bytes_per_s=sum(sizes) / wall_s,
        read_s=median(ranked),
        slow_read_s=ranked[math.ceil(0.95 * len(ranked)) - 1],
        num_reads=len(ranked),
    )


def drop_cache(path: Path) -> None:
    """Ask the kernel to drop a file from the page cache; raises OSError if it cannot be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """Speed of a disk, measured on one file.

    Attributes:
        read_bytes_per_s: Speed of sequential reads.
        piece_ms: Median time of random reads of 64 KiB, as a data loader reads packets.
        cached: True if reads came from the page cache; None if the kernel does not report it.
        write_bytes_per_s: Speed of writes; None if they were not measured.
    """

    read_bytes_per_s: float
    piece_ms: float
    cached: bool | None
    write_bytes_per_s: float | None = None


def speed_of_file(file: int) -> DiskSpeed | None:
    """Measure a disk by reading up to 48 MB of an open file; takes at most 4 s. Return None if the file is too small.

    Raises:
        OSError: The file cannot be read.
    """
    size = min(os.fstat(file).st_size, _NUM_BLOCKS * _BLOCK)
    if size < 2 * _PIECE:
        return None
    os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)
    cached = _is_cached(file, size)
    os.posix_fadvise(file, 0, size, os.POSIX_FADV_RANDOM)  # disables read-ahead
    numbers = random.Random(0).sample(range(size // _PIECE), min(_NUM_PIECES, size // _PIECE))
    pieces = read_speed([partial(_read, file, _PIECE, number * _PIECE) for number in numbers], seconds=_FILE_S)
    os.posix_fadvise(file, 0, size, os.POSIX_FADV_NORMAL)
    os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)
    blocks = read_speed([partial(_read, file, _BLOCK, begin) for begin in range(0, size, _BLOCK)], seconds=_FILE_S)
    return DiskSpeed(read_bytes_per_s=blocks.bytes_per_s, piece_ms=1000 * pieces.read_s, cached=cached)


def speed_of_folder(folder: Path) -> DiskSpeed:
    """Measure a disk by writing, flushing and reading a temporary file of up to 48 MB; takes at most 6 s.

    Raises:
        OSError: The folder is not writable.
    """
    block = random.Random(0).randbytes(_BLOCK)  # zeros might be compressed or not written
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begin_s, num_bytes = time.perf_counter(), 0
        while num_bytes < _NUM_BLOCKS * _BLOCK and time.perf_counter() - begin_s < _FILE_S:
            num_bytes += file.write(block)
        os.fsync(file.fileno())
        write_bytes_per_s = num_bytes / (time.perf_counter() - begin_s)
        speed = speed_of_file(file.fileno())
    assert speed is not None  # at least one block was written
    return DiskSpeed(**{**vars(speed), "write_bytes_per_s": write_bytes_per_s})


def _read(file: int, size: int, offset: int) -> int:
    return len(os.pread(file, size, offset))


def _is_cached(file: int, size: int) -> bool | None:
    """Return True if most of a file is in the page cache; None if the kernel does not report it."""
    offsets = range(0, size - 4096, max(4096, size // 32))
    num_cached = 0
    for offset in offsets:
        try:
            num_cached += os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            continue
        except OSError:
            return None
    return num_cached * 2 > len(offsets)
