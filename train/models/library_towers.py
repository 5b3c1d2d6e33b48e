"""Towers of open_clip, timm and transformers in a dual encoder: pictures frame by frame, texts as the library has them.

`LibraryImage` is a video tower like the others: `forward` embeds clips, `features` and `tokens` are before any
projection. Its frames go through the library's own module; with T = 1 it computes what the library computes.

Shape suffixes: B clips or texts, C channels, T frames, H and W pixels, L tokens of a text, N tokens of a frame, W width
of the library's embedding, D width of tokens, E embedding width, h heads, K width of a head.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import DualEncoderTowers, Towers
from clipmill.train.device.transfer import keep_buffers_in_recomputation
from clipmill.train.models.attention import Attend
from clipmill.train.models.libraries import Outline, image_outline, library_of, text_outline
from clipmill.train.models.transformer import HasBlocks
from clipmill.train.models.video_vit import VideoViTSize

_HEAD_WIDTH = 64
_LISTS = ("resblocks", "blocks", "layers", "layer", "stages", "block", "h")


class LibraryTower(HasBlocks):
    """A module of a library, `model`, and `reference`, its name there."""

    def __init__(self, reference: str, model: nn.Module) -> None:
        super().__init__()
        self.reference, self.library = reference, library_of(reference)[0]
        self.model = model

    def blocks(self) -> list[nn.Module]:
        """The outermost numbered blocks of the module; those of ResNets are its `layer1` to `layer4`."""
        return list(_numbered_modules(self.model))

    def checkpoint(self) -> None:
        """Enable activation checkpointing, as the library has it."""
        keep_buffers_in_recomputation(self.model)
        enable: Any = getattr(self.model, "set_grad_checkpointing", None)
        if enable is not None:
            enable(True)
            return
        enable = getattr(self.model, "gradient_checkpointing_enable", None)
        enable = enable if getattr(self.model, "supports_gradient_checkpointing", False) else None
        if enable is None:
            raise UserError(
                f"{self.reference} has no activation checkpointing (--towers.activation-checkpointing)",
                hint="leave it out, and use a smaller --microbatch",
                flags=("--towers.activation-checkpointing",),
            )
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _numbered_modules(module: nn.Module) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if name in _LISTS and isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        elif name.startswith("layer") and name.removeprefix("layer").isdigit():
            yield child
        else:
            yield from _numbered_modules(child)


def num_heads_of(width: int) -> int:
    """Number of heads for attention of a width that no published size has."""
    return width // _HEAD_WIDTH if width % _HEAD_WIDTH == 0 else 1


class FramePooling(nn.Module):
    """Attention pooling of frame embeddings, which begins as their mean.

    Each head weighs the frames, and the clip's embedding is the weighted mean of theirs: with one frame it is that
    frame's. The query is zero at first, so that all frames weigh the same.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads_of(width)
        self.norm = nn.LayerNorm(width)
        self.key = nn.Linear(width, width)
        self.query = nn.Parameter(torch.zeros(width))

    def forward(self, x_BTW: Tensor, times_TW: Tensor) -> Tensor:
        """Embeddings of clips, [B, W]; `times_TW` are added to the keys."""
        key_BThK = self.key(self.norm(x_BTW) + times_TW).unflatten(2, (self.num_heads, -1))
        query_hK = self.query.unflatten(0, (self.num_heads, -1))
        scores_BTh = (key_BThK * query_hK).sum(-1) * key_BThK.shape[-1] ** -0.5
        weights_BTh1 = scores_BTh.softmax(dim=1)[..., None]
        return (x_BTW.unflatten(2, (self.num_heads, -1)) * weights_BTh1).sum(1).flatten(1)


