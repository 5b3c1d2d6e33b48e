"""Tests of `prep` with a data folder in a bucket of a real S3 server.

A proxy delays, rejects and cuts responses. At the end, the objects in the bucket equal the files in a local data
folder, byte for byte.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from clipmill.manifests.storage import mirrors
from clipmill.manifests.storage.mirrors import UrlStream
from clipmill.manifests.storage.mounting import open_data
from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.core.data_folder import lock_for_writing, require_data_folder
from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.shard_result import ShardResult, stop_result
from clipmill.prep.engines import Check, Outcome, R, T
from clipmill.prep.scores.column import COLUMN as SCORES
from clipmill.prep.video.worker import ShardTask
from clipmill.shards.commit_table import Contents, write_contents
from tests.object_storage.faults import Fault, Faults, vanished_key
from tests.object_storage.folders import contents_of, upload
from tests.object_storage.server import S3Server
from tests.prep.here import Here, make_here
from tests.prep.running import contents, prep_here

LEN = ("--len", "500ms", "--preset", "ultrafast", "--short-side", 64, "--engine", "processes")


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two synthetic videos with captions, one per split."""
    folder = tmp_path_factory.mktemp("bucket") / "videos"
    prep_here("manifest", *synthetic(folder), "--data", folder.with_name("first"))
    return folder


@pytest.fixture(scope="module")
def chunks(videos: Path) -> Path:
    """Create a local data folder with two shards of chunks."""
    data = videos.with_name("local")
    prep_here("manifest", *synthetic(videos), "--data", data)
    prep_here("chunk", *LEN, "--workers", 1, "--data", data)
    return data


@pytest.fixture(autouse=True)
def _own_scratch(other_machine: Callable[[], Path]) -> None:
    other_machine()


@dataclass
class Elsewhere:
    """Engine whose worker acts as if on a different machine: for each task, it has neither local files nor mirrors."""

    copy: Path
    patch: pytest.MonkeyPatch

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, check: Check | None = None, **named: object
    ) -> Iterator[Outcome[T, R] | None]:
        assert check is not None
        away = self.copy.with_name("away")
        for task in tasks:
            with self.patch.context() as patch:
                self.copy.rename(away)
                (lock := self.copy.with_name(f"{self.copy.name}.lock")).rename(away.with_suffix(".lock"))
                patch.setattr(mirrors, "_mounted", {})
                try:
                    assert check() is None
                    outcome = Outcome(task, function(task))
                finally:
                    shutil.rmtree(self.copy)
                    away.rename(self.copy)
                    away.with_suffix(".lock").rename(lock)
            yield outcome


def synthetic(videos: Path) -> tuple[object, ...]:
    """Return the arguments of `prep manifest`; the videos are made once."""
    return "synthetic", "--videos", 2, "--minutes", 0.1, "--out", videos


