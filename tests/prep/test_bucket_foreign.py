"""Tests of `prep` in buckets as users have them: folder markers, foreign objects, refusals, open uploads."""

from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

from clipmill.manifests.publish import publish_bytes
from clipmill.manifests.storage.mounting import open_data
from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.core.data_folder import require_data_folder
from clipmill.shards.dataset import current_variant
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.folders import contents_of, upload
from tests.object_storage.server import S3Server
from tests.prep.here import Here
from tests.prep.running import prep_here
from tests.prep.sets import LEN

CHUNK = ("chunk", *LEN, "--engine", "processes", "--workers", 1)
MARKERS = ("", "video/", "scores/", "scores/new-0123abcd/", "manifest/", "layout/", "layout")
FOREIGN = ("a//b", "x/../y", "x/./y", "line\x01", "n" * 300, "video/" + "n" * 300 + ".tar", "probes.parquet/mine")


@pytest.fixture(autouse=True)
def _own_scratch(other_machine: Callable[[], Path]) -> None:
    other_machine()


@pytest.fixture
def data(made_set: Path, bucket: str) -> str:
    """Return a copy of a small set in a bucket."""
    upload(made_set, f"{bucket}/data")
    return f"{bucket}/data"


def test_markers_are_no_data_and_foreign_names_stop_nothing(s3: S3Server, data: str, bucket: str) -> None:
    for marker in MARKERS:
        s3.put(f"{bucket}/empty", marker)
        s3.put(data, marker)
    assert (
        f"there is no data folder at {bucket}/empty" in prep_here("status", "--data", f"{bucket}/empty", status=2).error
    )
    for name in FOREIGN:
        s3.put(data, name, b"of others")
    before = s3.keys(bucket)
    assert all(f"data/{name}" in before for name in (*MARKERS, *FOREIGN))
    prep_here("status", "--data", data)
    prep_here(*CHUNK, "--data", data)  # the first run reported the source that is not a video
    prep_here("verify", "--data", data)
    ran = prep_here("gc", "--data", data)
    left = [line for line in ran.stdout.splitlines() if line.startswith("left ")]
    assert len(left) == len(FOREIGN) and "nothing to remove" in ran.stdout
    assert any(r"line\x01: not part of the data format" in line for line in left)
    assert set(prep_here("gc", "--data", data, "--json").summary["unknown"]) == set(FOREIGN)
    assert {key for key in s3.keys(bucket) if not key.endswith(".lock")} == before
    (recipe := open_data(data) / "scores/new-0123abcd/recipe.json").parent.mkdir(parents=True)  # creates a marker
    publish_bytes(recipe, b"{}")


def test_what_a_bucket_refuses_is_neither_damaged_nor_made_again(
    data: str, made_set: Path, faults: Faults, few_retries: None, other_machine: Callable[[], Path]
) -> None:
    before = contents_of(data)
    refused = Fault("error", method="GET", path=r"000000-\w+\.tar$", status=403, code="AccessDenied")
    for fault in (refused, Fault("error", method="GET", path=r"000000-\w+\.index\.arrow$")):
        for deep in ((), ("--deep",)):
            other_machine()
            faults.set(fault)
            ran = prep_here("verify", "--data", data, *deep, status=1)
            assert "shard 000000  inaccessible" in ran.stdout and "not read completely" in ran.stdout
            assert "1 shard of " in ran.stderr and "cannot be accessed" in ran.stderr
            assert not any(word in ran.stdout + ran.stderr for word in ("damaged", "remove", "to repair"))
    other_machine()
    faults.set(Fault("error", method="GET", path=r"\.index\.arrow$", status=403, code="AccessDenied"))
    assert "access denied" in prep_here("scores", "--engine", "processes", "--data", data, status=3).error
    faults.set()
    assert contents_of(data) == before


def test_a_chunk_that_a_bucket_does_not_give_is_no_damaged_chunk(
    data: str, faults: Faults, few_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipmill.prep.engines.processes.ProcessEngine", lambda num_workers: Here())
    faults.set(Fault("error", method="GET", path=r"000000-\w+\.tar$"))
    ran = prep_here("scores", "--engine", "processes", "--json", "--data", data, status=1)
    assert set(ran.summary["failures"]) == {"io_error"}
    faults.set()
    assert "made" in prep_here("scores", "--engine", "processes", "--data", data).stdout


def test_gc_aborts_uploads_of_its_own_names_alone(data: str) -> None:
    objects = open_objects(data)
    variant = current_variant(require_data_folder(open_data(data)), "video")
    names = [
        f"video/{variant}/000007-0123abcd.tar",
        "mine.tar",
        f"video/{variant}/mine.tar",
        "video/x/000007-0123abcd.tar",
    ]
    for name in names:
        obstore.open_writer(objects._store, name, buffer_size=5 * 2**20).write(bytes(6 * 2**20))
    lines = prep_here("gc", "--dry-run", "--data", data).stdout.splitlines()
    assert lines[0].startswith(f"to remove  {names[0]} (started 20") and len(list(objects.open_uploads())) == 4
    assert prep_here("gc", "--data", data, "--json").summary["uploads"] == names[:1]
    assert {unfinished.key for unfinished in objects.open_uploads()} == {*names[1:]}


def test_verify_asks_the_bucket_and_not_its_copy_of_before(data: str, faults: Faults, few_retries: None) -> None:
    assert ": OK" in prep_here("verify", "--data", data).stdout
    faults.set()
    prep_here("verify", "--data", data)
    asked = {path for method, path in faults.seen().requests if method == "GET"}
    indexes = {key for key in contents_of(data) if key.endswith((".index.arrow", ".tar.idx", ".tar", ".json"))}
    assert all(any(path.endswith(key) for path in asked) for key in indexes if "/" in key)
    faults.set(Fault("error", method="GET", path=r"\.index\.arrow$", status=403, code="AccessDenied"))
    assert "inaccessible" in prep_here("verify", "--data", data, status=1).stdout


def test_commits_that_arrive_after_a_gc_are_named_by_all_and_removed_by_gc(data: str) -> None:
    before, late = contents_of(data), "video/new-0123abcd"
    objects = open_objects(data)
    (commit,) = (key for key in before if key.endswith("commits/000000.json"))
    objects.write(f"{late}/commits/000000.json", objects.read(commit))
    assert "`prep gc` removes it" in prep_here("status", "--data", data).stdout
    ran = prep_here("verify", "--data", data, status=1)
    assert f"{late}: a late run wrote commits" in ran.stdout and "to repair, run: prep gc" in ran.stderr
    ran = prep_here("gc", "--data", data)
    assert f"removed    {late} (1 file, " in ran.stdout and "left" not in ran.stdout
    assert contents_of(data) == before and "new-0123abcd" not in prep_here("status", "--data", data).stdout
    prep_here("verify", "--data", data)
    # All other objects in such a folder are foreign.
    for name in ("commits/000000.json", "mine.txt"):
        objects.write(f"{late}/{name}", objects.read(commit))
    assert f"left       {late}: not part of the data format" in prep_here("gc", "--data", data).stdout
    objects.delete(f"{late}/commits/000000.json", f"{late}/mine.txt")
