"""`train overview`: several runs on one page, compared by their metrics, settings and curves."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.shards.pages.templates import page_title, require_page_path
from clipmill.train.evaluation.tables import Cell, Table
from clipmill.train.report.charts import chart_values
from clipmill.train.report.curves import overlaid
from clipmill.train.report.repeats import OF_THE_PLACE, repeats, speed_ups
from clipmill.train.report.results import page_of, publish_page
from clipmill.train.run.folder import RunFolder, open_run

_NUM_STRIPS = 3


@dataclass(frozen=True)
class Compared:
    """A table of the comparison: one evaluation of the runs that have it.

    Attributes:
        title: the evaluation.
        which: its row and split.
        columns: names of the metrics.
        reference: what they are compared with.
        cells: of each column, by run.
        cautions: what limits the metrics of a run.
    """

    title: str
    which: str
    columns: tuple[str, ...]
    reference: str
    cells: dict[int, Sequence[Cell]]
    cautions: dict[int, str]


def write_overview(runs: Sequence[Path], out: Path, *, links: Sequence[Path] = ()) -> list[Path]:
    """Write an overview of runs that links to their pages.

    Args:
        runs: run folders, and what else `runs/*` names, such as embeddings and pages: it is left out.
        links: further pages to link to.

    Returns:
        What was left out.

    Raises:
        UserError: there is no run among them, one of them does not exist, a link is not a page, or `out` cannot be
            written or is a file of another kind.
    """
    require_page_path(out, flag="--out")
    left_out = [path for path in runs if path.exists() and not RunFolder(path).settings.is_file()]
    cards = []
    for path in runs if len(left_out) == len(runs) else [path for path in runs if path not in left_out]:
        run = open_run(path)
        page = page_of(run)
        shown, shown_data = _shown_examples(page)
        link = _relative_link(run.page, out.parent)
        cards.append({**page, "shown": shown, "shown_data": shown_data, "link": link})
    names = _distinct_names([card["name"] for card in cards])
    groups = repeats(cards, names)
    curves = overlaid(
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
    return left_out


def _distinct_names(names: Sequence[str]) -> list[str]:
    """Names that differ: a repeated one is followed by its number."""
    return [
        f"{name} ({names[: at + 1].count(name)})" if names.count(name) > 1 else name for at, name in enumerate(names)
    ]


def _metrics(cards: Sequence[Mapping[str, Any]]) -> list[Compared]:
    """The first row of each evaluation of the runs as trained, on their own data and on others; a table for each."""
    found: dict[tuple[str, str, tuple[str, ...]], Compared] = {}
    for at, card in enumerate(cards):
        for result in card["results"]:
            table = result["table"]
            if result["overridden"]:
                continue
            row = table.rows[table.headline]
            which = row.label if result["split"] in row.label.split() else f"{row.label} ({result['split']})"
            which += f", data: {data}" if (data := result["other_data"]) else ""
            empty = Compared(table.title, which, table.columns, table.reference, {}, {})
            compared = found.setdefault((table.title, which, table.columns), empty)
            compared.cells[at], compared.cautions[at] = _with_baseline(table), "; ".join(table.cautions)
    return list(found.values())


def _with_baseline(table: Table) -> Sequence[Cell]:
    """The cells of the row that represents a table, each with that of its trivial model."""
    cells = table.rows[table.headline].cells
    other = table.baseline
    if other is None:
        return cells
    return [
        replace(cell, baseline=f"{other.label} {its.text}" if its.text != "-" else "")
        for cell, its in zip(cells, other.cells, strict=True)
    ]


def _differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Settings that differ between the runs, by name; a run whose task has no such setting has a dash."""
    names = dict.fromkeys(name for one in settings for name in one if name.partition(".")[0] not in OF_THE_PLACE)
    values = {name: [_text(one, name) for one in settings] for name in names}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}


def _text(settings: Mapping[str, Any], name: str) -> str:
    return "-" if name not in settings else str(settings[name])


def _title(page: Path) -> str:
    title = page_title(page) if page.is_file() else None
    if title is None:
        raise UserError(
            f"{page} is not a page of clipmill (--link)",
            hint="write it first, with train search --page",
            flags=("--link",),
        )
    return title


def _shown_examples(page: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Pictures with captions of the first result that has some, and its data if it is not the run's own."""
    for result in page["results"]:
        if result["strips"]:
            return result["strips"][:_NUM_STRIPS], result["other_data"]
    return [], ""


def _relative_link(page: Path, folder: Path) -> str:
    """A relative link, which stays valid if both pages are moved together."""
    return Path(os.path.relpath(page.resolve(), folder.resolve())).as_posix()
