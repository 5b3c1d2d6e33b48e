"""Worker processes as an alternative to the loader's threads: they write clips to shared memory, and one process reads.

Blocks of `BLOCK` visits in training order are assigned round-robin: process b % N decodes block b in one thread, writes
its clips to the next slot of its ring buffer in shared memory, and sends the small remainder through a pipe. The reader
takes the blocks in order, so batches are byte-identical to those of the loader's threads. A byte on a second pipe
releases a slot. Each process has its own interpreter lock. The additional cost is a copy from shared memory, in place
of the copy from each sample to its batch, and one message per block.
"""

import mmap
import multiprocessing
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from train.data.batch import Batch, BatchRing, Sample
from train.data.loader import SampleRequest, SampleSet
from train.data.order import SampleOrder
from train.data.outcomes import FailedSample

BLOCK = 8
_PLACES = 4  # blocks per process that are being decoded or waiting
_LENGTH = struct.Struct("<I")


@dataclass
class _Worker:
    process: BaseProcess
    clips: NDArray[np.uint8]  # [slots, BLOCK, *clip]
    messages: int  # file descriptor
    free: int


class ProcessRing:
    """Endless batches of a dataset from `num_processes` forked processes; a context manager that terminates them.

    Args:
        clip_shape: shape of a clip's uint8 array.
    """

    def __init__(
        self, samples: SampleSet, *, num_processes: int, batch: int, seed: int, clip_shape: tuple[int, ...]
    ) -> None:
        self._batch, self._ring = batch, BatchRing(batch, pin=False)
        order = SampleOrder(len(samples), seed)
        self._workers = [
            _fork(samples, order, number, num_processes=num_processes, seed=seed, clip_shape=clip_shape)
            for number in range(num_processes)
        ]

    def __enter__(self) -> "ProcessRing":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            os.close(worker.messages)
            os.close(worker.free)

    def batches(self) -> Iterator[Batch]:
        """Yield batches in training order from the beginning; failed samples are dropped."""
        waiting: list[Sample] = []
        taken: list[_Worker] = []
        for number, worker in enumerate(self._endless()):
            place = number // len(self._workers) % _PLACES
            for at, sample in enumerate(_receive(worker.messages)):
                if not isinstance(sample, FailedSample):
                    sample["video"] = worker.clips[place, at]
                    waiting.append(sample)
            taken.append(worker)
            if len(waiting) >= self._batch:
                yield self._ring.collate(waiting[: self._batch])
                # Remaining clips are still in the ring; they are copied so that all slots can be released.
                waiting = [
                    cast(Sample, {**sample, "video": sample["video"].copy()}) for sample in waiting[self._batch :]
                ]
                for each in taken:
                    os.write(each.free, b"x")
                taken = []

    def _endless(self) -> Iterator[_Worker]:
        while True:
            yield from self._workers


def _fork(
    samples: SampleSet,
    order: SampleOrder,
    number: int,
    *,
    num_processes: int,
    seed: int,
    clip_shape: tuple[int, ...],
) -> _Worker:
    shape = (_PLACES, BLOCK, *clip_shape)
    clips = np.frombuffer(mmap.mmap(-1, int(np.prod(shape))), np.uint8).reshape(shape)
    read_messages, write_messages = os.pipe()
    read_free, write_free = os.pipe()
    os.write(write_free, b"x" * _PLACES)

    def run() -> None:
        os.close(read_messages)
        os.close(write_free)
        block, place = number, 0
        while os.read(read_free, 1):
            positions = np.arange(block * BLOCK, (block + 1) * BLOCK)
            requests = [
                SampleRequest(sample, at, seed)
                for at, sample in zip(positions.tolist(), order.at(positions).tolist(), strict=True)
            ]
            _send(write_messages, _written([samples.load([request])[0] for request in requests], clips[place]))
            block, place = block + num_processes, (place + 1) % _PLACES

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    os.close(write_messages)
    os.close(read_free)
    return _Worker(process, clips, read_messages, write_free)


def _written(loaded: Sequence[Sample | FailedSample], clips: NDArray[np.uint8]) -> list[Any]:
    """Return the samples without their clips, which are written to the ring."""
    rest: list[Any] = []
    for at, sample in enumerate(loaded):
        if not isinstance(sample, FailedSample):
            clips[at] = sample["video"]
            sample = cast(Sample, {name: value for name, value in sample.items() if name != "video"})
        rest.append(sample)
    return rest


def _send(descriptor: int, message: list[Any]) -> None:
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    os.write(descriptor, _LENGTH.pack(len(content)) + content)


def _receive(descriptor: int) -> list[Any]:
    (length,) = _LENGTH.unpack(_exactly(descriptor, _LENGTH.size))
    message: list[Any] = pickle.loads(_exactly(descriptor, length))
    return message


def _exactly(descriptor: int, size: int) -> bytes:
    pieces = []
    while size:
        piece = os.read(descriptor, size)
        if not piece:
            raise RuntimeError("a worker process has exited")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
