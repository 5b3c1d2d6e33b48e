"""Data folder on an HTTP server: same clips, few bytes, retries, and no replacement of failed samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.data_folder import open_data_folder
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings, SampleRequest
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.remote import RemoteTars
from clipmill.train.data.samples import Samples
from clipmill.train.models.text import load_tokenizer
from tests.train.data.http_folder import HttpFolder

LOADING = LoaderSettings(batch=2, num_threads=1, num_ahead=2, seed=0)
SHAPE = ClipShape(sampling=Sampling(num_frames=1), size_px=32)


def open_set(address: str, cache: Path | None = None) -> Samples[Any]:
    folder = open_data_folder(address, cache=cache)
    return open_captioned_clips(
        ClipQuery(folder.path, split="train", shape=SHAPE, loading=LOADING, tars=folder.tars), tokenize=load_tokenizer()
    )


def tar_of(samples: Samples[Any], data_server: Path) -> Path:
    [path] = data_server.glob("data/video/*/000000-*.tar")
    return path


def test_clips_of_a_remote_folder_are_those_of_the_local_one(
    data_dir: Path, data_server: HttpFolder, tmp_path: Path
) -> None:
    remote, local = open_set(f"{data_server.address}/data", tmp_path / "cache"), open_set(str(data_dir))
    assert remote.fingerprint == local.fingerprint and remote.describe() == local.describe()
    for sample in range(len(local)):
        [sample_read], [other] = (
            samples.reader.load([SampleRequest(sample, sample, 3)]) for samples in (remote, local)
        )
        assert not isinstance(sample_read, FailedSample) and not isinstance(other, FailedSample)
        assert np.array_equal(sample_read["video"], other["video"]) and sample_read["key"] == other["key"]


def test_only_the_packets_that_are_needed_are_fetched(
    data_server: HttpFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteTars, "gap_bytes", 0)
    samples = open_set(f"{data_server.address}/data", tmp_path / "cache")
    tar = tar_of(samples, tmp_path / "served")
    [sample] = samples.reader.load([SampleRequest(0, 0, None)])
    assert not isinstance(sample, FailedSample)
    fetched = data_server.num_bytes["/" + tar.relative_to(tmp_path / "served").as_posix()]
    assert 0 < fetched < tar.stat().st_size / 20


def test_a_read_that_fails_twice_and_then_works_gives_the_right_bytes(data_server: HttpFolder, tmp_path: Path) -> None:
    dataset = "/data/dataset.json"
    data_server.num_failures[dataset] = 2
    samples = open_set(f"{data_server.address}/data", tmp_path / "cache")
    tar = "/" + tar_of(samples, tmp_path / "served").relative_to(tmp_path / "served").as_posix()
    [before] = samples.reader.load([SampleRequest(0, 0, None)])
    data_server.num_failures[tar] = 2
    [sample] = samples.reader.load([SampleRequest(0, 0, None)])
    assert data_server.num_failures[tar] == data_server.num_failures[dataset] == 0
    assert not isinstance(sample, FailedSample) and not isinstance(before, FailedSample)
    assert np.array_equal(sample["video"], before["video"])


@pytest.mark.parametrize("trouble", ["fails for good", "comes short", "is gone", "is wrong"])
def test_a_read_that_never_works_is_a_failed_sample(data_server: HttpFolder, tmp_path: Path, trouble: str) -> None:
    samples = open_set(f"{data_server.address}/data", tmp_path / "cache")
    path = tar_of(samples, tmp_path / "served")
    tar = "/" + path.relative_to(tmp_path / "served").as_posix()
    if trouble == "fails for good":
        data_server.num_failures[tar] = 1000
    elif trouble == "comes short":
        data_server.cut.add(tar)
    elif trouble == "is wrong":
        path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))
    else:
        path.unlink()
    [failed] = samples.reader.load([SampleRequest(0, 5, None)])
    reason = "checksum" if trouble == "is wrong" else "shard_unreadable"
    assert isinstance(failed, FailedSample) and failed.reason == reason and failed.position == 5
    assert (f"in {data_server.address}{tar} do not match" if trouble == "is wrong" else path.name) in failed.detail


def test_an_index_is_copied_once_and_a_changed_one_refused(data_server: HttpFolder, tmp_path: Path) -> None:
    open_set(f"{data_server.address}/data", tmp_path / "cache")
    [index] = (tmp_path / "served").glob("data/video/*/000000-*.index.arrow")
    name = "/" + index.relative_to(tmp_path / "served").as_posix()
    once = data_server.num_bytes[name]
    open_set(f"{data_server.address}/data", tmp_path / "cache")
    assert data_server.num_bytes[name] == once > 0
    content = bytearray(index.read_bytes())
    content[-9] ^= 1
    index.write_bytes(content)
    with pytest.raises(UserError, match="differs from the file that was committed"):
        open_set(f"{data_server.address}/data", tmp_path / "other-cache")


def test_a_commit_that_went_away_goes_away_here(data_server: HttpFolder, tmp_path: Path) -> None:
    open_set(f"{data_server.address}/data", tmp_path / "cache")
    [commit] = (tmp_path / "served").glob("data/video/*/commits/000001.json")
    commit.unlink()
    open_set(f"{data_server.address}/data", tmp_path / "cache")
    [kept] = (tmp_path / "cache").rglob("commits/*.json")
    assert kept.name == "000000.json"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("{served}/nothing", "is not a data folder"),
        ("nosuchthing://bucket/data", "are not supported"),
        ("s3:///data", "is incomplete"),
    ],
)
def test_an_address_that_is_no_data_folder_is_the_users_mistake(
    data_server: HttpFolder, tmp_path: Path, address: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        open_set(address.format(served=data_server.address), tmp_path / "cache")


def test_a_cache_that_cannot_be_made_is_the_users_mistake(data_server: HttpFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        open_set(f"{data_server.address}/data", tmp_path / "file")
