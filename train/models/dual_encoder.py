"""Two towers: clips and captions meet in one space."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from train.config.model import PATCH_PX, Kind, ModelName, Towers, kind_of, tubelet_of
from train.models.attention import Attend
from train.models.text import TextTower, TextTowerSize
from train.models.transformer import NORM_EPS, TransformerSize, checkpoint_blocks, drop_path_of
from train.models.video_vit import VideoViT, VideoViTSize

_PLAIN = Towers()
# Of the published configurations; else CLIP's.
_NORM_EPS: dict[Kind, float] = {"videomae": 1e-12, "timesformer": 1e-6}


@dataclass(frozen=True, kw_only=True)
class DualEncoderSize:
    """Sizes of both towers and of the space they share."""

    video: VideoViTSize
    text: TextTowerSize
    embedding_width: int


def _clip(
    name: ModelName,
    *,
    video: tuple[int, int],
    text: tuple[int, int],
    embedding_width: int,
    head_width: int = 64,
) -> DualEncoderSize:
    """Towers of (width, depth) with heads of one width."""
    (video_width, video_depth), (text_width, text_depth) = video, text
    video_trunk = TransformerSize(width=video_width, depth=video_depth, num_heads=video_width // head_width)
    text_trunk = TransformerSize(width=text_width, depth=text_depth, num_heads=text_width // head_width)
    return DualEncoderSize(
        video=VideoViTSize(trunk=video_trunk, patch_px=PATCH_PX[name]),
        text=TextTowerSize(trunk=text_trunk),
        embedding_width=embedding_width,
    )


# CLIP, table 20, for b16 and l14; s16 and l16 have the widths of ViT-S and ViT-L and open_clip's text towers for them.
SIZES: dict[str, DualEncoderSize] = {
    "tiny": _clip("tiny", video=(128, 4), text=(128, 2), embedding_width=128, head_width=32),
    "s16": _clip("s16", video=(384, 12), text=(384, 12), embedding_width=384),
    "b16": _clip("b16", video=(768, 12), text=(512, 12), embedding_width=512),
    "l16": _clip("l16", video=(1024, 24), text=(768, 12), embedding_width=768),
    "l14": _clip("l14", video=(1024, 24), text=(768, 12), embedding_width=768),
    "l14-336": _clip("l14-336", video=(1024, 24), text=(768, 12), embedding_width=768),
}


def size_of(model: ModelName, towers: Towers) -> DualEncoderSize:
    """The size that a name stands for, with what the settings change in it."""
    size = SIZES[model]
    activation = towers.activation or size.video.trunk.activation
    kind = kind_of(towers)
    trunk = replace(
        size.video.trunk,
        activation=activation,
        norm_eps=towers.video_norm_eps or _NORM_EPS.get(kind, NORM_EPS),
        has_key_bias=kind != "videomae",
    )
    text_trunk = replace(size.text.trunk, activation=activation)
    return DualEncoderSize(
        video=replace(size.video, trunk=trunk, cube_frames=tubelet_of(towers)),
        text=replace(size.text, trunk=text_trunk),
        embedding_width=towers.embedding_width or size.embedding_width,
    )


class DualEncoder(nn.Module):
    """A video tower and a text tower.

    Args:
        towers: how they are trained: what is left out, what saves memory; `size` already has what it says of sizes.
        has_text_tower: without one, captions come as embeddings that another tower made.
    """

    def __init__(
        self,
        size: DualEncoderSize,
        *,
        image_px: int,
        num_frames: int,
        attend: Attend,
        towers: Towers = _PLAIN,
        has_text_tower: bool = True,
    ) -> None:
        super().__init__()
        trunk = size.video.trunk
        self.video = VideoViT(
            size.video,
            image_px=image_px,
            num_frames=num_frames,
            embedding_width=size.embedding_width,
            attend=attend,
            temporal_std=trunk.width**-0.5 if towers.temporal == "random" else 0.0,
            patch_dropout=towers.patch_dropout,
            drop_path=drop_path_of(towers.drop_path, depth=trunk.depth, is_rising=towers.drop_path_rule == "rising"),
        )
        self.text = None
        if has_text_tower:
            self.text = TextTower(
                size.text, embedding_width=size.embedding_width, attend=attend, is_packed=towers.packed_text
            )
        if towers.activation_checkpointing:
            checkpoint_blocks(self)

    def forward(
        self, video_BCTHW: torch.Tensor, text: torch.Tensor, lengths_B: NDArray[np.int64] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of clips and of captions, each [B, E] and of unit length; for the captions see `embed_text`."""
        # Captions first: where their lengths must be read from the device, it has nothing else to finish yet.
        text_BE = self.embed_text(text, lengths_B)
        return self.embed_video(video_BCTHW), text_BE

    def embed_video(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Clips [B, C, T, H, W] to float32 [B, E] of unit length (float64 where the model is)."""
        return _of_unit_length(self.video(video_BCTHW))

    def embed_text(self, text: torch.Tensor, lengths_B: NDArray[np.int64] | None = None) -> torch.Tensor:
        """Token ids [B, L], or without a text tower ready embeddings [B, E], to float32 [B, E] of unit length.

        Args:
            lengths_B: tokens of each caption, its end included, if the host knows them.
        """
        return _of_unit_length(text if self.text is None else self.text(text, lengths_B))


def _of_unit_length(embedding_BE: torch.Tensor) -> torch.Tensor:
    # In bfloat16 the similarities that losses are made of would be off by whole percents (docs/models.md).
    dtype = torch.promote_types(embedding_BE.dtype, torch.float32)
    return nn.functional.normalize(embedding_BE.to(dtype), dim=-1)