def test_a_worker_that_shares_nothing_works_through_the_bucket(
    chunks: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f"{bucket}/data"
    upload(chunks, data)
    folder = require_data_folder(open_data(data))
    summary = make_here(SCORES, folder, engine=Elsewhere(folder, monkeypatch))
    assert (summary.num_shards, summary.num_shards_made, summary.failures) == (2, 2, [])
    local = shutil.copytree(chunks, chunks.with_name("scored"))
    make_here(SCORES, local)
    assert contents_of(data) == contents(local)
    assert not any(path.stat().st_blocks for path in folder.rglob("*.tar"))


@pytest.fixture
def data(chunks: Path, bucket: str) -> str:
    """Return a copy of the chunks in a bucket."""
    upload(chunks, f"{bucket}/data")
    return f"{bucket}/data"


def test_a_damaged_object_is_found_and_made_again(data: str, chunks: Path) -> None:
    objects = open_objects(data)
    tar = next(info.key for info in objects.list() if info.key.endswith(".tar"))
    objects.write(tar, objects.read(tar)[:-2000] + b"x" * 2000)
    assert "prep chunk" in prep_here("verify", "--data", data, status=1).stderr
    objects.delete(f"{tar.removesuffix('.tar')}.index.arrow")
    prep_here("status", "--data", data, status=1)
    prep_here("chunk", *LEN, "--workers", 1, "--data", data)
    prep_here("verify", "--deep", "--data", data)  # in processes that fetch the tars
    assert contents_of(data) == contents(chunks)


def test_gc_removes_what_no_commit_names(data: str, chunks: Path, faults: Faults) -> None:
    objects = open_objects(data)
    variant = next(info.key for info in objects.list("video") if info.key.endswith("recipe.json")).rpartition("/")[0]
    temporary = ".tmp-0123456789ab-"
    for key in (f"{variant}/000099-0123abcd.tar", f"{variant}/{temporary}workers", f"{temporary}dataset.json"):
        objects.write(key, b"left by a killed run")
    objects.write(f"{variant}/notes.md", b"of the user")
    prep_here("gc", "--data", data)
    assert contents_of(data).keys() == contents(chunks).keys() | {f"{variant}/notes.md"}
    objects.delete(f"{variant}/notes.md")
    prep_here("chunk", *LEN[:2], *LEN[4:], "--workers", 1, "--data", data)
    num_old = len(list(objects.list(variant)))
    faults.set()
    prep_here("gc", "--data", data)
    num_deletions = sum(path.endswith("?delete") for _, path in faults.seen().requests)
    assert num_old > 10 > num_deletions  # two of the deletions probe the server's clock
    assert {info.key.split("/")[1] for info in objects.list("video")} != {variant.split("/")[1]}
    assert not any(info.key.startswith(variant) for info in objects.list())


def test_tables_of_a_variant_are_written_and_replaced_in_the_bucket(
    data: str, chunks: Path, tmp_path: Path, other_machine: Callable[[], Path]
) -> None:
    command = ("chunk", *LEN, "--workers", 1, "--data")
    shutil.copytree(chunks, local := tmp_path / "local")
    for folder in (local, data):
        other_machine()
        prep_here(*command, folder)
    assert contents_of(data) == contents(local)
    other_machine()
    prep_here("verify", "--data", data)
    assert "nothing to remove" in prep_here("gc", "--data", data).stdout
    objects = open_objects(data)
    for name in ("chunks.arrow", "commits.arrow", "shards.txt"):
        key = next(info.key for info in objects.list() if info.key.endswith(f"/{name}"))
        objects.write(key, objects.read(key)[:-9] + b"x" * 9)
        other_machine()
        assert name in prep_here("verify", "--data", data, status=1).stdout
        prep_here(*command, data)
        assert contents_of(data) == contents(local)


def test_the_table_of_chunks_is_fetched_only_where_it_is_needed(data: str, chunks: Path, faults: Faults) -> None:
    for command, num_requests in ((("status",), 0), (("plan", *LEN[:6]), 0), (("chunk", *LEN, "--workers", 1), 2)):
        faults.set()
        prep_here(*command, "--data", data)
        methods = [method for method, path in faults.seen().requests if path.endswith("/chunks.arrow")]
        assert methods == ["GET"] * num_requests, command  # the schema by range: the size request and the data request
    assert contents_of(data) == contents(chunks)


def test_two_commands_at_once_and_the_second_is_told(data: str) -> None:
    with lock_for_writing(require_data_folder(open_data(data))):
        error = prep_here("chunk", *LEN, "--data", data, status=2).error
    assert f"another command is writing to {data} (process " in error and " since 20" in error


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ftp://host/data", "are not supported: ftp://host/data"),
        ("s3://", "is incomplete"),
        ("https://example.org/data", "cannot be a data folder of prep"),
        ("s3://no-such-bucket/data", "the bucket of s3://no-such-bucket/data does not exist"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_before_anything_is_made(
    address: str, says: str, videos: Path, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status = 3 if "no-such-bucket" in address else 2
    for command in (("manifest", "folder", videos), ("chunk", *LEN), ("status",), ("gc",)):
        assert says in prep_here(*command, "--data", address, status=status).error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault("error", status=403, code="InvalidAccessKeyId"), "the credentials are refused"),
        (Fault("error", status=403, code="RequestTimeTooSkewed"), "the clock of this machine"),
        (Fault("error", method="PUT", status=403, code="AccessDenied"), "access denied (AccessDenied)"),
    ],
)
def test_a_bucket_that_refuses_is_reported_and_left_alone(
    fault: Fault, says: str, data: str, chunks: Path, faults: Faults
) -> None:
    faults.set(fault)
    for command in (("chunk", *LEN), ("retry", "--engine", "processes"), ("gc",)):
        assert says in prep_here(*command, "--data", data, status=3).error
    faults.set()
    assert contents_of(data) == contents(chunks)


def test_credentials_that_are_refused_at_the_start_of_a_worker_end_the_run_like_all_refusals(
    data: str, faults: Faults
) -> None:
    objects = open_objects(data)
    objects.delete(next(info.key for info in objects.list() if "/commits/" in info.key))
    faults.set(Fault("error", method="GET", path=r"/\.tmp-\w+-workers", status=400, code="ExpiredToken"))
    error = prep_here("chunk", *LEN, "--workers", 1, "--data", data, status=3).error
    assert error.startswith(f"no usable workers: this machine: {data} cannot be used: ")
    assert "the credentials are refused (ExpiredToken)" in error


