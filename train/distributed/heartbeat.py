"""Ranks that watch one another, so that none waits long for one that is gone.

A collective waits for all ranks; on a GPU, where no connection breaks, for ten minutes and more. So a thread of every
rank says every few seconds that it lives, and leaves the process when another one has been silent for too long or has
said why it stopped.
"""

import os
import sys
import threading
from datetime import timedelta
from time import monotonic

import torch.distributed as dist

from manifests.errors import EXIT_FAILED_WORK
from train.distributed.world import World

BEAT_S = 5.0
SILENT_S = 40.0
# A rank that says why it stops breaks connections too: the others have this long to notice by themselves.
_GRACE_S = 10.0
_LEFT, _FAILED = "left", "failed: "


class Heartbeat:
    """Beats from now on, until `end`."""

    def __init__(self, world: World, *, host: str, port: int, attempt: str) -> None:
        self._world = world
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if world.size == 1:
            return
        # A connection of its own: the process group's may be waiting for an answer.
        store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=SILENT_S / 2)
        )
        self._store = dist.PrefixStore(f"{attempt}/heartbeat", store)
        self._store.set(str(world.rank), "0")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self, *, error: BaseException | None = None) -> None:
        """Tells the others that this rank is done, or why it stops."""
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join(BEAT_S)
        self._thread = None
        try:
            self._store.set(str(self._world.rank), _LEFT if error is None else f"{_FAILED}{_described(error)}")
        except RuntimeError:
            pass  # the store is gone with the rank that had it, and so are all that would have read this

    def _run(self) -> None:
        watch = Watch(self._world)
        number = 0
        while not self._is_over.wait(BEAT_S):
            number += 1
            try:
                self._store.set(str(self._world.rank), str(number))
                said = [text.decode() for text in self._store.multi_get(list(map(str, range(self._world.size))))]
            except RuntimeError:
                said = None
            reason = watch.reason_to_stop(said, now_s=monotonic())
            if reason is not None and not self._is_over.is_set():
                sys.stderr.write(
                    f"failed: {reason}; rank {self._world.rank} stops too, "
                    "go on from the latest checkpoint with --resume\n"
                )
                sys.stderr.flush()
                # The main thread waits in a collective that will not end.
                os._exit(EXIT_FAILED_WORK)


class Watch:
    """What is known of the other ranks; time is given, so that it can be tested."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._said: dict[int, str] = {}
        self._heard_s: dict[int, float] = {}
        self._failed_s: float | None = None
        self._reached_s: float | None = None

    def reason_to_stop(self, said: list[str] | None, *, now_s: float) -> str | None:
        """Why this rank should stop, given what each rank said last (None where the store does not answer)."""
        if said is None:
            self._reached_s = now_s if self._reached_s is None else self._reached_s
            silent = now_s - self._reached_s >= SILENT_S
            return f"the machine of rank 0 has not answered for {SILENT_S:g} s" if silent else None
        self._reached_s = now_s
        for rank, text in enumerate(said):
            if rank == self._world.rank or text == _LEFT:
                continue
            if text.startswith(_FAILED):
                self._failed_s = now_s if self._failed_s is None else self._failed_s
                if now_s - self._failed_s >= _GRACE_S:
                    return f"rank {rank} has stopped: {text.removeprefix(_FAILED)}"
            elif self._said.get(rank) != text:
                self._said[rank], self._heard_s[rank] = text, now_s
            elif now_s - self._heard_s[rank] >= SILENT_S:
                return f"rank {rank} has not been heard of for {SILENT_S:g} s"
        return None


def _described(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
