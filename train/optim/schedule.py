"""The learning rate as a pure function of the step: a straight rise, then a way down (or none)."""

import math
from typing import Literal

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
