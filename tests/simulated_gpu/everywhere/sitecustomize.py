"""Python that starts with this folder in PYTHONPATH has simulated GPUs from its first line on; its children too."""

import torch

from tests.simulated_gpu.device import simulation

# No kernel runs, and none has to be slowed down.
torch.cuda._sleep = lambda cycles: None  # type: ignore[assignment]
# The runtime has no threads and no memory of a GPU that a fork would lose.
torch.cuda._is_in_bad_fork = lambda: False
_simulation = simulation()
_simulation.__enter__()
