"""CLIP-style dual encoder with a video tower and a text tower, and the model sizes that `--model` names."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clipmill.train.config.model import (
    LIBRARY,
    PATCH_PX,
    TOWERS,
    DualEncoderTowers,
    ModelName,
    Towers,
    kind_of,
    tubelet_of,
)
from clipmill.train.models.attention import Attend
from clipmill.train.models.text import CONTEXT_LENGTH, TextTower, TextTowerSize, Tokenize, load_tokenizer
from clipmill.train.models.transformer import NORM_EPS, TransformerSize, checkpoint_blocks
from clipmill.train.models.video_vit import VideoViTSize

if TYPE_CHECKING:
    from clipmill.train.models.library_towers import LibraryText

_DEFAULT_TOWERS = Towers()
_ANY_PX = 224  # input resolution for library towers that do not specify a resolution
# Epsilon of layer norms by kind of tower, from published configurations. Other kinds use CLIP's value.
_NORM_EPS: dict[str, float] = {"videomae": 1e-12, "timesformer": 1e-6}


@dataclass(frozen=True, kw_only=True)
class DualEncoderSize:
    """Dimensions of both towers and of their shared embedding space."""

    video: VideoViTSize
    text: TextTowerSize
    embedding_width: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of the model that provides the weights. They take precedence over --model and the size of the samples.

    Attributes:
        size: Dimensions of the towers.
        image_px: Side length of the square frames or latents; 0 if unknown.
    """

    size: DualEncoderSize
    image_px: int


