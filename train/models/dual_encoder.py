"""Two towers: clips and captions meet in one space."""

from dataclasses import dataclass

import torch
from torch import nn

from train.models.attention import Attend
from train.models.text import TextTower, TextTowerSize
from train.models.transformer import TransformerSize
from train.models.video_vit import VideoViT, VideoViTSize


@dataclass(frozen=True, kw_only=True)
class DualEncoderSize:
    """Sizes of both towers and of the space they share."""

    video: VideoViTSize
    text: TextTowerSize
    embedding_width: int


SIZES = {
    "tiny": DualEncoderSize(
        video=VideoViTSize(trunk=TransformerSize(width=128, depth=4, num_heads=4), patch_px=16),
        text=TextTowerSize(trunk=TransformerSize(width=128, depth=2, num_heads=4)),
        embedding_width=128,
    ),
    "s16": DualEncoderSize(
        video=VideoViTSize(trunk=TransformerSize(width=384, depth=12, num_heads=6), patch_px=16),
        text=TextTowerSize(trunk=TransformerSize(width=384, depth=12, num_heads=6)),
        embedding_width=384,
    ),
    "b16": DualEncoderSize(
        video=VideoViTSize(trunk=TransformerSize(width=768, depth=12, num_heads=12), patch_px=16),
        text=TextTowerSize(trunk=TransformerSize(width=512, depth=12, num_heads=8)),
        embedding_width=512,
    ),
}


class DualEncoder(nn.Module):
    """A video tower and a text tower.

    Args:
        has_text_tower: without one, captions come as embeddings that another tower made.
    """

    def __init__(
        self, size: DualEncoderSize, *, image_px: int, num_frames: int, attend: Attend, has_text_tower: bool = True
    ) -> None:
        super().__init__()
        self.video = VideoViT(
            size.video, image_px=image_px, num_frames=num_frames, embedding_width=size.embedding_width, attend=attend
        )
        self.text = None
        if has_text_tower:
            self.text = TextTower(size.text, embedding_width=size.embedding_width, attend=attend)

    def forward(self, video_BCTHW: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of clips and of captions, each [B, E] and of unit length; for `text` see `embed_text`."""
        return self.embed_video(video_BCTHW), self.embed_text(text)

    def embed_video(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Clips [B, C, T, H, W] to [B, E] of unit length."""
        return nn.functional.normalize(self.video(video_BCTHW), dim=-1)

    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        """Token ids [B, L], or without a text tower ready embeddings [B, E], to [B, E] of unit length."""
        embedded = text.float() if self.text is None else self.text(text)
        return nn.functional.normalize(embedded, dim=-1)
