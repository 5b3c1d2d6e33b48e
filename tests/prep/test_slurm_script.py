"""Tests of scripts/slurm_prep.sh with SLURM's variables: the part that a task makes, and arrays that are rejected."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT


def run_task(programs: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    prep = programs / "prep"
    prep.write_text('#!/bin/bash\necho "$@"\n')
    prep.chmod(stat.S_IRWXU)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") and name != "PARTS"}
    environment = {**ours, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
    command = ["bash", "scripts/slurm_prep.sh", "chunk", "--len", "15s"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def array(task: int, low: int, high: int, count: int) -> dict[str, str]:
    values = {"ID": task, "MIN": low, "MAX": high, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


def test_a_task_makes_the_part_of_its_number(tmp_path: Path) -> None:
    made = run_task(tmp_path, **array(3, 1, 16, 16), SLURM_CPUS_PER_TASK="4")
    assert made.stdout == "chunk --len 15s --part 3/16 --engine processes --workers 4\n"
    again = run_task(tmp_path, **array(3, 3, 3, 1), PARTS="16")
    assert "--part 3/16 " in again.stdout


def test_a_job_without_an_array_is_told_to_be_one(tmp_path: Path) -> None:
    refused = run_task(tmp_path)
    assert refused.returncode == 2 and "submit with --array 1-N" in refused.stderr


@pytest.mark.parametrize("numbers", [(3, 3, 3, 1), (3, 1, 15, 8), (3, 2, 4, 3)])
def test_an_array_whose_numbers_do_not_tell_the_parts_is_refused(
    numbers: tuple[int, int, int, int], tmp_path: Path
) -> None:
    refused = run_task(tmp_path, **array(*numbers))
    assert refused.returncode == 2 and refused.stdout == ""
    assert "PARTS=16 sbatch --array 3 scripts/slurm_prep.sh chunk --len 15s" in refused.stderr
