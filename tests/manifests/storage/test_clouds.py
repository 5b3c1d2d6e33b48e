"""Tests of the object storage client with Google's and Microsoft's protocols, where they differ from S3."""

import secrets
from collections.abc import Iterator

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.leases import Lease, LeaseHeld, server_time_s
from clipmill.manifests.storage.objects import open_objects
from clipmill.manifests.storage.stores import AccessRefused, Conflict
from tests.object_storage.azure import PROGRAM, azure_server, is_installed
from tests.object_storage.google import google_server, write_key_file
from tests.object_storage.server import S3Server


@pytest.fixture(scope="module", params=["gs", "az"])
def cloud_bucket(request: pytest.FixtureRequest, s3: S3Server) -> Iterator[str]:
    """URL of an empty bucket on Google's server, or on Azure's emulator if it is installed."""
    if request.param == "az" and not is_installed():
        pytest.skip(f"{PROGRAM} is not installed (npm install azurite)")
    with (
        google_server(s3) if request.param == "gs" else azure_server() as server,
        pytest.MonkeyPatch.context() as environment,
    ):
        for name, value in server.environment().items():
            environment.setenv(name, value)
        yield server.make_bucket(f"test-{secrets.token_hex(8)}")


def test_an_object_has_one_version_however_it_is_asked_for(cloud_bucket: str) -> None:
    objects = open_objects(f"{cloud_bucket}/versions")
    etag = objects.write("a/k", b"content")
    objects.copy("a/k", "b é #1%")
    assert objects.info("a/k").etag == etag
    assert {info.key: info for info in objects.list()} == {key: objects.info(key) for key in ("a/k", "b é #1%")}


def test_conditional_writes_have_one_winner(cloud_bucket: str) -> None:
    objects = open_objects(f"{cloud_bucket}/conditions")
    etag = objects.write("k", b"first", only_new=True)
    with pytest.raises(Conflict):
        objects.write("k", b"second", only_new=True)
    newer = objects.write("k", b"third", replaces=etag)
    with pytest.raises(Conflict):
        objects.write("k", b"fourth", replaces=etag)
    with pytest.raises(Conflict):
        objects.write("none", b"fifth", replaces=newer)
    assert objects.read("k") == b"third"


def test_objects_that_do_not_exist_may_be_deleted_with_others(cloud_bucket: str) -> None:
    objects = open_objects(f"{cloud_bucket}/deleted")
    for key in ("a", "b", "c"):
        objects.write(key, b"")
    objects.delete("none", "a", "b", "no other", "c")
    assert not list(objects.list())
    objects.delete("none")


def test_a_lease_has_one_holder(cloud_bucket: str) -> None:
    objects = open_objects(f"{cloud_bucket}/leases")
    first, second = (Lease(objects, ".lock", resource="the folder") for _ in range(2))
    for _ in range(2):
        first.acquire()
        with pytest.raises(LeaseHeld, match="another command is writing to the folder"):
            second.acquire()
        first.note("still here")
        first.release()
    second.acquire()
    assert server_time_s(objects) >= objects.info(".lock").modified_s
    second.release()


def test_refusals_name_the_variables_of_the_cloud(
    cloud_bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scheme = cloud_bucket.partition("://")[0]
    with pytest.raises(Exception, match=r"the bucket of .*no-such-bucket/data does not exist"):
        list(open_objects(f"{scheme}://no-such-bucket/data").list())
    if scheme == "az":
        with pytest.raises(UserError, match="refuses the name"):
            list(open_objects("az://A_/data").list())
    key_file = write_key_file(tmp_path_factory.mktemp("key") / "other.json")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm90IHRoZSBrZXk=")
    with pytest.raises(AccessRefused, match="credentials are refused") as refused:
        list(open_objects(cloud_bucket).list())
    variable = {"gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_STORAGE_ACCOUNT_KEY"}[scheme]
    assert variable in (refused.value.hint or "") and "clock" in (refused.value.hint or "")
    assert "AWS" not in (refused.value.hint or "")
