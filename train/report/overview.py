"""`train overview`: several runs on one page, each with its metrics, its loss and a few pictures."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.report.results import page_of, publish_page
from train.run.folder import open_run

_NUM_STRIPS = 3


def write_overview(runs: Sequence[Path], out: Path) -> None:
    """Write an overview of runs that links to their pages.

    Raises:
        UserError: one of them is not a run.
    """
    cards = []
    for path in runs:
        run = open_run(path)
        page = page_of(run)
        shown, shown_data = _shown(page)
        link = _relative(run.page, out.parent)
        cards.append({**page, "shown": shown, "shown_data": shown_data, "link": link})
    publish_page("overview.html.j2", out, cards=cards)


def _shown(page: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Pictures with captions of the first result that has some, and its data if it is not the run's own."""
    for result in page["results"]:
        if result["strips"]:
            return result["strips"][:_NUM_STRIPS], result["other_data"]
    return [], ""


def _relative(page: Path, folder: Path) -> str:
    """A relative link, which stays valid if both pages are moved together."""
    return Path(os.path.relpath(page.resolve(), folder.resolve())).as_posix()
