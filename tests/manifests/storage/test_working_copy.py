"""Tests of folders that mirror a bucket: the bucket is authoritative, and local files can be lost at any time."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.locks import folder_lock
from clipmill.manifests.publish import publish_atomically, publish_bytes, remove, rename
from clipmill.manifests.storage.leases import LeaseLost
from clipmill.manifests.storage.mirrors import file_state, local_copy, mirror_of, show_urls
from clipmill.manifests.storage.mounting import open_data
from clipmill.manifests.storage.objects import Objects, open_objects
from clipmill.manifests.storage.working_copy import WorkingCopy
from clipmill.shards.opening import open_regular
from tests.object_storage.faults import Fault, Faults, vanished_key

TAR = b"tar" * 1000


@pytest.fixture(autouse=True)
def _own_scratch(other_machine: Callable[[], Path]) -> None:
    other_machine()


@pytest.fixture
def address(bucket: str) -> str:
    return f"{bucket}/data"


@pytest.fixture
def objects(address: str) -> Objects:
    """Return the objects of the data folder, as a different machine writes them."""
    objects = open_objects(address)
    objects.write("dataset.json", b"{}")
    objects.write("video/v-1/000001-0.tar", TAR)
    objects.write("video/v-1/000001-0.index.arrow", b"index")
    objects.write("video/v-1/commits/000001.json", b"one")
    return objects


def copy_of(address: str) -> tuple[Path, WorkingCopy]:
    """Return a working copy in its current state."""
    folder = open_data(address)
    copy = mirror_of(folder)
    assert isinstance(copy, WorkingCopy)
    copy.ensure_listed()
    return folder, copy


def test_records_are_fetched_and_other_files_stand_for_themselves(address: str, objects: Objects) -> None:
    folder, _ = copy_of(address)
    assert (folder / "video/v-1/commits/000001.json").read_bytes() == b"one"
    tar, index = folder / "video/v-1/000001-0.tar", folder / "video/v-1/000001-0.index.arrow"
    assert tar.stat().st_size == file_state(tar)[0] == len(TAR) and tar.stat().st_blocks == 0
    with os.fdopen(open_regular(tar), "rb") as file:
        assert file.read() == TAR
    assert tar.stat().st_blocks == 0 and not list(tar.parent.glob(".tmp-*"))
    os.close(open_regular(index))
    assert index.read_bytes() == b"index"
    with local_copy(tar):
        assert tar.read_bytes() == TAR
    assert tar.stat().st_blocks == 0 and tar.stat().st_size == len(TAR)
    assert show_urls(f"see {tar}:") == f"see {address}/video/v-1/000001-0.tar:"


def test_only_what_changed_is_fetched_again(address: str, objects: Objects, faults: Faults) -> None:
    folder, _ = copy_of(address)
    objects.write("dataset.json", b"[]")  # the same size as before, in the same second
    objects.delete("video/v-1/commits/000001.json")
    objects.write("video/v-1/000001-0.index.arrow", b"INDEX")
    (folder / "probes.parquet").write_text("left by a killed command")
    faults.set()
    copy_of(address)
    assert [path.rpartition("/")[2] for _, path in faults.seen().requests[1:]] == ["dataset.json"]
    assert (folder / "dataset.json").read_bytes() == b"[]"
    assert not (folder / "video/v-1/commits/000001.json").exists() and not (folder / "probes.parquet").exists()
    os.close(open_regular(folder / "video/v-1/000001-0.index.arrow"))
    assert (folder / "video/v-1/000001-0.index.arrow").read_bytes() == b"INDEX"
    faults.set()
    copy_of(address)
    assert faults.seen().methods() == {"GET": 1}
    shutil.rmtree(folder)
    folder.mkdir()
    copy_of(address)
    assert (folder / "dataset.json").read_bytes() == b"[]"


def test_files_are_written_to_the_bucket_before_they_appear(address: str, objects: Objects, faults: Faults) -> None:
    folder, _ = copy_of(address)
    faults.set(Fault("error", method="PUT", status=403, code="AccessDenied", times=1))
    with pytest.raises(PermissionError):
        publish_bytes(folder / "dataset.json", b"new")
    assert (folder / "dataset.json").read_bytes() == b"{}" == objects.read("dataset.json")
    with publish_atomically(folder / "video/v-1/000002-0.tar") as temporary:
        temporary.write_bytes(TAR)
    publish_bytes(folder / "dataset.json", b"new")
    assert (folder / "video/v-1/000002-0.tar").stat().st_blocks == 0  # no local copy is kept
    assert objects.read("video/v-1/000002-0.tar") == TAR and objects.read("dataset.json") == b"new"
    rename(folder / "dataset.json", folder / "old.json")
    remove(folder / "video/v-1/000001-0.tar")
    keys = {info.key for info in objects.list()}
    assert "old.json" in keys and not keys & {"dataset.json", "video/v-1/000001-0.tar"}
    faults.set()
    copy_of(address)
    assert faults.seen().methods() == {"GET": 1}  # the machine does not download its own files


def test_a_folder_appears_in_the_bucket_under_its_final_name(address: str, objects: Objects) -> None:
    folder, _ = copy_of(address)
    temporary = folder / "video/.tmp-0123456789ab-v-2"
    temporary.mkdir()
    publish_bytes(temporary / "recipe.json", b"recipe")
    assert not any("v-2" in info.key for info in objects.list())
    rename(temporary, folder / "video/v-2")
    assert objects.read("video/v-2/recipe.json") == b"recipe"
    rename(folder / "video/v-2", temporary)
    assert not any("v-2" in info.key for info in objects.list()) and (temporary / "recipe.json").is_file()


def test_whoever_lost_the_lock_publishes_nothing(
    address: str, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copy = copy_of(address)
    with pytest.raises(LeaseLost), copy.column_lock(".lock"):
        publish_bytes(folder / "dataset.json", b"mine")
        monkeypatch.setattr("clipmill.manifests.storage.leases.EXPIRY_S", 0.0)
        objects.write(".lock", b'{"holder": "another"}')
        for publish in (
            lambda: publish_bytes(folder / "dataset.json", b"late"),
            lambda: remove(folder / "dataset.json"),
        ):
            with pytest.raises(LeaseLost, match="another"):
                publish()
    assert objects.read("dataset.json") == b"mine"


def test_the_lock_of_the_folder_brings_its_own_records_up_to_date(address: str, objects: Objects) -> None:
    folder, _ = copy_of(address)
    objects.write("dataset.json", b"of another command")
    with folder_lock(folder):
        assert (folder / "dataset.json").read_bytes() == b"of another command"


def test_a_key_that_is_listed_and_gone_is_an_error_that_names_it(
    address: str, objects: Objects, faults: Faults
) -> None:
    faults.set(vanished_key("commits", times=1))
    folder, _ = copy_of(address)  # it was deleted while the bucket was read
    shutil.rmtree(folder / "video")
    faults.set(vanished_key("commits"))
    with pytest.raises(FileNotFoundError) as missing:
        copy_of(address)
    assert missing.value.filename == f"{address}/video/v-1/commits/000001.json"


def test_commands_at_once_have_folders_of_their_own(address: str, objects: Objects) -> None:
    folder, _ = copy_of(address)
    program = "import sys; from clipmill.manifests.storage.mounting import open_data; print(open_data(sys.argv[1]))"
    command = [sys.executable, "-c", program, address]
    other = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert Path(other).parent == folder.parent and Path(other) != folder == open_data(address)
    assert folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_web_server_cannot_hold_a_data_folder() -> None:
    with pytest.raises(UserError, match="cannot be a data folder of prep"):
        open_data("https://example.org/data")
