"""Limits of metrics on held-out clips are shown with the metrics: few clips, and look-alikes in the training split."""

import json
import shutil
from pathlib import Path

import pytest

from clipmill.train.data.held_out import MIN_ITEMS, HeldOut, interval
from clipmill.train.run.folder import RunFolder
from tests.shards.made_scores import phash, write_scores
from tests.train.running import SMALL, facts, train

ALIKE = "1 of 2 chunks looks like a chunk of the training split 'train'"


@pytest.mark.parametrize(("count", "num"), [(0, 3), (2, 3), (3, 3), (17, 50), (1, 99)])
def test_the_interval_is_wilsons(count: int, num: int) -> None:
    theirs = pytest.importorskip("scipy.stats").binomtest(count, num).proportion_ci(method="wilson")
    assert interval(count / num, num) == pytest.approx((theirs.low, theirs.high), abs=1e-4)


def test_many_clips_that_look_like_no_others_need_no_caution() -> None:
    assert HeldOut(num_clips=MIN_ITEMS).cautions(0.5) == []
    assert HeldOut(num_clips=MIN_ITEMS, num_chunks=50, num_alike=0).cautions(0.5) == []
    assert HeldOut(num_clips=MIN_ITEMS - 1).cautions(0.5) == [
        "only 99 clips, so that 50.0 % has a 95 % interval from 40.3 % to 59.7 %"
    ]


@pytest.fixture(scope="module")
def scored_data(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data with scores; one of the two chunks in which held-out clips start looks like a chunk of train."""
    scored = shutil.copytree(data_dir, tmp_path_factory.mktemp("scored") / "data")
    hashes = {
        f"{video}_{start:09d}": phash(10 * number + start) for number, video in enumerate("abc") for start in (0,)
    }
    hashes |= {"d_000000000": phash(10, flipped=(3,)), "d_000002000": phash(66), "d_000004000": phash(77)}
    write_scores(scored, {key: {"phash": value} for key, value in sorted(hashes.items())})
    return scored


@pytest.fixture(scope="module")
def run(scored_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "first"
    flags = (*SMALL, "--steps", 2, "--workers", 1, "--evaluate.every", 2)
    assert train("dual-encoder", "--shards", scored_data, "--out", out, *flags) == 0
    return out


def test_an_evaluation_says_it_above_its_protocol_in_its_result_and_on_all_pages(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("eval", "retrieval", run) == 0
    printed = capsys.readouterr().out
    assert "caution: only 3 clips, so that " in printed and " has a 95 % interval from " in printed
    assert f"; {ALIKE}\ndata: " in printed
    result = json.loads(RunFolder(run).evaluation("retrieval-val").read_bytes())
    facts_of = {"num_clips": 3, "num_chunks": 2, "num_alike": 1, "trained_split": "train", "were_trained_on": False}
    assert result["held_out"] == facts_of
    page = RunFolder(run).page.read_text()
    tile = page.split('class="tiles"')[1].split("</div>")[0]
    assert f"only 3 clips; {ALIKE}".replace("'", "&#39;") in tile and "<dt>caution</dt>" in page
    other = shutil.copytree(run, tmp_path / "other")
    assert train("overview", run, other, "--out", tmp_path / "runs.html") == 0
    overview = (tmp_path / "runs.html").read_text().replace("&#39;", "'")
    assert overview.split("</caption>")[2].split("</table>")[0].count(f"only 3 clips; {ALIKE}") == 2
    assert train("export", run, "--format", "hf", "--out", tmp_path / "exported") == 0
    assert "- caution: only 3 clips, so that" in (tmp_path / "exported" / "README.md").read_text()


def test_an_evaluation_in_the_loop_says_it_before_the_first_step(run: Path) -> None:
    assert facts(run)["evaluations"]["val"]["caution"] == f"only 3 clips; {ALIKE}"


def test_what_was_not_trained_on_is_not_called_a_copy_of_it(
    run: Path, scored_data: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in (("--split", "train"), ("--shards", data_dir)):
        capsys.readouterr()
        assert train("eval", "retrieval", run, *more, "--json") == 0
        assert json.loads(capsys.readouterr().out)["held_out"]["num_alike"] is None
    # Only the evaluated clips are checked, not the complete split.
    assert train("eval", "retrieval", run, "--where", "not duplicate", "--json") == 0
    held_out = json.loads(capsys.readouterr().out)["held_out"]
    assert held_out == {
        "num_clips": 1,
        "num_chunks": 1,
        "num_alike": 0,
        "trained_split": "train",
        "were_trained_on": False,
    }
