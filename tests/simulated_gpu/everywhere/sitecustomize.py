"""Python that is started with this folder in PYTHONPATH has simulated GPUs from its first line on, as do its children."""

import torch

from tests.simulated_gpu.device import simulation

# No kernel runs, and none has to be slowed down.
torch.cuda._sleep = lambda cycles: None  # type: ignore[assignment]
_simulation = simulation()
_simulation.__enter__()
