"""Small models of each kind, with random weights that differ in every element."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipmill.train.config.model import Activation
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import DualEncoder, DualEncoderSize
from clipmill.train.models.text import TextTowerSize
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.video_vit import VideoViTSize
from clipmill.train.weights.loading import LoadedWeights, copy_into, fit_to
from clipmill.train.weights.source import Say, Source

IMAGE_PX, PATCH_PX, WIDTH, TEXT_WIDTH, EMBEDDING, VOCABULARY, CONTEXT = 32, 8, 64, 48, 24, 99, 12
HEADS, TEXT_HEADS, DEPTH = 4, 3, 2

SIZE = DualEncoderSize(
    video=VideoViTSize(trunk=TransformerSize(width=WIDTH, depth=DEPTH, num_heads=HEADS), patch_px=PATCH_PX),
    text=TextTowerSize(
        trunk=TransformerSize(width=TEXT_WIDTH, depth=DEPTH, num_heads=TEXT_HEADS),
        vocabulary_size=VOCABULARY,
        context_length=CONTEXT,
    ),
    embedding_width=EMBEDDING,
)

OPEN_CLIP_CONFIG: dict[str, Any] = {
    "embed_dim": EMBEDDING,
    "vision_cfg": {"image_size": IMAGE_PX, "layers": DEPTH, "width": WIDTH, "head_width": 16, "patch_size": PATCH_PX},
    "text_cfg": {
        "context_length": CONTEXT,
        "vocab_size": VOCABULARY,
        "width": TEXT_WIDTH,
        "heads": TEXT_HEADS,
        "layers": DEPTH,
    },
}


def our_model(
    *,
    activation: Activation = "gelu",
    video_eps: float = 1e-5,
    num_frames: int = 1,
    size: DualEncoderSize = SIZE,
    **changes: Any,
) -> DualEncoder:
    """Make a small DualEncoder with random weights, in float32."""
    video_trunk = replace(size.video.trunk, activation=activation, norm_eps=video_eps)
    text_trunk = replace(size.text.trunk, activation=activation)
    size = replace(size, video=replace(size.video, trunk=video_trunk), text=replace(size.text, trunk=text_trunk))
    options = {"image_px": IMAGE_PX, "num_frames": num_frames, "attend": attend_with_sdpa, **changes}
    model = DualEncoder(size, **options)
    shuffle(model, seed=7)
    return model.eval()


def loaded_weights(model: nn.Module, source: Source, *, allow: tuple[str, ...] = (), say: Say) -> LoadedWeights:
    """Fit weights to a model and copy them into it."""
    loaded = fit_to(model, source, allow=allow, say=say)
    copy_into(model, loaded)
    return loaded


def shuffle(model: nn.Module, *, seed: int) -> None:
    """Fill every parameter with random numbers, so that no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def open_clip_model(name: str, folder: Path, **changes: Any) -> Any:
    """Make a small open_clip model with random weights, and register it under `name`."""
    import open_clip

    (folder / f"{name}.json").write_text(json.dumps({**OPEN_CLIP_CONFIG, **changes}))
    open_clip.add_model_config(folder / f"{name}.json")
    model = open_clip.create_model(name)
    shuffle(model, seed=1)
    return model.eval()


def images(number: int = 3) -> torch.Tensor:
    """Return random images [N, 3, H, W]."""
    return torch.randn(number, 3, IMAGE_PX, IMAGE_PX, generator=torch.Generator().manual_seed(2))


def tokens() -> torch.Tensor:
    """Return captions of several lengths, [3, L]; each ends with the largest id."""
    ids = torch.zeros(3, CONTEXT, dtype=torch.int64)
    for row, length in enumerate((3, 7, CONTEXT)):
        ids[row, :length] = torch.arange(1, length + 1) * 5 % (VOCABULARY - 1)
        ids[row, length - 1] = VOCABULARY - 1
    return ids


def ignore_line(line: str) -> None:
    """Ignore a line of progress."""
