"""Several runs on one page: markup from outside stays text, and links lead to the runs."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from manifests.errors import UserError
from tests.train.test_report import HOSTILE, Tags, hostile_run
from train.report.results import write_overview, write_page


def test_runs_are_linked_and_nothing_from_outside_becomes_markup(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    write_page(run)
    out = tmp_path / "pages" / "index.html"
    out.parent.mkdir()
    write_overview([run.path, run.path], out)
    found = Tags()
    found.feed(out.read_text())
    assert HOSTILE not in out.read_text() and "script" not in found.tags
    links = [one for one in found.loaded if not one.startswith("data:")]
    assert len(links) == 2
    assert all((out.parent / unquote(link)).resolve() == run.page.resolve() for link in links)
    assert out.read_text().count("data:image/jpeg;base64,AA==") == 2  # of the first text found, in each card


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere") as caught:
        write_overview([tmp_path / "nowhere"], tmp_path / "index.html")
    assert caught.value.hint == "name a training command's --out"  # of any of them
