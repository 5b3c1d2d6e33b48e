"""The optimizer of a run: construction, learning rate schedule, gradient clipping and steps."""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import torch
from torch import nn

from clipmill.train.config.fields import num_steps
from clipmill.train.config.training import OptimizerSettings, TrainingSettings
from clipmill.train.device.transfer import Scalar, is_on_host
from clipmill.train.distributed.parallel import local_part, norms
from clipmill.train.distributed.world import World
from clipmill.train.losses.objective import Objective
from clipmill.train.optim.algorithms import Lamb, Lion, Sgd
from clipmill.train.optim.parameters import parameter_groups

Schedule = Literal["cosine", "linear", "fixed"]

_FUSED = {"cpu", "cuda"}  # device types with a fused AdamW, which takes a seventh of the time on a CPU
_ONE_STAGE = World()


def make_optimizer(model: nn.Module, objective: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Create the optimizer of the parameters of `model` (possibly wrapped or sharded) and `objective`."""
    groups = parameter_groups(
        model,
        objective,
        weight_decay=settings.weight_decay,
        layer_decay=settings.optimizer.layer_decay,
        adapts_all=settings.optimizer.lamb_alpha == "all",
    )
    kind, options = optimizer_kind(settings.optimizer, device_types={one.device.type for one in model.parameters()})
    return kind(groups, lr=settings.lr, **options)


def optimizer_kind(
    settings: OptimizerSettings, *, device_types: set[str]
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Class of the optimizer and its arguments besides parameters and learning rate."""
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
    """Set the learning rate of each group for step 1, 2, ... and return that of the schedule."""
    scale = settings.optimizer.lr_scale(settings.batch)
    lr = learning_rate(
        step,
        peak=settings.lr * scale,
        warmup_steps=num_steps(settings.warmup_steps, flag=settings.flag("warmup_steps")),
        num_steps=settings.steps,
        schedule=settings.optimizer.schedule,
        start=None if settings.optimizer.start_lr is None else settings.optimizer.start_lr * scale,
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
    stages: World = _ONE_STAGE,
    repeated: Collection[nn.Parameter] = (),
) -> torch.Tensor:
    """Unscale gradients and clip their global norm to `max_norm`, without synchronising with a GPU.

    Parameters may be whole or sharded (DTensor). All ranks call it and get the same norm.

    Args:
        stages: the ranks with the other stages of the model, in a pipeline.
        repeated: parameters of this rank that are tied to, and counted on, another stage.

    Returns:
        The global gradient norm before clipping, zero-dimensional float64; not finite if a gradient is not, in which
        case the gradients must not be used.
    """
    parameters = list(parameters)
    not_counted = {id(one) for one in repeated}
    # Counted parameters first, so that their norms are a slice.
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
    # As in torch.nn.utils.clip_grad_norm_; dividing a Python number by a tensor would round its reciprocal first.
    factor = (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0) / loss_scale
    # Skip the pass over all gradients if the factor is known to be 1.
    is_one = is_on_host(factor) and factor.item() == 1
    if parts and not is_one:
        for dtype in {one.dtype for one in parts}:
            torch._foreach_mul_([one for one in parts if one.dtype == dtype], factor.to(dtype))
    return norm


def take_step(optimizer: torch.optim.Optimizer, may_step: torch.Tensor, *, skips: bool) -> None:
    """Step if `may_step`, a bool on the device, is true; a GPU decides without the host.

    A step that is not allowed leaves weights and state unchanged. If only an error can forbid one (`skips` is False),
    optimizers that would have to copy them first ignore `may_step` on a GPU, since the result is never saved.
    """
    if is_on_host(may_step):
        if may_step:
            optimizer.step()
        return
    if skips or optimizer.defaults.get("fused"):
        # As torch.amp.GradScaler does for fused optimizers.
        optimizer.found_inf = (~may_step).float()  # type: ignore[attr-defined]
    optimizer.step()


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    num_steps: int,
    schedule: Schedule = "cosine",
    start: float | None = None,
    end: float = 0.0,
) -> float:
    """Learning rate of step 1, 2, ..., num_steps.

    Rises linearly to `peak` at step `warmup_steps`, which the next step has too, and then decays so that it would reach
    `end` one step after the last. It rises from `start` at step 1 (AVION), or from 0 at a step before it (open_clip).
    """
    if step <= warmup_steps:
        if start is None:
            return peak * step / warmup_steps
        return start + (peak - start) * (step - 1) / max(1, warmup_steps - 1)
    if schedule == "fixed":
        return peak
    done = (step - 1 - warmup_steps) / max(1, num_steps - warmup_steps)
    left = 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return end + (peak - end) * left
