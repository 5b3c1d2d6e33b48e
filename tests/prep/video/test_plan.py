"""Tests of what a plan decides for each shard: a function of plain tables, without files."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipmill.manifests.schema import VIDEOS
from clipmill.prep.core.plan import ShardState, StoredShards
from clipmill.prep.core.tables import LAYOUT
from clipmill.prep.sources.table import PROBES
from clipmill.prep.video.column import Recipe, resolve
from clipmill.prep.video.plan import Plan, Videos
from clipmill.shards.commits import Commit, Failure

RECIPE = resolve(Recipe(len="1s"), ffmpeg_version="9.0")


def videos(*names: str, **changes: dict[str, Any]) -> Videos:
    rows = [
        {
            "video_id": name,
            "source_id": name,
            "path": f"/videos/{name}.mp4",
            "split": "train",
            "dataset": "folder",
            "num_captions": 0,
            "captions_sha256": "",
            **changes.get(name, {}),
        }
        for name in names
    ]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=VIDEOS), file, row_group_size=2)
    return Videos(pq.ParquetFile(file), path=Path("videos.parquet"))


def probes(*names: str, **changes: dict[str, Any]) -> pa.Table:
    rows = [
        {
            "path": f"/videos/{name}.mp4",
            "size_bytes": 1000,
            "mtime_ns": 5,
            "fingerprint": hashlib.sha256(name.encode()).hexdigest(),
            "end_s": 30.0,
            "fps": 25.0,
            "width": 640,
            "height": 480,
            "codec": "h264",
            "key_gap_s": 0.0,
            "num_audio": 0,
            "timeline": "",
            "notes": "",
            **changes.get(name, {}),
        }
        for name in names
    ]
    return pa.Table.from_pylist(rows, schema=PROBES).drop_columns("path")


def plan(names: str = "ab", **changes: Any) -> Plan:
    given = {
        "recipe": RECIPE,
        "videos": videos(*names),
        "probes": probes(*names),
        "layout": LAYOUT.empty_table(),
    }
    stored = StoredShards(changes.pop("commits", {}), changes.pop("problems", {}))
    return Plan(**{**given, **changes}, stored=stored)


def commits_of(plan_: Plan, *failures: Failure) -> dict[int, Commit]:
    return {
        shard.shard_id: Commit("video", shard.shard_id, shard.split, shard.plan_fingerprint, None, failures)
        for shard in plan_.shards
    }


def states(plan_: Plan) -> list[ShardState]:
    return [shard.state for shard in plan_.shards]


FIRST = plan()  # each video has a span of 20 chunks and one of 10: shards (a0), (a1), (b0), (b1)
DONE: dict[str, Any] = {"layout": FIRST.layout, "commits": commits_of(FIRST)}


def test_a_first_plan_is_all_new_and_a_second_has_no_work() -> None:
    assert states(FIRST) == [ShardState.NEW] * 4
    assert [shard.num_chunks for shard in FIRST.shards] == [20, 10, 20, 10] and FIRST.num_chunks == 60
    assert states(plan(**DONE)) == [ShardState.CURRENT] * 4
    spans = [span for shard in FIRST.shards for span in FIRST.spans(shard.rows)]
    assert [(span.video_id, span.span.index, span.span.first_frame) for span in spans] == [
        ("a", 0, 0),
        ("a", 1, 600),
        ("b", 0, 0),
        ("b", 1, 600),
    ]
    assert len({span.fingerprint for span in spans}) == 4
    assert FIRST.workload(np.arange(4)).seconds.tolist() == [20, 10, 20, 10]


def test_an_added_video_changes_no_old_shard() -> None:
    more = plan("xab", **DONE)
    assert states(more) == [ShardState.CURRENT] * 4 + [ShardState.NEW] * 2


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("probes", {"fingerprint": "f" * 64}),
        ("probes", {"end_s": 29.0}),
        ("videos", {"captions_sha256": "other"}),
        ("videos", {"source_id": "b.b"}),
        ("videos", {"dataset": "other"}),
    ],
)
def test_a_change_of_one_video_is_a_change_of_its_shards_only(table: str, change: dict[str, Any]) -> None:
    make: Any = videos if table == "videos" else probes
    changed = plan(**DONE, **{table: make("a", "b", b=change)})
    assert states(changed)[:2] == [ShardState.CURRENT] * 2
    assert set(states(changed)[2:]) == {ShardState.CHANGED}


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("probes", {"path": "/elsewhere/b.mp4", "mtime_ns": 9}),
        ("probes", {"code": "source_missing", "message": "gone", "size_bytes": -1}),
        ("videos", {"path": "/elsewhere/b.mp4"}),
    ],
)
def test_a_moved_or_removed_source_changes_nothing(table: str, change: dict[str, Any]) -> None:
    make: Any = videos if table == "videos" else probes
    assert states(plan(**DONE, **{table: make("a", "b", b=change)})) == [ShardState.CURRENT] * 4


def test_first_captions_change_every_shard_since_samples_gain_a_member() -> None:
    captioned = plan(**DONE, videos=videos("a", "b", b={"num_captions": 1}))
    assert states(captioned) == [ShardState.CHANGED] * 4


def test_removed_videos_leave_orphans_and_longer_ones_get_new_shards() -> None:
    assert states(plan("a", **DONE)) == [ShardState.CURRENT] * 2 + [ShardState.ORPHANED] * 2
    longer = plan(**DONE, probes=probes("a", "b", b={"end_s": 45.0, "fingerprint": "e" * 64}))
    assert states(longer) == [ShardState.CURRENT] * 2 + [ShardState.CHANGED] * 2 + [ShardState.NEW]
    other_split = plan(**DONE, videos=videos("a", "b", b={"split": "val"}))
    assert states(other_split) == [ShardState.CURRENT] * 2 + [ShardState.NEW] * 2 + [ShardState.ORPHANED] * 2
    assert [shard.split for shard in other_split.shards][2:4] == ["val", "val"]


def test_damage_and_failures() -> None:
    problems = {1: (ShardState.MISSING, "gone"), 2: (ShardState.CORRUPT, "other bytes")}
    damaged = plan(**DONE, problems=problems)
    assert states(damaged) == [ShardState.CURRENT, ShardState.MISSING, ShardState.CORRUPT, ShardState.CURRENT]
    assert [shard.reason for shard in damaged.shards][1:3] == ["gone", "other bytes"]
    for code, codes, state in (
        ("timeout", frozenset(), ShardState.RETRY),
        ("decode_errors", frozenset(), ShardState.CURRENT),
        ("decode_errors", frozenset({"decode_errors"}), ShardState.RETRY),
        ("decode_errors", frozenset({"frames_differ"}), ShardState.CURRENT),
    ):
        commits = commits_of(FIRST, Failure("a", None, code, "because"))
        again = plan(layout=FIRST.layout, commits=commits, retry_codes=codes)
        assert set(states(again)) == {state}, code
        assert all((code in shard.reason) == (state == ShardState.RETRY) for shard in again.shards)


def test_unusable_videos_have_no_chunks_and_are_named() -> None:
    unread = {"code": "no_video", "message": "only sound", "fingerprint": None, "end_s": None}
    some = plan(probes=probes("a", "b", b=unread))
    assert states(some) == [ShardState.NEW] * 2 and some.num_unusable == {"no_video": 1}
    assert [(failure.video_id, failure.code) for failure in some.failed_sources()] == [("b", "no_video")]
    assert some.num_chunks == 30 and some.num_videos == 2


def test_another_recipe_or_ffmpeg_changes_every_span() -> None:
    fingerprints = {
        span.fingerprint
        for settings, version in (
            (Recipe(len="1s"), "9.0"),
            (Recipe(len="1s", crf=30), "9.0"),
            (Recipe(len="1s"), "9.1"),
        )
        for other in [plan(recipe=resolve(settings, ffmpeg_version=version))]
        for shard in other.shards
        for span in other.spans(shard.rows)
    }
    assert len(fingerprints) == 12
