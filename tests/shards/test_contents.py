"""Tests of contents.json: a missing commit is detected, and a killed run is never mistaken for damage."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_bytes, publish_checked_json, publish_json
from clipmill.shards.commit_table import read_commits, read_contents
from clipmill.shards.commits import Commit, commit_path
from clipmill.shards.lists import damaged_lists, finish_run
from clipmill.shards.opening import DamagedContents
from clipmill.shards.reader import Variant
from clipmill.shards.writer import Sample
from tests.manifests.test_interrupted_writes import Killed, stop_at

CommitShard = Callable[..., Commit]
Samples = Callable[..., list[Sample]]


@pytest.fixture
def variant(tmp_path: Path, commit_shard: CommitShard, samples: Samples) -> Path:
    """Create shards 0 to 3 of a completed run; 1 and 2 are in val."""
    folder = tmp_path / "data" / "video" / "made"
    for shard_id in range(4):
        split = "val" if shard_id in (1, 2) else "train"
        commit_shard(folder, samples(2, video_id=f"v{shard_id}"), shard_id=shard_id, split=split)
    publish_json(folder / "recipe.json", {"crf": 24})
    finish_run(folder, dropped_ids=(), planned_ids=range(4))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_sound(folder: Path) -> bool:
    commits = read_commits(folder)
    return (
        not commits.damaged
        and not damaged_lists(folder, commits.commits)
        and Variant(folder).require_complete() is not None
    )


def test_what_a_run_leaves_is_sound_and_settling_again_writes_nothing(variant: Path) -> None:
    assert is_sound(variant)
    contents = read_contents(variant)
    assert contents is not None and contents.shard_ids == {0, 1, 2, 3}
    assert set(contents.files) == {"recipe.json", "commits.arrow", "shards.txt", "shards-train.txt", "shards-val.txt"}
    before = {path: path.stat().st_ino for path in variant.iterdir()}
    finish_run(variant, dropped_ids=(), planned_ids=range(4))
    assert {path: path.stat().st_ino for path in variant.iterdir()} == before


@pytest.mark.parametrize("shard_id", [0, 1, 3])
def test_a_missing_commit_is_named_by_every_reader(variant: Path, shard_id: int) -> None:
    commit_path(variant, shard_id).unlink()
    [damaged] = read_commits(variant).damaged
    assert damaged.shard_id == shard_id and "missing" in str(damaged)
    opened = Variant(variant)
    assert len(opened.shards()) == 3
    with pytest.raises(UserError, match=f"{shard_id:06d}.json") as caught:
        opened.require_complete()
    assert "prep chunk" in str(caught.value.hint) and "prep verify --column video" in str(caught.value.hint)


def test_all_commits_missing_is_no_empty_set(variant: Path) -> None:
    shutil.rmtree(variant / "commits")
    assert [damaged.shard_id for damaged in read_commits(variant).damaged] == [0, 1, 2, 3]


def test_a_commit_that_cannot_be_made_again_stays_reported(variant: Path) -> None:
    commit_path(variant, 2).unlink()
    finish_run(variant, dropped_ids=(), planned_ids=range(4))
    assert [damaged.shard_id for damaged in read_commits(variant).damaged] == [2]
    finish_run(variant, dropped_ids=(), planned_ids=(0, 1, 3))  # the plan no longer contains it
    assert is_sound(variant)


def test_a_damaged_commit_of_a_shard_that_nothing_wants_goes(variant: Path) -> None:
    publish_bytes(commit_path(variant, 3), b"{")
    finish_run(variant, dropped_ids=(), planned_ids=(0, 1, 2))
    assert is_sound(variant) and not commit_path(variant, 3).exists()


def test_a_run_that_is_killed_at_its_end_looks_like_no_damage(
    variant: Path, tmp_path: Path, commit_shard: CommitShard, samples: Samples
) -> None:
    """The run has made shard 4 and made shard 0 again; it no longer needs 1 and 2, which are all of val."""
    commit_shard(variant, samples(2, video_id="v4"), shard_id=4, split="test")
    commit_shard(variant, samples(3, video_id="v0"), shard_id=0)
    assert is_sound(variant), "a run killed before its end must look sound"
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(variant, undisturbed)
    finish_run(undisturbed, dropped_ids=(1, 2), planned_ids=(0, 3, 4))
    assert is_sound(undisturbed) and not (undisturbed / "shards-val.txt").exists()
    for point in itertools.count():
        folder = tmp_path / str(point) / "video" / "made"
        shutil.copytree(variant, folder)
        with pytest.MonkeyPatch.context() as patch:
            stop_at(point, patch, Killed())
            try:
                finish_run(folder, dropped_ids=(1, 2), planned_ids=(0, 3, 4))
                break
            except Killed:
                pass
        assert is_sound(folder), f"killed at point {point}"
        finish_run(folder, dropped_ids={1, 2} & read_commits(folder).commits.keys(), planned_ids=(0, 3, 4))
        assert files(folder) == files(undisturbed)
    assert point > 8


@pytest.mark.parametrize("name", ["shards.txt", "shards-val.txt"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_list_of_shards_is_found(variant: Path, name: str, damage: str) -> None:
    before, path = files(variant), variant / name
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flipped" else content[:-21])
    [problem] = damaged_lists(variant, read_commits(variant).commits)
    assert problem.path == path
    finish_run(variant, dropped_ids=(), planned_ids=range(4))
    assert files(variant) == before


def test_a_damaged_recipe_is_refused(variant: Path) -> None:
    (variant / "recipe.json").write_text('{\n "crf": 25\n}\n')
    with pytest.raises(UserError, match=r"recipe\.json is damaged") as caught:
        _ = Variant(variant).recipe
    assert caught.value.hint


def test_damaged_contents_are_refused_and_written_again(variant: Path) -> None:
    before, path = files(variant), variant / "contents.json"
    path.write_text(path.read_text().replace("3", "2"))
    with pytest.raises(DamagedContents):
        read_contents(variant)
    with pytest.raises(UserError, match=r"contents\.json"):
        Variant(variant).require_complete()
    finish_run(variant, dropped_ids=(), planned_ids=range(4))
    assert files(variant) == before


def test_a_set_without_contents_is_read_as_before(variant: Path) -> None:
    (variant / "contents.json").unlink()
    assert is_sound(variant)
    commit_path(variant, 1).unlink()
    (variant / "shards.txt").write_text("")
    assert len(Variant(variant).require_complete().shards()) == 3


def test_contents_of_another_version_are_refused(variant: Path) -> None:
    record = json.loads((variant / "contents.json").read_bytes())
    del record["sha256"]
    publish_checked_json(variant / "contents.json", {**record, "clipmill_format": 99})
    with pytest.raises(UserError, match="format 99"):
        Variant(variant)
