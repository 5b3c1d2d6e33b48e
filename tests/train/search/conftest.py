"""Runs of a dual encoder and a masked autoencoder on the tiny data folder, and embeddings of the folder."""

from pathlib import Path

import pytest

from clipmill.shards.reader import Variant
from tests.train.running import train

FLAGS = "--model tiny --size-px 32 --num-frames 2 --workers 1 --batch 3 --steps 2 --warmup-steps 1 --device cpu"
SMALL = FLAGS.split()


@pytest.fixture(scope="package")
def run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("search") / "run"
    assert train("dual-encoder", "--shards", data_dir, "--out", out, *SMALL, "--towers.temporal", "random") == 0
    return out


@pytest.fixture(scope="package")
def masked_run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("search") / "masked"
    assert train("mae", "--shards", data_dir, "--out", out, *SMALL) == 0
    return out


@pytest.fixture(scope="package")
def embedded_clips(run: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings of the nine clips of split train."""
    out = tmp_path_factory.mktemp("search") / "embedded"
    assert embed(run, data_dir, out) == 0
    return out


def embed(weights: Path, data_dir: Path, out: Path, *flags: object, split: str = "train") -> int:
    words = ("--shards", data_dir, "--split", split, "--out", out, "--workers", 1, "--device", "cpu", *flags)
    return train("embed", weights, *words)


def content(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def overwrite_chunk(data_dir: Path, key: str) -> None:
    """Overwrite a chunk with zeros, so that it cannot be decoded."""
    for shard in Variant.open(data_dir).require_complete().shards():
        for row, its in enumerate(shard.index["key"].to_pylist()):
            if its == key:
                offset, size = shard.packet_tables.payload(row)
                with shard.tar_path.open("r+b") as file:
                    file.seek(offset)
                    file.write(bytes(size))
                return
    raise AssertionError(key)
