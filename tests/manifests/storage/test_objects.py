"""Tests of the object storage client, against a real S3 server with faults."""

import os
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage import waiting
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.objects import Objects, open_objects
from clipmill.manifests.storage.stores import AccessRefused, Conflict
from tests.object_storage.faults import Fault, Faults, vanished_key
from tests.object_storage.server import S3Server

CONTENT = bytes(range(256)) * 800


def test_addresses_have_a_scheme() -> None:
    assert is_remote("s3://bucket/folder") and is_remote("ftp://host/x")
    assert not is_remote("data") and not is_remote("/data/s3:/x") and not is_remote("a/b://c")


@pytest.mark.parametrize("address", ["ftp://host/x", "hdfs://host/x", "file:///x", "s3://", "s3:///folder"])
def test_an_address_that_cannot_be_served_is_refused(address: str) -> None:
    with pytest.raises(UserError) as refused:
        open_objects(address)
    assert address in str(refused.value) and "s3://BUCKET" in (refused.value.hint or "")


def test_http_must_be_allowed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(UserError, match="not encrypted"):
        open_objects(bucket)


def test_objects_are_written_read_listed_and_deleted(bucket: str, tmp_path: Path) -> None:
    objects = open_objects(f"{bucket}/data/")
    assert objects.url == f"{bucket}/data"
    etag = objects.write("a/b.bin", CONTENT)
    (tmp_path / "file").write_bytes(CONTENT * 60)  # 12 MB, which are uploaded in several parts
    objects.write("a/ü #1%.bin", tmp_path / "file")
    open_objects(bucket).write("data2/c", b"outside")
    assert objects.read("a/b.bin") == CONTENT
    assert objects.read_range("a/b.bin", 5, 10) == CONTENT[5:15]
    ranges = [(300_000 % 204_000, 7), (0, 3), (9, 0), (100_000, 100)]
    assert objects.read_ranges("a/b.bin", ranges) == [CONTENT[begin : begin + size] for begin, size in ranges]
    assert objects.info("a/b.bin").etag == etag and objects.info("a/b.bin").size_bytes == len(CONTENT)
    listed = {info.key: info for info in objects.list()}
    assert listed.keys() == {"a/b.bin", "a/ü #1%.bin"} and listed["a/b.bin"] == objects.info("a/b.bin")
    objects.fetch("a/ü #1%.bin", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT * 60
    objects.delete("a/b.bin", "a/none")
    assert [info.key for info in objects.list("a")] == ["a/ü #1%.bin"]
    assert not list(objects.list("none"))


def test_requests_and_bytes_are_counted(faults: Faults, bucket: str) -> None:
    objects = open_objects(bucket)
    objects.write("k", CONTENT)
    objects.read("k")
    objects.read_ranges("k", [(0, 10), (20, 10)])
    assert objects.num_requests == len(faults.seen().requests) == 3
    assert objects.num_bytes == 2 * len(CONTENT) + 20


def test_a_client_can_be_sent_to_a_worker(bucket: str) -> None:
    objects = open_objects(bucket)
    objects.write("k", b"1")
    assert pickle.loads(pickle.dumps(objects)).read("k") == b"1"


@pytest.mark.parametrize("kind", ["cut", "lost", "error"])
def test_answers_that_fail_in_passing_are_retried(kind: str, faults: Faults, bucket: str, tmp_path: Path) -> None:
    objects = open_objects(bucket)
    objects.write("k", CONTENT)
    faults.set(Fault(kind, method="GET", every=2))  # type: ignore[arg-type]
    assert objects.read("k") == CONTENT
    assert objects.read_ranges("k", [(1, 5)]) == [CONTENT[1:6]]
    objects.fetch("k", tmp_path / "k")
    assert (tmp_path / "k").read_bytes() == CONTENT
    assert faults.seen().num_faults >= 3


def test_listings_and_deletions_whose_answer_is_cut_are_repeated(faults: Faults, bucket: str) -> None:
    objects = open_objects(f"{bucket}/folder")
    keys = [f"k{number:04d}" for number in range(5)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: objects.write(key, b""), keys))
    faults.set(Fault("cut", path="list-type", times=2, every=2))
    assert [info.key for info in objects.list()] == keys
    assert len(list(objects.list(recursive=False))) == len(keys)
    assert faults.seen().num_faults == 2
    faults.set(Fault("cut", method="POST", times=1))
    objects.delete(*keys)
    assert not list(objects.list())


def test_a_server_that_hangs_is_asked_again(faults: Faults, bucket: str, few_retries: None) -> None:
    objects = open_objects(bucket)
    faults.set(Fault("hang", times=1))
    objects.write("k", CONTENT)
    assert faults.seen().num_faults == 1 and objects.read("k") == CONTENT


