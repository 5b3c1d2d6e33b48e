"""The learning rate by step."""

import numpy as np
import pytest
import torch

from clipmill.train.config.training import OptimizerSettings
from clipmill.train.losses.objective import Objective
from clipmill.train.optim.optimizer import learning_rate, set_learning_rates
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, peak=2.0, warmup_steps=4, total_steps=10) for step in range(1, 11)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert all(rates[i] > rates[i + 1] > 0 for i in range(4, 9))
    assert learning_rate(1, peak=2.0, warmup_steps=0, total_steps=1) == 2.0


@pytest.mark.parametrize("num_warmup_steps", [1, 2, 131])
def test_with_a_start_it_rises_and_falls_as_in_avions_code(num_warmup_steps: int) -> None:
    """AVION's schedule in NumPy is a line with both ends included, followed by half a cosine."""
    start, peak, end, num_steps = 1e-6, 3e-5, 1e-5, 400
    after = np.arange(num_steps - num_warmup_steps)
    falling = end + 0.5 * (peak - end) * (1 + np.cos(np.pi * after / len(after)))
    expected = np.concatenate([np.linspace(start, peak, num_warmup_steps), falling])
    given = {"peak": peak, "warmup_steps": num_warmup_steps, "total_steps": num_steps, "start": start, "end": end}
    rates = [learning_rate(step, **given) for step in range(1, num_steps + 1)]  # type: ignore[arg-type]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert rates[0] == start and rates[num_warmup_steps] == pytest.approx(peak)


def test_the_start_is_scaled_with_the_batch_like_the_peak() -> None:
    optimizer = OptimizerSettings(start_lr=1e-4, lr_batch=32)
    settings = DualEncoderSettings(lr=1e-3, warmup_steps=3, batch=64, optimizer=optimizer)
    sgd = torch.optim.SGD([{"params": [torch.zeros(1)], "is_objective": False, "lr_scale": 1.0}])
    rates = [set_learning_rates(sgd, step, settings, objective=Objective()) for step in (1, 2, 3)]
    assert rates == pytest.approx([2e-4, 1.1e-3, 2e-3])


def test_it_falls_along_half_a_cosine_or_a_line_to_its_end_or_stays() -> None:
    def rates(**chosen: object) -> list[float]:
        given = {"peak": 2.0, "warmup_steps": 2, "total_steps": 6, **chosen}
        return [learning_rate(step, **given) for step in range(3, 8)]  # type: ignore[arg-type]

    half_root = 0.5**0.5
    assert rates() == pytest.approx([2, 1 + half_root, 1, 1 - half_root, 0], abs=1e-12)
    assert rates(end=1.0) == pytest.approx([2, 1.5 + half_root / 2, 1.5, 1.5 - half_root / 2, 1])
    assert rates(schedule="linear", end=1.0) == pytest.approx([2, 1.75, 1.5, 1.25, 1])
    assert rates(schedule="fixed") == [2.0] * 5
