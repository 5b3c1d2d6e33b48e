"""Running a function in Ray actors, which stay alive and keep what the function has loaded, such as a model."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from clipmill.manifests.errors import first_line
from clipmill.prep.engines import TICK_S, Outcome, Refused
from clipmill.prep.engines.ray_flights import (
    Actor,
    Flight,
    Given,
    Pace,
    Session,
    answer_of,
    flights_of,
    raise_cause,
    straggler_elsewhere,
)

_MAX_FAILED_STARTS = 3  # one after another

Events = Iterator[Outcome[Any, Any] | Refused | None]


class ActorRun:
    """One run of a function in Ray actors.

    Args:
        num_actors: returns the number of actors to have.
    """

    def __init__(self, session: Session, *, num_actors: Callable[[], int]) -> None:
        self._session, self._num_actors = session, num_actors
        self._kind = session.ray.remote(session.work.as_class())
        self._again = deque[Flight]()
        # An actor gets a task only after it has started: its node may have disappeared while other nodes are available.
        self._starting = dict[Any, Any]()
        self._idle = list[Actor]()
        self._busy = dict[Any, tuple[Actor, Flight]]()
        self._num_failed_starts = 0
        self._pace = Pace(session.execution.straggler_factor)

    def outcomes(self, given: Given) -> Events:
        """Run the tasks; see `clipmill.prep.engines.Engine.run`."""
        new, nodes = flights_of(given), self._session.nodes
        while True:
            self._idle = [actor for actor in self._idle if not self._is_given_a_task(actor, new)]
            if self._idle and not self._busy:
                return
            while not self._idle and len(self._starting) + len(self._busy) < self._num_actors():
                handle = self._kind.options(**self._session.options, **nodes.options()).remote()
                self._starting[handle.arrive.remote()] = handle
            ready, _ = self._session.ray.wait([*self._starting, *self._busy], timeout=TICK_S)
            if not ready:
                nodes.require_one()
                yield None
            yield from nodes.answers()
            for call in ready:
                if call in self._starting:
                    yield from self._start(call)
                elif call in self._busy:  # otherwise its other copy has just ended
                    yield from self._end(call)

    def _is_given_a_task(self, actor: Actor, new: Iterator[Flight]) -> bool:
        """Give an idle actor the next task, or a copy of a straggler; return False if there is none."""
        flight = self._again.popleft() if self._again else next(new, None)
        if flight is None:
            flight = straggler_elsewhere(self._busy.values(), self._pace, node_id=actor.node_id)
        if flight is None:
            return False
        if not flight.calls:
            flight.sent_s = time.monotonic()
        call = actor.handle.work.options(name=flight.label.name).remote(self._session.work.packed(flight.task))
        flight.calls.append(call)
        self._busy[call] = actor, flight
        return True

    def _start(self, call: Any) -> Events:
        """Take in the start of an actor."""
        ray, handle = self._session.ray, self._starting.pop(call)
        try:
            node_id, reason = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            raise_cause(error)
        except ray.exceptions.ActorDiedError:  # with its node, or for a reason that affects the next one as well
            self._num_failed_starts += 1
            if self._num_failed_starts == _MAX_FAILED_STARTS:
                raise
            return
        self._num_failed_starts = 0
        if reason is None:
            self._idle.append(Actor(handle, node_id))
        else:
            yield from self._session.nodes.refuse((node_id, reason))

    def _end(self, call: Any) -> Events:
        """Take in the end of a call."""
        ray, (actor, flight) = self._session.ray, self._busy.pop(call)
        flight.calls.remove(call)
        answer = answer_of(ray, call)
        if answer.error is None:
            self._idle.append(actor)
            self._pace.add(flight.label.work, answer.run_s)
            for copy in flight.calls:
                ray.kill(self._busy.pop(copy)[0].handle)
            yield Outcome(flight.task, answer.result)
            return
        with suppress(ray.exceptions.RayError):
            ray.kill(actor.handle)  # Ray may only have lost sight of it
        if flight.calls:
            return  # its other copy may succeed
        is_node = not self._session.nodes.is_alive(actor.node_id)
        if flight.is_retried(self._session.execution, is_node=is_node):
            self._again.append(flight)
        else:
            yield Outcome(flight.task, None, lost=first_line(answer.error))
