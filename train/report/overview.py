"""`train overview`: comparison of several runs on one page, by metrics, settings and curves.

For runs that differ only in the seed, the page shows mean and standard deviation; for more processes, the speed-up.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, percent
from clipmill.manifests.storage.mirrors import mirror_of, show_addresses
from clipmill.shards.pages.templates import page_title, require_page_path
from clipmill.train.config.shards import local_folder
from clipmill.train.evaluation.tables import Cell, Table
from clipmill.train.report.results import chart_values, overlay_curves, page_of, publish_page
from clipmill.train.run.folder import RunFolder, open_run

# Settings of the machine and of folders, which do not describe the model.
MACHINE_SETTINGS = frozenset({"out", "cache", "cache_size", "checkpoint_every", "keep_checkpoints", "track", "workers"})
# Further settings that may change with the number of processes.
_SCALE_SETTINGS = frozenset({"seed", "batch", "microbatch", "lr", "parallel"})


@dataclass(frozen=True)
class Repeats:
    """Runs that differ only in the seed.

    Attributes:
        runs: Indices of the runs, at least two, with different seeds.
        label: Text with the number of seeds and the names of the runs.
    """

    runs: tuple[int, ...]
    label: str

    def mean(self, cells: Mapping[int, Sequence[Cell]]) -> list[str] | None:
        """Return mean and standard deviation of each column; None if a run has no cells."""
        if any(run not in cells for run in self.runs):
            return None
        return [mean_text([cells[run][column] for run in self.runs]) for column in range(len(cells[self.runs[0]]))]

    def training(self, cards: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """Return mean and deviation of the last losses and of samples per second; None if a run has no steps."""
        summaries = [cards[run]["summary"] for run in self.runs]
        if any("last_loss" not in summary for summary in summaries):
            return None
        return [_number_text([summary[name] for summary in summaries]) for name in ("last_loss", "samples_per_s")]


def repeats(cards: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Repeats]:
    """Return the groups of runs that differ only in the seed, ordered by their first runs."""
    groups = []
    for group in _groups(cards, besides=frozenset({"seed"})):
        by_seed: dict[str, int] = {}
        for run in group:
            by_seed.setdefault(str(cards[run]["settings"].get("seed")), run)
        if len(by_seed) > 1:
            runs = tuple(by_seed.values())
            label = f"mean (standard deviation) of {len(runs)} seeds: {', '.join(names[run] for run in runs)}"
            groups.append(Repeats(runs, label))
    return groups


def speed_ups(cards: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return each run's speed-up over the run with the fewest processes, for runs that differ in this number.

    Batch size, learning rate and strategy may also differ: the batch may grow with the number of processes, or be
    divided among them.
    """
    texts = {}
    for group in _groups(cards, besides=_SCALE_SETTINGS):
        timed = {run: processes(cards[run]["facts"]) for run in group if "samples_per_s" in cards[run]["summary"]}
        if len(set(timed.values())) < 2:
            continue
        fewest = min(timed, key=timed.__getitem__)
        speed = cards[fewest]["summary"]["samples_per_s"]
        for run, number in timed.items():
            factor = cards[run]["summary"]["samples_per_s"] / speed
            texts[run] = f"{factor:.2f} x ({count_noun(number, 'process', 'processes')} against {timed[fewest]})"
    return texts


def processes(facts: Mapping[str, Any]) -> int:
    """Return the number of processes of a run, 1 if run.json does not record it."""
    first = str(facts.get("processes", "1")).partition(",")[0]
    return int(first) if first.isdecimal() else 1


