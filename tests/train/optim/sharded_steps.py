"""Steps of every optimizer with unsharded and sharded weights, on each of two ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from clipmill.train.config.training import OptimizerName, OptimizerSettings, TrainingSettings
from clipmill.train.losses.objective import Objective
from clipmill.train.optim.ema import Ema
from clipmill.train.optim.optimizer import clip_gradients, make_optimizer, set_learning_rates

NAMES: tuple[OptimizerName, ...] = ("adamw", "lamb", "lion", "sgd")


class Temperature(Objective):
    """An objective with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.tensor(0.07, dtype=torch.float64))


def compare_steps(folder: Path) -> None:
    """Run one rank: assert that sharded weights equal unsharded weights, and record the compared optimizers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for name in NAMES:
        whole, sharded = (_steps(_model(its_mesh), name) for its_mesh in (None, mesh))
        for tensor, other in zip(whole, sharded, strict=True):
            torch.testing.assert_close(other, tensor, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(whole[4], whole[5])
    (folder / f"compared-{dist.get_rank()}").write_text("\n".join(NAMES))
    dist.destroy_process_group()


def _model(mesh: DeviceMesh | None) -> nn.Sequential:
    torch.manual_seed(0)
    # The rows are divided unevenly between two ranks, and the second rank has no part of the last bias.
    model = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 1)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if mesh is not None:
        for part in (model[0], model[3], model):
            fully_shard(part, mesh=mesh)
        assert any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    return model


def _gather(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _steps(model: nn.Sequential, name: OptimizerName) -> list[torch.Tensor]:
    """Return gradient norms, outputs with and without averages, and all weights and states after four steps."""
    settings = TrainingSettings(
        lr=0.05, warmup_steps=2, steps=8, optimizer=OptimizerSettings(name=name, layer_decay=0.9)
    )
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    objective = Temperature()
    optimizer, ema = make_optimizer(model, objective, settings), Ema(model, decay=0.9)
    seen = []
    for step in range(1, 5):
        set_learning_rates(optimizer, step, settings, objective=objective)
        optimizer.zero_grad()
        # Both ranks see the same rows, so their mean equals the result of one process.
        (((model(x) - 3) ** 2).mean() / objective.tau).backward()
        norm = clip_gradients([*model.parameters(), objective.tau], max_norm=1.0)
        optimizer.step()
        ema.update(model, step=step)
        seen.append(torch.tensor(norm, dtype=torch.float64))
    with ema.swap_in(model), torch.no_grad():
        seen.append(model(x))
    # The next pass must gather the weights again instead of using the averages.
    seen.append(model(x).detach())
    with torch.no_grad():
        seen.append(model(x))
    with ema.swap_in(model), torch.no_grad():
        seen.append(model(x))
    seen += [_gather(tensor) for tensor in ema.state_dict().values()]
    seen += [_gather(parameter.detach()) for parameter in model.parameters()] + [objective.tau.detach()]
    states = optimizer.state_dict()["state"].values()
    return seen + [_gather(value) for state in states for value in state.values() if torch.is_tensor(value)]
