"""Towers small enough for float64 on a CPU, with weights large enough that every part affects the result."""

import torch
from torch import nn

from clipmill.train.config.model import Towers, tubelet_of
from clipmill.train.models.attention import Attend, attend_with_sdpa
from clipmill.train.models.dual_encoder import DualEncoder, DualEncoderSize
from clipmill.train.models.text import TextTowerSize
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.video_vit import VideoViTSize

PLAIN = Towers()
END = 99  # the largest id


def small_size(towers: Towers = PLAIN) -> DualEncoderSize:
    """Return a size with three blocks of width 32 per tower, patches of 8 px, 100 ids and 12 tokens per caption."""
    trunk = TransformerSize(width=32, depth=3, num_heads=4, activation=towers.activation or "gelu")
    return DualEncoderSize(
        video=VideoViTSize(trunk=trunk, patch_px=8, cube_frames=tubelet_of(towers)),
        text=TextTowerSize(trunk=trunk, vocabulary_size=END + 1, context_length=12),
        embedding_width=towers.embedding_width or 24,
    )


def small_encoder(
    towers: Towers = PLAIN, *, num_frames: int = 4, attend: Attend = attend_with_sdpa, seed: int = 0
) -> DualEncoder:
    """Make a float64 encoder for clips at 32 px."""
    torch.manual_seed(seed)
    encoder = DualEncoder(small_size(towers), image_px=32, num_frames=num_frames, attend=attend, towers=towers).double()
    spread_out(encoder)
    if towers.temporal == "zero":
        nn.init.zeros_(encoder.video.temporal_embedding)
    return encoder


def spread_out(module: nn.Module) -> None:
    """Fill all parameters, including gains and biases, so that an omitted parameter changes the result."""
    for name, parameter in module.named_parameters():
        is_gain = parameter.ndim == 1 and name.endswith("weight")
        nn.init.normal_(parameter, mean=1.0 if is_gain else 0.0, std=0.2)


def captions(*lengths: int, seed: int = 0) -> torch.Tensor:
    """Return token ids [B, 12] of captions with the given numbers of tokens, including the end token; padding is 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BL = torch.zeros(len(lengths), 12, dtype=torch.int64)
    for row, length in enumerate(lengths):
        tokens_BL[row, :length] = torch.randint(1, END, (length,), generator=generator)
        tokens_BL[row, length - 1] = END
    return tokens_BL


def clips(num_clips: int, num_frames: int = 4, *, seed: int = 0) -> torch.Tensor:
    """Return random clips [B, 3, T, 32, 32]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_clips, 3, num_frames, 32, 32, generator=generator, dtype=torch.float64)


def gradients(module: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of all parameters by name."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
