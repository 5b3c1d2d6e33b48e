"""Runs that repeat each other: mean and standard deviation over seeds, and the speed-up by more processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from clipmill.manifests.formatting import count_noun, percent
from clipmill.train.evaluation.tables import Cell

# Settings of the place rather than of the model.
OF_THE_PLACE = frozenset({"out", "cache", "cache_size", "checkpoint_every", "keep_checkpoints", "track", "workers"})
# What changes with the number of processes, besides.
_OF_SCALE = frozenset({"seed", "batch", "microbatch", "lr", "parallel"})


@dataclass(frozen=True)
class Repeats:
    """Runs that differ in the seed alone.

    Attributes:
        runs: their indices, at least two; one for each seed.
        label: which they are.
    """

    runs: tuple[int, ...]
    label: str

    def mean(self, cells: Mapping[int, Sequence[Cell]]) -> list[str] | None:
        """Mean and standard deviation of each column; None unless all of the runs have it."""
        if any(run not in cells for run in self.runs):
            return None
        return [mean_text([cells[run][column] for run in self.runs]) for column in range(len(cells[self.runs[0]]))]

    def training(self, cards: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """The same of the last losses and of samples per second; None if one of the runs has no steps."""
        summaries = [cards[run]["summary"] for run in self.runs]
        if any("last_loss" not in one for one in summaries):
            return None
        return [_number_text([one[name] for one in summaries]) for name in ("last_loss", "samples_per_s")]


def repeats(cards: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Repeats]:
    """The groups of runs that differ in the seed alone, in the order of their first runs."""
    found = []
    for group in _groups(cards, besides=frozenset({"seed"})):
        by_seed: dict[str, int] = {}
        for run in group:
            by_seed.setdefault(str(cards[run]["settings"].get("seed")), run)
        if len(by_seed) > 1:
            runs = tuple(by_seed.values())
            label = f"mean (standard deviation) of {len(runs)} seeds: {', '.join(names[run] for run in runs)}"
            found.append(Repeats(runs, label))
    return found


def speed_ups(cards: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Samples per second against the run with the fewest processes, of runs that differ in their number, by run.

    Batch size, learning rate and strategy may differ with it: a batch may grow with the processes, or be shared by
    them.
    """
    found = {}
    for group in _groups(cards, besides=_OF_SCALE):
        timed = {run: processes(cards[run]["facts"]) for run in group if "samples_per_s" in cards[run]["summary"]}
        if len(set(timed.values())) < 2:
            continue
        fewest = min(timed, key=timed.__getitem__)
        speed = cards[fewest]["summary"]["samples_per_s"]
        for run, number in timed.items():
            factor = cards[run]["summary"]["samples_per_s"] / speed
            found[run] = f"{factor:.2f} x ({count_noun(number, 'process', 'processes')} against {timed[fewest]})"
    return found


def processes(facts: Mapping[str, Any]) -> int:
    """The number of processes of a run, 1 where run.json does not say it."""
    first = str(facts.get("processes", "1")).partition(",")[0]
    return int(first) if first.isdecimal() else 1


def mean_text(cells: Sequence[Cell]) -> str:
    """Mean and standard deviation (n - 1) of one metric, as text; a dash if one of its values is not a number."""
    shares = [cell.share for cell in cells if cell.share is not None]
    if len(shares) == len(cells):
        return f"{percent(fmean(shares))} ({100 * stdev(shares):.2f})"
    try:
        values = [float(cell.text) for cell in cells]
    except ValueError:
        return "-"
    return _number_text(values)


def _number_text(values: Sequence[float]) -> str:
    return f"{fmean(values):.4g} ({stdev(values):.2g})"


def _groups(cards: Sequence[Mapping[str, Any]], *, besides: frozenset[str]) -> list[list[int]]:
    """Indices of runs of the same task whose settings, or groups of settings, are equal besides those of the place."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for run, card in enumerate(cards):
        settings = sorted(
            (name, str(value))
            for name, value in card["settings"].items()
            if not {name, name.partition(".")[0]} & (OF_THE_PLACE | besides)
        )
        groups.setdefault((card["facts"].get("task"), *settings), []).append(run)
    return list(groups.values())