def test_a_server_that_does_not_answer_is_named_once(
    faults: Faults, bucket: str, few_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(waiting, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(waiting, "_PERIOD_S", 0.1)
    waiting.set_wait_reporter(told.append)
    try:
        objects = open_objects(bucket)
        objects.write("k", CONTENT)
        assert not told
        faults.set(Fault("hang", times=1))
        assert objects.read("k") == CONTENT
    finally:
        waiting.set_wait_reporter(None)
    assert told == [f"waiting for {bucket}, which has not responded for 0.2 s; giving up after 2 minutes"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("cut", method="GET"), "was truncated in all attempts"),
        (Fault("error"), "503 Injected|503 Service Unavailable"),
        (Fault("lost"), "does not respond"),
    ],
)
def test_retries_are_bounded(
    fault: Fault, reason: str, faults: Faults, bucket: str, few_retries: None, tmp_path: Path
) -> None:
    objects = open_objects(bucket)
    objects.write("k", CONTENT)
    faults.set(fault)
    with pytest.raises(OSError, match=reason) as failed:
        objects.read("k")
    assert failed.value.filename == f"{bucket}/k"
    assert len(faults.seen().requests) == 3
    with pytest.raises(OSError, match=reason):
        objects.fetch("k", tmp_path / "k")
    assert not list(tmp_path.iterdir())


def test_a_missing_key_is_not_retried(faults: Faults, bucket: str) -> None:
    objects = open_objects(bucket)
    objects.write("k", CONTENT)
    faults.set(vanished_key("k"))
    for read in (objects.read, lambda key: objects.read_range(key, 0, 5), objects.info):
        with pytest.raises(FileNotFoundError) as missing:
            read("none" if read == objects.info else "k")
        assert missing.value.filename.startswith(bucket)
    assert len(faults.seen().requests) == 3


def test_an_object_shorter_than_its_record_is_an_error(bucket: str) -> None:
    objects = open_objects(bucket)
    objects.write("k", b"12345")
    with pytest.raises(OSError, match="ends before byte 8"):
        objects.read_range("k", 3, 5)


def test_conditional_writes_have_one_winner(bucket: str) -> None:
    objects = open_objects(bucket)
    etag = objects.write("k", b"first", only_new=True)
    with pytest.raises(Conflict):
        objects.write("k", b"second", only_new=True)
    newer = objects.write("k", b"third", replaces=etag)
    with pytest.raises(Conflict):
        objects.write("k", b"fourth", replaces=etag)
    with pytest.raises(Conflict):
        objects.write("none", b"fifth", replaces=newer)
    assert objects.read("k") == b"third"


@pytest.mark.parametrize("kind", ["lost", "hang"])
def test_a_conditional_write_whose_answer_was_lost_finds_its_own_object(
    kind: str, faults: Faults, bucket: str, few_retries: None
) -> None:
    objects = open_objects(bucket)
    faults.set(Fault(kind, method="PUT", times=1))  # type: ignore[arg-type]
    etag = objects.write("k", b"mine", only_new=True)
    faults.set(Fault(kind, method="PUT", times=1))  # type: ignore[arg-type]
    assert objects.write("k", b"mine too", replaces=etag) == objects.info("k").etag != etag
    assert faults.seen().methods() == Counter(PUT=2, GET=1, HEAD=1) or kind == "hang"


def test_a_missing_bucket_is_named(s3: S3Server) -> None:
    objects = open_objects("s3://no-such-bucket/data")
    for use in (lambda: objects.read("k"), lambda: objects.write("k", b"1"), lambda: list(objects.list())):
        with pytest.raises(UserError, match="the bucket of s3://no-such-bucket/data does not exist"):
            use()


def test_unknown_credentials_are_refused_by_a_real_server(s3: S3Server, bucket: str) -> None:
    objects = open_objects(bucket)
    s3.require_known_users()
    try:
        with pytest.raises(AccessRefused, match=r"credentials are refused \(InvalidAccessKeyId") as refused:
            objects.read("k")
    finally:
        s3.require_known_users(required=False)
    assert isinstance(refused.value, PermissionError) and "AWS_ACCESS_KEY_ID" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("RequestTimeTooSkewed", "the clock of this machine"),
        ("SignatureDoesNotMatch", "credentials"),
        ("AccessDenied", "access denied"),
    ],
)
def test_refusals_are_explained_at_once(code: str, says: str, faults: Faults, bucket: str) -> None:
    objects = open_objects(bucket)
    faults.set(Fault("error", status=403, code=code))
    uses = (lambda: objects.read("k"), lambda: objects.write("k", b"1"), lambda: list(objects.list()))
    for use in uses:
        with pytest.raises(AccessRefused, match=says):
            use()
    assert len(faults.seen().requests) == 3


@pytest.mark.parametrize(("status", "code"), [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed")])
def test_a_bucket_of_another_region_is_told(status: int, code: str, faults: Faults, bucket: str) -> None:
    address = f"{bucket}/{'a-long-name-of-a-folder/' * 4}data"
    objects = open_objects(address)
    faults.set(Fault("error", status=status, code=code))
    for use in (lambda: objects.read("k"), lambda: objects.write("k", b"1"), lambda: list(objects.list())):
        with pytest.raises(UserError, match=f"the bucket of {address} is in a different region") as told:
            use()
        assert "AWS_REGION" in (told.value.hint or "")


def test_a_web_server_is_read_only(s3: S3Server, tmp_path: Path) -> None:
    objects: Objects = open_objects(f"{s3.endpoint}/some")
    with pytest.raises(UserError, match="read-only"):
        objects.write("k", b"1")
    with pytest.raises(UserError, match="cannot be listed"):
        next(objects.list())


def test_a_forked_process_says_so_instead_of_waiting_for_ever(bucket: str) -> None:
    objects = open_objects(bucket)
    objects.write("k", b"1")
    child = os.fork()
    if not child:
        try:
            objects.read("k")
        except RuntimeError as error:
            os._exit(7 if "spawn" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
