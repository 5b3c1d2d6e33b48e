"""Heartbeats between ranks, so that no rank waits long for a lost rank.

A collective waits for all ranks. On GPUs, a lost rank does not break a connection, so the collective waits for ten
minutes or longer. Therefore, a thread of every rank updates a counter every few seconds. The thread ends its process if
another rank has been silent for too long, or has reported a failure.

The counters are in a store that torchrun or rank 0 hosts. If that process freezes or its machine is lost, calls to the
store never return. Therefore, a second thread measures how long the calls of the first thread take.
"""

import os
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic

import torch.distributed as dist

from clipmill.manifests.errors import EXIT_FAILED_WORK
from clipmill.train.distributed.world import World

BEAT_S = 5.0  # interval between the heartbeats of a rank
SILENT_S = 40.0  # a rank without a heartbeat for this time counts as lost
_TICK_S = 1.0
# A rank that fails also breaks connections, so its peers have this much time to raise their own errors.
_GRACE_S = 10.0
_LEFT, _FAILED = "left", "failed: "
_MAX_REASON = 300  # maximum length of a reason, in characters


class Heartbeat:
    """Sender of heartbeats. It runs from its creation until `end` is called.

    Args:
        host, port: Address of the store.
        attempt: Name of this launch attempt, as returned by `name_attempt`.
    """

    def __init__(self, world: World, *, host: str, port: int, attempt: str) -> None:
        self._world = world
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if world.size == 1:
            return
        # Use a separate connection, because the connection of the process group may be waiting for a response.
        store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=SILENT_S / 2)
        )
        self._store = dist.PrefixStore(f"{attempt}/heartbeat", store)
        self._store.set(str(world.rank), "0")
        self._clock = _RunningClock()
        self._called_s: float | None = None  # start of the pending store call
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        threading.Thread(target=self._time_calls, name="heartbeat-timer", daemon=True).start()

    def end(self, *, error: BaseException | None = None) -> None:
        """Tell the other ranks that this rank has finished, or why it failed."""
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join(BEAT_S)
        is_stuck = self._thread.is_alive()
        self._thread = None
        if is_stuck:
            return  # the thread is blocked in a call to the store; further calls would block too
        try:
            reason = _LEFT
            if error is not None:
                reason = _FAILED + " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON]
            self._store.set(str(self._world.rank), reason)
        except RuntimeError:
            pass  # the store is lost, so no rank could read the message

    def _run(self) -> None:
        watch = Watch(self._world)
        ranks = range(self._world.size)
        joined_ranks: list[int] = []
        count = 0
        while not self._is_over.wait(BEAT_S):
            count += 1
            self._called_s = self._clock.now_s
            try:
                self._store.set(str(self._world.rank), str(count))
                if len(joined_ranks) < len(ranks):
                    joined_ranks = [rank for rank in ranks if self._store.check([str(rank)])]
                texts = self._store.multi_get(list(map(str, joined_ranks)))
                messages = {rank: text.decode() for rank, text in zip(joined_ranks, texts, strict=True)}
            except RuntimeError:
                messages = None
            self._called_s = None
            self._exit_with(watch.reason_to_stop(messages, now_s=self._clock.now_s))

    def _time_calls(self) -> None:
        while not self._is_over.wait(_TICK_S):
            self._clock.tick()
            called_s = self._called_s
            if called_s is not None and self._clock.now_s - called_s >= SILENT_S:
                self._exit_with(_unanswered_text())

    def _exit_with(self, reason: str | None) -> None:
        if reason is None or self._is_over.is_set():
            return
        sys.stderr.write(
            f"failed: {reason}; rank {self._world.rank} stops too; resume from the latest checkpoint with --resume\n"
        )
        sys.stderr.flush()
        # The main thread is blocked in a collective, so it cannot end the process.
        os._exit(EXIT_FAILED_WORK)


class _RunningClock:
    """Clock that stands still while this process is suspended (Ctrl-Z, SIGSTOP).

    Otherwise, the other ranks would seem to have been silent during the suspension.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ticked_s = monotonic()

    def tick(self) -> None:
        """Advance by the time since the last call, but at most two ticks: a longer gap indicates a suspension."""
        now_s = monotonic()
        self.now_s += min(now_s - self._ticked_s, 2 * _TICK_S)
        self._ticked_s = now_s


class Watch:
    """Last messages of the other ranks, and their times. Times are arguments, so that tests can choose them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._messages: dict[int, str] = {}
        self._seen_s: dict[int, float] = {}
        self._failed_s: float | None = None
        self._reached_s: float | None = None

    def reason_to_stop(self, messages: Mapping[int, str] | None, *, now_s: float) -> str | None:
        """Return the reason why this rank should stop; None to continue.

        Args:
            messages: Last message of each rank that has sent one; None if the store does not respond.
        """
        if messages is None:
            self._reached_s = now_s if self._reached_s is None else self._reached_s
            return _unanswered_text() if now_s - self._reached_s >= SILENT_S else None
        self._reached_s = now_s
        for rank, text in messages.items():
            if rank == self._world.rank or text == _LEFT:
                continue
            if text.startswith(_FAILED):
                self._failed_s = now_s if self._failed_s is None else self._failed_s
                if now_s - self._failed_s >= _GRACE_S:
                    return f"rank {rank} has stopped: {text.removeprefix(_FAILED)}"
            elif self._messages.get(rank) != text:
                self._messages[rank], self._seen_s[rank] = text, now_s
            elif now_s - self._seen_s[rank] >= SILENT_S:
                return f"rank {rank} has sent no heartbeat for {SILENT_S:g} s"
        return None


def _unanswered_text() -> str:
    return f"the machine of rank 0 has not responded for {SILENT_S:g} s, or its process is suspended"
