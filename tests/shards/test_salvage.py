import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.shards.commits import Commit
from clipmill.shards.index import open_index
from clipmill.shards.verify import SalvagedSample, readable_rows
from clipmill.shards.writer import Sample

MakeSamples = Callable[..., list[Sample]]
Flip = Callable[[Path, int], None]


@pytest.fixture
def written_samples(samples: MakeSamples) -> list[Sample]:
    return samples(20)


@pytest.fixture
def commit(tmp_path: Path, written_samples: list[Sample], commit_shard: Callable[..., Commit]) -> Commit:
    return commit_shard(tmp_path, written_samples)


def _tar(directory: Path, commit: Commit) -> Path:
    assert commit.files is not None
    return directory / commit.files.tar


def _index(directory: Path, commit: Commit) -> Path:
    assert commit.files is not None
    return directory / commit.files.index


def _as_salvaged(samples: list[Sample], *, with_fields: bool = True) -> list[SalvagedSample]:
    return [SalvagedSample(sample.key, sample.members, sample.fields if with_fields else None) for sample in samples]


def test_a_whole_shard_gives_every_sample(tmp_path: Path, commit: Commit, written_samples: list[Sample]) -> None:
    assert list(readable_rows(tmp_path, commit)) == _as_salvaged(written_samples)


def test_damaged_samples_are_left_out(
    tmp_path: Path, commit: Commit, written_samples: list[Sample], flip: Flip
) -> None:
    table = open_index(_index(tmp_path, commit))
    flip(_tar(tmp_path, commit), table.column("json_offset")[3].as_py())
    flip(_tar(tmp_path, commit), table.column("mp4_offset")[9].as_py() + 100)
    flip(_tar(tmp_path, commit), table.column("mp4_offset")[11].as_py() - 500)  # a tar header: the sample is intact
    whole = [sample for row, sample in enumerate(written_samples) if row not in (3, 9)]
    assert list(readable_rows(tmp_path, commit)) == _as_salvaged(whole)


def test_a_cut_tar_gives_what_lies_before_the_cut(
    tmp_path: Path, commit: Commit, written_samples: list[Sample]
) -> None:
    offset = open_index(_index(tmp_path, commit)).column("json_offset")[12].as_py()
    os.truncate(_tar(tmp_path, commit), offset + 1)
    assert list(readable_rows(tmp_path, commit)) == _as_salvaged(written_samples[:12])


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_without_its_index_an_intact_tar_gives_every_sample(
    tmp_path: Path, commit: Commit, written_samples: list[Sample], flip: Flip, damage: str
) -> None:
    index = _index(tmp_path, commit)
    if damage == "missing":
        index.unlink()
    elif damage == "cut":
        os.truncate(index, 100)
    else:
        flip(index, index.stat().st_size // 2)
    assert list(readable_rows(tmp_path, commit)) == _as_salvaged(written_samples, with_fields=False)
    # If the tar is damaged too, nothing can be verified.
    flip(_tar(tmp_path, commit), _tar(tmp_path, commit).stat().st_size - 1)
    assert list(readable_rows(tmp_path, commit)) == []


def test_a_missing_tar_or_no_shard_at_all_gives_nothing(tmp_path: Path, commit: Commit) -> None:
    _tar(tmp_path, commit).unlink()
    assert list(readable_rows(tmp_path, commit)) == []
    assert list(readable_rows(tmp_path / "nowhere", commit)) == []
    assert list(readable_rows(tmp_path, Commit("video", 1, "train", "00", None, ()))) == []
