"""Credentials of a bucket that expire during a run."""

from pathlib import Path

import pytest

from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder, read_lines
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.folders import upload
from tests.train.running import SMALL, steps, train, two_lines
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

NAMES = [f"v{number}" for number in range(9)]
HELD_OUT = NAMES[-1]


def upload_set(tmp_path: Path, bucket: str) -> tuple[object, ...]:
    """Upload captioned videos to a bucket, one of them held out; return the flags of a run that reads them."""
    data = tmp_path / "data"
    splits = {name: "val" if name == HELD_OUT else "train" for name in NAMES}
    for number, (name, split) in enumerate(splits.items()):
        write_shard(data, number, chunks_of(name, 16), split=split)
    write_captions(data, splits, [Caption(name, 0, 1, f"about {name}") for name in NAMES])
    upload(data, bucket)
    cache = ("--cache", tmp_path / "cache", "--cache-size", "1kB")
    return ("--shards", bucket, *cache, "--out", tmp_path / "run", "--workers", 1)


def test_credentials_that_expire_end_a_run_at_once_with_a_checkpoint(
    tmp_path: Path, bucket: str, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, out = upload_set(tmp_path, bucket), tmp_path / "run"
    faults.set(Fault("error", method="GET", path=r"\.tar", skip=60, status=400, code="ExpiredToken", spreads=True))
    assert train("mae", *SMALL, *settings, "--steps", 500) == 3
    error, hint = two_lines(capsys)
    assert error.startswith(f"error: {bucket}/video/") and error.endswith("credentials are refused (ExpiredToken)")
    assert "check AWS_ACCESS_KEY_ID" in hint
    saved = list(all_checkpoints(RunFolder(out).checkpoints))
    assert saved == [steps(out)[-1]["step"]] and 0 < saved[0] < 500
    assert read_lines(RunFolder(out).failures) == []


@pytest.mark.nightly
def test_credentials_that_expire_in_an_evaluation_leave_a_checkpoint_too(
    tmp_path: Path, bucket: str, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = upload_set(tmp_path, bucket)
    faults.set(Fault("error", method="GET", path=r"000008-\w+\.tar", status=400, code="ExpiredToken", spreads=True))
    evaluate = ("--evaluate.every", 2, "--checkpoint-every", 4)
    assert train("dual-encoder", *SMALL, *settings, "--steps", 4, *evaluate) == 3
    assert two_lines(capsys)[0].endswith("credentials are refused (ExpiredToken)")
    assert list(all_checkpoints(RunFolder(tmp_path / "run").checkpoints)) == [2]
