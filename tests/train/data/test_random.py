"""Random draws of torch and numpy: both are bit-identical."""

import numpy as np
import torch

from clipmill.train.device.random import device_uniform, draw_uniform


def test_torch_draws_the_same_numbers_to_the_bit() -> None:
    positions = np.concatenate([np.arange(50), np.random.default_rng(0).integers(0, 2**63 - 1, 50)])
    for seed, purpose in [(0, "tube mask"), (2**63 - 1, "another")]:
        expected = draw_uniform(positions, 130, seed=seed, purpose=purpose)
        uniform = device_uniform(torch.from_numpy(positions), 130, seed=seed, purpose=purpose)
        assert uniform.dtype == torch.float64
        np.testing.assert_array_equal(uniform.numpy(), expected)
        assert 0 <= expected.min() < 0.001 and 0.999 < expected.max() < 1
