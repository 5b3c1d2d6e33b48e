"""A captioner: a video tower and a GPT-2 that attends to its tokens.

Shape suffixes: V videos, C channels, T frames, H and W pixels, R rows of text (V * n, grouped by video), L tokens of a
row, N tokens of a video, D decoder width, E tower width, K vocabulary size.
"""

from typing import Protocol

from torch import Tensor, nn

from clipmill.train.models.gpt2 import Gpt2, TextCache


class VideoTower(Protocol):
    """What all video towers have: `TokenTower` and `LibraryImage`."""

    @property
    def token_width(self) -> int:
        """E."""

    def tokens(self, video_BCTHW: Tensor) -> Tensor:
        """All tokens of normalised clips [V, C, T, H, W] after the last norm, [V, N, E]."""


class Captioner(nn.Module):
    """Predicts the next tokens of captions of clips. `projection` connects a tower and decoder of different widths."""

    def __init__(self, video: nn.Module, decoder: Gpt2) -> None:
        super().__init__()
        self.video = video
        widths = tower_of(self).token_width, decoder.size.trunk.width
        self.projection = None if widths[0] == widths[1] else nn.Linear(*widths)
        self.decoder = decoder

    def forward(self, video_VCTHW: Tensor, tokens: Tensor) -> Tensor:
        """Logits [R, L, K] of the token after each of `tokens`, int64 [V, L] or [V, n, L] for n captions per video."""
        return self.decoder(tokens.flatten(0, -2), self.encode(video_VCTHW))  # type: ignore[no-any-return]

    def encode(self, video_VCTHW: Tensor) -> Tensor:
        """The encoder output that the decoder attends to, [V, N, D]."""
        x_VNE = tower_of(self).tokens(video_VCTHW)
        return x_VNE if self.projection is None else self.projection(x_VNE)

    def start(self, video_VCTHW: Tensor, *, num_tokens: int, rows_per_video: int = 1) -> TextCache:
        """Encode clips and create the decoding cache for `step`; see `Gpt2.start`."""
        return self.decoder.start(self.encode(video_VCTHW), num_tokens=num_tokens, rows_per_video=rows_per_video)

    def step(self, tokens_RL: Tensor, cache: TextCache) -> Tensor:
        """Logits [R, K] of the next tokens; see `Gpt2.step`."""
        return self.decoder.step(tokens_RL, cache)


def tower_of(model: nn.Module) -> VideoTower:
    """The video tower of a captioner or of a part of one."""
    tower: VideoTower = model.video  # type: ignore[assignment]
    return tower
