"""A video tower with one linear layer behind it.

Shape suffixes: B batch, C channels, T frames, H and W pixels, K classes.
"""

import torch
from torch import nn

from train.models.attention import Attend
from train.models.dual_encoder import size_of
from train.models.settings import ModelName, Towers
from train.models.transformer import checkpoint_blocks, drop_path_of
from train.models.video_vit import VideoViT

_HEAD_STD = 0.01


class VideoClassifier(nn.Module):
    """Logits of clips: the tower's class token, without CLIP's projection, through dropout and a linear layer.

    Parameters are named as a dual encoder's: `video.*`, and `head.*`. The head starts with a standard deviation of
    0.01 and without bias (AVION's).
    """

    def __init__(
        self,
        model: ModelName,
        *,
        towers: Towers,
        image_px: int,
        num_frames: int,
        num_classes: int,
        dropout: float,
        attend: Attend,
    ) -> None:
        super().__init__()
        size = size_of(model, towers).video
        trunk = size.trunk
        self.video = VideoViT(
            size,
            image_px=image_px,
            num_frames=num_frames,
            embedding_width=None,
            attend=attend,
            temporal_std=trunk.width**-0.5 if towers.temporal == "random" else 0.0,
            patch_dropout=towers.patch_dropout,
            drop_path=drop_path_of(towers.drop_path, depth=trunk.depth, is_rising=towers.drop_path_rule == "rising"),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(trunk.width, num_classes)
        nn.init.normal_(self.head.weight, std=_HEAD_STD)
        nn.init.zeros_(self.head.bias)
        if towers.activation_checkpointing:
            checkpoint_blocks(self)

    def forward(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K] of normalised clips [B, C, T, H, W]."""
        logits_BK: torch.Tensor = self.head(self.dropout(self.video(video_BCTHW)))
        return logits_BK
