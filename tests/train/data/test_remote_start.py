"""Number of requests to open a remote data folder, and how the ranks on a machine share them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_json
from clipmill.manifests.storage.objects import Objects, open_objects
from clipmill.manifests.storage.stores import AccessRefused
from clipmill.shards.chunk_table import update_chunk_table
from clipmill.shards.commits import commit_path
from clipmill.shards.lists import finish_run
from clipmill.shards.reader import Variant
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.samples import Samples
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.server import S3Server
from tests.train.data.test_remote import open_set
from tests.train.full_disk import fill
from tests.train.tiny_data import VARIANT, Caption, encode_chunk, video_sample, write_captions, write_shard

NUM_SHARDS = 120


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data folder with many one-chunk shards and merged tables."""
    folder = tmp_path_factory.mktemp("many")
    payload = encode_chunk(0, 8)
    names = [f"v{number:04d}" for number in range(NUM_SHARDS)]
    for number, name in enumerate(names):
        write_shard(folder, number, [video_sample(name, 0, payload)], split="train")
    write_captions(folder, dict.fromkeys(names, "train"), [Caption(name, 0.0, 0.8, f"of {name}") for name in names])
    variant = folder / "video" / VARIANT
    publish_json(variant / "recipe.json", {})
    finish_run(variant, dropped_ids=(), planned_ids=range(NUM_SHARDS))
    assert update_chunk_table(Variant(variant), column="video")
    assert (variant / "commits.arrow").is_file()
    return folder


@pytest.fixture(scope="module")
def remote(many: Path, s3: S3Server) -> Objects:
    """Bucket with the same data folder, but only with the tars of shard 7."""
    objects = open_objects(s3.make_bucket("many-shards"))
    tables = {"commits.arrow", "contents.json"}  # uploaded first, so that all records are newer
    paths = sorted((path for path in many.rglob("*") if path.is_file()), key=lambda path: path.name not in tables)
    for path in paths:
        if path.suffix not in (".tar", ".idx") or "00007-" in path.name:
            objects.write(path.relative_to(many).as_posix(), path)
    return objects


@contextmanager
def without(remote: Objects, many: Path, *keys: str) -> Iterator[None]:
    """Remove some objects from the bucket for the duration of the block."""
    remote.delete(*keys)
    yield
    for key in keys:
        remote.write(key, many / key)


def num_requests(faults: Faults, work: Callable[[], object]) -> int:
    faults.set()
    work()
    return len(faults.seen().requests)


def test_opening_many_shards_takes_few_requests(many: Path, remote: Objects, faults: Faults, tmp_path: Path) -> None:
    opened: list[Samples[Any]] = []
    assert num_requests(faults, lambda: opened.append(open_set(remote.url, tmp_path))) < 20
    [samples], local = opened, open_set(str(many))
    assert samples.fingerprint == local.fingerprint and len(samples) == NUM_SHARDS
    assert not list(tmp_path.rglob("*.index.arrow")) and not list(tmp_path.rglob("commits/**/*.json"))
    [remote_sample], [other] = (its.reader.load([SampleRequest(7, 7, None)]) for its in (samples, local))
    assert not isinstance(remote_sample, FailedSample) and not isinstance(other, FailedSample)
    assert np.array_equal(remote_sample["video"], other["video"])
    assert len(list(tmp_path.rglob("*.index.arrow"))) == 1
    # No large file is copied again.
    assert num_requests(faults, lambda: open_set(remote.url, tmp_path)) < 15


def test_a_disk_that_fills_after_opening_is_named_and_no_sample_is_blamed(remote: Objects, tiny_disk: Path) -> None:
    samples = open_set(remote.url, tiny_disk)
    fill(tiny_disk)
    with pytest.raises(UserError, match=r"cannot store a copy of s3://.*/000007-\w+\.index\.arrow: No space left"):
        samples.reader.load([SampleRequest(7, 7, None)])


def test_an_index_that_a_bucket_refuses_fails_its_samples_and_is_no_damage(
    remote: Objects, faults: Faults, tmp_path: Path
) -> None:
    samples = open_set(remote.url, tmp_path)
    faults.set(Fault("error", path=r"index\.arrow", status=403, code="AccessDenied"))
    [failed] = samples.reader.load([SampleRequest(7, 7, None)])
    assert isinstance(failed, FailedSample) and failed.reason == "shard_unreadable" and "access denied" in failed.detail


