"""Runs of one process and of two ranks that many tests share, because a launch takes longer than its work."""

import os
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from clipmill.train.distributed.world import World
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.distributed.runs import (
    STRATEGIES,
    adapter_settings,
    exact_plane,
    locked_settings,
    masked_settings,
    run_ranks,
    towers,
    train_masked,
    train_plane,
    train_towers,
)
from tests.train.latents.columns import write_columns

ONE = World()


@dataclass(frozen=True)
class Runs:
    """Folders of runs: `one` holds the runs of one process, `two` the runs of two ranks."""

    one: Path
    two: Path
    data_dir: Path


def slurm_environment(folder: Path, *, job: int, python: Path) -> dict[str, str]:
    """Return the environment that SLURM sets for a job of two processes on this machine.

    The programs in `folder` replace SLURM's programs, and `train` and `torchrun`, which `python` runs.
    """
    programs = folder / "bin"
    programs.mkdir()
    step, requeued = programs / "step.pid", programs / "requeued"
    fakes = {
        "srun": f'echo $$ > {step}; while [[ "$1" == --* ]]; do shift; done\nexec "$@"',
        "scontrol": f'if [[ "$1" == requeue ]]; then echo "$2" >> {requeued}; else echo 127.0.0.1; fi',
        "train": f'exec {python} -m clipmill.train.cli "$@"',
        "torchrun": f'exec {python} -m torch.distributed.run "$@"',
        # Like the real scancel, this signals the processes of the job's steps, not the script.
        "scancel": f'[[ "$*" == "--signal=TERM {job}" ]] && kill -TERM "$(cat {step})"',
    }
    for name, content in fakes.items():
        (programs / name).write_text(f"#!/bin/bash\n{content}\n")
        (programs / name).chmod(stat.S_IRWXU)
    return {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_GPUS_ON_NODE": "2",
    }


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that `tests.train.distributed.runs` makes on one process and on two."""
    data_dir = write_columns(tmp_path_factory.mktemp("columns"))
    made = Runs(tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two"), data_dir)
    train_plane(exact_plane(made.one / "plane", keep_checkpoints=9), ONE)
    for strategy in STRATEGIES:
        resumed = made.two / f"resumed-{strategy}"
        shutil.copytree(made.one / "plane", resumed)
        for path in sorted((resumed / "checkpoints").iterdir())[1:]:
            shutil.rmtree(path)
    train_towers(towers(made.one / "towers", data_dir), ONE)
    ranks = fork_ranks(
        run_ranks, made.two, data_dir, made.one / "towers", size=2, folder=tmp_path_factory.mktemp("said")
    )
    train_towers(adapter_settings(made.one / "adapted", data_dir, source=made.one / "towers"), ONE)
    train_towers(locked_settings(made.one / "locked", data_dir), ONE)
    train_masked(masked_settings(made.one / "masked", data_dir), ONE)
    end_well(ranks)
    return made
