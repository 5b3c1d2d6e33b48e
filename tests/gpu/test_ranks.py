"""Two processes on one GPU are the run of one: copies that average their gradients, and parts."""

from pathlib import Path

import pytest
import torch

from tests.gpu.commands import train_as_rank
from tests.gpu.processes import start
from tests.gpu.runs import Runs, losses
from tests.gpu.test_tasks import ALL, FIRST, Record, assert_near
from tests.train.distributed.forked import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

STRATEGIES = ("ddp", "fsdp")
TASKS = ("dual-encoder", "caption")
SHOWN = "caption"  # the task of the dry run
SIZE = 2


def two_ranks(
    runs: Runs, device: torch.device, *, backend: str, folder: Path, within_s: float
) -> tuple[list[int | None], str]:
    """Runs of every task and strategy in `folder`; what the two ended with, and what the one that failed said."""
    commands = [
        runs.command(task, device, "--parallel.strategy", strategy, out=folder / f"{task}-{strategy}")
        for strategy in STRATEGIES
        for task in (TASKS if device.type == "cuda" else (SHOWN,))
    ]
    ports = [free_port() for _ in commands]
    shared = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}
    ranks = [
        start(
            train_as_rank,
            commands,
            ports,
            backend,
            said=folder / f"said-by-{rank}.txt",
            environment={**shared, "RANK": str(rank), "MASTER_PORT": str(ports[0])},
        )
        for rank in range(SIZE)
    ]
    ends = [rank.end(within_s=within_s) for rank in ranks]
    return [status for status, _ in ends], "\n".join(said[-2000:] for status, said in ends if status != 0)


@pytest.fixture(scope="module")
def folder(runs: Runs, device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the runs of two ranks, and what their tensors travelled by, in words."""
    why = "a CPU"
    if device.type == "cuda":
        path = tmp_path_factory.mktemp("nccl")
        statuses, said = two_ranks(runs, device, backend="nccl", folder=path, within_s=60)
        if statuses == [0] * SIZE:
            return path, "nccl"
        lines = [line for line in said.splitlines() if "uplicate GPU" in line or "error" in line.lower()]
        why = f"NCCL ended with {statuses}: {' / '.join(lines)[:500] or said[-500:]}"
    path = tmp_path_factory.mktemp("gloo")
    statuses, said = two_ranks(runs, device, backend="gloo", folder=path, within_s=90)
    assert statuses == [0] * SIZE, f"gloo, because of {why}: {said}"
    return path, f"gloo ({why})"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("task", TASKS)
def test_two_processes_have_the_losses_of_one(
    task: str,
    strategy: str,
    folder: tuple[Path, str],
    runs: Runs,
    device: torch.device,
    record_property: Record,
) -> None:
    if device.type == "cpu" and task != SHOWN:
        pytest.skip(f"{SHOWN} shows the way in the dry run")
    path, backend = folder
    record_property("backend", backend)
    found = losses(path / f"{task}-{strategy}")
    assert_near(found, losses(runs.make(task, device)), first=FIRST, every=ALL, record=record_property)
