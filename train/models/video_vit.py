"""A joint space-time vision transformer: every patch of every frame attends to every other.

It is CLIP's image tower with a temporal embedding: with one frame and a zero temporal embedding it computes
CLIP's image features (AVION, section 3.1, builds its video tower the same way).

Shape suffixes: B batch, C channels, T frames, H and W pixels, P patches of a frame, L tokens (1 + T * P),
D width, E width of the embedding.
"""

from dataclasses import dataclass

import torch
from torch import nn

from train.models.attention import Attend
from train.models.transformer import Transformer, TransformerSize


@dataclass(frozen=True, kw_only=True)
class VideoViTSize:
    """A video tower; `trunk` is its transformer, `patch_px` the side of a patch."""

    trunk: TransformerSize
    patch_px: int
    num_channels: int = 3


class VideoViT(nn.Module):
    """Clips to embeddings."""

    def __init__(
        self, size: VideoViTSize, *, image_px: int, num_frames: int, embedding_width: int, attend: Attend
    ) -> None:
        super().__init__()
        if image_px % size.patch_px:
            raise ValueError(f"a picture of {image_px} px cannot be cut into patches of {size.patch_px} px")
        width, num_patches = size.trunk.width, (image_px // size.patch_px) ** 2
        self.conv1 = nn.Conv2d(size.num_channels, width, kernel_size=size.patch_px, stride=size.patch_px, bias=False)
        self.class_embedding = nn.Parameter(width**-0.5 * torch.randn(width))
        self.positional_embedding = nn.Parameter(width**-0.5 * torch.randn(1 + num_patches, width))
        self.temporal_embedding = nn.Parameter(width**-0.5 * torch.randn(num_frames, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = Transformer(size.trunk, attend=attend)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(width**-0.5 * torch.randn(width, embedding_width))

    def forward(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Embeds normalised clips [B, C, T, H, W] as [B, E], not yet of unit length."""
        num_clips, _, num_frames = video_BCTHW.shape[:3]
        patches = self.conv1(video_BCTHW.transpose(1, 2).flatten(0, 1)).flatten(2)
        x_BTPD = patches.transpose(1, 2).unflatten(0, (num_clips, num_frames))
        x_BTPD = x_BTPD + self.positional_embedding[1:] + self.temporal_embedding[:, None]
        class_B1D = (self.class_embedding + self.positional_embedding[0]).expand(num_clips, 1, -1)
        x_BLD = torch.cat([class_B1D, x_BTPD.flatten(1, 2)], dim=1)
        x_BLD = self.transformer(self.ln_pre(x_BLD))
        embedding_BE: torch.Tensor = self.ln_post(x_BLD[:, 0]) @ self.proj
        return embedding_BE
