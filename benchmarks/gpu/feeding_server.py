"""A loader process, so that the measuring process has no competing threads, and CUDA is never forked.

It is forked before CUDA is initialised, keeps the datasets open, and answers requests through a pipe:

    threads     the training loader with the given number of worker threads
    processes   that many processes, each with a one-thread loader and its own part of the samples: the upper bound
    ring        that many worker processes, and this process to read from them (benchmarks.gpu.feeding_ring)
    lock        the loader with that many threads, and the fraction of time that the interpreter lock is held
    same        whether threads and the ring return the same batches
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from benchmarks.gpu.feeding_lock import find_interpreter_lock
from benchmarks.gpu.feeding_ring import ProcessRing
from train.data.loader import Loader, LoaderSettings
from train.data.video_captions import VideoCaptions
from train.distributed.world import World
from train.models.attention import open_attention
from train.tasks.dual_encoder.settings import DualEncoderSettings
from train.tasks.dual_encoder.task import DualEncoderTask

_WARM_BATCHES = 2
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What to load: the flags of `train dual-encoder`."""

    num_frames: int
    sampling: str
    size_px: int
    batch: int
    batches_ahead: int = 2


class LoaderServer:
    """The client of the loader process; `ask` waits for its answer.

    Args:
        data: the data folder, which may be created after the start.
    """

    def __init__(self, data: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        # Not a daemon: daemonic processes cannot have children.
        self._process = context.Process(target=_serve, args=(theirs, self._pipe, data))
        self._process.start()
        theirs.close()

    def ask(self, do: str, shown: Shown, **details: Any) -> Any:
        """Send one request and return the answer.

        Raises:
            RuntimeError: the request failed, or the process has exited.
        """
        self._pipe.send((do, shown, details))
        try:
            answer, error = self._pipe.recv()
        except EOFError as gone:
            raise RuntimeError(f"the loading process exited during the request {do!r}") from gone
        if error is not None:
            raise RuntimeError(error)
        return answer

    def close(self) -> None:
        """Terminate the process."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Connection, others: Connection, data: Path) -> None:
    others.close()  # otherwise the exit of the measuring process would go unnoticed
    torch.set_num_threads(1)  # for the thread that copies samples into batches
    loading = _Loading(data)
    while True:
        try:
            do, shown, details = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, str | None] = (getattr(loading, do)(shown, **details), None)
        except Exception as error:  # noqa: BLE001  the one that asked is told
            answer = (None, f"{type(error).__name__}: {error}")
        pipe.send(answer)


class _Loading:
    def __init__(self, data: Path) -> None:
        self._data = data
        self._opened: dict[Shown, VideoCaptions] = {}

    def threads(self, shown: Shown, *, number: int, seconds: float) -> dict[str, float]:
        with self._batches(shown, num_threads=number) as take:
            return _timed(take, seconds=seconds)

    def processes(self, shown: Shown, *, number: int, seconds: float) -> dict[str, float]:
        self._samples(shown)  # opened once, before the other processes are forked
        context = multiprocessing.get_context("fork")
        together = context.Barrier(number)
        pairs = [context.Pipe(duplex=False) for _ in range(number)]

        def run(rank: int, barrier: Barrier) -> None:
            with self._batches(shown, num_threads=1, rank=rank, num_ranks=number) as take:
                barrier.wait()
                pairs[rank][1].send(_timed(take, seconds=seconds))

        processes = [context.Process(target=run, args=(rank, together), daemon=True) for rank in range(number)]
        for process in processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()  # so that an early exit is noticed
        answers = [pipe.recv() for pipe, _ in pairs]
        for process in processes:
            process.join()
        return {
            "clips_per_s": sum(answer["clips_per_s"] for answer in answers),
            "cpu_ms": sum(answer["cpu_ms"] for answer in answers) / number,
        }

    def ring(self, shown: Shown, *, number: int, seconds: float) -> dict[str, float]:
        with self._ring(shown, number=number) as ring:
            batches = ring.batches()
            for _ in range(_WARM_BATCHES):
                next(batches)
            return {**_timed(lambda: len(next(batches)["key"]), seconds=seconds), "cpu_ms": float("nan")}

    def lock(self, shown: Shown, *, number: int, seconds: float) -> dict[str, float]:
        lock = find_interpreter_lock()
        stops, num_clips = Event(), 0
        with self._batches(shown, num_threads=number) as take:

            def load() -> None:
                nonlocal num_clips
                while not stops.is_set():
                    num_clips += take()

            thread = Thread(target=load)
            begin_s = time.perf_counter()
            thread.start()
            share = lock.held_share_for(seconds)
            stops.set()
            thread.join()
            wall_s = time.perf_counter() - begin_s
        return {"held_share": share, "clips_per_s": num_clips / wall_s}

    def same(self, shown: Shown, *, number: int) -> dict[str, bool]:
        with self._ring(shown, number=number) as ring, self._loader(shown, num_threads=2) as threads:
            batches, is_same = ring.batches(), True
            for _ in range(_WARM_BATCHES):
                one, other = next(batches), next(threads).batch
                is_same &= torch.equal(one["video"], other["video"]) and one["key"] == other["key"]
            return {"is_same": is_same}

    def _samples(self, shown: Shown) -> VideoCaptions:
        if shown not in self._opened:
            settings = DualEncoderSettings(
                shards=str(self._data),
                num_frames=shown.num_frames,
                sampling=shown.sampling,  # type: ignore[arg-type]
                size_px=shown.size_px,
                batch=shown.batch,
                seed=_SEED,
                device="cpu",
            )
            attention = open_attention("sdpa", device_type="cpu")
            samples = DualEncoderTask(settings, attention=attention, device=torch.device("cpu")).training_set(World())
            assert isinstance(samples, VideoCaptions)
            self._opened[shown] = samples
        return self._opened[shown]

    @contextmanager
    def _loader(self, shown: Shown, *, num_threads: int, rank: int = 0, num_ranks: int = 1) -> Iterator[Any]:
        settings = LoaderSettings(
            batch=shown.batch,
            num_threads=num_threads,
            num_ahead=shown.batch * shown.batches_ahead,
            seed=_SEED,
            rank=rank,
            num_ranks=num_ranks,
        )
        with closing(Loader(self._samples(shown), settings).batches(max_failures=0)) as batches:
            yield batches

    @contextmanager
    def _batches(
        self, shown: Shown, *, num_threads: int, rank: int = 0, num_ranks: int = 1
    ) -> Iterator[Callable[[], int]]:
        with self._loader(shown, num_threads=num_threads, rank=rank, num_ranks=num_ranks) as batches:
            for _ in range(_WARM_BATCHES):
                next(batches)
            yield lambda: len(next(batches).batch["key"])

    def _ring(self, shown: Shown, *, number: int) -> ProcessRing:
        clip_shape = (shown.num_frames, shown.size_px * shown.size_px * 3 // 2)
        return ProcessRing(
            self._samples(shown), num_processes=number, batch=shown.batch, seed=_SEED, clip_shape=clip_shape
        )


def _timed(take: Callable[[], int], *, seconds: float) -> dict[str, float]:
    """Return clips per second of wall time, and CPU milliseconds of this process per clip."""
    num_clips, cpu_begin_s, begin_s = 0, time.process_time(), time.perf_counter()
    while (wall_s := time.perf_counter() - begin_s) < seconds or not num_clips:
        num_clips += take()
    return {"clips_per_s": num_clips / wall_s, "cpu_ms": 1000 * (time.process_time() - cpu_begin_s) / num_clips}
