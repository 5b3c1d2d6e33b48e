"""Tests of commands on a set whose shards 999 and 1000 are in different folders, and of a driver's reads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clipmill.prep.core import shard_result
from clipmill.prep.core.recipe import recipe_fingerprint
from clipmill.prep.core.shard_result import Heartbeat, RunningChunks
from clipmill.prep.core.tables import read_layout, write_layout
from clipmill.shards.commits import commit_path
from tests.prep.running import Ran, chunk, contents
from tests.prep.sets import LEN, ShardSet, flip, rerun

Prep = Callable[..., Ran]


@pytest.fixture(scope="module")
def made_far(made_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the set again with the layout of a set that has lost its first 999 shards."""
    data = tmp_path_factory.mktemp("far") / "data"
    shutil.copytree(made_set, data, ignore=shutil.ignore_patterns("video"))
    (path,) = (data / "layout").iterdir()
    layout = read_layout(path)
    field = layout.schema.field("shard_id")
    write_layout(path, layout.set_column(0, field, pa.array(np.asarray(layout["shard_id"]) + 999, field.type)))
    chunk(data, *LEN, status=1)
    return data


@pytest.fixture
def far_set(made_far: Path, tmp_path: Path) -> ShardSet:
    shutil.copytree(made_far, tmp_path / "data")
    return ShardSet(tmp_path / "data")


def test_every_command_knows_the_folders(prep: Prep, far_set: ShardSet) -> None:
    before = contents(far_set.data)
    assert sorted(path.parent.name for path in far_set.variant.glob("*/001000*")) == ["001"] * 3
    assert commit_path(far_set.variant, 1000).parent == far_set.variant / "commits" / "001"
    status = prep("status", "--data", far_set.data, "--json", status=0).summary["columns"]["video"]["variants"][0]
    assert (status["num_shards"], status["num_samples"]) == (2, 5)
    assert "nothing to remove" in prep("gc", "--data", far_set.data).stdout
    assert prep("verify", "--deep", "--data", far_set.data).stdout.count(": OK") == 1
    assert "001/001000-" in prep("inspect", "short_000000000", "--data", far_set.data).stdout
    assert rerun(prep, far_set, *LEN)["num_shards_made"] == 0
    assert contents(far_set.data) == before


def test_damage_in_a_folder_is_found_and_repaired(prep: Prep, far_set: ShardSet) -> None:
    before = contents(far_set.variant)
    flip(far_set.tar(1000), 600)
    assert "001000" in prep("verify", "--data", far_set.data, status=1).stdout
    assert rerun(prep, far_set, *LEN)["num_shards_made"] == 1
    assert contents(far_set.variant) == before


def test_verify_reads_the_records_behind_the_table(prep: Prep, far_set: ShardSet) -> None:
    rerun(prep, far_set, *LEN)
    before = contents(far_set.variant)
    assert "commits.arrow" in before
    hours = prep("status", "--data", far_set.data, "--json").summary["columns"]["video"]["variants"][0]["hours"]
    assert hours == pytest.approx(8 / 3600)
    record = commit_path(far_set.variant, 1000)
    flip(record, record.read_bytes().index(b"val"))
    assert rerun(prep, far_set, *LEN)["num_shards_made"] == 0  # the table stores the content of the record
    ran = prep("verify", "--data", far_set.data, "--json", status=1)
    (finding,) = ran.summary["video"]["findings"]
    assert (finding["shard_id"], finding["code"]) == (1000, "commit_damaged")
    assert "to repair, run: prep chunk" in ran.stderr
    assert rerun(prep, far_set, *LEN)["num_shards_made"] == 1
    assert contents(far_set.variant) == before
    table = far_set.variant / "commits.arrow"
    flip(table, table.read_bytes().index(b"train"))
    ran = prep("verify", "--data", far_set.data, "--json", status=1)
    (record_finding,) = ran.summary["records"]
    assert record_finding["path"] == str(table) and "table of commits" in record_finding["message"]
    assert rerun(prep, far_set, *LEN)["num_shards_made"] == 0
    assert contents(far_set.variant) == before


def test_gc_removes_what_is_not_needed_in_folders_and_leaves_strays(prep: Prep, far_set: ShardSet) -> None:
    strays = ["001/notes", "001/000007-0123abcd.tar", "commits/001/000007.json", "007/mine/001000-0123abcd.tar"]
    for name in strays:
        (far_set.variant / name).parent.mkdir(parents=True, exist_ok=True)
        (far_set.variant / name).write_text("mine")
    before = contents(far_set.data)
    leftovers = ["001/.tmp-0123456789ab-001000.tar", "commits/001/.tmp-0123456789ab-001000.json"]
    for name in (*leftovers, "001/001000-0123abcd.tar", "001/001000-0123abcd.tar.idx"):
        (far_set.variant / name).write_bytes(b"12345")
    ran = prep("gc", "--data", far_set.data)
    assert contents(far_set.data) == before and "20 bytes freed" in ran.stdout
    for name in (*strays[:3], "007/mine"):
        assert f"{name}: not part of the data format" in ran.stdout
    for name in leftovers:
        (far_set.variant / name).write_bytes(b"12345")
    rerun(prep, far_set, *LEN)
    assert contents(far_set.data) == before


def test_gc_removes_the_folders_of_an_old_variant(prep: Prep, far_set: ShardSet) -> None:
    recipe = {**json.loads((far_set.variant / "recipe.json").read_bytes()), "crf": 40}
    old = far_set.variant.with_name(f"old-{recipe_fingerprint(recipe)[:8]}")
    before = contents(far_set.data)
    shutil.copytree(far_set.variant, old)
    (old / "recipe.json").write_text(json.dumps(recipe))
    prep("gc", "--data", far_set.data)
    assert not old.exists() and contents(far_set.data) == before


def test_heartbeats_are_read_for_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, num_read = 100.0, 0
    read = shard_result.running_shards

    def slowly(folder: Path) -> list[shard_result.ShardProgress]:
        nonlocal now_s, num_read
        now_s, num_read = now_s + 0.1, num_read + 1
        return read(folder)

    running = RunningChunks(tmp_path, shard_ids=range(100))
    with Heartbeat(tmp_path, 3, num_chunks=10) as beat, Heartbeat(tmp_path, 4, num_chunks=10) as other:
        for heartbeat, num_done in ((beat, 2), (other, 5)):
            heartbeat._written_s = 0.0
            heartbeat.show(num_done)
        monkeypatch.setattr(shard_result, "running_shards", slowly)
        monkeypatch.setattr(shard_result.time, "monotonic", lambda: now_s)
        running._next_s = now_s
        for _ in range(1000):
            assert running.num_done() == 7
            now_s += 0.01
        assert 2 <= num_read <= 3
        running._next_s = now_s + 1
        running.finish(4)
        running.finish(5)  # this shard was never seen
        assert running.num_done() == 2
