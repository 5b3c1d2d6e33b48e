"""The optimizers compared with FastCLIP's procedure 4, written tensor by tensor, and with timm's optimizers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm.optim
import torch
from torch import nn

from clipmill.train.config.training import OptimizerSettings, TrainingSettings
from clipmill.train.losses.objective import Objective
from clipmill.train.optim.optimizer import Lamb, Lion, clip_gradients, make_optimizer, set_learning_rates

LR, DECAY, STEPS = 0.02, 0.1, 7
Array = np.ndarray[Any, np.dtype[np.float64]]


class Net(nn.Module):
    """Small float64 model with matrices, gains, biases and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.positional_embedding = nn.Parameter(torch.randn(5, 4))
        self.linear = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        nn.init.normal_(self.norm.bias)
        self.double()


class Temperature(Objective):
    def __init__(self) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.tensor(0.07, dtype=torch.float64))

    def learning_rate(self, scheduled: float) -> float:
        return scheduled / 3


def settings(**chosen: Any) -> TrainingSettings:
    return TrainingSettings(
        lr=LR, weight_decay=DECAY, warmup_steps=0, optimizer=OptimizerSettings(schedule="fixed", **chosen)
    )


def gradients(step: int, name: str, shape: tuple[int, ...]) -> Array:
    rng = np.random.default_rng([step, *name.encode()])
    return rng.normal(size=shape)


def steps_of(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> Iterator[int]:
    for step in range(1, STEPS + 1):
        for name, parameter in named.items():
            parameter.grad = torch.from_numpy(np.asarray(gradients(step, name, tuple(parameter.shape))))
        yield step
        optimizer.step()


def norm(values: Array) -> float:
    return float(np.sqrt((values**2).sum()))


class Reference:
    """Procedure 4 for one tensor."""

    def __init__(self, theta: Array, *, decay: float, lr: float, adapts: bool) -> None:
        self.theta, self.decay, self.lr, self.adapts = theta.copy(), decay, lr, adapts
        self.m, self.v, self.t = np.zeros_like(theta), np.zeros_like(theta), 0

    def sgd(self, g: Array) -> None:
        self.m = 0.9 * self.m + g + self.decay * self.theta
        self.theta = self.theta - self.lr * self.m

    def lion(self, g: Array) -> None:
        c = 0.9 * self.m + 0.1 * g
        self.m = 0.99 * self.m + 0.01 * g
        self.theta = self.theta - self.lr * (np.sign(c) + self.decay * self.theta)

    def lamb(self, g: Array, *, beta2: float = 0.999, eps: float = 1e-6) -> None:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = beta2 * self.v + (1 - beta2) * g**2
        r = (self.m / (1 - 0.9**self.t)) / (np.sqrt(self.v / (1 - beta2**self.t)) + eps)
        update = r + self.decay * self.theta
        alpha = norm(self.theta) / norm(update) if self.adapts else 1.0
        self.theta = self.theta - self.lr * alpha * update

    def adamw(self, g: Array) -> None:
        self.adapts = False
        self.lamb(g, beta2=0.98, eps=1e-8)


@pytest.mark.parametrize("alpha", ["all", "decayed"])
@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "sgd"])
def test_an_optimizer_is_procedure_4_of_fastclip(name: Any, alpha: Any) -> None:
    model, objective = Net(), Temperature()
    chosen = settings(name=name, lamb_alpha=alpha)
    named = {**dict(model.named_parameters()), "tau": objective.tau}
    decayed = {"linear.weight"}
    references = {
        key: Reference(
            parameter.detach().numpy(),
            decay=DECAY if key in decayed else 0.0,
            lr=LR / 3 if key == "tau" else LR,
            adapts=key != "tau" and (alpha == "all" or key in decayed),
        )
        for key, parameter in named.items()
    }
    optimizer = make_optimizer(model, objective, chosen)
    for step in steps_of(optimizer, named):
        assert set_learning_rates(optimizer, step, chosen, objective=objective) == LR
        for key, reference in references.items():
            getattr(reference, name)(gradients(step, key, reference.theta.shape))
    for key, reference in references.items():
        np.testing.assert_allclose(named[key].detach().numpy(), reference.theta, rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda ps: Lamb(ps, lr=LR, betas=(0.9, 0.99), eps=1e-6, weight_decay=DECAY),
            lambda ps: timm.optim.Lamb(ps, lr=LR, betas=(0.9, 0.99), eps=1e-6, weight_decay=DECAY, max_grad_norm=None),
        ),
        (
            lambda ps: Lion(ps, lr=LR, betas=(0.9, 0.98), weight_decay=DECAY),
            lambda ps: timm.optim.Lion(ps, lr=LR, betas=(0.9, 0.98), weight_decay=DECAY),
        ),
    ],
)
def test_lamb_and_lion_equal_timms(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    norms = []
    for make in (ours, theirs):
        model = Net()
        with torch.no_grad():
            model.norm.bias.zero_()  # has a norm of 0, so its step cannot be adapted
        named = dict(model.named_parameters())
        for _ in steps_of(optimizer := make(named.values()), named):
            pass
        assert optimizer.state_dict()["param_groups"][0]["lr"] == LR
        norms.append(named)
    for name, parameter in norms[0].items():
        torch.testing.assert_close(parameter, norms[1][name], rtol=1e-9, atol=1e-12)
        assert not torch.equal(parameter, Net().get_parameter(name))


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_torchs_whatever_the_loss_was_scaled_by(max_norm: float, loss_scale: float) -> None:
    ours, theirs = Net(), Net()
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.grad = torch.randn_like(other)
        parameter.grad = other.grad * loss_scale
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm).item()
    result = clip_gradients(ours.parameters(), max_norm=max_norm, loss_scale=loss_scale)
    assert result == pytest.approx(expected, rel=1e-12)
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_a_weight_that_another_stage_counts_is_clipped_and_not_counted_again() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for number, weight in enumerate(weights, start=1):
        weight.grad = torch.full((2,), 10.0**number)
    norm = clip_gradients(weights, max_norm=1.0, repeated_parameters=weights[1:2])
    assert norm == pytest.approx((2 * (10.0**2 + 1000.0**2)) ** 0.5)
    for number, weight in enumerate(weights, start=1):
        torch.testing.assert_close(weight.grad, torch.full((2,), 10.0**number / norm.item()))


def test_a_norm_says_that_a_gradient_is_no_number() -> None:
    model = Net()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert clip_gradients(model.parameters(), max_norm=1.0) == 0
    assert model.linear.bias.grad is not None
    model.linear.bias.grad[2] = float("inf")
    assert clip_gradients(model.parameters(), max_norm=1.0) == float("inf")
    assert clip_gradients(Net().parameters(), max_norm=1.0) == 0


def test_frozen_parameters_are_left_alone() -> None:
    model = Net()
    model.linear.requires_grad_(False)
    optimizer = make_optimizer(model, Objective(), replace(settings(), weight_decay=1.0))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 3
