"""Steps that the device skips leave no trace, and the other steps and clipped gradients do not change."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from clipmill.train.device.transfer import Scalar
from clipmill.train.optim.optimizer import Sgd, clip_gradients, make_optimizer, take_step
from tests.train.device_reads import as_on_a_gpu
from tests.train.optim.test_optimizers import Net, Temperature, settings

NAMES = ["adamw", "lion", "lamb", "sgd"]


def fill(model: nn.Module, step: int, *, is_good: bool = True) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if not is_good:
            parameter.grad.flatten()[0] = float("nan")


def run(name: Any, good: list[bool], *, leaves_out: bool) -> dict[str, torch.Tensor]:
    """Return weights and state after several steps.

    Steps that are not good are either skipped by the device or not taken at all.
    """
    model = Net().float()
    optimizer = make_optimizer(model, Temperature(), settings(name=name))
    for step, is_good in enumerate(good):
        fill(model, step, is_good=is_good)
        if leaves_out:
            take_step(optimizer, torch.tensor(is_good), skips=True)
        elif is_good:
            optimizer.step()
    state = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for key, parameter in model.named_parameters():
        state |= {f"{key}.{kind}": value.clone() for kind, value in optimizer.state.get(parameter, {}).items()}
    return state


@pytest.mark.parametrize("is_gpus_way", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("good", [[True] * 5, [True, True, False, True, True], [False, False, True, True]])
def test_a_step_that_is_left_out_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, name: str, good: list[bool], is_gpus_way: bool
) -> None:
    if is_gpus_way:
        as_on_a_gpu(monkeypatch)
    state, expected = (run(name, good, leaves_out=leaves_out) for leaves_out in (True, False))
    assert state.keys() == expected.keys() and len(state) > len(list(Net().parameters()))
    for key, value in state.items():
        # On a GPU, the device computes LAMB's corrections, but also in float64.
        assert torch.equal(value, expected[key]) or (name == "lamb" and is_gpus_way), key
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_where_errors_alone_forbid_a_step_good_ones_are_the_optimizers_own(
    monkeypatch: pytest.MonkeyPatch, name: Any
) -> None:
    as_on_a_gpu(monkeypatch)
    model, other = Net(), Net()
    optimizers = [make_optimizer(module, Temperature(), settings(name=name)) for module in (model, other)]
    for step in range(4):
        fill(model, step)
        fill(other, step)
        take_step(optimizers[0], torch.tensor(True), skips=False)
        optimizers[1].step()
    assert all(
        torch.equal(parameter, expected)
        for parameter, expected in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_sgd_is_torchs_to_the_bit_and_goes_on_with_its_state(momentum: float, decay: float) -> None:
    ours, theirs = Net().float(), Net().float()
    optimizer = Sgd(ours.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, weight_decay=decay, foreach=True)
    for step in range(6):
        fill(ours, step)
        fill(theirs, step)
        if step == 3:
            state = deepcopy(other.state_dict())["state"]
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        optimizer.step()
        other.step()
        assert all(
            torch.equal(parameter, expected)
            for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True)
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_learning_rate_that_the_device_decides_is_a_learning_rate(name: Any) -> None:
    states = []
    for lr in (0.02, torch.tensor(0.02, dtype=torch.float64)):
        model = Net().float()
        optimizer = make_optimizer(model, Temperature(), settings(name=name))
        for group in optimizer.param_groups:
            # Only the objective's group has such a learning rate.
            group["lr"], group["weight_decay"], group["adapts"] = lr, 0.0, False
        for step in range(3):
            fill(model, step)
            optimizer.step()
        states.append(list(model.parameters()))
    for parameter, expected in zip(*states, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_scale", [1.0, torch.tensor(1024.0, dtype=torch.float64)])
@pytest.mark.parametrize("max_norm", [0.3, 1e6])
def test_gradients_are_clipped_to_the_bit_as_with_pythons_numbers(
    dtype: torch.dtype, loss_scale: Scalar, max_norm: float
) -> None:
    for step in range(20):
        model, other = Net().to(dtype), Net().to(dtype)
        fill(model, step)
        fill(other, step)
        norm = clip_gradients(model.parameters(), max_norm=max_norm, loss_scale=loss_scale)
        gradients = [parameter.grad for parameter in other.parameters() if parameter.grad is not None]
        squares = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).square()
        expected = squares.sqrt().square().sum().sqrt().item() / float(loss_scale)
        assert norm.item() == expected
        factor = min(1.0, max_norm / (expected + 1e-6)) / float(loss_scale)
        torch._foreach_mul_(gradients, factor)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
