"""`train overview`: comparison of several runs on one page, by metrics, settings and curves.

For runs that differ only in the seed, the page shows the mean and the standard deviation of each metric; for runs that
differ in the number of processes, it shows the speed-up.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, percent
from clipmill.manifests.storage.mirrors import mirror_of, show_urls
from clipmill.shards.pages.templates import page_title, require_page_path
from clipmill.train.config.shards import local_folder
from clipmill.train.evaluation.tables import Cell, Table
from clipmill.train.report.results import chart_values, overlay_curves, page_of, publish_page
from clipmill.train.run.folder import RunFolder, open_run

# Settings for folders and for the machine. They do not affect the model.
MACHINE_SETTINGS = frozenset({"out", "cache", "cache_size", "checkpoint_every", "keep_checkpoints", "track", "workers"})
# Other settings that may change with the number of processes.
_SCALE_SETTINGS = frozenset({"seed", "batch", "microbatch", "lr", "parallel"})


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in the seed.

    Attributes:
        runs: Indices of the runs, at least two, with different seeds.
        label: Text with the number of seeds and the names of the runs.
    """

    runs: tuple[int, ...]
    label: str

    def mean(self, cells: Mapping[int, Sequence[Cell]]) -> list[str] | None:
        """Return the mean and standard deviation of each column; None if a run has no cells."""
        if any(run not in cells for run in self.runs):
            return None
        return [mean_text([cells[run][column] for run in self.runs]) for column in range(len(cells[self.runs[0]]))]

    def training_means(self, cards: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """Return mean and standard deviation of the last loss and of samples per second; None if a run has no steps."""
        summaries = [cards[run]["summary"] for run in self.runs]
        if any("last_loss" not in summary for summary in summaries):
            return None
        return [_number_text([summary[name] for summary in summaries]) for name in ("last_loss", "samples_per_s")]


def seed_groups(cards: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[SeedGroup]:
    """Return the groups of runs that differ only in the seed, ordered by the first run of each group."""
    groups = []
    for group in _group_runs(cards, ignored=frozenset({"seed"})):
        run_by_seed: dict[str, int] = {}
        for run in group:
            run_by_seed.setdefault(str(cards[run]["settings"].get("seed")), run)
        if len(run_by_seed) > 1:
            runs = tuple(run_by_seed.values())
            label = f"mean (standard deviation) of {len(runs)} seeds: {', '.join(names[run] for run in runs)}"
            groups.append(SeedGroup(runs, label))
    return groups


def speed_ups(cards: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the speed-up of each run over the comparable run with the fewest processes, keyed by the run's index.

    Comparable runs have the same settings, except batch size, learning rate, strategy and seed: the batch may grow with
    the number of processes, or be divided among them.
    """
    texts = {}
    for group in _group_runs(cards, ignored=_SCALE_SETTINGS):
        counts = {run: num_processes(cards[run]["facts"]) for run in group if "samples_per_s" in cards[run]["summary"]}
        if len(set(counts.values())) < 2:
            continue
        reference_run = min(counts, key=counts.__getitem__)
        speed = cards[reference_run]["summary"]["samples_per_s"]
        for run, count in counts.items():
            factor = cards[run]["summary"]["samples_per_s"] / speed
            texts[run] = f"{factor:.2f} x ({count_noun(count, 'process', 'processes')} against {counts[reference_run]})"
    return texts


def num_processes(facts: Mapping[str, Any]) -> int:
    """Return the number of processes of a run; 1 if run.json does not record the number."""
    count_text = str(facts.get("processes", "1")).partition(",")[0]
    return int(count_text) if count_text.isdecimal() else 1


def mean_text(cells: Sequence[Cell]) -> str:
    """Return the mean and standard deviation (n - 1) of a metric as text; a dash if a value is not a number."""
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


def _group_runs(cards: Sequence[Mapping[str, Any]], *, ignored: frozenset[str]) -> list[list[int]]:
    """Group the runs of each task by their settings, except MACHINE_SETTINGS and the `ignored` settings."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for run, card in enumerate(cards):
        settings = sorted(
            (name, str(value))
            for name, value in card["settings"].items()
            if not {name, name.partition(".")[0]} & (MACHINE_SETTINGS | ignored)
        )
        groups.setdefault((card["facts"].get("task"), *settings), []).append(run)
    return list(groups.values())


_NUM_STRIPS = 3


@dataclass(frozen=True)
class ComparisonTable:
    """Results of one evaluation, for all runs that have a result.

    Attributes:
        title: Name of the evaluation.
        subtitle: Row, split and data of the evaluation.
        columns: Names of the metrics.
        reference: Name of the reference value for each metric.
        cells: Cells of all columns, keyed by the index of the run.
        cautions: Limitations of the metrics, keyed by the index of the run.
    """

    title: str
    subtitle: str
    columns: tuple[str, ...]
    reference: str
    cells: dict[int, Sequence[Cell]]
    cautions: dict[int, str]


def write_overview(runs: Sequence[str | Path], out: Path, *, links: Sequence[Path] = ()) -> list[Path]:
    """Write a page that compares runs and links to their pages.

    Args:
        runs: Paths or URLs of run folders. Other paths, such as embeddings that match `runs/*`, are omitted.
        links: Additional pages to link to.

    Returns:
        The omitted paths.

    Raises:
        UserError: There is no run among the paths, a run does not exist, a link is not a page, or `out` cannot be
            written or is not a page.
    """
    require_page_path(out, flag="--out")
    paths = [local_folder(run) for run in runs]
    omitted_paths = [path for path in paths if path.exists() and not RunFolder(path).settings.is_file()]
    cards = []
    for path in paths if len(omitted_paths) == len(paths) else [path for path in paths if path not in omitted_paths]:
        run = open_run(path)
        page = page_of(run)
        # Show the first result that has captioned frames, and its data if these are not the run's own data.
        captioned_result = next(
            (result for result in page["results"] if result["strips"]), {"strips": [], "other_data": ""}
        )
        strips = {"shown": captioned_result["strips"][:_NUM_STRIPS], "shown_data": captioned_result["other_data"]}
        cards.append({**page, **strips, "link": _link(run, out.parent)})
    names = [card["name"] for card in cards]
    # Number the runs that have the same name.
    names = [
        f"{name} ({names[: run + 1].count(name)})" if names.count(name) > 1 else name for run, name in enumerate(names)
    ]
    groups = seed_groups(cards, names)
    curves = overlay_curves(
        {name: [*card["evaluation_curves"], *card["curves"]] for name, card in zip(names, cards, strict=True)}
    )
    page_links = [{"title": _title(path), "address": _relative_link(path, out.parent)} for path in links]
    publish_page(
        "overview.html.j2",
        out,
        cards=cards,
        names=names,
        seed_groups=groups,
        speed_ups=speed_ups(cards),
        links=page_links,
        comparisons=_compare_results(cards),
        differing=_setting_differences([card["settings"] for card in cards]),
        curves=curves,
        charts=chart_values(curves),
    )
    return omitted_paths


def _compare_results(cards: Sequence[Mapping[str, Any]]) -> list[ComparisonTable]:
    """Return a table of headline rows for each evaluation, split and data; results with overrides are omitted."""
    comparisons: dict[tuple[str, str, tuple[str, ...]], ComparisonTable] = {}
    for run, card in enumerate(cards):
        for result in card["results"]:
            table = result["table"]
            if result["overridden"]:
                continue
            row = table.rows[table.headline]
            subtitle = row.label if result["split"] in row.label.split() else f"{row.label} ({result['split']})"
            subtitle += f", data: {data}" if (data := result["other_data"]) else ""
            new_comparison = ComparisonTable(table.title, subtitle, table.columns, table.reference, {}, {})
            comparison = comparisons.setdefault((table.title, subtitle, table.columns), new_comparison)
            comparison.cells[run], comparison.cautions[run] = _headline_cells(table), "; ".join(table.cautions)
    return list(comparisons.values())


def _headline_cells(table: Table) -> Sequence[Cell]:
    """Return the cells of a table's headline row, each with the value of the baseline row."""
    cells = table.rows[table.headline].cells
    row = table.baseline
    if row is None:
        return cells
    return [
        replace(cell, baseline=f"{row.label} {baseline.text}" if baseline.text != "-" else "")
        for cell, baseline in zip(cells, row.cells, strict=True)
    ]


def _setting_differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, as {name: value of each run}; a dash stands for a missing value."""
    names = dict.fromkeys(name for run in settings for name in run if name.partition(".")[0] not in MACHINE_SETTINGS)
    values = {name: [str(run.get(name, "-")) for run in settings] for name in names}
    return {name: texts for name, texts in values.items() if len(set(texts)) > 1}


def _title(page: Path) -> str:
    title = page_title(page) if page.is_file() else None
    if title is None:
        raise UserError(
            f"{page} is not a page written by clipmill (--link)",
            hint="use a page that train search --page has written",
            flags=("--link",),
        )
    return title


def _link(run: RunFolder, folder: Path) -> str:
    """Return the link to the page of a run: a relative path, or a URL for a run in a bucket."""
    return _relative_link(run.page, folder) if mirror_of(run.path) is None else show_urls(str(run.page))


def _relative_link(page: Path, folder: Path) -> str:
    """Return a relative link, which stays valid if both pages are moved together."""
    return Path(os.path.relpath(page.resolve(), folder.resolve())).as_posix()
