"""Running a function in Ray tasks, which keep nothing from one task to the next."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from clipmill.manifests.errors import first_line
from clipmill.prep.engines import TICK_S, Outcome, Refused
from clipmill.prep.engines.ray_flights import Flight, Given, Pace, Session, answer_of, flights_of, stragglers

_STRAGGLER_INTERVAL_S = 5.0

Events = Iterator[Outcome[Any, Any] | Refused | None]


class TaskRun:
    """One run of a function in Ray tasks.

    Args:
        window: returns the number of tasks to have in flight.
    """

    def __init__(self, session: Session, *, window: Callable[[], int]) -> None:
        self._session, self._window = session, window
        self._remote = session.ray.remote(session.work.as_function())
        self._options = {"max_retries": 0, "retry_exceptions": False, **session.options}
        self._again = deque[Flight]()
        self._pending = dict[Any, Flight]()
        self._pace = Pace(session.execution.straggler_factor)
        self._compared_s = time.monotonic()

    def outcomes(self, given: Given) -> Events:
        """Run the tasks; see `clipmill.prep.engines.Engine.run`."""
        new, nodes = flights_of(given), self._session.nodes
        while True:
            while len(self._pending) < self._window():
                flight = self._again.popleft() if self._again else next(new, None)
                if flight is None:
                    break
                self._send(flight)
            if not self._pending:
                return
            ready, _ = self._session.ray.wait(list(self._pending), timeout=TICK_S)
            if not ready:
                nodes.require_one()
                yield None
            yield from nodes.answers()
            for call in ready:
                if call in self._pending:  # otherwise its other copy has just ended
                    yield from self._end(call)
            self._copy_stragglers()

    def _send(self, flight: Flight, *, without: str | None = None) -> None:
        if not flight.calls:
            flight.sent_s = time.monotonic()
        options = {"name": flight.label.name, **self._options, **self._session.nodes.options(without=without)}
        packed = self._session.work.packed(flight.task)
        flight.calls.append(self._remote.options(**options).remote(packed, flight.number))
        self._pending[flight.calls[-1]] = flight

    def _end(self, call: Any) -> Events:
        """Take in the end of a call."""
        ray, flight = self._session.ray, self._pending.pop(call)
        flight.calls.remove(call)
        answer = answer_of(ray, call)
        if answer.refusal is not None:
            yield from self._session.nodes.refuse(answer.refusal)
            if not flight.calls:
                self._again.append(flight)
        elif answer.error is None:
            self._pace.add(flight.label.work, answer.run_s)
            for copy in flight.calls:
                del self._pending[copy]
                ray.cancel(copy, force=True)
            yield Outcome(flight.task, answer.result)
        elif not flight.calls:  # otherwise its other copy may succeed
            is_node = isinstance(answer.error, ray.exceptions.NodeDiedError)
            if flight.is_retried(self._session.execution, is_node=is_node):
                self._again.append(flight)
            else:
                yield Outcome(flight.task, None, lost=first_line(answer.error))

    def _copy_stragglers(self) -> None:
        board, nodes = self._session.board, self._session.nodes
        if board is None or time.monotonic() - self._compared_s < _STRAGGLER_INTERVAL_S:
            return
        for flight, node_id in stragglers(board, set(self._pending.values()), self._pace):
            if nodes.has_other(node_id):
                self._send(flight, without=node_id)
        self._compared_s = time.monotonic()
