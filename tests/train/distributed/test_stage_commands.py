"""Pipelines from the command line: the SLURM script launches a pipeline that equals the run of one process."""

import json
import subprocess
from pathlib import Path

import pytest

from clipmill.train.run.folder import RunFolder, read_lines
from tests.forks import Forks
from tests.train.distributed.conftest import slurm_environment
from tests.train.running import train

SMALL = "--model tiny --size-px 32 --num-frames 2 --workers 1 --batch 4 --lr 1e-3 --warmup-steps 2 --device cpu"
DECODER = "--decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280"
EVALUATION = "--evaluate.every 2 --evaluate.split train --evaluate.max-samples 4 --decoding.max-tokens 6"
FLAGS = [*SMALL.split(), *DECODER.split(), *EVALUATION.split(), "--steps", "4", "--microbatch", "2"]
OF_SPEED = ("_s", "_share", "tflops")


@pytest.mark.nightly
def test_the_slurm_script_launches_a_pipeline(repository: Path, data_dir: Path, tmp_path: Path, forks: Forks) -> None:
    first_out, two = tmp_path / "one", tmp_path / "two"
    command = ["bash", "scripts/slurm_train.sh", "caption", "--shards", str(data_dir), "--out", str(two), *FLAGS]
    process = subprocess.Popen(
        [*command, "--parallel.stages", "2"],
        cwd=repository,
        env=slurm_environment(tmp_path, job=4712, python=forks.python()),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert train("caption", "--shards", data_dir, "--out", first_out, *FLAGS) == 0
    stderr, _ = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    assert stderr.count("done: 4 steps") == 1, "only one process prints the summary"
    assert json.loads((two / "run.json").read_bytes())["processes"] == "2, ddp, 1 x 2 stages, 1f1b"
    lines, expected = (read_lines(RunFolder(out).metrics) for out in (two, first_out))
    for line, expected_line in zip(lines, expected, strict=True):
        assert line.keys() == expected_line.keys()
        batches, expected_batches = (values.pop("batches", {}) for values in (line, expected_line))
        assert batches.keys() == expected_batches.keys()
        for name, losses in batches.items():
            assert losses == pytest.approx(expected_batches[name], rel=1e-4), name
        for name, value in line.items():
            if not name.endswith(OF_SPEED):
                assert value == pytest.approx(expected_line[name], rel=1e-4, abs=1e-6), name
    assert "train/cider_d" in lines[1]


def test_stages_need_processes_and_a_model_that_can_be_cut(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert train("mae", "--shards", data_dir, "--out", out, "--parallel.stages", 2, "--device", "cpu") == 2
    assert "--parallel.stages is 2, but 1 process cannot be divided" in capsys.readouterr().err
    assert not out.exists()
