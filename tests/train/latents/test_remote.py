"""Latents and stored text in a bucket: the samples of the local folder, read from the cache and by range."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.objects import Objects
from clipmill.shards.reader import Variant
from clipmill.train.data.data_folder import DataFolder, open_data_folder
from clipmill.train.data.interface import open_latents
from clipmill.train.data.mapped_tars import RemoteMaps
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.remote import open_cache
from clipmill.train.data.samples import Samples
from tests.object_storage.faults import Fault, Faults, vanished_key
from tests.object_storage.upload import upload
from tests.train.full_disk import fill
from tests.train.latents.conftest import SHARDS
from tests.train.latents.querying import segments
from tests.train.latents.test_checksums import flip
from tests.train.latents.written import Written, write_latents

ALL = "1GB"
NUM_BATCHES = 8


@pytest.fixture
def remote(written_data: Written, bucket: str) -> Objects:
    return upload(written_data.data_dir, f"{bucket}/data")


def open_folder(address: str, cache: Path, *, size: str = ALL) -> DataFolder:
    return open_data_folder(address, cache=cache, cache_size=size, column="latents")


GIVEN: dict[str, Any] = {"split": "train", "batch": 3, "seed": 5, "can_keep": True}


def loader(folder: DataFolder, **settings: Any) -> Samples[Any]:
    return open_latent_segments(segments(folder.path, tars=folder.tars, **{**GIVEN, **settings}))


def first_batches(samples: Samples[Any]) -> Iterator[LoadedBatch]:
    batches = samples.batches()
    yield from islice(batches, NUM_BATCHES)
    batches.close()


def bits(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.view(torch.int16).flatten().tolist()
    return values


def content(batches: Iterator[LoadedBatch]) -> list[Any]:
    """Return all entries of batches without failures."""
    batches_read = []
    for loaded_batch in batches:
        assert not loaded_batch.failed
        batch = loaded_batch.batch
        text = bits(batch["text"]) if "text" in batch else None
        batches_read.append((list(batch["key"]), bits(batch["latents"]), batch["position"].tolist(), text))
    return batches_read


def maps_of(samples: Samples[Any]) -> RemoteMaps:
    assert isinstance(samples.reader.segments.maps, RemoteMaps)
    return samples.reader.segments.maps


def size_of_text(written: Written) -> int:
    return sum(path.stat().st_size for path in written.text_dir.glob("*.tar"))


def copies_of(written: Written, cache: Path) -> list[Path]:
    names = {path.name for path in written.latents_dir.glob("*.tar")}
    return sorted(path for path in (cache / "objects").iterdir() if path.name.partition("-")[2] in names)


def fetch_all(samples: Samples[Any]) -> None:
    maps = maps_of(samples)
    for number in range(len(maps.starts)):
        maps.fetch(number, waits=True)


@pytest.mark.parametrize("has_room", [True, False])
def test_latents_in_a_bucket_are_those_of_the_local_folder(
    written_data: Written, remote: Objects, tmp_path: Path, has_room: bool
) -> None:
    limit = 10**9 if has_room else size_of_text(written_data)
    samples, expected = (
        loader(open_folder(remote.url, tmp_path, size=f"{limit}B")),
        loader(DataFolder(written_data.data_dir)),
    )
    assert samples.fingerprint == expected.fingerprint
    assert ("the rest is read by range" in samples.describe()) == (not has_room)
    assert content(first_batches(samples)) == content(first_batches(expected))
    assert content(samples.evaluation_batches()) == content(expected.evaluation_batches())
    assert samples.shown_frames(1, num_frames=1)[0].tolist() == expected.shown_frames(1, num_frames=1)[0].tolist()
    assert sum(path.stat().st_size for path in (tmp_path / "objects").iterdir()) <= limit
    if not has_room:
        assert not copies_of(written_data, tmp_path)


def test_compressed_latents_are_read_by_range(written_data: Written, bucket: str, tmp_path: Path) -> None:
    packed = Written(tmp_path / "packed")
    packed.data_dir.mkdir()
    upload_from = tmp_path / "packed"
    (upload_from / "manifest").symlink_to(written_data.data_dir / "manifest")
    write_latents(packed, SHARDS, is_compressed=True)
    remote = upload(upload_from, f"{bucket}/packed")
    upload(written_data.data_dir / "manifest", f"{remote.url}/manifest")
    settings = {"captions": "none", "tails": "pad"}
    samples = loader(open_folder(remote.url, tmp_path / "cache", size="1B"), **settings)
    assert content(first_batches(samples)) == content(first_batches(loader(DataFolder(upload_from), **settings)))


def test_what_is_in_the_cache_is_not_asked_for_again(
    written_data: Written, remote: Objects, tmp_path: Path, faults: Faults
) -> None:
    fetch_all(loader(open_folder(remote.url, tmp_path)))
    faults.set()
    samples = loader(open_folder(remote.url, tmp_path))
    assert content(first_batches(samples)) == content(first_batches(loader(DataFolder(written_data.data_dir))))
    asked = [path for _, path in faults.seen().requests]
    assert asked and not [path for path in asked if ".tar" in path or "index" in path]


def test_a_copy_that_is_damaged_is_mended_and_fetched_again_by_the_next_run(
    written_data: Written, remote: Objects, tmp_path: Path
) -> None:
    fetch_all(loader(open_folder(remote.url, tmp_path)))
    for path in copies_of(written_data, tmp_path):
        with path.open("r+b") as file:
            file.seek(1500)
            file.write(bytes([path.read_bytes()[1500] ^ 1]))
    samples = loader(open_folder(remote.url, tmp_path))
    assert maps_of(samples).are_mapped(samples.reader.segments.records.array_place)
    # Samples are read in order, so that all are visited.
    assert content(samples.evaluation_batches()) == content(
        loader(DataFolder(written_data.data_dir)).evaluation_batches()
    )
    assert not copies_of(written_data, tmp_path)


def test_a_copy_that_was_cut_is_fetched_again(written_data: Written, remote: Objects, tmp_path: Path) -> None:
    fetch_all(loader(open_folder(remote.url, tmp_path)))
    first = copies_of(written_data, tmp_path)[0]
    whole = first.read_bytes()
    os.truncate(first, 100)
    samples = loader(open_folder(remote.url, tmp_path))
    assert content(first_batches(samples)) == content(first_batches(loader(DataFolder(written_data.data_dir))))
    fetch_all(samples)
    assert first.read_bytes() == whole


def test_faults_in_passing_lose_nothing(written_data: Written, remote: Objects, tmp_path: Path, faults: Faults) -> None:
    faults.set(
        Fault("error", path=r"\.tar", every=3),
        Fault("cut", path=r"\.tar", skip=1, every=4),
        Fault("delay", path=r"\.tar", every=5, delay_s=0.05),
    )
    samples = loader(open_folder(remote.url, tmp_path, size=f"{size_of_text(written_data)}B"))
    assert content(first_batches(samples)) == content(first_batches(loader(DataFolder(written_data.data_dir))))
    assert faults.seen().num_faults > 3


def test_a_disk_that_fills_up_is_noted_and_the_rest_is_read_by_range(
    written_data: Written, remote: Objects, tiny_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = loader(open_folder(remote.url, tiny_disk))
    fill(tiny_disk)
    assert content(first_batches(samples)) == content(first_batches(loader(DataFolder(written_data.data_dir))))
    stderr = capsys.readouterr().err
    assert "note: the cache cannot store more tars, so the remaining tars are read by range: [Errno 28]" in stderr
    assert not copies_of(written_data, tiny_disk)


def test_a_tar_that_vanishes_is_failures_by_name(
    written_data: Written, remote: Objects, tmp_path: Path, faults: Faults, few_retries: None
) -> None:
    samples = loader(open_folder(remote.url, tmp_path, size=f"{size_of_text(written_data)}B"))
    faults.set(vanished_key(r"latents/.*/000001-\w+\.tar"))
    batches = list(samples.evaluation_batches())
    failures = [failure for loaded_batch in batches for failure in loaded_batch.failed]
    assert {failure.reason for failure in failures} == {"shard_unreadable"}
    assert {failure.key.partition("_")[0] for failure in failures} == {"c", "d"} & {
        key.partition("_")[0]
        for loaded_batch in loader(DataFolder(written_data.data_dir)).evaluation_batches()
        for key in loaded_batch.batch["key"]
    }
    assert all("000001-" in failure.detail for failure in failures)
    assert sum(len(loaded_batch.batch.get("key", ())) for loaded_batch in batches) + len(failures) == len(samples)


def test_wrong_bytes_of_an_object_are_reported_under_its_address(
    data_copy: Written, bucket: str, tmp_path: Path
) -> None:
    flip(data_copy.data_dir, column="latents", key="c_000015000")
    tar = (
        Variant.open(data_copy.data_dir, column="latents")
        .find("c_000015000")[0]
        .tar_path.relative_to(data_copy.data_dir)
    )
    samples = loader(
        open_folder(upload(data_copy.data_dir, f"{bucket}/data").url, tmp_path, size=f"{size_of_text(data_copy)}B")
    )
    failed = [failure for loaded in samples.evaluation_batches() for failure in loaded.failed]
    assert {(failure.key, failure.reason) for failure in failed} == {("c_000015000", "checksum")}
    assert f"({bucket}/data/{tar}) do not match their checksum" in failed[0].detail


def test_text_that_does_not_fit_is_the_users_mistake(written_data: Written, remote: Objects, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the complete text column has to be in the cache") as caught:
        loader(open_folder(remote.url, tmp_path, size="1kB"))
    assert caught.value.hint and "--cache-size" in caught.value.hint


def test_open_latents_reads_a_bucket_and_a_mixture(written_data: Written, remote: Objects, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch": 3, "shuffle": False, "captions": "embedding"}

    def read_open_latents(data: Any) -> list[Any]:
        batches = open_latents(data, cache=tmp_path, cache_size=f"{size_of_text(written_data)}B", **settings)
        return [(list(batch["key"]), bits(batch["latents"]), bits(batch["text"])) for batch in batches]

    assert read_open_latents(remote.url) == read_open_latents(str(written_data.data_dir))
    assert read_open_latents([remote.url, str(written_data.data_dir)]) == read_open_latents(
        [str(written_data.data_dir), remote.url]
    )


def test_a_cache_keeps_its_claims(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, size="100B")
    assert cache.claim({"a": 60}) and cache.claim({"a": 60}) and not cache.claim({"b": 50}, only_if_it_fits=True)