def _clip(
    name: ModelName, *, video: tuple[int, int], text: tuple[int, int], embedding_width: int, head_width: int = 64
) -> DualEncoderSize:
    """Return the size of a dual encoder whose towers are specified as (width, depth)."""
    (video_width, video_depth), (text_width, text_depth) = video, text
    video_trunk = TransformerSize(width=video_width, depth=video_depth, num_heads=video_width // head_width)
    text_trunk = TransformerSize(width=text_width, depth=text_depth, num_heads=text_width // head_width)
    return DualEncoderSize(
        video=VideoViTSize(trunk=video_trunk, patch_px=PATCH_PX[name]),
        text=TextTowerSize(trunk=text_trunk),
        embedding_width=embedding_width,
    )


# b32, b16, l14 and l14-336 are from CLIP (Radford et al. 2021, table 20). s16 and l16 are ViT-S and ViT-L with the text
# towers that open_clip uses for them. tiny is clipmill's own size, for first runs and tests.
SIZES: dict[str, DualEncoderSize] = {
    "tiny": _clip("tiny", video=(128, 4), text=(128, 2), embedding_width=128, head_width=32),
    "s16": _clip("s16", video=(384, 12), text=(384, 12), embedding_width=384),
    "b32": _clip("b32", video=(768, 12), text=(512, 12), embedding_width=512),
    "b16": _clip("b16", video=(768, 12), text=(512, 12), embedding_width=512),
    "l16": _clip("l16", video=(1024, 24), text=(768, 12), embedding_width=768),
    "l14": _clip("l14", video=(1024, 24), text=(768, 12), embedding_width=768),
    "l14-336": _clip("l14-336", video=(1024, 24), text=(768, 12), embedding_width=768),
}


def size_of(model: ModelName, towers: Towers, *, num_views: int = 1) -> DualEncoderSize:
    """Return the dimensions of a model by name, with the changes that the settings of its towers specify.

    Args:
        model: Value of --model.
        towers: Settings of the towers.
        num_views: Number of cameras per clip.

    Raises:
        UserError: The width of a tower is not a multiple of its number of heads.
    """
    size = SIZES[model]
    activation = towers.activation or size.video.trunk.activation
    kind = kind_of(towers)
    trunk = replace(
        size.video.trunk.resize(width=towers.width, depth=towers.depth, heads=towers.heads, flag="--towers."),
        activation=activation,
        norm_eps=towers.video_norm_eps or _NORM_EPS.get(kind, NORM_EPS),
        has_key_bias=kind != "videomae",
        mlp_ratio=towers.mlp_ratio,
    )
    text_trunk, context_length = replace(size.text.trunk, activation=activation), None
    if isinstance(towers, DualEncoderTowers):
        context_length = towers.context_length
        text_trunk = text_trunk.resize(
            width=towers.text_width, depth=towers.text_depth, heads=towers.text_heads, flag="--towers.text-"
        )
    return DualEncoderSize(
        video=replace(
            size.video,
            trunk=trunk,
            cube_frames=tubelet_of(towers),
            # A tower from a library has its own input resolution and patches.
            patch_px=1 if kind == LIBRARY else towers.patch_px or size.video.patch_px,
            is_divided=towers.attention == "divided",
            num_views=num_views,
        ),
        text=replace(size.text, trunk=text_trunk, context_length=context_length or CONTEXT_LENGTH),
        embedding_width=towers.embedding_width or library_width(towers) or size.embedding_width,
    )


def library_width(towers: Towers) -> int | None:
    """Return the width of a library's embeddings, from the text tower or else the image tower; None without either."""
    if towers.image is None and getattr(towers, "text", None) is None:
        return None
    from clipmill.train.models.library_towers import image_outline, preprocessing_of, text_outline

    if isinstance(towers, DualEncoderTowers) and towers.text is not None:
        return text_outline(towers.text, towers.text_pooling).width
    assert towers.image is not None
    return image_outline(towers.image, preprocessing_of(towers.image).size_px or _ANY_PX).width


def tokenizer_for(towers: Towers) -> Tokenize:
    """Return the tokenizer of a text tower. A tower from a library has its own tokenizer, and our tower has CLIP's.

    Raises:
        UserError: The tokenizer of the library is not available.
    """
    length = towers.context_length if isinstance(towers, DualEncoderTowers) else None
    if not isinstance(towers, DualEncoderTowers) or towers.text is None:
        return load_tokenizer(length or CONTEXT_LENGTH)
    from clipmill.train.models.library_towers import context_length_of, tokenizer_of

    return tokenizer_of(towers.text, length or context_length_of(towers.text))


class DualEncoder(nn.Module):
    """Video tower and text tower in a shared embedding space.

    Args:
        size: Dimensions of the towers.
        image_px: Side length of the square frames or latents.
        num_frames: Number of frames per clip.
        attend: Attention function.
        towers: Settings of the towers. Dimensions are taken from `size`, which already reflects these settings.
        has_text_tower: False if captions are passed as embeddings that a separate text tower computed.
    """

    def __init__(
        self,
        size: DualEncoderSize,
        *,
        image_px: int,
        num_frames: int,
        attend: Attend,
        towers: Towers = _DEFAULT_TOWERS,
        has_text_tower: bool = True,
    ) -> None:
        super().__init__()
        self._towers = towers
        video = TOWERS[kind_of(towers)].load()(
            size.video,
            image_px=image_px,
            num_frames=num_frames,
            embedding_width=size.embedding_width,
            attend=attend,
            towers=towers,
        )
        if size.video.num_views > 1:
            from clipmill.train.models.views import accept_views

            accept_views(video, num_views=size.video.num_views, rule=towers.views)
        # Register the text tower first, in the order of `forward`, so that the exchange of gradients between ranks
        # overlaps with the backward pass. Random weights are drawn for the video tower first.
        self.text: TextTower | LibraryText | None = None
        if has_text_tower and isinstance(towers, DualEncoderTowers) and towers.text is not None:
            from clipmill.train.models.library_towers import text_tower

            self.text = text_tower(towers, embedding_width=size.embedding_width)
        elif has_text_tower:
            self.text = TextTower(
                size.text, embedding_width=size.embedding_width, attend=attend, is_packed=towers.packed_text
            )
        self.video = video
        if towers.activation_checkpointing:
            checkpoint_blocks(self)

    def forward(
        self,
        video_BCTHW: Tensor,
        text: Tensor,
        lengths_B: NDArray[np.int64] | None = None,
        *,
        skips_frozen: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return unit-length embeddings of clips and captions, each [B, E].

        Args:
            video_BCTHW: Normalised clips.
            text, lengths_B: See `embed_text`.
            skips_frozen: True to skip frozen towers, whose embeddings are then empty.
        """
        # Embed captions first: if their lengths must be read from the device, there is no earlier work to wait for.
        empty = video_BCTHW.new_empty(0)
        text_BE = empty if skips_frozen and _is_frozen(self.text) else self.embed_text(text, lengths_B)
        return empty if skips_frozen and _is_frozen(self.video) else self.embed_video(video_BCTHW), text_BE

    @cached_property
    def tokenize(self) -> Tokenize:
        """Tokenizer of the text tower. A UserError is raised if a library's tokenizer is not available."""
        return tokenizer_for(self._towers)

    @property
    def has_frozen_tower(self) -> bool:
        """True if one of the towers has no trainable parameters."""
        return _is_frozen(self.video) or _is_frozen(self.text)

    def embed_video(self, video_BCTHW: Tensor) -> Tensor:
        """Embed clips [B, C, T, H, W] as unit-length float32 [B, E] (float64 for a float64 model)."""
        return _normalize(self.video(video_BCTHW))

    def embed_text(self, text: Tensor, lengths_B: NDArray[np.int64] | None = None) -> Tensor:
        """Embed captions as unit-length float32 [B, E].

        Args:
            text: Token IDs [B, L]; without a text tower, embeddings [B, E].
            lengths_B: Number of tokens of each caption, including the end token; None if the host does not know them.
        """
        return _normalize(text if self.text is None else self.text(text, lengths_B))


def _is_frozen(tower: nn.Module | None) -> bool:
    return tower is not None and not any(parameter.requires_grad for parameter in tower.parameters())


def _normalize(embedding_BE: Tensor) -> Tensor:
    # In bfloat16, similarities would be wrong by several percent (docs/models.md).
    dtype = torch.promote_types(embedding_BE.dtype, torch.float32)
    return nn.functional.normalize(embedding_BE.to(dtype), dim=-1)
