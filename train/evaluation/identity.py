"""The identity of weights: a hash of everything that affects a model's outputs."""

import hashlib
import json
from typing import Any

from torch import nn

from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.model import kind_of
from clipmill.train.models.library_towers import LibraryTower
from clipmill.train.models.video_vit import TokenTower
from clipmill.train.weights.conversion import CLIP_MEAN, CLIP_STD, MEANS, STDS, Mean

# Settings that affect an output, in addition to tensors and kind of task.
_DECISIVE = ("num_frames", "sampling", "stride", "size_px", "input", "segment")


def identity_of(model: nn.Module, settings: ClipSettings, *, task: str) -> str:
    """Return the SHA-256 of the tensors and of the settings that affect outputs. It is equal for a run and its exports.

    It depends neither on device and precision, which only round the outputs, nor on file names.

    Args:
        task: Name of the task.
    """
    digest = hashlib.sha256()
    decisive = {name: getattr(settings, name, None) for name in _DECISIVE}
    if settings.views is not None:
        decisive |= {"views": settings.views, "rule": settings.towers.views}
    decisive |= {"task": task, "normalisation": normalisation_of(settings), **_unseen_facts(model)}
    digest.update(json.dumps(decisive, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not tensor.is_floating_point():  # a counter, which affects no output
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def normalisation_of(settings: ClipSettings) -> tuple[Mean, Mean]:
    """Return means and standard deviations with which pixels are normalised."""
    init, kind = settings.init, kind_of(settings.towers)
    return init.pixel_mean or MEANS.get(kind, CLIP_MEAN), init.pixel_std or STDS.get(kind, CLIP_STD)


def _unseen_facts(model: nn.Module) -> dict[str, Any]:
    """Return values that a network uses but that no tensor shows."""
    facts: dict[str, Any] = {
        name: [value for one in model.modules() if isinstance(value := getattr(one, name, None), int | float)]
        for name in ("num_heads", "eps")
    }
    video, text = model.video, getattr(model, "text", None)
    if isinstance(video, TokenTower):
        facts["activation"] = video.size.trunk.activation
    towers = (one for one in (video, text) if isinstance(one, LibraryTower))
    return facts | {f"tower {one.reference}": getattr(one, "pooling", "") for one in towers}
