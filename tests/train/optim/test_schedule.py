"""The learning rate by step."""

import pytest

from train.optim.optimizer import learning_rate


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, peak=2.0, warmup_steps=4, num_steps=10) for step in range(1, 11)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert all(rates[i] > rates[i + 1] > 0 for i in range(4, 9))
    assert learning_rate(1, peak=2.0, warmup_steps=0, num_steps=1) == 2.0


def test_it_falls_along_half_a_cosine_or_a_line_to_its_end_or_stays() -> None:
    def rates(**chosen: object) -> list[float]:
        given = {"peak": 2.0, "warmup_steps": 2, "num_steps": 6, **chosen}
        return [learning_rate(step, **given) for step in range(3, 8)]  # type: ignore[arg-type]

    half_root = 0.5**0.5
    assert rates() == pytest.approx([2, 1 + half_root, 1, 1 - half_root, 0], abs=1e-12)
    assert rates(end=1.0) == pytest.approx([2, 1.5 + half_root / 2, 1.5, 1.5 - half_root / 2, 1])
    assert rates(schedule="linear", end=1.0) == pytest.approx([2, 1.75, 1.5, 1.25, 1])
    assert rates(schedule="fixed") == [2.0] * 5
