"""Exponential moving average of the weights."""

import pytest
import torch
from torch import nn

from clipmill.train.optim.ema import Ema


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def set_to(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)


def test_the_average_follows_the_weights_faster_at_first() -> None:
    model = model_of(1.0).double()
    ema = Ema(model, decay=0.5)
    average = 1.0
    for step in range(1, 21):
        set_to(model, float(step))
        ema.update(model, step=step)
        decay = min(0.5, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * step
    assert decay == 0.5 and 2 / 11 < 0.5
    for tensor in ema.state_dict().values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, average), rtol=1e-12, atol=0)
    assert all((parameter == 20.0).all() for parameter in model.parameters())


def test_a_model_has_the_averages_for_a_while_and_its_own_weights_after_it() -> None:
    model = model_of(1.0)
    ema = Ema(model, decay=0.9)
    set_to(model, 5.0)
    parameters = list(model.parameters())
    x = torch.ones(1, 3)
    with ema.swap_in(model):
        assert model(x).tolist() == [[4.0, 4.0]]
    assert model(x).tolist() == [[20.0, 20.0]]
    with pytest.raises(RuntimeError), ema.swap_in(model):
        raise RuntimeError
    assert model(x).tolist() == [[20.0, 20.0]]
    assert all(parameter is other for parameter, other in zip(model.parameters(), parameters, strict=True))
    assert all((tensor == 1.0).all() for tensor in ema.state_dict().values())


def test_frozen_weights_have_no_average() -> None:
    model = model_of(2.0)
    model.bias.requires_grad_(False)
    assert Ema(model, decay=0.9).state_dict().keys() == {"weight"}
