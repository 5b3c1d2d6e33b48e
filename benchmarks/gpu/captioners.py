"""The captioners shared by two measurements: clipmill's and transformers', with the same weights."""

from functools import lru_cache
from typing import Any

import torch

from benchmarks.caption import SHAPES
from benchmarks.caption_steps import Shape, captioners
from benchmarks.gpu.measurements import Setup
from clipmill.train.models.captioner import Captioner


def shape_of(setup: Setup) -> Shape:
    """Return the shape of TimeSformer-B with GPT-2; tiny models in a dry run."""
    return SHAPES["tiny" if setup.is_dry_run else "base"]


def opened_captioners(setup: Setup) -> tuple[Captioner, Any]:
    """Create both captioners on the device, where they are kept."""
    return _opened(shape_of(setup), setup.device)


@lru_cache(maxsize=1)
def _opened(shape: Shape, device: torch.device) -> tuple[Captioner, Any]:
    return captioners(shape, device=device)
