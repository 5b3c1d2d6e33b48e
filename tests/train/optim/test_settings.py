"""--optimizer.*: combinations of flags that are rejected."""

from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.config.training import OptimizerSettings, TrainingSettings


@pytest.mark.parametrize(
    ("chosen", "message", "hint"),
    [
        ({"momentum": 0.9}, "--optimizer.momentum is 0.9, but adamw does not use it", "sgd"),
        ({"name": "sgd", "beta1": 0.9}, "sgd does not use it", "adamw, lamb, lion"),
        ({"name": "lion", "eps": 1e-8}, "lion does not use it", "adamw, lamb"),
        ({"beta2": 1.0}, "--optimizer.beta2 is 1.0", "less than 1"),
        ({"eps": 0.0}, "--optimizer.eps is 0.0", "more than 0"),
        ({"ema": 1.0}, "--optimizer.ema is 1.0", "less than 1"),
        ({"ema": float("nan")}, "--optimizer.ema is nan", "less than 1"),
        ({"layer_decay": 0.0}, "--optimizer.layer-decay is 0.0", "at most 1"),
        ({"end_lr": -1.0}, "--optimizer.end-lr is -1.0", "0 or more"),
    ],
)
def test_a_number_that_is_not_used_or_makes_no_sense_is_refused(
    chosen: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UserError) as raised:
        OptimizerSettings(**chosen)
    assert message in str(raised.value)
    assert raised.value.hint is not None and hint in raised.value.hint


def test_the_end_of_the_schedule_is_not_above_its_peak() -> None:
    with pytest.raises(UserError, match=r"--optimizer\.end-lr 0\.2 is larger than --lr 0\.1"):
        TrainingSettings(lr=0.1, optimizer=OptimizerSettings(end_lr=0.2))


def test_the_start_of_the_warmup_is_not_above_its_end() -> None:
    with pytest.raises(UserError, match=r"--optimizer\.start-lr 0\.2 is larger than --lr 0\.1"):
        TrainingSettings(lr=0.1, optimizer=OptimizerSettings(start_lr=0.2))


def test_an_optimizer_has_numbers_of_its_own() -> None:
    assert OptimizerSettings().number("beta2") == 0.98
    assert OptimizerSettings(name="lion").number("beta2") == 0.99
    assert OptimizerSettings(name="lion", beta2=0.5).number("beta2") == 0.5
