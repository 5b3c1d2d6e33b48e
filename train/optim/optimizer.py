"""The run's optimizer, made from settings, and its learning rates at a step."""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import torch
from torch import nn

from train.config.optim import OptimizerSettings
from train.config.training import TrainingSettings
from train.device.transfer import Scalar, is_on_host
from train.distributed.sharded import local_part, norms
from train.distributed.world import World
from train.losses.objective import Objective
from train.optim.groups import parameter_groups
from train.optim.lamb import Lamb
from train.optim.lion import Lion
from train.optim.sgd import Sgd

# Where torch's AdamW takes a step in one pass over memory: a seventh of the time on a CPU.
_FUSED = {"cpu", "cuda"}
ONE_STAGE = World()


def make_optimizer(model: nn.Module, objective: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """The optimizer of the parameters of `model` (wrapped or sharded as it may be) and of `objective`."""
    groups = parameter_groups(
        model,
        objective,
        weight_decay=settings.weight_decay,
        layer_decay=settings.optimizer.layer_decay,
        adapts_all=settings.optimizer.lamb_alpha == "all",
    )
    kind, numbers = optimizer_kind(settings.optimizer, device_types={one.device.type for one in model.parameters()})
    return kind(groups, lr=settings.lr, **numbers)


def optimizer_kind(
    settings: OptimizerSettings, *, device_types: set[str]
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Class of the optimizer, and its arguments besides parameters and learning rate."""
    if settings.name == "sgd":
        return Sgd, {"momentum": settings.number("momentum")}
    betas = (settings.number("beta1"), settings.number("beta2"))
    if settings.name == "lion":
        return Lion, {"betas": betas}
    if settings.name == "lamb":
        return Lamb, {"betas": betas, "eps": settings.number("eps")}
    return torch.optim.AdamW, {"betas": betas, "eps": settings.number("eps"), "fused": device_types <= _FUSED or None}


def set_learning_rates(
    optimizer: torch.optim.Optimizer, step: int, settings: TrainingSettings, *, objective: Objective
) -> float:
    """Gives each group of `optimizer` its learning rate for step 1, 2, ..., and returns the schedule's own."""
    scale = settings.optimizer.lr_scale(settings.batch)
    lr = learning_rate(
        step,
        peak=settings.lr * scale,
        warmup_steps=settings.warmup_steps,
        num_steps=settings.steps,
        schedule=settings.optimizer.schedule,
        end=settings.optimizer.end_lr * scale,
    )
    for group in optimizer.param_groups:
        group["lr"] = objective.learning_rate(lr) if group["is_objective"] else lr * group["lr_scale"]
    return lr


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    *,
    max_norm: float,
    loss_scale: Scalar = 1.0,
    stages: World = ONE_STAGE,
    repeated: Collection[nn.Parameter] = (),
) -> torch.Tensor:
    """Divides gradients by `loss_scale`, then shortens them together to `max_norm` where they are longer.

    Parameters may be whole or sharded (DTensor); every rank must call it, and gets the same norm. It waits for no GPU.

    Args:
        stages: the ranks that have the other parameters of the model, where it is cut into a pipeline.
        repeated: those of this rank's that another stage has too, and counts.

    Returns:
        The norm of all gradients together, before they were shortened, float64 without dimensions; not finite where one
        of them is not, and the gradients are then of no use.
    """
    parameters = list(parameters)
    not_counted = {id(one) for one in repeated}
    # Counted ones first, so that their norms are a slice.
    trained = sorted((one for one in parameters if one.grad is not None), key=lambda one: id(one) in not_counted)
    gradients = [one.grad for one in trained if one.grad is not None]
    if not gradients and stages.size == 1:
        return torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    parts = [local_part(one) for one in gradients]
    num_counted = sum(id(one) not in not_counted for one in trained)
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    if gradients:
        square = norms(parts, like=gradients)[:num_counted].square().sum()
    norm = stages.sum(square).sqrt() / loss_scale
    # As torch.nn.utils.clip_grad_norm_ does. A number divided by a tensor would be its reciprocal, rounded, times that.
    factor = (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0) / loss_scale
    # A pass over all gradients is spared where that is known to be possible.
    is_one = is_on_host(factor) and factor.item() == 1
    if parts and not is_one:
        for dtype in {one.dtype for one in parts}:
            torch._foreach_mul_([one for one in parts if one.dtype == dtype], factor.to(dtype))
    return norm


def take_step(optimizer: torch.optim.Optimizer, may_step: torch.Tensor, *, skips: bool) -> None:
    """Takes a step of `optimizer` if `may_step`, a bool on the device, allows it; a GPU decides by itself.

    A step that is not allowed leaves weights and state as they are. Where only an error can forbid one (`skips` is
    False), optimizers that would have to copy them first do not look on a GPU: whatever they make of it is never saved.
    """
    if is_on_host(may_step):
        if may_step:
            optimizer.step()
        return
    if skips or optimizer.defaults.get("fused"):
        # As torch.amp.GradScaler tells torch's fused optimizers.
        optimizer.found_inf = (~may_step).float()  # type: ignore[attr-defined]
    optimizer.step()


# The learning rate as a pure function of the step: a straight rise, then a way down (or none).


Schedule = Literal["cosine", "linear", "fixed"]


def learning_rate(
    step: int, *, peak: float, warmup_steps: int, num_steps: int, schedule: Schedule = "cosine", end: float = 0.0
) -> float:
    """Learning rate of step 1, 2, ..., num_steps.

    It rises straight to `peak`, which step `warmup_steps` and the one after it have, and then goes towards `end`,
    which it would reach one step after the last.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "fixed":
        return peak
    done = (step - 1 - warmup_steps) / max(1, num_steps - warmup_steps)
    left = 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return end + (peak - end) * left
