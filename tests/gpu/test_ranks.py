"""Two processes on one GPU are the run of one: copies that average their gradients, and parts."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.gpu.commands import train_as_rank
from tests.gpu.processes import start
from tests.gpu.runs import Runs
from tests.gpu.test_tasks import ALL, FIRST, Record, assert_near
from tests.train.distributed.forked import free_port
from tests.train.running import losses

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

STRATEGIES = ("ddp", "fsdp")
TASKS = ("dual-encoder", "caption")
SHOWN = "caption"  # the task of the dry run
SIZE = 2
# Named for each device: where a GPU is there, torch makes a mesh's group by NCCL if the world's is gloo in one word.
GLOO = "cpu:gloo,cuda:gloo"


def two_ranks(
    strategy: str, runs: Runs, device: torch.device, *, backend: str, folder: Path, within_s: float
) -> tuple[list[int | None], str]:
    """Runs of every task in `folder`; what the two ranks ended with, and what those that failed said."""
    tasks = TASKS if device.type == "cuda" else (SHOWN,)
    commands = [runs.command(task, device, "--parallel.strategy", strategy, out=folder / task) for task in tasks]
    ports = [free_port() for _ in commands]
    shared = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}
    ranks = [
        start(
            train_as_rank,
            commands,
            ports,
            backend,
            stderr_path=folder / f"said-by-{rank}.txt",
            environment={**shared, "RANK": str(rank), "MASTER_PORT": str(ports[0])},
        )
        for rank in range(SIZE)
    ]
    ends = [rank.end(within_s=within_s) for rank in ranks]
    return [status for status, _ in ends], "\n".join(text[-2000:] for status, text in ends if status != 0)


@dataclass
class Launches:
    """Launches of two ranks, one a strategy.

    Attributes:
        why_not_nccl: why tensors do not travel by NCCL; None as long as nothing is known.
    """

    folder: Path
    why_not_nccl: str | None = None
    made: dict[str, Path] = field(default_factory=dict)

    def make(self, strategy: str, runs: Runs, device: torch.device) -> tuple[Path, str]:
        """The folder of the runs of a strategy, and what their tensors travelled by, in words."""
        if device.type == "cpu":
            self.why_not_nccl = "no GPU"
        if strategy not in self.made and self.why_not_nccl is None:
            folder = self._folder(f"{strategy}-nccl")
            statuses, stderr = two_ranks(strategy, runs, device, backend="nccl", folder=folder, within_s=45)
            if statuses == [0] * SIZE:
                self.made[strategy] = folder
            else:
                lines = [line for line in stderr.splitlines() if "uplicate GPU" in line or "error" in line.lower()]
                self.why_not_nccl = f"NCCL ended with {statuses}: {' / '.join(lines)[:500] or stderr[-500:]}"
        if strategy not in self.made:
            folder = self._folder(f"{strategy}-gloo")
            statuses, stderr = two_ranks(strategy, runs, device, backend=GLOO, folder=folder, within_s=60)
            assert statuses == [0] * SIZE, f"gloo ended with {statuses} ({self.why_not_nccl}): {stderr}"
            self.made[strategy] = folder
        return self.made[strategy], "nccl" if self.why_not_nccl is None else f"gloo: {self.why_not_nccl}"

    def _folder(self, name: str) -> Path:
        (self.folder / name).mkdir()
        return self.folder / name


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_have_the_losses_of_one(
    strategy: str, task: str, launches: Launches, runs: Runs, device: torch.device, record_property: Record
) -> None:
    if device.type == "cpu" and task != SHOWN:
        pytest.skip(f"not in the dry run, which runs {SHOWN} alone")
    path, backend = launches.make(strategy, runs, device)
    record_property("backend", backend)
    values = losses(path / task)
    assert_near(values, losses(runs.make(task, device)), first=FIRST, every=ALL, record=record_property)
