"""Run `train` commands in the test process, and read their output and the files of their runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.train.cli import main
from clipmill.train.run.checkpoint import latest_checkpoint, read_weights
from clipmill.train.run.folder import RunFolder, read_lines

# Flags for a model and a run that take hundredths of a second per step, with frames of `tests/train/tiny_data.py`.
SMALL = [
    *("--model", "tiny", "--num-frames", "2", "--size-px", "32"),
    *("--batch", "4", "--warmup-steps", "2", "--lr", "1e-3"),
]


def train(*arguments: object) -> int:
    """Return the exit status of `train` with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
    return int(left.value.code or 0)


def two_lines(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return the error and the hint of a rejected command, which prints only these and its progress on stderr."""
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not re.match(r"[0-9TZ:-]{20} \[\d+:\d\d\] ", line)
    ]
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"], lines
    return lines[0], lines[1]


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))


def steps(out: Path) -> list[dict[str, Any]]:
    return read_lines(RunFolder(out).metrics)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in steps(out)]


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the latest checkpoint of a run."""
    path = latest_checkpoint(RunFolder(out).checkpoints)
    assert path is not None
    return read_weights(path)


def facts(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "run.json").read_bytes())
    return record


def all_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
