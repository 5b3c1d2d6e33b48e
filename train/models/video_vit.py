"""A joint space-time vision transformer: every cube of a clip attends to every other.

It is CLIP's image tower with a temporal embedding: with one frame and a zero temporal embedding it computes
CLIP's image features (AVION, section 3.1, builds its video tower the same way). A cube is a patch of one frame, or
of several that follow one another (ViViT's tubelets, Arnab et al. 2021, section 3.2).

Shape suffixes: B batch, C channels, T frames, H and W pixels, S steps of time (T / frames of a cube), P patches of a
frame, N cubes of a clip (S * P), L tokens (1 + N), D width, E width of the embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from train.models.attention import Attend
from train.models.transformer import LayerNorm, Transformer, TransformerSize


@dataclass(frozen=True, kw_only=True)
class VideoViTSize:
    """A video tower; `trunk` is its transformer, `patch_px` the side of a cube, `cube_frames` its length."""

    trunk: TransformerSize
    patch_px: int
    num_channels: int = 3
    cube_frames: int = 1


class CubeEmbedding(nn.Module):
    """One linear map of each cube's values: the convolution of CLIP's `conv1` as one product.

    `weight` is [D, C, p, p] as CLIP's for cubes of one frame, and [D, C, t, p, p] as a Conv3d's for longer ones.

    Args:
        has_bias: VideoMAE's has one, CLIP's has none.
    """

    def __init__(self, size: VideoViTSize, *, has_bias: bool = False) -> None:
        super().__init__()
        self.bias: nn.Parameter | None
        self.cube_frames, self.patch_px = size.cube_frames, size.patch_px
        time = () if size.cube_frames == 1 else (size.cube_frames,)
        self.weight = nn.Parameter(
            torch.empty(size.trunk.width, size.num_channels, *time, size.patch_px, size.patch_px)
        )
        fan_in = self.weight[0].numel()
        nn.init.uniform_(self.weight, -(fan_in**-0.5), fan_in**-0.5)  # as torch's convolutions
        self.register_parameter("bias", nn.Parameter(torch.zeros(size.trunk.width)) if has_bias else None)

    def cut(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """The values of each cube, [B, S, P, C * t * p * p]; cubes of a frame row by row."""
        t, p = self.cube_frames, self.patch_px
        b, c, frames, height, width = video_BCTHW.shape
        cubes = video_BCTHW.reshape(b, c, frames // t, t, height // p, p, width // p, p)
        return cubes.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(2, 3)

    def forward(self, cubes: torch.Tensor) -> torch.Tensor:
        """Embeds cubes [..., C * t * p * p] as [..., D]."""
        return nn.functional.linear(cubes, self.weight.flatten(1), self.bias)


class VideoViT(nn.Module):
    """Clips to embeddings.

    Args:
        num_frames: of a clip; a multiple of the cubes' frames.
        embedding_width: E; None for the class token itself, without a projection.
        temporal_std: of the temporal embedding at the start; with 0 the order of frames does not count yet.
        patch_dropout: share of a clip's cubes that are left out in training (Li et al. 2023, FLIP; AVION).
        drop_path: for each block, the probability that it is skipped for a clip in training; empty for none.
    """

    def __init__(
        self,
        size: VideoViTSize,
        *,
        image_px: int,
        num_frames: int,
        embedding_width: int | None,
        attend: Attend,
        temporal_std: float = 0.0,
        patch_dropout: float = 0.0,
        drop_path: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self.proj: nn.Parameter
        if image_px % size.patch_px:
            raise ValueError(f"a picture of {image_px} px cannot be cut into patches of {size.patch_px} px")
        if num_frames % size.cube_frames:
            raise ValueError(f"{num_frames} frames cannot be cut into cubes of {size.cube_frames} frames")
        self.size = size
        self.patch_dropout = patch_dropout
        width, num_patches = size.trunk.width, (image_px // size.patch_px) ** 2
        self.conv1 = CubeEmbedding(size)
        self.class_embedding = nn.Parameter(width**-0.5 * torch.randn(width))
        self.positional_embedding = nn.Parameter(width**-0.5 * torch.randn(1 + num_patches, width))
        self.temporal_embedding = nn.Parameter(temporal_std * torch.randn(num_frames // size.cube_frames, width))
        self.ln_pre = LayerNorm(width, eps=size.trunk.norm_eps)
        self.transformer = Transformer(size.trunk, attend=attend, drop_path=drop_path)
        self.ln_post = LayerNorm(width, eps=size.trunk.norm_eps)
        self.has_projection = embedding_width is not None
        self.register_parameter("proj", None)
        if embedding_width is not None:
            self.proj = nn.Parameter(width**-0.5 * torch.randn(width, embedding_width))

    def forward(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Embeds normalised clips [B, C, T, H, W] as [B, E], not yet of unit length; [B, D] without a projection."""
        class_BD = self.features(video_BCTHW)
        return class_BD @ self.proj if self.has_projection else class_BD

    def features(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """One vector a clip, [B, D]: the class token, before the projection."""
        x_BLD = self.transformer(self.embed(video_BCTHW))
        return self.finish(x_BLD[:, 0])

    def tokens(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """All tokens of normalised clips, [B, L, D]: the class token, then the cubes in the order of their numbers."""
        return self.finish(self.transformer(self.embed(video_BCTHW)))

    def embed(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """What the first block is given of normalised clips: tokens with their places, normalised, [B, L, D]."""
        num_clips = len(video_BCTHW)
        cubes_BN = self.conv1.cut(video_BCTHW).flatten(1, 2)
        positions_SPD = self.positional_embedding[1:] + self.temporal_embedding[:, None]
        positions_BND = positions_SPD.flatten(0, 1).expand(num_clips, -1, -1)
        if self.training and self.patch_dropout:
            kept_BK = drawn_cubes(num_clips, cubes_BN.shape[1], dropout=self.patch_dropout, device=cubes_BN.device)
            # Left out before they are embedded: that work is saved too.
            cubes_BN, positions_BND = (chosen(x, kept_BK) for x in (cubes_BN, positions_BND))
        embedded_BND = self.conv1(cubes_BN)
        # All that follows is in the precision of that product, as in open_clip.
        x_BND = embedded_BND + positions_BND.to(embedded_BND.dtype)
        class_D = (self.class_embedding + self.positional_embedding[0]).to(x_BND.dtype)
        x_BLD = torch.cat([class_D.expand(num_clips, 1, -1), x_BND], dim=1)
        x_BLD = self.ln_pre(x_BLD)
        return x_BLD

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """What the last block gave, normalised."""
        x = self.ln_post(x)
        return x


def drawn_cubes(num_clips: int, num_cubes: int, *, dropout: float, device: torch.device) -> torch.Tensor:
    """Numbers of the cubes that are kept of each clip, int64 [B, K], in rising order, from torch's generator.

    K is the same for all clips: num_cubes * (1 - dropout), rounded down, and 1 at least.
    """
    num_kept = max(1, int(num_cubes * (1 - dropout)))
    drawn_BN = torch.rand(num_clips, num_cubes, device=device)
    return drawn_BN.topk(num_kept, dim=1).indices.sort(dim=1).values


def chosen(x_BNV: torch.Tensor, kept_BK: torch.Tensor) -> torch.Tensor:
    """The kept rows of each item: [B, K, V] of [B, N, V]."""
    return x_BNV.gather(1, kept_BK[..., None].expand(-1, -1, x_BNV.shape[2]))


def resampled_temporal(embedding_SD: torch.Tensor, num_steps: int) -> torch.Tensor:
    """A temporal embedding for another number of steps, linear between the old ones, constant beyond their centres.

    Steps are equal parts of a clip, and an embedding stands at its part's centre (4 to 16 frames as AVION does).
    """
    if len(embedding_SD) == num_steps:
        return embedding_SD
    resampled_1DS = nn.functional.interpolate(embedding_SD.T[None], size=num_steps, mode="linear", align_corners=False)
    return resampled_1DS[0].T.contiguous()


def inflated_cubes(weight_DCPP: torch.Tensor, cube_frames: int) -> torch.Tensor:
    """CLIP's `conv1` for cubes of several frames: on equal frames it gives what it gave on one (I3D's inflation)."""
    if cube_frames == 1:
        return weight_DCPP
    return (weight_DCPP / cube_frames)[:, :, None].repeat(1, 1, cube_frames, 1, 1)
