"""Measure the read and write speed of disks and buckets, for `prep advise`, `train doctor` and `train quickstart`.

Reads from the page cache say nothing about the disk, so the pages of a file are dropped first (posix_fadvise).
Non-blocking reads (RWF_NOWAIT) then show whether the kernel has dropped them.
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

_BLOCK_BYTES, _NUM_BLOCKS = 1 << 22, 12  # sequential reads and writes
_RANDOM_BYTES, _NUM_RANDOM = 1 << 16, 64  # random reads
_FILE_LIMIT_S, _READS_LIMIT_S, _MAX_BYTES = 2.0, 3.0, 4 << 30

Read = Callable[[], int]  # function that reads bytes and returns how many it read


@dataclass(frozen=True, kw_only=True)
class ReadSpeed:
    """Speed of a series of reads.

    Attributes:
        bytes_per_s: Bytes read per second by all threads together.
        read_s, slow_read_s: Median and 95th percentile of the duration of a read in seconds.
        num_reads: Number of reads.
    """

    bytes_per_s: float
    read_s: float
    slow_read_s: float
    num_reads: int


def measure_reads(
    reads: Sequence[Read], *, num_threads: int = 1, seconds: float = _READS_LIMIT_S, repeats: bool = False
) -> ReadSpeed:
    """Call `reads` in order, and measure their speed. At least one read is called.

    Args:
        num_threads: Number of threads that call the reads.
        seconds: Time after which no further read begins, in seconds. The measurement also ends after 4 GiB.
        repeats: True to start over with the first read after the last read.

    Raises:
        OSError, Damaged: A read failed.
    """
    lock, durations_s, sizes = threading.Lock(), list[float](), list[int]()
    num_started, start_s = 0, time.perf_counter()

    def call_reads() -> None:
        nonlocal num_started
        while True:
            with lock:
                read_index, num_started = num_started, num_started + 1
            is_late = time.perf_counter() - start_s > seconds or sum(sizes) > _MAX_BYTES
            if (read_index and is_late) or (read_index >= len(reads) and not repeats):
                return
            begin_s = time.perf_counter()
            size = reads[read_index % len(reads)]()
            durations_s.append(time.perf_counter() - begin_s)
            sizes.append(size)

    with ThreadPoolExecutor(num_threads) as pool:
        for future in [pool.submit(call_reads) for _ in range(num_threads)]:
            future.result()
    # With a single thread, do not count the time between two reads.
    total_s = sum(durations_s) if num_threads == 1 else time.perf_counter() - start_s
    sorted_s = sorted(durations_s)
    return ReadSpeed(
        bytes_per_s=sum(sizes) / total_s,
        read_s=median(sorted_s),
        slow_read_s=sorted_s[math.ceil(0.95 * len(sorted_s)) - 1],
        num_reads=len(sorted_s),
    )


def drop_cache(path: Path) -> None:
    """Ask the kernel to drop a file from the page cache.

    Raises:
        OSError: The file cannot be opened.
    """
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
        piece_ms: Median duration of a random read of 64 KiB in ms; data loaders read packets in this way.
        cached: True if the file was still in the page cache; None if the kernel does not report it.
        write_bytes_per_s: Speed of sequential writes; None if it was not measured.
    """

    read_bytes_per_s: float
    piece_ms: float
    cached: bool | None
    write_bytes_per_s: float | None = None


def measure_file(file: int) -> DiskSpeed | None:
    """Measure a disk by reading up to 48 MiB of an open file, in at most 4 s; return None if the file is too small.

    Args:
        file: Descriptor of the file.

    Raises:
        OSError: The file cannot be read.
    """
    size = min(os.fstat(file).st_size, _NUM_BLOCKS * _BLOCK_BYTES)
    if size < 2 * _RANDOM_BYTES:
        return None
    os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)
    cached = _is_cached(file, size)
    os.posix_fadvise(file, 0, size, os.POSIX_FADV_RANDOM)  # disables read-ahead
    blocks = random.Random(0).sample(range(size // _RANDOM_BYTES), min(_NUM_RANDOM, size // _RANDOM_BYTES))
    random_reads = [partial(_read, file, _RANDOM_BYTES, block * _RANDOM_BYTES) for block in blocks]
    random_speed = measure_reads(random_reads, seconds=_FILE_LIMIT_S)
    os.posix_fadvise(file, 0, size, os.POSIX_FADV_NORMAL)
    os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)
    block_reads = [partial(_read, file, _BLOCK_BYTES, begin) for begin in range(0, size, _BLOCK_BYTES)]
    block_speed = measure_reads(block_reads, seconds=_FILE_LIMIT_S)
    return DiskSpeed(read_bytes_per_s=block_speed.bytes_per_s, piece_ms=1000 * random_speed.read_s, cached=cached)


def measure_folder(folder: Path) -> DiskSpeed:
    """Measure a disk by writing, flushing and reading a temporary file of up to 48 MiB, in at most 6 s.

    Raises:
        OSError: The folder is not writable.
    """
    block = random.Random(0).randbytes(_BLOCK_BYTES)  # a file system might compress zeros, or not store them
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begin_s, num_bytes = time.perf_counter(), 0
        while num_bytes < _NUM_BLOCKS * _BLOCK_BYTES and time.perf_counter() - begin_s < _FILE_LIMIT_S:
            num_bytes += file.write(block)
        os.fsync(file.fileno())
        write_bytes_per_s = num_bytes / (time.perf_counter() - begin_s)
        speed = measure_file(file.fileno())
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
