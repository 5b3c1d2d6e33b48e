"""Running a function in Ray actors: workers that take one task after another and keep what the function has loaded.

A worker is checked when it starts, wherever that is, and gets its first task once it has passed. When no task is left
for it, it ends, and what it has reserved is free.

Ray restarts no actor and repeats no call here, because its counts cannot tell who is to blame: a task may be what kills
its workers, but not what takes a node away. So the engine counts both for each task, and a lost worker is replaced by a
new one.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.formatting import on_one_line
from clipmill.prep.engines import TICK_S, Check, Outcome, Refused
from clipmill.prep.engines.ray_nodes import Nodes
from clipmill.prep.engines.ray_worker import packed, worker_class

_TASKS_PER_ACTOR = 2  # one that it works on, and one that it gets without asking the command for it
_MAX_FAILED_STARTS = 3  # per actor, one after another
_MAX_LOST_NODES = 10  # for one task, which may be what takes its nodes down
_MAX_FAULTS = 2  # tasks in a row that a node fails and another one does, before it gets no more of them

Events = Iterator[Outcome[Any, Any] | Refused | None]


@dataclass(eq=False)
class _Attempt:
    """A task, and how often its worker was lost.

    Attributes:
        name: name of the task where Ray lists it.
        num_deaths: how often its worker died; the loss of a node counts in `num_lost_nodes` instead.
        failed_on: ids of the nodes whose machine has failed it, with the reasons.
    """

    task: Any
    name: str
    num_deaths: int = 0
    num_lost_nodes: int = 0
    failed_on: dict[str, str] = field(default_factory=dict)

    def is_retried(self, task_retries: int, *, is_node: bool) -> bool:
        """Count a loss of its worker, or of its node, and return True if the task is to be tried again."""
        if is_node:
            self.num_lost_nodes += 1
        else:
            self.num_deaths += 1
        return self.num_deaths <= task_retries and self.num_lost_nodes <= _MAX_LOST_NODES


@dataclass(frozen=True)
class _Actor:
    """An actor that has started, and its node."""

    handle: Any
    node_id: str


class ActorRun:
    """One run of a function in Ray actors.

    Args:
        task_retries: how often a task whose worker died is tried again.
        num_actors: returns the number of actors to have, at least 1.
    """

    def __init__(
        self,
        ray: Any,
        nodes: Nodes,
        function: Callable[[Any], Any],
        check: Check | None,
        *,
        task_retries: int,
        num_actors: Callable[[], int],
    ) -> None:
        self._ray, self._nodes, self._function = ray, nodes, function
        self._task_retries, self._num_actors = task_retries, num_actors
        self._kind = ray.remote(worker_class(ray, check, nodes.need))
        self._waiting = deque[_Attempt]()
        # An actor gets a task only after it has started: its node may have disappeared while other nodes are available.
        self._starting = dict[Any, Any]()
        self._busy = dict[Any, tuple[_Actor, _Attempt]]()
        self._num_failed_starts = 0
        self._num_faults = Counter[str]()  # of a node, since its last task without one

    def outcomes(self, given: Iterator[tuple[Any, str]]) -> Events:
        """Run the tasks, each given with its name; see `clipmill.prep.engines.Engine.run`."""
        while True:
            num_actors = self._num_actors()
            while len(self._waiting) + len(self._busy) < _TASKS_PER_ACTOR * num_actors:
                new = next(given, None)
                if new is None:
                    break
                self._waiting.append(_Attempt(*new))
            if not self._waiting and not self._busy:
                return
            # Those that the nodes have no room for make an autoscaler start others.
            while len(self._starting) < min(len(self._waiting), num_actors - len(self._busy)):
                avoided = set.intersection(*(set(attempt.failed_on) for attempt in self._waiting))
                options = self._nodes.options(avoided=avoided)
                handle = self._kind.options(max_restarts=0, max_task_retries=0, **options).remote()
                self._starting[handle.arrive.remote()] = handle
            # With neither room nor a task for it, a worker would start at the end of the run, for nothing.
            while len(self._starting) > max(len(self._waiting), self._nodes.capacity() - len(self._busy)):
                self._ray.kill(self._starting.popitem()[1])
            ready, _ = self._ray.wait([*self._starting, *self._busy], timeout=TICK_S)
            if not ready:
                self._nodes.require_one()
                for attempt in self._waiting:
                    if attempt.failed_on and not self._nodes.has_other(attempt.failed_on):  # the others were lost
                        attempt.failed_on.clear()
                yield None
            for call in ready:
                yield from self._start(call) if call in self._starting else self._end(call)

    def late_refusals(self, *, limit_s: float) -> Events:
        """Yield the refused nodes among those whose workers have not started yet, waiting at most `limit_s` seconds."""
        if not self._starting:
            return
        ready, _ = self._ray.wait([*self._starting], num_returns=len(self._starting), timeout=limit_s)
        for call in ready:
            yield from self._start(call)

    def _start(self, call: Any) -> Events:
        """Take in the start of an actor."""
        handle = self._starting.pop(call)
        error, answer = self._answer(call)
        if error is not None:  # its node was lost, or there is a reason that affects the next one as well
            self._num_failed_starts += 1
            if self._num_failed_starts >= _MAX_FAILED_STARTS * self._num_actors():
                raise error
            return
        self._num_failed_starts = 0
        node_id, reason = answer
        if reason is None:
            self._give(_Actor(handle, node_id))
        else:
            yield from self._nodes.refuse(node_id, reason)

    def _give(self, actor: _Actor) -> None:
        """Give an actor the next task for its node. Without one it ends, because nothing refers to it any more."""
        if self._nodes.is_refused(actor.node_id):
            return
        attempt = next((attempt for attempt in self._waiting if actor.node_id not in attempt.failed_on), None)
        if attempt is not None:
            self._waiting.remove(attempt)
            call = actor.handle.work.options(name=attempt.name).remote(packed(self._ray, self._function, attempt.task))
            self._busy[call] = actor, attempt

    def _end(self, call: Any) -> Events:
        """Take in the end of a task."""
        actor, attempt = self._busy.pop(call)
        error, result = self._answer(call)
        if error is None:
            yield from self._take(result, actor, attempt)
            self._give(actor)
            return
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor.handle)  # Ray may only have lost sight of it
        is_node = not self._nodes.is_alive(actor.node_id)
        if is_node:
            yield from self._nodes.lose(actor.node_id)
        if attempt.is_retried(self._task_retries, is_node=is_node):
            self._waiting.appendleft(attempt)
        else:
            yield Outcome(attempt.task, None, lost=first_line(error))

    def _take(self, result: Any, actor: _Actor, attempt: _Attempt) -> Events:
        """Take in a result; if the machine seems to have failed, let the other nodes try the task.

        A machine is to blame if another one does what it has failed; what fails on all nodes is not their fault.
        """
        fault = getattr(result, "machine_fault", None)
        if fault is not None:
            attempt.failed_on[actor.node_id] = fault
            if self._nodes.has_other(attempt.failed_on):
                self._waiting.appendleft(attempt)
                return
        yield Outcome(attempt.task, result)
        if fault is None:
            self._num_faults[actor.node_id] = 0
            for node_id, reason in attempt.failed_on.items():
                self._num_faults[node_id] += 1
                if self._num_faults[node_id] >= _MAX_FAULTS:
                    yield from self._nodes.refuse(node_id, f"its tasks fail, and succeed on other nodes: {reason}")

    def _answer(self, call: Any) -> tuple[Exception | None, Any]:
        """Return how the worker of a call was lost, or None, and what the call returned.

        Raises:
            Exception: what the function itself raised.
            UserError: the runtime environment of a Ray job cannot be set up.
            ConnectionError: the Ray instance has ended.
        """
        errors = self._ray.exceptions
        try:
            return None, self._ray.get(call)
        except errors.RayTaskError as error:
            _raise_cause(error)
        except errors.RuntimeEnvSetupError as error:
            raise UserError(
                f"a node cannot set up the runtime environment of the job: {on_one_line(str(error))}",
                hint="correct the runtime environment given to `ray job submit`",
            ) from None
        except errors.LocalRayletDiedError as error:
            raise ConnectionError(first_line(error)) from None
        except errors.RayError as error:
            return error, None


def _raise_cause(error: Any) -> NoReturn:
    """Raise the exception that the function itself raised, with its traceback."""
    cause = error.cause if isinstance(error.cause, Exception) else RuntimeError(first_line(error))
    cause.add_note(str(error))
    raise cause from None
