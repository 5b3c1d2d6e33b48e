"""An engine without workers: the tasks run in the process of the test."""

from collections.abc import Callable, Iterable, Iterator

from clipmill.prep.engines import Check, Outcome, R, T


class Here:
    """Runs tasks in this process, one after another."""

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, check: Check | None = None, **named: object
    ) -> Iterator[Outcome[T, R] | None]:
        assert check is None or check() is None
        for task in tasks:
            yield Outcome(task, function(task))
