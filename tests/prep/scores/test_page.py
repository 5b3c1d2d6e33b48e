"""Tests of `prep inspect --column scores --html`: distributions, images, and the chunks that an expression keeps."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clipmill.prep.scores.page import landmarks
from clipmill.shards.pages.figures import evenly_spaced_items, histogram
from clipmill.shards.reader import Variant
from tests.prep.running import Ran

Prep = Callable[..., Ran]


def page_of(prep: Prep, data: Path, path: Path, *arguments: object, message: str = "15 chunks") -> str:
    ran = prep("inspect", "--column", "scores", "--html", path, "--data", data, *arguments)
    assert ran.stdout == f"{path}: {message}\n"
    return path.read_text()


def test_the_page_shows_every_score_with_pictures_and_the_cuts(prep: Prep, clips: Path, tmp_path: Path) -> None:
    page = page_of(prep, clips, tmp_path / "page.html")
    names = ("motion", "camera_motion", "object_motion", "sharpness", "brightness", "black", "frozen", "letterbox")
    for name in (*names, "cuts", "speech", "cut_times_s"):
        section = page.split(f'<section id="{name}">')[1].split("</section>")[0]
        assert section.count("<svg") >= 1 and section.count('src="data:image/jpeg;base64,') >= 2, name
    assert "3 cuts in 4.0 s: at 0.23, 1.67, 3.23 s" in page
    assert "15 chunks of 13 videos" in page and "1 unknown" in page
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page
    text = re.sub(r"base64,[^\"]*", "", page)
    assert not re.search(r"<script|http://|https://|\bnan\b", text)


def test_the_page_shows_what_an_expression_keeps_and_drops(prep: Prep, clips: Path, tmp_path: Path) -> None:
    where = ("--where", "cuts == 0 and black < 0.1 and duration_s > 1")
    page = page_of(prep, clips, tmp_path / "page.html", *where, message="--where keeps 6 of 15 chunks")
    assert "cuts == 0 and black &lt; 0.1 and duration_s &gt; 1" in page
    assert "keeps 6 of 15 chunks (40.0 %), and drops 9" in page
    selected = page.split("<h2>Selection</h2>")[1].split("</section>")[0]
    kept, dropped = selected.split('<h3 class="dropped">')
    assert (kept.count("<article>"), dropped.count("<article>")) == (6, 9)
    assert "shots_000000000" in dropped and "grey_000000000" in kept
    nothing = "--where keeps 0 of 15 chunks; the distributions on the page show which values occur"
    none = page_of(prep, clips, tmp_path / "none.html", "--where", "motion > 1000", message=nothing)
    assert "keeps 0 of 15 chunks (0.0 %), and drops 15" in none


def test_the_page_of_chunks_has_their_scores_and_the_distribution_of_motion(
    prep: Prep, clips: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chunks.html"
    ran = prep("inspect", "--html", path, "--where", "motion > 0.01", "--data", clips, "--json")
    page = path.read_text()
    num_chunks = ran.summary["num_chunks"]
    assert 0 < num_chunks < 15 and page.count("<article") == page.count(" data-motion=") == num_chunks
    assert f"Motion: histogram of {num_chunks} values" in page and "<dt>sharpness</dt>" in page


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--where", "speed > 1", "--html", "PAGE"), "there is no name speed"),
        (("--where", "words > 1", "--html", "PAGE"), "the page shows chunks"),
        (("--where", "motion > 1"), "--where has no effect without a page"),
        (("--chunks", "5", "--html", "PAGE"), "--chunks has no effect for the column scores"),
        (("--chunks", "5"), "--chunks has no effect without a page"),
        (("--html", "missing/PAGE"), "there is no folder"),
    ],
)
def test_requests_that_make_no_page(
    prep: Prep, clips: Path, tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    given = [str(tmp_path / word) if word.endswith("PAGE") else word for word in arguments]
    column = () if "--column" in arguments else ("--column", "scores")
    assert error in prep("inspect", *column, *given, "--data", clips, status=2).error
    assert not (tmp_path / "PAGE").exists()


def test_a_chunk_that_is_gone_is_named_in_its_place(
    prep: Prep, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipmill.prep.scores.page.is_readable", lambda shard: False)
    page = page_of(prep, clips, tmp_path / "page.html")
    assert "not in the video column, or damaged" in page and "data:image" not in page
    assert Variant.open(clips, column="scores").commits


def test_landmarks_are_chunks_at_the_quartiles() -> None:
    values = np.array([5.0, np.nan, 1.0, 3.0, 2.0, 4.0])
    assert landmarks(values) == [
        *(("lowest", 2), ("1st quartile", 4), ("median", 3), ("3rd quartile", 5), ("highest", 0))
    ]
    assert landmarks(np.array([np.nan])) == [] and landmarks(np.array([7.0])) == [("lowest", 0)]
    assert evenly_spaced_items(range(100), at_most=3) == [0, 50, 99] and evenly_spaced_items([], at_most=3) == []


def test_histograms_hold_all_values_and_end_before_a_long_tail() -> None:
    values = np.concatenate([np.linspace(0, 1, 1000), [50.0]])
    html = histogram(values, is_kept=values > 0.5)
    assert html.end < 2 and html.omits_tail and html.counts.sum() == 1001
    assert html.kept_counts is not None and html.kept_counts.sum() == (values > 0.5).sum()
    for outliers in ([9000.0], [7000.0, 8000.0, 9000.0]):
        few = histogram(np.array([*np.linspace(100, 300, 32), *outliers]))
        assert few.end < 1100 and few.omits_tail and (few.counts > 0).sum() > 5 and few.counts[-1] <= 5
    assert histogram(np.array([0.0, 0.0]), bounds=(0.0, 1.0)).counts[0] == 2
    counts = histogram(np.array([0.0, 0.0, 7.0]), is_count=True)
    assert counts.counts.tolist() == [2, 0, 0, 0, 0, 0, 0, 1] and not counts.omits_tail
    many = histogram(np.array([0.0, 100.0]), is_count=True)
    assert many.end == 128 and many.counts.sum() == 2
