"""Hash that identifies a model in runs and exports, computed from everything that affects the model's outputs."""

import hashlib
import json
from typing import Any

from torch import nn

from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.model import kind_of
from clipmill.train.models.library_towers import LibraryTower
from clipmill.train.models.video_vit import TokenTower
from clipmill.train.weights.conversion import CLIP_MEAN, CLIP_STD, MEANS, STDS, Mean

# Settings that affect the outputs, in addition to the tensors and the task.
_OUTPUT_SETTINGS = ("num_frames", "sampling", "stride", "size_px", "input", "segment")


def identity_of(model: nn.Module, settings: ClipSettings, *, task: str) -> str:
    """Return the SHA-256 of the tensors and of the settings that affect the outputs.

    A run and its exports have the same hash. The hash depends neither on file names nor on the device or the precision,
    which affect only rounding.
    """
    digest = hashlib.sha256()
    settings_facts = {name: getattr(settings, name, None) for name in _OUTPUT_SETTINGS}
    if settings.views is not None:
        settings_facts |= {"views": settings.views, "rule": settings.towers.views}
    settings_facts |= {"task": task, "normalisation": normalisation_of(settings), **_hidden_facts(model)}
    digest.update(json.dumps(settings_facts, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not tensor.is_floating_point():  # counters do not affect the outputs
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def normalisation_of(settings: ClipSettings) -> tuple[Mean, Mean]:
    """Return the mean and standard deviation of each channel for the normalisation of pixels."""
    init, kind = settings.init, kind_of(settings.towers)
    return init.pixel_mean or MEANS.get(kind, CLIP_MEAN), init.pixel_std or STDS.get(kind, CLIP_STD)


def _hidden_facts(model: nn.Module) -> dict[str, Any]:
    """Return values that affect the outputs of a network, but cannot be read from its tensors."""
    facts: dict[str, Any] = {
        name: [value for module in model.modules() if isinstance(value := getattr(module, name, None), int | float)]
        for name in ("num_heads", "eps")
    }
    video, text = model.video, getattr(model, "text", None)
    if isinstance(video, TokenTower):
        facts["activation"] = video.size.trunk.activation
    towers = (tower for tower in (video, text) if isinstance(tower, LibraryTower))
    return facts | {f"tower {tower.reference}": getattr(tower, "pooling", "") for tower in towers}
