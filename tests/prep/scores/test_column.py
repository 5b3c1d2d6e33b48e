"""End-to-end tests of `prep scores`: reruns, verification, and which bytes are read."""

import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pytest

from clipmill.prep.core.chunk_column import resolve
from clipmill.prep.core.column import DeepCode
from clipmill.prep.scores.column import COLUMN, ScoresSettings
from clipmill.prep.scores.score import EXTENSION, check_scores
from clipmill.prep.scores.work import WORK, installed_libraries, version_mismatch
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.shards.commit_table import SCHEMA, TableCommits
from clipmill.shards.merged_table import open_merged_table, write_merged_table
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import SCORES_FIELDS
from clipmill.shards.scores import CHUNKS_FILE, open_scores, score_table_problem
from tests.prep.running import Ran, chunk, manifest, prep_here
from tests.prep.scores.conftest import make, rows_of
from tests.prep.sets import ShardSet, flip

Prep = Callable[..., Ran]
PROCESSES = ("--engine", "processes")


@pytest.fixture(scope="session")
def scored_set(made_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the set of five chunks with scores, once."""
    data = tmp_path_factory.mktemp("scored") / "data"
    shutil.copytree(made_set, data)
    make(data)
    return data


@pytest.fixture
def scored_copy(scored_set: Path, tmp_path: Path) -> ShardSet:
    """Return a copy of the set that a test may damage."""
    shutil.copytree(scored_set, tmp_path / "scored")
    return ShardSet(tmp_path / "scored")


def folder_of(data: Path) -> Path:
    return Variant.open(data, column="scores").directory


def test_samples_are_those_of_video_and_members_hold_the_values_of_the_index(scored_copy: ShardSet) -> None:
    video, scores = (Variant.open(scored_copy.data, column=column) for column in ("video", "scores"))
    assert [shard.split for shard in video.shards()] == [shard.split for shard in scores.shards()]
    for chunks, shard in zip(video.shards(), scores.shards(), strict=True):
        assert shard.shard_id == chunks.shard_id and shard.extensions == (EXTENSION,)
        assert shard.index["key"].to_pylist() == chunks.index["key"].to_pylist()
        for number, row in enumerate(shard.index.to_pylist()):
            stated = json.loads(shard.read(number, EXTENSION))
            assert int(stated["phash"], 16) == row["phash"] and len(stated["phash"]) == 16
            typed = pa.Table.from_pylist([{**stated, "phash": row["phash"]}], pa.schema(SCORES_FIELDS)).to_pylist()[0]
            assert typed == {field.name: row[field.name] for field in SCORES_FIELDS}
    assert scores.recipe["video"] == video.directory.name and scores.directory.name.startswith("cut27-")
    assert open_scores(scored_copy.data).table.num_rows == 5


def test_a_chunk_that_failed_has_a_row_of_unknown_values(shard_set: ShardSet) -> None:
    shard = Variant.open(shard_set.data).shards()[0]
    flip(shard.tar_path, shard.index["mp4_offset"][0].as_py() + 2000)
    assert make(shard_set.data).failures_by_code() == {"chunk_damaged": 1}
    table = open_scores(shard_set.data).table
    assert table.filter(pa.compute.is_null(table["phash"])).num_rows == 1
    assert score_table_problem(Variant(folder_of(shard_set.data))) is None


@pytest.mark.parametrize("damage", ["removed", "flipped", "of other commits"])
def test_a_merged_table_that_is_not_whole_is_written_again(prep: Prep, scored_copy: ShardSet, damage: str) -> None:
    path = folder_of(scored_copy.data) / CHUNKS_FILE
    whole = path.read_bytes()
    if damage == "removed":
        path.unlink()
    elif damage == "flipped":
        flip(path, whole.index(b"long") + 1)
        assert CHUNKS_FILE in prep("verify", "--data", scored_copy.data, status=1).stdout
    else:
        write_merged_table(path, open_merged_table(path), commits=TableCommits(SCHEMA.empty_table()), metadata={})
    assert score_table_problem(Variant(folder_of(scored_copy.data))) is not None
    what = {"removed": "missing", "flipped": "damaged", "of other commits": "stale"}[damage]
    verified = prep("verify", "--column", "scores", "--data", scored_copy.data, status=1)
    assert f"{path} is {what}" in verified.stdout and f"prep scores --data {scored_copy.data}" in verified.stderr
    status = prep("status", "--data", scored_copy.data).stdout
    assert f"{path} is {what}" in status and f"next      prep scores --data {scored_copy.data}" in status
    plan = prep("plan", "scores", "--data", scored_copy.data).stdout
    assert f"table    {path} is {what}" in plan and "nothing to do" not in plan
    lines = prep("scores", "--data", scored_copy.data, *PROCESSES).stdout.splitlines()
    assert "table    chunks.arrow: written" in lines
    assert path.read_bytes() == whole
    assert "chunks.arrow" not in prep("status", "--data", scored_copy.data).stdout
    prep("verify", "--column", "scores", "--data", scored_copy.data)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"motion": 0.5}, "motion is "),
        ({"brightness": 2.0}, "brightness is "),
        ({"sharpness": float("nan")}, "sharpness is "),
        ({"cuts": 3}, "cuts is 3, but"),
        ({"phash": 7}, "phash is "),
    ],
)
def test_verify_deep_compares_rows_with_members(scored_set: Path, change: dict[str, object], difference: str) -> None:
    key, row = next(iter(rows_of(scored_set).items()))
    shard, number = Variant.open(scored_set, column="scores").find(key)
    members = {EXTENSION: shard.read(number, EXTENSION)}
    assert not check_scores(row, members, "train").differences
    differences = check_scores({**row, **change}, members, "train").differences
    assert differences and all(code == DeepCode.JSON_DIFFERS for code, _ in differences)
    assert any(message.startswith(difference) for _, message in differences)
    [(_, broken)] = check_scores(row, {EXTENSION: b"{"}, "train").differences
    assert "cannot be read" in broken


def test_workers_with_other_libraries_are_refused() -> None:
    libraries = installed_libraries()
    assert version_mismatch(libraries) is None
    assert "the plan requires opencv 1" in str(version_mismatch("opencv 1"))
    first, other = (resolve(COLUMN, WORK, ScoresSettings(cut_threshold=value), video="v") for value in (27.0, 28.0))
    assert first.fingerprint != other.fingerprint and libraries in first.values.values()


def test_a_duplicate_says_of_which_chunk_it_is_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        video = FrameNumberVideo(num_frames=20, fps=Fraction(10), width=64, height=64)
        video.write(tmp_path / "videos" / f"{name}.mp4")
    manifest(data := tmp_path / "data", tmp_path / "videos")
    chunk(data, "--len", "1s", "--preset", "ultrafast", "--short-side", "32")
    make(data)
    asked = ("inspect", "--data", data, "--column", "scores")
    assert "duplicate_of        a_000001000\n" in prep_here(*asked, "b_000001000").stdout
    assert prep_here(*asked, "a_000001000", "--json").summary["duplicate_of"] is None
    page = tmp_path / "page.html"
    prep_here(*asked, "--html", page, "--where", "duplicate")
    assert "duplicate of <code>a_000001000</code>" in page.read_text()