class LibraryImage(LibraryTower):
    """An image tower that embeds each frame of a clip.

    Args:
        outline: of the tower: W, D, and N.
        num_frames: of a clip; only attention pooling depends on it.
        embedding_width: E; None, or W, for the library's embedding without a projection.
        pools: frames by attention, in place of their mean.
        temporal_std: standard deviation of the initial temporal embedding, which attention pooling has.

    Attributes:
        feature_width: W.
        token_width: D.
        frame_tokens: N.
    """

    def __init__(
        self,
        reference: str,
        model: nn.Module,
        *,
        outline: Outline,
        num_frames: int,
        embedding_width: int | None,
        pools: bool,
        temporal_std: float = 0.0,
    ) -> None:
        super().__init__(reference, model)
        width = self.feature_width = outline.width
        self.token_width, self.frame_tokens = outline.token_width, outline.num_tokens
        self.pool: FramePooling | None = None
        if pools:
            self.temporal_embedding = nn.Parameter(temporal_std * torch.randn(num_frames, width))
            self.pool = FramePooling(width)
        self.proj: nn.Parameter | None
        self.register_parameter("proj", None)
        if embedding_width not in (None, width):
            self.proj = nn.Parameter(width**-0.5 * torch.randn(width, embedding_width))

    def forward(self, video_BCTHW: Tensor) -> Tensor:
        """Embed normalised clips [B, C, T, H, W] as [B, E], not of unit length; [B, W] without a projection."""
        features_BW = self.features(video_BCTHW)
        return features_BW if self.proj is None else features_BW @ self.proj

    def features(self, video_BCTHW: Tensor) -> Tensor:
        """The library's embeddings of frames, pooled over time, [B, W]."""
        num_clips = len(video_BCTHW)
        x_BTW = self.library.embed(self.model, _frames(video_BCTHW)).unflatten(0, (num_clips, -1))
        return x_BTW.mean(1) if self.pool is None else self.pool(x_BTW, self.temporal_embedding)

    def tokens(self, video_BCTHW: Tensor) -> Tensor:
        """The last tokens of all frames, frame by frame, [B, T * N, D]."""
        x_BTND = self.library.tokens(self.model, _frames(video_BCTHW)).unflatten(0, (len(video_BCTHW), -1))
        return x_BTND.flatten(1, 2)


def _frames(video_BCTHW: Tensor) -> Tensor:
    return video_BCTHW.transpose(1, 2).flatten(0, 1)


class LibraryText(LibraryTower):
    """A text tower.

    Args:
        width: W.
        embedding_width: E; W for the library's embedding without a projection.
        pooling: of tokens, `--towers.text-pooling`.
    """

    def __init__(self, reference: str, model: nn.Module, *, width: int, embedding_width: int, pooling: str) -> None:
        super().__init__(reference, model)
        self.pooling = pooling
        self.text_projection: nn.Parameter | None
        self.register_parameter("text_projection", None)
        if embedding_width != width:
            self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, embedding_width))

    def forward(self, tokens_BL: Tensor, lengths_B: NDArray[np.int64] | None = None) -> Tensor:
        """Embed int64 token ids [B, L] as [B, E], not of unit length; the lengths are of no use to it."""
        x_BW = self.library.embed_text(self.model, tokens_BL, self.pooling)
        return x_BW if self.text_projection is None else x_BW @ self.text_projection


def image_tower(
    size: VideoViTSize, *, image_px: int, num_frames: int, embedding_width: int | None, attend: Attend, towers: Towers
) -> LibraryImage:
    """The tower that `--towers.image` names, for frames of `image_px`.

    Raises:
        UserError: its library has none of that name, or it takes pictures of another size.
    """
    assert towers.image is not None
    outline = image_outline(towers.image, image_px)
    library, name = library_of(towers.image)
    return LibraryImage(
        towers.image,
        library.image(name),
        outline=outline,
        num_frames=num_frames,
        embedding_width=embedding_width,
        pools=towers.pool_frames == "attention",
        temporal_std=outline.width**-0.5 if towers.temporal == "random" else 0.0,
    )


def text_tower(towers: DualEncoderTowers, *, embedding_width: int) -> LibraryText:
    """The tower that `--towers.text` names.

    Raises:
        UserError: its library has none of that name.
    """
    assert towers.text is not None
    library, name = library_of(towers.text)
    width = text_outline(towers.text, towers.text_pooling).width
    return LibraryText(
        towers.text,
        library.text(name, towers.context_length),
        width=width,
        embedding_width=embedding_width,
        pooling=towers.text_pooling,
    )
