"""The captioners of two measurements, made once: ours and transformers', with the same weights."""

from functools import lru_cache
from typing import Any

import torch

from benchmarks.caption import SHAPES
from benchmarks.caption_steps import Shape, captioners
from benchmarks.gpu.parts import Setup
from train.models.captioner import Captioner


def shape_of(setup: Setup) -> Shape:
    """TimeSformer-B and GPT-2; tiny ones in a dry run."""
    return SHAPES["tiny" if setup.is_dry_run else "base"]


def opened_captioners(setup: Setup) -> tuple[Captioner, Any]:
    """Ours and theirs, on the device; they stay there."""
    return _opened(shape_of(setup), setup.device)


@lru_cache(maxsize=1)
def _opened(shape: Shape, device: torch.device) -> tuple[Captioner, Any]:
    return captioners(shape, device=device)
