"""A few steps of every loss, on one rank or on several, and their results."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from clipmill.train.bench.communication import FeatureExchange
from clipmill.train.distributed.world import Step, World
from clipmill.train.losses.contrastive import ContrastiveObjective, Similarities
from clipmill.train.losses.settings import Convention, Loss
from tests.plugins import installed_here
from tests.train.losses.pairs import CASES, Towers, batch_of, defined_infonce, objective_of, own_part, settings_of

Results = dict[str, torch.Tensor]
# A checkpoint must restore these on a different number of ranks: averages, and temperatures with their optimizer.
SAVED: tuple[tuple[str, Convention], ...] = (("fastclip-v2", "paper"), ("fastclip-v3", "fast_clip"))


def run_all(
    world: World, exchange: type[Similarities] = Similarities, *, num_steps: int = 3
) -> tuple[Results, dict[str, ContrastiveObjective]]:
    """Run all losses.

    Returns:
        Losses, metrics and mean gradients by case and step, and the objectives after the last step.
    """
    results: Results = {}
    objectives = {}
    for number, (kind, convention) in enumerate(CASES):
        settings = settings_of(kind, convention)
        # Every second case runs in microbatches, whose size divides the parts of ranks, too.
        name, microbatch = f"{kind}/{convention}", 2 if number % 2 else None
        objectives[name] = _run(name, settings, world, microbatch, results, exchange, num_steps=num_steps)
    adaptive = Loss(kind="max-margin", use_relevancy=True)
    _run("max-margin/adaptive", adaptive, world, None, results, exchange, num_steps=num_steps)
    _run("infonce/defined", defined_infonce(world=world), world, None, results, exchange, num_steps=num_steps)
    return results, objectives


def _run(
    name: str,
    settings: Loss | ContrastiveObjective,
    world: World,
    microbatch: int | None,
    results: Results,
    exchange: type[Similarities] = Similarities,
    *,
    num_steps: int = 3,
) -> ContrastiveObjective:
    towers = Towers(dropout=0.0)
    objective = objective_of(settings, world=world) if isinstance(settings, Loss) else settings
    objective.exchange = exchange
    parameters = [*towers.named_parameters(), *objective.named_parameters()]
    for number in range(num_steps):
        towers.zero_grad()
        objective.zero_grad()
        step = Step(number=number + 1, epoch=float(number), world=world, microbatch=microbatch)
        metrics = objective.backward(towers, own_part(batch_of(number), world), step)
        results |= {f"{name}/{number}/{key}": torch.as_tensor(value) for key, value in metrics.items()}
        for key, parameter in parameters:
            if parameter.grad is not None:
                results[f"{name}/{number}/{key}"] = gradient = world.sum(parameter.grad) / world.size
                parameter.data -= 0.05 * gradient
        objective.after_step(step)
    return objective


def run_rank(folder: Path) -> None:
    """Run one rank of several: run all losses, save state for one rank, and read the state that one rank saved."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    results, objectives = run_all(world)
    for kind, convention in SAVED:
        name = f"{kind}/{convention}"
        dcp.save({"objective": objectives[name].state_dict()}, checkpoint_id=folder / "by-ranks" / name)
        objective = objective_of(settings_of(kind, convention), world=world)
        state = objective.state_dict()
        dcp.load({"objective": state}, checkpoint_id=folder / "by-one" / name)
        objective.load_state_dict(state)
        for key, value in objective.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            results[f"{name}/loaded/{key}"] = whole.clone()
    results["kept rows"] = world.gather(torch.tensor([len(objectives["fastclip-v3/paper"].get_buffer("clips.rows"))]))
    features, _ = run_all(world, FeatureExchange, num_steps=1)
    if world.rank == 0:
        torch.save(results, folder / "results.pt")
        torch.save(features, folder / "features.pt")
    dist.destroy_process_group()


def run_outside(world: World, *, microbatch: int | None) -> Results:
    """Return metrics, mean gradients and the final state for three steps of the external loss "decoupled"."""
    results: Results = {}
    objective = _run("decoupled", settings_of("decoupled"), world, microbatch, results)
    return results | {f"decoupled/last/{key}": value.detach() for key, value in objective.state_dict().items()}


def run_outside_rank(folder: Path) -> None:
    """Run `run_outside` on one rank of several, in microbatches; the folder declares the package."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    with installed_here(folder):
        results = run_outside(world, microbatch=2)
    if world.rank == 0:
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()
