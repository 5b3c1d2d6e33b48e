"""Tests that `prep status` lists chunks of different splits that look alike."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.shards.dataset import set_current_variant
from tests.prep.running import Ran
from tests.shards.made_scores import phash, write_scores
from tests.train.tiny_data import write_captions

Prep = Callable[..., Ran]
SPLITS = {"v": "val", "a": "train", "b": "train", "t": "test"}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    write_captions(tmp_path, SPLITS, [])
    (tmp_path / "video" / "h264-1").mkdir(parents=True)
    (tmp_path / "video" / "h264-1" / "recipe.json").write_text("{}")
    set_current_variant(tmp_path, "video", "h264-1")
    return tmp_path


def test_pairs_of_different_splits_are_counted_and_named(data_dir: Path, prep: Prep) -> None:
    hashes = {
        "v_000000000": phash(1),  # looks like two chunks of train; the first chunk is listed
        "v_000002000": phash(9),
        "a_000002000": phash(1, flipped=(4, 5, 6)),
        "b_000000000": phash(1),
        "b_000002000": phash(2),
        "b_000004000": phash(3),
        "a_000004000": phash(2),  # same split
        "t_000000000": phash(2, flipped=(7,)),
        "t_000002000": phash(3, flipped=(1, 2, 3, 4, 5)),  # too different
        "t_000004000": phash(9),
        "gone_000000000": phash(9),  # the manifest no longer contains the video
    }
    assert prep("status", "--data", data_dir, "--json").summary["leakage"] is None
    directory = write_scores(data_dir, {key: {"phash": value} for key, value in hashes.items()})
    leakage = prep("status", "--data", data_dir, "--json").summary["leakage"]
    assert leakage["counts"] == [
        {"split": "val", "other_split": "train", "num": 1},
        {"split": "test", "other_split": "train", "num": 1},
        {"split": "test", "other_split": "val", "num": 1},
    ]
    assert [(pair["key"], pair["other_key"]) for pair in leakage["pairs"]] == [
        ("v_000000000", "a_000002000"),
        ("t_000000000", "a_000004000"),
        ("t_000004000", "v_000002000"),
    ]
    text = prep("status", "--data", data_dir).stdout
    assert "leakage   1 chunk of split val looks like a chunk of split train" in text
    assert "          v_000000000 looks like a_000002000" in text
    # The current manifest determines the splits.
    write_captions(data_dir, dict.fromkeys(SPLITS, "train"), [])
    assert prep("status", "--data", data_dir, "--json").summary["leakage"]["counts"] == []
    (directory / "chunks.arrow").unlink()
    assert "leakage   unknown: " in prep("status", "--data", data_dir).stdout


def test_many_pairs_are_shown_in_part(data_dir: Path, prep: Prep) -> None:
    hashes = {f"{video}_{n * 1000:09d}": phash(n) for video in "av" for n in range(5)}
    write_scores(data_dir, {key: {"phash": value} for key, value in hashes.items()})
    text = prep("status", "--data", data_dir).stdout
    assert "5 chunks of split val look like a chunk of split train" in text
    assert text.count("looks like") == 3
    assert "... and 2 more (--json)" in text