def test_credentials_that_are_refused_fail_no_sample_and_end_the_reading(
    remote: Objects, faults: Faults, tmp_path: Path
) -> None:
    for status, code, message in (
        (400, "ExpiredToken", "credentials are refused"),
        (403, "AccessDenied", "access denied"),
    ):
        for path in (tmp_path / code / "by-index", tmp_path / code / "by-tar"):
            faults.set()
            samples = open_set(remote.url, path)
            if path.name == "by-tar":  # the index is already in the cache
                samples.reader.load([SampleRequest(7, 7, None)])
            faults.set(Fault("error", status=status, code=code))
            with pytest.raises(AccessRefused, match=rf"s3://.*{message}.*{code}"):
                samples.reader.load([SampleRequest(7, 7, None)])


def test_a_change_that_is_newer_than_the_tables_counts(many: Path, remote: Objects, tmp_path: Path) -> None:
    open_set(remote.url, tmp_path)
    with (
        without(remote, many, f"video/{VARIANT}/commits/000003.json"),
        pytest.raises(UserError, match=r"000003\.json: the commit record is missing"),
    ):
        open_set(remote.url, tmp_path)
    assert len(open_set(remote.url, tmp_path)) == NUM_SHARDS


@pytest.mark.nightly
def test_a_run_that_goes_on_costs_the_records_and_indexes_that_it_has_added(
    many: Path, remote: Objects, faults: Faults, tmp_path: Path
) -> None:
    open_set(remote.url, tmp_path / "before")
    # One shard is rebuilt, and one shard is new.
    copy = Path(shutil.copytree(many, tmp_path / "many"))
    payload = encode_chunk(8, 8)
    write_shard(copy, 3, [video_sample("v0003", 0, payload)], split="train")
    write_shard(copy, NUM_SHARDS, [video_sample("v0003", 800, payload)], split="train")
    variant = copy / "video" / VARIANT
    paths = [
        *variant.glob("*000003-*.index.arrow"),
        *variant.glob("commits/*3.json"),
        *variant.glob(f"*{NUM_SHARDS}-*"),
    ]
    changed = [commit_path(variant, shard_id) for shard_id in (3, NUM_SHARDS)]
    names = [path.relative_to(copy).as_posix() for path in {*paths, *changed} if path.suffix != ".tar"]
    (variant / "commits.arrow").unlink()
    (variant / "chunks.arrow").unlink()
    expected = open_set(str(copy)).fingerprint
    kept = {name: (many / name) for name in names if (many / name).is_file()}
    try:
        for name in names:
            remote.write(name, copy / name)
        for cache in ("before", "empty"):
            faults.set()
            opened = open_set(remote.url, tmp_path / cache)
            assert len(faults.seen().requests) < 25 and opened.fingerprint == expected
        assert len(list((tmp_path / "empty").rglob("*.index.arrow"))) == 2
        assert num_requests(faults, lambda: open_set(remote.url, tmp_path / "empty")) < 20
    finally:
        remote.delete(*names)
        for name, path in kept.items():
            remote.write(name, path)


def test_without_tables_the_records_and_indexes_are_copied(
    many: Path, remote: Objects, faults: Faults, tmp_path: Path
) -> None:
    opened: list[Samples[Any]] = []
    with without(remote, many, f"video/{VARIANT}/commits.arrow", f"video/{VARIANT}/chunks.arrow"):
        count = num_requests(faults, lambda: opened.append(open_set(remote.url, tmp_path)))
        assert 2 * NUM_SHARDS < count < 2 * NUM_SHARDS + 25
        assert num_requests(faults, lambda: open_set(remote.url, tmp_path)) < 25
    assert len(opened[0]) == NUM_SHARDS


def test_ranks_of_a_machine_copy_once(remote: Objects, faults: Faults, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from clipmill.manifests.storage.objects import open_objects\n"
        "from clipmill.train.data.remote import RemoteFiles\n"
        "files = RemoteFiles(open_objects(sys.argv[1]), Path(sys.argv[2]))\n"
        "files.copy_manifest(); files.copy_column('video'); files.copy_column('video')"
    )
    # The launcher's child processes are the ranks.
    launch = (
        "import os, subprocess, sys\n"
        "surroundings = [{**os.environ, 'LOCAL_RANK': str(rank)} for rank in range(int(sys.argv[1]))]\n"
        "ranks = [subprocess.Popen(sys.argv[2:], env=variables) for variables in surroundings]\n"
        "sys.exit(any([one.wait() for one in ranks]))"
    )

    def run(num_ranks: int, copy: Path) -> None:
        command = [sys.executable, "-c", script, remote.url, str(copy)]
        environment = {**os.environ, "WORLD_SIZE": "2"}
        subprocess.run([sys.executable, "-c", launch, str(num_ranks), *command], check=True, env=environment)

    single = num_requests(faults, lambda: run(1, tmp_path / "one"))
    three = num_requests(faults, lambda: run(3, tmp_path / "three"))
    assert three == single > 5
    assert len(list((tmp_path / "three").rglob("chunks.arrow"))) == 1
