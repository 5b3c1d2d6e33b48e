"""Tasks that have been given to Ray: what becomes of their calls, and which of them take too long.

Tasks are retried by the engine, not by Ray: a task whose node was lost is not to blame, while one whose worker died may
be. A second copy of a straggler runs on another node; both make the same bytes under the same names, the first result
counts, and the worker of the other copy is killed.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.quoting import on_one_line
from clipmill.prep.engines import Label
from clipmill.prep.engines.execution import Execution
from clipmill.prep.engines.ray_nodes import Nodes
from clipmill.prep.engines.ray_work import Board, Work

_MIN_FINISHED = 5  # tasks before a median means anything
_REMEMBERED = 500
_MAX_LOST_NODES = 10  # for one task, which may be what takes its nodes down
SHORTEST_S = 60.0  # a shorter task is not worth a second copy, which has to load everything again

Given = Iterator[tuple[Any, Label]]


@dataclass(eq=False)
class Flight:
    """A task that has been given to Ray, in one or two copies.

    Attributes:
        num_deaths: how often its worker died; the loss of a node counts in `num_lost_nodes` instead.
        calls: the references of its copies.
    """

    number: int
    task: Any
    label: Label
    num_deaths: int = 0
    num_lost_nodes: int = 0
    sent_s: float = 0.0
    calls: list[Any] = field(default_factory=list)

    def is_retried(self, execution: Execution, *, is_node: bool) -> bool:
        """Count a loss of its worker, or of its node, and return True if the task is to be tried again."""
        if is_node:
            self.num_lost_nodes += 1
        else:
            self.num_deaths += 1
        return self.num_deaths <= execution.task_retries and self.num_lost_nodes <= _MAX_LOST_NODES


@dataclass(frozen=True)
class Answer:
    """What became of a call: exactly one of a refusal (node id, reason), an error, and a result."""

    refusal: tuple[str, str] | None = None
    error: Exception | None = None
    result: Any = None
    run_s: float = 0.0


@dataclass(eq=False)
class Actor:
    """An actor that has started, and its node."""

    handle: Any
    node_id: str


@dataclass(frozen=True)
class Session:
    """A run on a Ray instance.

    Attributes:
        board: table of what runs, or None if stragglers are not looked for.
        options: options of each task or actor.
    """

    ray: Any
    nodes: Nodes
    work: Work
    board: Board | None
    execution: Execution
    options: dict[str, float]


class Pace:
    """Pace of the finished tasks of a run.

    Args:
        factor: how many times the median a task may take before it counts as a straggler; 0: none ever does.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._seconds_per_work: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, work: float, run_s: float) -> None:
        """Record a finished task: its amount of work, and how long it ran."""
        if work > 0:
            self._seconds_per_work.append(run_s / work)

    def limit_s(self, work: float) -> float | None:
        """Return how long a task with this amount of work may run; None while that is unknown, or without a limit."""
        if not self._factor or work <= 0 or len(self._seconds_per_work) < _MIN_FINISHED:
            return None
        return max(SHORTEST_S, self._factor * statistics.median(self._seconds_per_work) * work)


def flights_of(given: Given) -> Iterator[Flight]:
    """Number the tasks of a run."""
    for number, (task, label) in enumerate(given):
        yield Flight(number, task, label)


def stragglers(board: Board, flights: set[Flight], pace: Pace) -> list[tuple[Flight, str]]:
    """Return the flights with one copy that has been running for too long, each with the node where it runs."""
    limits = {flight: pace.limit_s(flight.label.work) for flight in flights if len(flight.calls) == 1}
    now_s = time.monotonic()
    # A task cannot run for longer than since it was sent, so usually the table of what runs is not needed.
    late = {flight: limit_s for flight, limit_s in limits.items() if limit_s and now_s - flight.sent_s > limit_s}
    if not late:
        return []
    running, now_s = board.running(), time.time()
    found = ((flight, limit_s, running.get(flight.number)) for flight, limit_s in late.items())
    return [(flight, at[0]) for flight, limit_s, at in found if at is not None and now_s - at[1] > limit_s]


def straggler_elsewhere(busy: Iterable[tuple[Actor, Flight]], pace: Pace, *, node_id: str) -> Flight | None:
    """Return a flight with one copy that has been running for too long in an actor on another node than `node_id`."""
    for actor, flight in busy:
        limit_s = pace.limit_s(flight.label.work)
        is_alone = len(flight.calls) == 1 and actor.node_id != node_id
        if is_alone and limit_s is not None and time.monotonic() - flight.sent_s > limit_s:
            return flight
    return None


def answer_of(ray: Any, call: Any) -> Answer:
    """Return what became of a call.

    Raises:
        Exception: what the function itself raised.
        UserError: the runtime environment of a Ray job cannot be set up.
        ConnectionError: the Ray instance has ended.
    """
    try:
        refusal, result, run_s = ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raise_cause(error)
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise UserError(
            f"a node cannot set up the runtime environment of the job: {on_one_line(str(error))}",
            hint="correct the runtime environment given to `ray job submit`",
        ) from None
    except ray.exceptions.LocalRayletDiedError as error:
        raise ConnectionError(first_line(error)) from None
    except ray.exceptions.RayError as error:
        return Answer(error=error)
    return Answer(refusal=refusal, result=result, run_s=run_s)


def raise_cause(error: Any) -> NoReturn:
    """Raise the exception that the function itself raised, with its traceback."""
    cause = error.cause if isinstance(error.cause, Exception) else RuntimeError(first_line(error))
    cause.add_note(str(error))
    raise cause from None
