"""A captioner: a video tower whose tokens a GPT-2 attends to.

Shape suffixes: V videos, C channels, T frames, H and W pixels, R rows of text (V * n, those of a video one behind the
other), L tokens of a row, N tokens of a video, D width of the decoder, E width of the tower, K words of the vocabulary.
"""

from typing import Protocol

import torch
from torch import nn

from train.models.gpt2 import Gpt2
from train.models.gpt2_block import TextCache
from train.models.transformer import Stack
from train.models.video_vit import VideoViTSize


class VideoTower(Protocol):
    """What a captioner asks of its video tower: TimeSformer, VideoViT and VideoMAEEncoder have it."""

    size: VideoViTSize
    transformer: Stack

    def embed(self, video: torch.Tensor, /) -> torch.Tensor:
        """What the first block is given of normalised clips [V, C, T, H, W]: [V, N, E]."""

    def finish(self, x: torch.Tensor, /) -> torch.Tensor:
        """The tower's tokens, of what the last block gave."""


class Captioner(nn.Module):
    """Clips and the tokens of captions to logits of the next tokens.

    Where tower and decoder differ in width, a linear layer stands between them (`projection`).
    """

    def __init__(self, video: nn.Module, decoder: Gpt2) -> None:
        super().__init__()
        self.video = video
        self.decoder = decoder
        widths = tower_of(self).size.trunk.width, decoder.size.trunk.width
        self.projection = None if widths[0] == widths[1] else nn.Linear(*widths)

    def forward(self, video_VCTHW: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [R, L, K] of the token after each.

        Args:
            tokens: int64 [V, L], or [V, n, L] for n captions of each video.
        """
        return self.decoder(tokens.flatten(0, -2), self.encode(video_VCTHW))  # type: ignore[no-any-return]

    def encode(self, video_VCTHW: torch.Tensor) -> torch.Tensor:
        """What the decoder attends to, [V, N, D]."""
        tower = tower_of(self)
        return self.finish(tower.transformer(tower.embed(video_VCTHW)))

    def finish(self, x_VNE: torch.Tensor) -> torch.Tensor:
        """What the decoder attends to, of what the tower's last block gave."""
        x_VNE = tower_of(self).finish(x_VNE)
        return x_VNE if self.projection is None else self.projection(x_VNE)

    def start(self, video_VCTHW: torch.Tensor, *, num_tokens: int, rows_per_video: int = 1) -> TextCache:
        """A cache for captions of clips, to be written by `step`; see `Gpt2.start`."""
        return self.decoder.start(self.encode(video_VCTHW), num_tokens=num_tokens, rows_per_video=rows_per_video)

    def step(self, tokens_RL: torch.Tensor, cache: TextCache) -> torch.Tensor:
        """Logits [R, K] of what follows these tokens; see `Gpt2.step`."""
        return self.decoder.step(tokens_RL, cache)


def tower_of(model: nn.Module) -> VideoTower:
    """The video tower of a captioner, or of a part of one."""
    tower: VideoTower = model.video  # type: ignore[assignment]
    return tower
