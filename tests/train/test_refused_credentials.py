"""Credentials of a bucket that expire while a run trains."""

from pathlib import Path

import pytest

from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder, read_lines
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.folders import upload
from tests.train.running import SMALL, steps, train, two_lines
from tests.train.tiny_data import chunks_of, write_captions, write_shard

NAMES = [f"v{number}" for number in range(8)]


def test_credentials_that_expire_end_a_run_at_once_with_a_checkpoint(
    tmp_path: Path, bucket: str, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    for number, name in enumerate(NAMES):
        write_shard(data, number, chunks_of(name, 16), split="train")
    write_captions(data, dict.fromkeys(NAMES, "train"), [])
    upload(data, bucket)
    settings = ("--shards", bucket, "--cache", tmp_path / "cache", "--cache-size", "1kB", "--out", out, "--workers", 1)
    faults.set(Fault("error", method="GET", path=r"\.tar", skip=60, status=400, code="ExpiredToken", spreads=True))
    assert train("mae", *SMALL, *settings, "--steps", 500) == 2
    error, hint = two_lines(capsys)
    assert error.startswith(f"error: {bucket}/video/") and error.endswith("credentials are refused (ExpiredToken)")
    assert "check AWS_ACCESS_KEY_ID" in hint
    saved = list(all_checkpoints(RunFolder(out).checkpoints))
    assert saved == [steps(out)[-1]["step"]] and 0 < saved[0] < 500
    assert read_lines(RunFolder(out).failures) == []
