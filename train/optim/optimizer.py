"""The optimizer of a run: construction, learning rate schedule, gradient clipping and steps.

AdamW comes from torch. SGD, Lion and LAMB are implemented here: they update many tensors together, complete or
sharded, and a GPU can skip a step without waiting for the host.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, ParamsT

from clipmill.train.config.fields import num_steps
from clipmill.train.config.training import TrainingSettings
from clipmill.train.device.transfer import Scalar, is_on_host, send
from clipmill.train.distributed.parallel import buckets, local_part, norms
from clipmill.train.distributed.world import World
from clipmill.train.losses.objective import Objective
from clipmill.train.optim.parameters import parameter_groups


class ForeachOptimizer(Optimizer):
    """Base class for optimizers that update all parameters of a group together.

    Attributes:
        found_inf: Zero-dimensional float on the device. If it is not 0, the step is skipped, as in torch's fused
            optimizers. None to take every step.
    """

    found_inf: torch.Tensor | None = None

    def initial_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the initial state of a parameter."""
        raise NotImplementedError

    def update(self, parameters: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Update parameters, which all have gradients, and their state."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter].update(self.initial_state(parameter))
            if self.found_inf is None:
                if parameters:
                    self.update(parameters, group)
                continue
            # The device decides: to skip a step, it restores copies that were made before the update. Parameters are
            # updated in buckets, because copies of all tensors might not fit into memory.
            for bucket in buckets(parameters):
                changed_tensors = [local_part(parameter) for parameter in bucket]
                for parameter in bucket:
                    state = self.state[parameter]
                    for name, value in state.items():
                        # A step count on the CPU cannot depend on the device's decision.
                        state[name] = send(value, parameter.device)
                        changed_tensors.append(local_part(state[name]))
                copies = [tensor.clone() for tensor in changed_tensors]
                self.update(bucket, group)
                for tensor, copy in zip(changed_tensors, copies, strict=True):
                    torch.where(self.found_inf == 0, tensor, copy, out=tensor)


class Sgd(ForeachOptimizer):
    """SGD with momentum (FastCLIP procedure 4), with the same results and state as torch's SGD.

    g += decay theta;  m = momentum m + g;  theta -= lr m. The momentum of the first step is g.

    torch's SGD is not used, because it cannot skip steps. Its fused version can, but leaves the momentum uninitialised
    if the first step is skipped.
    """

    def __init__(self, params: ParamsT, *, lr: float, momentum: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def initial_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def update(self, parameters: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        weights, updates = _weights_and_gradients(parameters)
        if group["weight_decay"]:
            updates = list(torch._foreach_add(updates, weights, alpha=group["weight_decay"]))
        momenta = [local_part(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, updates)
        subtract(weights, momenta, lr=group["lr"])


class Lion(ForeachOptimizer):
    """Lion: sign of the momentum, decoupled weight decay (Chen et al. 2023, program 1; FastCLIP procedure 4).

    c = beta1 m + (1 - beta1) g;  theta -= lr (sign(c) + decay theta);  m = beta2 m + (1 - beta2) g.
    """

    def __init__(self, params: ParamsT, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def initial_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.zeros_like(parameter)}

    def update(self, parameters: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        weights, gradients = _weights_and_gradients(parameters)
        momenta = [local_part(self.state[parameter]["exp_avg"]) for parameter in parameters]
        beta1, beta2 = group["betas"]
        updates = list(torch._foreach_lerp(momenta, gradients, 1 - beta1))
        torch._foreach_sign_(updates)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        subtract(weights, updates, lr=group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)


class Lamb(ForeachOptimizer):
    """LAMB: Adam with a trust ratio per tensor (You et al. 2020, algorithm 2; FastCLIP procedure 4).

    theta -= lr alpha (r + decay theta), with Adam's update r and alpha = |theta| / |r + decay theta|; the norms are
    over complete tensors. alpha is 1 (as in AdamW) in groups whose `adapts` is False, for updates of norm zero,
    and for tensors of norm zero, which otherwise could not change.
    """

    def __init__(
        self, params: ParamsT, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapts": True})

    def initial_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        # The step count is a CPU tensor, as in torch's optimizers, so that checkpoints handle all optimizers alike.
        step = torch.tensor(0.0)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def update(self, parameters: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for state in states:
            state["step"] += 1
        weights, gradients = _weights_and_gradients(parameters)
        # If the device decides whether to step, only the device knows how many steps were taken.
        steps = [int(state["step"]) if self.found_inf is None else state["step"].double() for state in states]
        updates = _adam_updates(states, gradients, steps=steps, betas=group["betas"], eps=group["eps"])
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if not group["adapts"]:
            subtract(weights, updates, lr=group["lr"])
            return
        weight_norms_N, update_norms_N = norms([*weights, *updates], like=[*parameters, *parameters]).chunk(2)
        has_ratio_N = (weight_norms_N > 0) & (update_norms_N > 0)
        alphas_N = torch.where(has_ratio_N, weight_norms_N / update_norms_N, 1.0)
        for weight, update, alpha in zip(weights, updates, alphas_N, strict=True):
            weight.addcmul_(update, alpha.to(weight.dtype), value=-group["lr"])


def subtract(weights: Sequence[torch.Tensor], updates: Sequence[torch.Tensor], *, lr: Scalar) -> None:
    """Compute weights -= lr updates, without synchronising if `lr` is on a GPU."""
    if isinstance(lr, torch.Tensor):
        for weight, update in zip(weights, updates, strict=True):
            weight.addcmul_(update, lr.to(weight.dtype), value=-1)
    else:
        torch._foreach_add_(list(weights), list(updates), alpha=-lr)


def _weights_and_gradients(parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return [local_part(parameter) for parameter in parameters], gradients


def _adam_updates(
    states: list[dict[str, torch.Tensor]],
    gradients: list[torch.Tensor],
    *,
    steps: Sequence[Any],
    betas: tuple[float, float],
    eps: float,
) -> list[torch.Tensor]:
    """Update the moments in `states`, and return Adam's updates without learning rate and weight decay."""
    beta1, beta2 = betas
    first_moments = [local_part(state["exp_avg"]) for state in states]
    second_moments = [local_part(state["exp_avg_sq"]) for state in states]
    torch._foreach_lerp_(first_moments, gradients, 1 - beta1)
    torch._foreach_mul_(second_moments, beta2)
    torch._foreach_addcmul_(second_moments, gradients, gradients, 1 - beta2)
    # r = (m / b1) / (sqrt(v / b2) + eps), with the bias corrections b1 and b2. Both are part of the divisor, so one
    # temporary copy of the moments is enough.
    corrections = [1 - beta1**step for step in steps]
    factors = [correction / (1 - beta2**step) ** 0.5 for correction, step in zip(corrections, steps, strict=True)]
    updates = list(torch._foreach_sqrt(second_moments))
    torch._foreach_mul_(updates, factors)
    torch._foreach_add_(updates, [correction * eps for correction in corrections])
    torch._foreach_reciprocal_(updates)
    torch._foreach_mul_(updates, first_moments)
    return updates


Schedule = Literal["cosine", "linear", "fixed"]

_FUSED_DEVICES = {"cpu", "cuda"}  # device types with a fused AdamW, which is seven times as fast on a CPU
_ONE_STAGE = World()


def make_optimizer(model: nn.Module, objective: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Create the optimizer for the parameters of `model` (possibly wrapped or sharded) and `objective`."""
    groups = parameter_groups(
        model,
        objective,
        weight_decay=settings.weight_decay,
        layer_decay=settings.optimizer.layer_decay,
        adapts_all=settings.optimizer.lamb_alpha == "all",
    )
    lr, number = settings.lr, settings.optimizer.number
    if settings.optimizer.name == "sgd":
        return Sgd(groups, lr=lr, momentum=number("momentum"))
    betas = (number("beta1"), number("beta2"))
    if settings.optimizer.name == "lion":
        return Lion(groups, lr=lr, betas=betas)
    if settings.optimizer.name == "lamb":
        return Lamb(groups, lr=lr, betas=betas, eps=number("eps"))
    is_fused = {parameter.device.type for parameter in model.parameters()} <= _FUSED_DEVICES
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=number("eps"), fused=is_fused or None)


def set_learning_rates(
    optimizer: torch.optim.Optimizer, step: int, settings: TrainingSettings, *, objective: Objective
) -> float:
    """Set the learning rate of each group for a step, counted from 1, and return the scheduled rate."""
    scale = settings.optimizer.lr_scale(settings.batch)
    lr = learning_rate(
        step,
        peak=settings.lr * scale,
        warmup_steps=num_steps(settings.warmup_steps, flag=settings.flag("warmup_steps")),
        total_steps=settings.steps,
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
    repeated_parameters: Collection[nn.Parameter] = (),
) -> torch.Tensor:
    """Unscale gradients and clip their global norm to `max_norm`, without synchronising with a GPU.

    Parameters may be complete or sharded (DTensor). All ranks must call this function, and get the same norm.

    Args:
        loss_scale: Factor of the loss, and thus of the gradients.
        stages: Ranks that hold the stages of the model, in a pipeline.
        repeated_parameters: Parameters of this rank that are tied to parameters of another stage. The other stage
            counts their norms.

    Returns:
        The global norm of the unscaled gradients before clipping, zero-dimensional float64. If it is not finite, the
        gradients must not be used.
    """
    parameters = list(parameters)
    repeated_ids = {id(parameter) for parameter in repeated_parameters}
    # Parameters that this rank counts come first, so that their norms are a slice.
    trained_parameters = sorted(
        (parameter for parameter in parameters if parameter.grad is not None),
        key=lambda parameter: id(parameter) in repeated_ids,
    )
    gradients = [parameter.grad for parameter in trained_parameters if parameter.grad is not None]
    if not gradients and stages.size == 1:
        return torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    parts = [local_part(gradient) for gradient in gradients]
    num_counted = sum(id(parameter) not in repeated_ids for parameter in trained_parameters)
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    if gradients:
        square = norms(parts, like=gradients)[:num_counted].square().sum()
    norm = stages.sum(square).sqrt() / loss_scale
    # As in torch.nn.utils.clip_grad_norm_. `max_norm` becomes a tensor first: dividing a Python number by a tensor
    # would round the reciprocal of the tensor.
    factor = (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0) / loss_scale
    # Skip the pass over all gradients if the factor is known to be 1.
    is_one = is_on_host(factor) and factor.item() == 1
    if parts and not is_one:
        for dtype in {part.dtype for part in parts}:
            torch._foreach_mul_([part for part in parts if part.dtype == dtype], factor.to(dtype))
    return norm


def take_step(optimizer: torch.optim.Optimizer, may_step: torch.Tensor, *, skips: bool) -> None:
    """Take a step if `may_step` is true; otherwise leave weights and state unchanged. A GPU decides without the host.

    Args:
        may_step: Zero-dimensional bool on the device.
        skips: True if training can continue after a skipped step. If False, a forbidden step ends the run with an
            error, so its result is never saved. Optimizers that need copies to skip a step then ignore `may_step` on a
            GPU.
    """
    if is_on_host(may_step):
        if may_step:
            optimizer.step()
        return
    if skips or optimizer.defaults.get("fused"):
        # torch.amp.GradScaler sets the same attribute of fused optimizers.
        optimizer.found_inf = (~may_step).float()  # type: ignore[attr-defined]
    optimizer.step()


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    schedule: Schedule = "cosine",
    start: float | None = None,
    end: float = 0.0,
) -> float:
    """Return the learning rate of a step. Steps count from 1 to `total_steps`.

    The rate increases linearly to `peak` at step `warmup_steps`, stays there for one step, and then decays so that it
    would reach `end` one step after the last step. With the schedule "fixed", it stays at `peak`. The increase begins
    with `start` at step 1 (AVION) or, if `start` is None, with 0 at step 0 (open_clip).
    """
    if step <= warmup_steps:
        if start is None:
            return peak * step / warmup_steps
        return start + (peak - start) * (step - 1) / max(1, warmup_steps - 1)
    if schedule == "fixed":
        return peak
    progress = (step - 1 - warmup_steps) / max(1, total_steps - warmup_steps)
    factor = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return end + (peak - end) * factor