def test_a_run_that_lost_its_lock_stops_and_publishes_nothing_more(
    data: str, chunks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = open_objects(data)
    commits = [info.key for info in objects.list() if "/commits/" in info.key]
    objects.delete(*commits)

    def taken_over(task: ShardTask) -> ShardResult:
        objects.write(".lock", b'{"holder": "process 7 on node1"}')
        monkeypatch.setattr("clipmill.manifests.storage.leases.EXPIRY_S", 0.0)
        return stop_result(task, FailureCode.WORKER_LOST, "")

    monkeypatch.setattr("clipmill.prep.video.worker.make_shard", taken_over)
    monkeypatch.setattr("clipmill.prep.engines.processes.ProcessEngine", lambda num_workers: Here())
    ran = prep_here("chunk", *LEN, "--workers", 1, "--data", data, status=1)
    assert "taken over by process 7 on node1" in ran.stderr and "run the same command again" in ran.stderr
    left = {key for key in contents_of(data) if "/.tmp-" not in key}  # the next run removes the token of this run
    assert left == contents(chunks).keys() - {*commits}


def test_a_run_that_lost_its_lock_at_its_end_does_not_end_well(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = open_objects(data)

    def taken_over(variant_dir: Path, contents: Contents) -> None:
        write_contents(variant_dir, contents)
        objects.write(".lock", b'{"holder": "process 7 on node1"}')
        monkeypatch.setattr("clipmill.manifests.storage.leases.EXPIRY_S", 0.0)

    monkeypatch.setattr("clipmill.shards.lists.write_contents", taken_over)
    objects.delete(next(info.key for info in objects.list() if info.key.endswith("/chunks.arrow")))
    ran = prep_here("chunk", *LEN, "--workers", 1, "--data", data, status=1)
    assert f"failed: the lock of {data} was taken over by process 7 on node1" in ran.stderr


def test_synthetic_videos_need_a_local_folder(bucket: str) -> None:
    assert "--out" in prep_here("manifest", "synthetic", "--data", f"{bucket}/data", status=2).stderr
    assert not list(open_objects(bucket).list())


def test_messages_name_the_address_and_not_the_working_copy(data: str) -> None:
    folder = open_data(data)
    print(f"failures are listed in {folder}/failures.jsonl", file=UrlStream(text := StringIO()))
    assert text.getvalue() == f"failures are listed in {data}/failures.jsonl\n"


def test_an_empty_folder_of_a_bucket_is_no_data_folder(bucket: str) -> None:
    ran = prep_here("status", "--data", f"{bucket}/none", status=2)
    assert f"there is no data folder at {bucket}/none" in ran.error and f"--data {bucket}/none" in ran.stderr


def test_a_key_that_is_gone_for_good_is_named(data: str, faults: Faults) -> None:
    faults.set(vanished_key("/commits/"))
    assert "/commits/" in prep_here("status", "--data", data, status=1).stderr


def test_a_server_that_fails_for_good_ends_the_run_and_the_next_goes_on(
    data: str, chunks: Path, faults: Faults, few_retries: None
) -> None:
    variant = next(iter((chunks / "video").iterdir())).name
    open_objects(data).delete(f"video/{variant}/commits/000000.json")
    faults.set(Fault("error", method="PUT", path=r"\.tar$", status=403, code="AccessDenied"))
    ran = prep_here("chunk", *LEN, "--workers", 1, "--data", data, status=1)
    assert "failed" in ran.stderr
    faults.set()
    prep_here("chunk", *LEN, "--workers", 1, "--data", data)
    assert contents_of(data) == contents(chunks)


def test_advise_reads_from_the_bucket(data: str, faults: Faults) -> None:
    ran = prep_here("advise", "--step-time", 0.5, "--batch", 8, "--json", "--data", data)
    ranges = [path for method, path in faults.seen().requests if method == "GET" and path.endswith(".tar")]
    assert len(ranges) >= 10 and ran.summary


def test_a_copied_data_folder_is_read_once(data: str, faults: Faults) -> None:
    objects = open_objects(data)
    time.sleep(1.1)  # the server's timestamps have a resolution of one second
    for info in list(objects.list()):
        if info.key.endswith((".tar", ".idx", ".arrow")):
            objects.write(info.key, objects.read(info.key))
    faults.set()
    for num_tars in (2, 0):
        prep_here("chunk", *LEN, "--data", data)
        assert sum(path.endswith(".tar") for _, path in faults.seen().requests) == num_tars
        faults.set()
