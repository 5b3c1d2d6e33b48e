"""Tests that stored numbers equal torch's, and that non-finite values are detected."""

import numpy as np
import pytest
import torch

from clipmill.prep.latents.worker import is_finite, round_to_dtype


def test_both_types_are_rounded_as_torch_rounds() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(100_000, dtype=np.float32) * np.float32(10.0) ** rng.integers(-6, 4, 100_000)
    values = np.concatenate([values, np.array([0.0, -0.0, 1.00390625, 1.01171875, 65504.0])]).astype(np.float32)
    expected = torch.from_numpy(values)
    half = round_to_dtype(values, dtype="float16")
    assert half.dtype == np.float16 and np.array_equal(half, expected.half().numpy())
    brain = round_to_dtype(values, dtype="bfloat16")
    assert brain.dtype == np.uint16
    assert np.array_equal(brain.view(np.int16), expected.bfloat16().view(torch.int16).numpy())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_what_is_not_finite_is_seen(dtype: str, bad: float) -> None:
    values = np.zeros((2, 3), np.float32)
    assert is_finite(round_to_dtype(values, dtype=dtype))  # type: ignore[arg-type]
    values[1, 2] = bad
    assert not is_finite(round_to_dtype(values, dtype=dtype))  # type: ignore[arg-type]


def test_a_nan_stays_one_whatever_its_bits() -> None:
    quiet_and_loud = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    stored = torch.from_numpy(round_to_dtype(quiet_and_loud, dtype="bfloat16").view(np.int16)).view(torch.bfloat16)
    assert bool(stored.isnan().all())