def mean_text(cells: Sequence[Cell]) -> str:
    """Return mean and standard deviation (n - 1) of a metric as text; a dash if a value is not a number."""
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
    """Return groups of runs of the same task with equal settings, except MACHINE_SETTINGS and `besides`."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for run, card in enumerate(cards):
        settings = sorted(
            (name, str(value))
            for name, value in card["settings"].items()
            if not {name, name.partition(".")[0]} & (MACHINE_SETTINGS | besides)
        )
        groups.setdefault((card["facts"].get("task"), *settings), []).append(run)
    return list(groups.values())


_NUM_STRIPS = 3


@dataclass(frozen=True)
class Compared:
    """Table of the comparison: an evaluation, for all runs that have a result.

    Attributes:
        title: Name of the evaluation.
        which: Row, split and data of the evaluation.
        columns: Names of the metrics.
        reference: Baseline of the metrics.
        cells: Cells of the columns by run.
        cautions: Limitations of the metrics by run.
    """

    title: str
    which: str
    columns: tuple[str, ...]
    reference: str
    cells: dict[int, Sequence[Cell]]
    cautions: dict[int, str]


def write_overview(runs: Sequence[str | Path], out: Path, *, links: Sequence[Path] = ()) -> list[Path]:
    """Write an overview of runs that links to their pages.

    Args:
        runs: Run folders, or addresses. Other paths, such as embeddings and pages that match `runs/*`, are omitted.
        links: Additional pages to link to.

    Returns:
        The paths that were omitted.

    Raises:
        UserError: There is no run among the paths, a run does not exist, a link is not a page, or `out` cannot be
            written or is not a page.
    """
    require_page_path(out, flag="--out")
    paths = [local_folder(run) for run in runs]
    omitted = [path for path in paths if path.exists() and not RunFolder(path).settings.is_file()]
    cards = []
    for path in paths if len(omitted) == len(paths) else [path for path in paths if path not in omitted]:
        run = open_run(path)
        page = page_of(run)
        # The first result with captioned frames; its data are shown if they are not the run's data.
        pictured = next((result for result in page["results"] if result["strips"]), {"strips": [], "other_data": ""})
        shown = {"shown": pictured["strips"][:_NUM_STRIPS], "shown_data": pictured["other_data"]}
        cards.append({**page, **shown, "link": _link(run, out.parent)})
    names = [card["name"] for card in cards]
    # A repeated name gets its number as a suffix.
    names = [
        f"{name} ({names[: at + 1].count(name)})" if names.count(name) > 1 else name for at, name in enumerate(names)
    ]
    groups = repeats(cards, names)
    curves = overlay_curves(
        {name: [*card["evaluation_curves"], *card["curves"]] for name, card in zip(names, cards, strict=True)}
    )
    shown_links = [{"title": _title(path), "address": _relative_link(path, out.parent)} for path in links]
    publish_page(
        "overview.html.j2",
        out,
        cards=cards,
        names=names,
        repeats=groups,
        speed_ups=speed_ups(cards),
        links=shown_links,
        metrics=_metrics(cards),
        differing=_differing_settings([card["settings"] for card in cards]),
        curves=curves,
        charts=chart_values(curves),
    )
    return omitted


def _metrics(cards: Sequence[Mapping[str, Any]]) -> list[Compared]:
    """Return a table for each evaluation of the trained runs: its first row, on the run's data and on other data."""
    tables: dict[tuple[str, str, tuple[str, ...]], Compared] = {}
    for run, card in enumerate(cards):
        for result in card["results"]:
            table = result["table"]
            if result["overridden"]:
                continue
            row = table.rows[table.headline]
            which = row.label if result["split"] in row.label.split() else f"{row.label} ({result['split']})"
            which += f", data: {data}" if (data := result["other_data"]) else ""
            empty = Compared(table.title, which, table.columns, table.reference, {}, {})
            compared = tables.setdefault((table.title, which, table.columns), empty)
            compared.cells[run], compared.cautions[run] = _headline_cells(table), "; ".join(table.cautions)
    return list(tables.values())


def _headline_cells(table: Table) -> Sequence[Cell]:
    """Return the cells of a table's headline row, each with the value of the trivial model."""
    cells = table.rows[table.headline].cells
    row = table.baseline
    if row is None:
        return cells
    return [
        replace(cell, baseline=f"{row.label} {baseline.text}" if baseline.text != "-" else "")
        for cell, baseline in zip(cells, row.cells, strict=True)
    ]


def _differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, by name; a dash if a run has no such setting."""
    names = dict.fromkeys(name for run in settings for name in run if name.partition(".")[0] not in MACHINE_SETTINGS)
    values = {name: [str(run.get(name, "-")) for run in settings] for name in names}
    return {name: texts for name, texts in values.items() if len(set(texts)) > 1}


def _title(page: Path) -> str:
    title = page_title(page) if page.is_file() else None
    if title is None:
        raise UserError(
            f"{page} is not a page written by clipmill (--link)",
            hint="write it first with train search --page",
            flags=("--link",),
        )
    return title


def _link(run: RunFolder, folder: Path) -> str:
    """Return the link to the page of a run: relative, or its address."""
    return _relative_link(run.page, folder) if mirror_of(run.path) is None else show_addresses(str(run.page))


def _relative_link(page: Path, folder: Path) -> str:
    """Return a relative link, which stays valid if both pages are moved together."""
    return Path(os.path.relpath(page.resolve(), folder.resolve())).as_posix()
