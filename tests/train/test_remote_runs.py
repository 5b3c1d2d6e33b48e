"""Training from a bucket: the weights of the local folder, on pixels and on latents, kills included."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.forks import Forks
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.upload import upload
from tests.train.test_cli import train
from tests.train.test_latents_training import FLAGS, write_columns
from train.run.checkpoint import all_checkpoints, latest_checkpoint, read_weights
from train.run.folder import RunFolder

__all__ = ["train"]

Train = Callable[..., int]
SMALL = ("--preset", "tiny", "--num-frames", 2, "--size-px", 32, "--batch", 4, "--workers", 1, "--device", "cpu")
_LIMIT_S = 120


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_columns(tmp_path_factory.mktemp("columns"))


def weights(out: Path) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(RunFolder(out).checkpoints)
    assert path is not None
    return read_weights(path)


def same(out: Path, other: Path) -> bool:
    expected = weights(other)
    return all(torch.equal(value, expected[name]) for name, value in weights(out).items())


def test_a_run_on_pixels_of_a_bucket_is_that_of_the_local_folder(
    train: Train, data_dir: Path, bucket: str, faults: Faults, tmp_path: Path
) -> None:
    remote = upload(data_dir, f"{bucket}/data").address
    faults.set(Fault("error", path=r"\.tar", every=7), Fault("cut", path=r"\.tar", skip=2, every=9))
    for shards, out in ((remote, "remote"), (data_dir, "local")):
        cache = ("--cache", tmp_path / "cache") if out == "remote" else ()
        steps = ("--steps", 2, "--warmup-steps", 1, "--out", tmp_path / out)
        assert train("dual-encoder", *SMALL, "--shards", shards, *steps, *cache) == 0
    assert same(tmp_path / "remote", tmp_path / "local")
    assert faults.seen().num_faults
    assert train("eval", "retrieval", tmp_path / "remote", "--json") == 0


def test_a_run_on_latents_of_a_bucket_that_is_killed_goes_on(
    train: Train, columns: Path, bucket: str, forks: Forks, tmp_path: Path
) -> None:
    remote = upload(columns, f"{bucket}/data").address

    def line(shards: object, out: Path, *more: object) -> list[str]:
        steps = ("--batch", 8, "--lr", "1e-3", "--warmup-steps", 2, "--steps", 6, "--checkpoint-every", 1)
        given: tuple[Any, ...] = ("dual-encoder", "--shards", shards, *FLAGS, *steps, "--out", out, *more)
        return [str(word) for word in (*given, "--device", "cpu", "--resume", "auto")]

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    cached = ("--cache", tmp_path / "cache", "--cache-size", "50MB")
    log = tmp_path / "log"
    with Path(os.devnull).open("rb") as nothing, log.open("wb") as output:
        descriptors = (nothing.fileno(), output.fileno(), output.fileno())
        arguments = line(remote, killed, *cached)
        connection = forks.start(
            "train.cli", arguments, environment=os.environ, folder=ROOT, descriptors=descriptors, limit_s=_LIMIT_S
        )
    with connection, connection.makefile() as lines:
        process = int(lines.readline())
        deadline_s = time.monotonic() + _LIMIT_S
        while not (killed.is_dir() and all_checkpoints(RunFolder(killed).checkpoints)):
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.02)
        os.kill(process, signal.SIGKILL)
        assert int(lines.readline()) == -signal.SIGKILL, log.read_text()
    assert train(*line(remote, killed, *cached)) == 0
    assert train(*line(columns, whole)) == 0
    assert same(killed, whole)
