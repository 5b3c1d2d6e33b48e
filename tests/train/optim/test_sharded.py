"""Two processes with sharded weights take the steps that one takes with whole ones."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train.objective import Objective
from train.optim.ema import Ema
from train.optim.optimizer import clip_gradients, make_optimizer, set_learning_rates
from train.optim.settings import OptimizerSettings
from train.settings import TrainingSettings

torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


class Temperature(Objective):
    def __init__(self):
        super().__init__()
        self.tau = nn.Parameter(torch.tensor(0.07, dtype=torch.float64))


def build(sharded):
    torch.manual_seed(0)
    # Rows that two ranks share unequally, and a bias of which the second has nothing.
    model = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 1)).double()
    for one in model.parameters():
        nn.init.normal_(one)
    if sharded:
        for part in (model[0], model[3]):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
for name in ("adamw", "lamb", "lion", "sgd"):
    settings = TrainingSettings(
        lr=0.05, warmup_steps=2, steps=8, optimizer=OptimizerSettings(name=name, layer_decay=0.9)
    )
    found = []
    for sharded in (False, True):
        model, objective = build(sharded), Temperature()
        optimizer, ema = make_optimizer(model, objective, settings), Ema(model, decay=0.9)
        seen = []
        for step in range(1, 5):
            set_learning_rates(optimizer, step, settings, objective=objective)
            optimizer.zero_grad()
            # Both ranks see the same rows, so that their mean is what one process has.
            (((model(x) - 3) ** 2).mean() / objective.tau).backward()
            norm = clip_gradients([*model.parameters(), objective.tau], max_norm=1.0)
            optimizer.step()
            ema.update(model, step=step)
            seen.append(torch.tensor(norm, dtype=torch.float64))
        with ema.swapped(model), torch.no_grad():
            seen.append(model(x))
        # The next pass must gather the weights again, not go on with averages.
        seen.append(model(x).detach())
        with torch.no_grad():
            seen.append(model(x))
        with ema.swapped(model), torch.no_grad():
            seen.append(model(x))
        seen += [whole(one) for one in ema.state_dict().values()]
        seen += [whole(one.detach()) for one in model.parameters()] + [objective.tau.detach()]
        seen += [whole(value) for state in optimizer.state_dict()["state"].values() for value in state.values()
                 if torch.is_tensor(value)]
        found.append(seen)
    assert any(hasattr(one, "full_tensor") for one in model.parameters())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found[0][4], found[0][5])
dist.destroy_process_group()
print("equal")
"""


def test_sharded_weights_are_stepped_clipped_and_averaged_like_whole_ones(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            cwd=repository,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in ranks]
    except subprocess.TimeoutExpired:
        pytest.fail("the ranks wait for one another")
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(printed)
    assert all(text.endswith("equal\n") for text in printed)
