"""Remote storage other than a well-behaved web server, and the cache when the data change or the disk is full."""

import json
import shutil
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_json
from clipmill.manifests.storage.objects import open_objects
from clipmill.manifests.store import CAPTIONS_FILE, staged_path
from clipmill.shards.lists import finish_run
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.remote import local_copy
from tests.object_storage.server import S3Server
from tests.train.data.http_folder import HttpFolder
from tests.train.data.test_remote import open_set, tar_of
from tests.train.full_disk import make_read_only
from tests.train.tiny_data import Caption, encode_chunk, video_sample, write_captions, write_shard


def test_a_clip_at_the_end_of_a_long_chunk_is_a_small_part_of_its_tar(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    write_shard(folder, 0, [video_sample("v", 0, encode_chunk(0, 150, size_px=256))], split="train")
    write_captions(folder, {"v": "train"}, [Caption("v", 14.5, 14.9, "its end")])
    server = HttpFolder(folder)
    samples = open_set(server.address, tmp_path / "cache")
    [sample] = samples.reader.load([SampleRequest(0, 0, None)])
    server.close()
    [tar] = folder.rglob("*.tar")
    assert not isinstance(sample, FailedSample)
    assert 0 < server.num_bytes["/" + tar.relative_to(folder).as_posix()] < tar.stat().st_size / 5


def test_a_server_without_ranges_is_named_and_not_asked_again(data_server: HttpFolder, tmp_path: Path) -> None:
    samples = open_set(f"{data_server.address}/data", tmp_path / "cache")
    tar = tar_of(samples, tmp_path / "served")
    address = "/" + tar.relative_to(tmp_path / "served").as_posix()
    data_server.without_ranges.add(address)
    [failed] = samples.reader.load([SampleRequest(0, 0, None)])
    assert isinstance(failed, FailedSample) and failed.reason == "shard_unreadable"
    assert "the server does not support ranges" in failed.detail
    assert data_server.num_bytes[address] == tar.stat().st_size


def test_a_server_that_knows_no_ranges_is_refused_before_a_tar_is_touched(
    data_server: HttpFolder, tmp_path: Path
) -> None:
    data_server.without_ranges.add("/data/dataset.json")
    with pytest.raises(UserError, match="does not support range requests"):
        open_set(f"{data_server.address}/data", tmp_path / "cache")
    assert not [name for name in data_server.num_bytes if name.endswith(".tar")]


def test_tables_are_copied_again_when_the_manifest_has_changed(data_server: HttpFolder, tmp_path: Path) -> None:
    address, captions = f"{data_server.address}/data", "/data/manifest/captions.parquet"
    before = len(open_set(address, tmp_path / "cache"))
    once = data_server.num_bytes[captions]
    open_set(address, tmp_path / "cache")
    assert data_server.num_bytes[captions] == once
    write_captions(tmp_path / "served/data", {"a": "train"}, [Caption("a", 0, 1, "only one")])
    assert len(open_set(address, tmp_path / "cache")) == 1 < before


def test_a_table_is_found_under_the_name_that_a_killed_write_left_it(data_server: HttpFolder, tmp_path: Path) -> None:
    folder = tmp_path / "served/data/manifest"
    old = (folder / CAPTIONS_FILE).read_bytes()
    write_captions(tmp_path / "served/data", {"a": "train"}, [Caption("a", 0, 1, "only one")])
    mark = json.loads((folder / "manifest.json").read_bytes())["fingerprint"]
    (folder / CAPTIONS_FILE).rename(staged_path(folder, CAPTIONS_FILE, fingerprint=mark))
    (folder / CAPTIONS_FILE).write_bytes(old)
    assert len(open_set(f"{data_server.address}/data", tmp_path / "cache")) == 1


@pytest.mark.parametrize("name", ["manifest.json", "caption_spans.arrow"])
def test_a_damaged_manifest_over_there_is_refused_and_a_mended_one_taken(
    data_server: HttpFolder, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "served/data/manifest" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(UserError, match=rf"{name} is damaged"):
        open_set(f"{data_server.address}/data", tmp_path / "cache")
    path.write_bytes(whole)
    open_set(f"{data_server.address}/data", tmp_path / "cache")


def test_a_commit_that_is_missing_over_there_is_refused(data_server: HttpFolder, tmp_path: Path) -> None:
    [folder] = (tmp_path / "served/data/video").iterdir()
    publish_json(folder / "recipe.json", {})
    finish_run(folder, dropped_ids=(), planned_ids=(0, 1))
    open_set(f"{data_server.address}/data", tmp_path / "cache")
    (folder / "commits" / "000001.json").unlink()
    (folder / "commits.arrow").unlink()  # the merged table that replaces the commit records
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match=r"000001\.json: the commit record is missing"):
        open_set(f"{data_server.address}/data", tmp_path / "cache")


def test_a_copy_that_was_damaged_is_fetched_again(data_server: HttpFolder, tmp_path: Path) -> None:
    open_set(f"{data_server.address}/data", tmp_path / "cache")
    index = next((tmp_path / "cache").rglob("000000-*.index.arrow"))
    whole = index.read_bytes()
    index.write_bytes(whole[:-10] + bytes(10))
    opened = open_set(f"{data_server.address}/data", tmp_path / "cache")
    clips = [opened.reader.load([SampleRequest(number, number, 0)])[0] for number in range(len(opened))]
    assert not any(isinstance(clip, FailedSample) for clip in clips) and index.read_bytes() == whole
    captions = next((tmp_path / "cache").rglob(CAPTIONS_FILE))
    whole = captions.read_bytes()
    captions.write_bytes(whole[:-10] + bytes(10))
    open_set(f"{data_server.address}/data", tmp_path / "cache")
    assert captions.read_bytes() == whole


def test_a_tar_that_changed_over_there_is_fetched_again_and_the_old_copy_dropped(bucket: str, tmp_path: Path) -> None:
    objects, address = open_objects(bucket), f"{bucket}/0.tar"
    objects.write("0.tar", b"one" * 1000)
    first = local_copy(address, cache=tmp_path)
    assert first.read_bytes() == b"one" * 1000 and local_copy(address, cache=tmp_path) == first
    objects.write("0.tar", b"two" * 1000)
    second = local_copy(address, cache=tmp_path)
    assert second.read_bytes() == b"two" * 1000 and list((tmp_path / "objects").iterdir()) == [second]


def test_a_disk_that_is_full_is_named_at_once(tiny_disk: Path, bucket: str) -> None:
    open_objects(bucket).write("0.tar", bytes(1 << 20))
    with pytest.raises(UserError, match=r"cannot store a copy of s3://.*/0.tar: No space left") as caught:
        local_copy(f"{bucket}/0.tar", cache=tiny_disk, size="100MB")
    assert caught.value.hint and "--cache" in caught.value.hint
    assert not list(tiny_disk.rglob("*.tar"))


def test_a_cache_on_a_read_only_disk_is_the_users_mistake(tiny_disk: Path, bucket: str) -> None:
    make_read_only(tiny_disk)
    with pytest.raises(UserError, match=r"the cache folder .* cannot be written: Read-only") as caught:
        local_copy(f"{bucket}/0.tar", cache=tiny_disk)
    assert caught.value.hint and "--cache" in caught.value.hint


def test_a_cache_that_is_too_small_for_a_tar_is_the_users_mistake(bucket: str, tmp_path: Path) -> None:
    open_objects(bucket).write("0.tar", bytes(2000))
    with pytest.raises(
        UserError, match=r"has 2,000 bytes, but only 1,000 of 1,000 bytes are free or unused in the cache"
    ) as caught:
        local_copy(f"{bucket}/0.tar", cache=tmp_path, size="1kB")
    assert caught.value.hint and "--cache-size" in caught.value.hint


def test_buckets_that_are_not_there_or_refuse_are_the_users_mistake(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_set("s3://no-such-bucket-anywhere/data", tmp_path)
    with pytest.raises(UserError, match=r"is not a data folder: .*dataset\.json is missing"):
        open_set(f"{bucket}/data", tmp_path)
    s3.require_known_users()
    try:
        with pytest.raises(UserError, match="credentials are refused"):
            open_set(f"{bucket}/data", tmp_path)
    finally:
        s3.require_known_users(required=False)
