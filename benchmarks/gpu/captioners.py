"""Captioners of clipmill and transformers with the same weights, which two measurements share."""

from functools import lru_cache
from typing import Any

import torch

from benchmarks.caption import SHAPES
from benchmarks.caption_steps import Shape, captioners
from benchmarks.gpu.measurements import Setup
from clipmill.train.models.captioner import Captioner


def shape_of(setup: Setup) -> Shape:
    """Return the dimensions of TimeSformer-B with GPT-2, or of tiny models in a dry run."""
    return SHAPES["tiny" if setup.is_dry_run else "base"]


def open_captioners(setup: Setup) -> tuple[Captioner, Any]:
    """Return both captioners on the device. They are created once, and kept."""
    return _create(shape_of(setup), setup.device)


@lru_cache(maxsize=1)
def _create(shape: Shape, device: torch.device) -> tuple[Captioner, Any]:
    return captioners(shape, device=device)
