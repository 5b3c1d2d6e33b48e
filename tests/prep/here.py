"""Engine without workers: its tasks run in the test process."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.data_folder import lock_for_writing
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Summary
from clipmill.prep.core.work import work_of
from clipmill.prep.engines import Check, Engine, Outcome, R, T


class Here:
    """Engine that runs tasks in this process, one after another."""

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, check: Check | None = None, **named: object
    ) -> Iterator[Outcome[T, R] | None]:
        assert check is None or check() is None
        for task in tasks:
            yield Outcome(task, function(task))


@dataclass(frozen=True, kw_only=True)
class HereRequest(Request):
    """Request whose tasks run in the test process."""

    engine_here: Engine = field(default_factory=Here)

    def open_engine(self, *, memory_gb: float, gpus_per_worker: float = 0.0) -> Engine:
        return self.engine_here


def make_here(
    column: ColumnSpec,
    data: Path,
    *,
    engine: Engine | None = None,
    retry_codes: frozenset[str] = frozenset(),
    **settings: Any,
) -> Summary:
    """Plan and make a column of `data`, as the command of the column does."""
    work, given = work_of(column), column.settings(**settings)
    request = HereRequest(data=data, engine_here=engine or Here(), retry_codes=retry_codes)
    with lock_for_writing(data, column=column.name):
        return work.run(work.plan(data, given, request), given, request, None)
