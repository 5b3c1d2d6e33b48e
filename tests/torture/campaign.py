"""Campaign runner: runs cases, two at a time, until all are done or the time is up, and collects the outcomes."""

import math
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from tests.torture.cases import Broken, Case, taken_in_turns
from tests.torture.workspace import Workspace

NUM_AT_ONCE = 2
# Map from a subject to its cases, in the order of execution. The cases are drawn only when the subject's turn comes.
Subjects = dict[str, Callable[[], Iterator[Case]]]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case; `reason` is None if the case passed."""

    seed: int
    case: Case
    reason: str | None
    seconds: float


@dataclass
class Result:
    """Outcomes of a campaign."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_left: int = 0

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.reason is not None]


def run_campaign(
    parts: dict[str, Subjects],
    workspace: Workspace,
    *,
    seed: int,
    seconds: float = math.inf,
    only: str | None = None,
    keeps: bool = False,
    num_cases: Mapping[str, int] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Run one case of each part and subject in turn.

    Args:
        seed: Seed from which the cases are drawn.
        seconds: Time after which no more cases are started.
        only: Name of the case to run, or a common prefix of several names.
        keeps: True to keep the folders of failed cases.
        num_cases: Maximum number of cases per part; parts that are not listed run all of their cases.
        say: Callback for the progress lines.
    """
    deadline_s = time.monotonic() + seconds
    result, lock = Result(), threading.Lock()
    lists, broken = _list_cases(parts, seed=seed, only=only)
    for outcome in broken:
        say(_line(outcome, 0, 0))
    result.outcomes.extend(broken)
    in_parts: list[Iterator[Case]] = [
        islice(taken_in_turns([iter(cases) for cases in subjects]), (num_cases or {}).get(part))
        for part, subjects in zip(parts, lists, strict=True)
    ]
    waiting = list(taken_in_turns(in_parts))
    position = iter(range(len(waiting)))

    def work() -> None:
        while time.monotonic() < deadline_s:
            with lock:
                number = next(position, None)
            if number is None:
                return
            folder = workspace.folder / "cases" / f"{seed}-{number:05d}"
            outcome = Outcome(seed, waiting[number], *_try(waiting[number], folder, keeps=keeps))
            with lock:
                result.outcomes.append(outcome)
                say(_line(outcome, len(result.outcomes), len(waiting)))

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for done in [pool.submit(work) for _ in range(NUM_AT_ONCE)]:
            done.result()
    result.num_left = len(waiting) + len(broken) - len(result.outcomes)
    return result


def _list_cases(
    parts: dict[str, Subjects], *, seed: int, only: str | None
) -> tuple[list[list[list[Case]]], list[Outcome]]:
    """List the cases of each part and subject.

    A subject that fails even without faults is returned as a failure.
    """
    broken: list[Outcome] = []

    def cases_of(part: str, subject: str, draw: Callable[[], Iterator[Case]]) -> list[Case]:
        begin_s = time.monotonic()
        try:
            cases = list(draw())
            if only is None:
                return cases
            return [case for case in cases if case.name == only] or [
                case_ for case_ in cases if case_.name.startswith(only)
            ]
        except Exception as error:  # noqa: BLE001 - of one subject; the others go on
            case = Case(f"{part}/{subject}/undisturbed", "none", lambda _: None)
            broken.append(Outcome(seed, case, _reason(error), time.monotonic() - begin_s))
            return []

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        waiting = [
            [
                pool.submit(partial(cases_of, part, subject, draw))
                for subject, draw in subjects.items()
                if only is None or f"{part}/{subject}/".startswith(only) or only.startswith(f"{part}/{subject}/")
            ]
            for part, subjects in parts.items()
        ]
        return [[cases.result() for cases in subjects] for subjects in waiting], broken


def _try(case: Case, folder: Path, *, keeps: bool) -> tuple[str | None, float]:
    """Run a case; return the reason of its failure (None if it passed) and its duration in seconds."""
    folder.mkdir(parents=True)
    begin_s, reason = time.monotonic(), None
    try:
        case.run(folder)
    except Exception as error:  # noqa: BLE001 - a case that cannot be tried has failed too
        reason = _reason(error)
    if reason is None or not keeps:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        reason += f"\nkept in {folder}"
    return reason, time.monotonic() - begin_s


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Broken) else "".join(traceback.format_exception(error))


def _line(outcome: Outcome, number: int, of: int) -> str:
    state = "held" if outcome.reason is None else "FAILED"
    return f"{number}/{of}  {state}  {outcome.case.name}  {outcome.seconds:.1f} s"
