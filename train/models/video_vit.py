"""Joint space-time vision transformer, in which every cube of a clip attends to every other cube.

This is CLIP's image tower with a temporal embedding, as in AVION (Zhao and Krähenbühl 2023, section 5.2). With one
frame and a zero temporal embedding, it computes CLIP's image features. A cube is a patch of one frame, or of several
consecutive frames (ViViT's tubelets, Arnab et al. 2021, section 3.2).

Shape suffixes: B batch, C channels, T frames, H and W pixels, S time steps (T / frames per cube), P patches of a frame,
N cubes of a clip (S * P), L tokens (1 + N), K selected cubes, V values of a cube, D width, E embedding width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from clipmill.train.config.model import Towers
from clipmill.train.models.attention import Attend
from clipmill.train.models.transformer import LayerNorm, Stack, Transformer, TransformerSize, drop_path_of


@dataclass(frozen=True)
class CubeGrid:
    """Numbers of cubes of a clip along time, height and width. Cube indices follow this order."""

    steps: int
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        """Number of cubes in one time step."""
        return self.rows * self.columns

    @property
    def cubes(self) -> int:
        """Number of cubes in a clip."""
        return self.steps * self.patches


@dataclass(frozen=True, kw_only=True)
class VideoViTSize:
    """Dimensions of a video tower.

    Attributes:
        trunk: Dimensions of the transformer.
        patch_px: Side length of a cube, in pixels.
        num_channels: Number of channels of a frame; 3 for pixels.
        cube_frames: Number of frames in a cube.
        is_divided: True to attend over time and then over space, as LaViLa's tower does, instead of over all cubes at
            once.
        num_views: Number of cameras that recorded a clip (clipmill.train.models.views).
    """

    trunk: TransformerSize
    patch_px: int
    num_channels: int = 3
    cube_frames: int = 1
    is_divided: bool = False
    num_views: int = 1

    def grid(self, *, image_px: int, num_frames: int) -> CubeGrid:
        """Return the grid of clips with square frames; raise ValueError if clips cannot be cut into complete cubes."""
        if image_px % self.patch_px:
            raise ValueError(f"a frame of {image_px} px cannot be cut into patches of {self.patch_px} px")
        if num_frames % self.cube_frames:
            raise ValueError(f"{num_frames} frames cannot be cut into cubes of {self.cube_frames} frames")
        return CubeGrid(num_frames // self.cube_frames, *[image_px // self.patch_px] * 2)


def grid_of(video_BCTHW: Tensor, *, cube_frames: int, patch_px: int) -> CubeGrid:
    """Return the grid of clips; raise ValueError if clips cannot be cut into complete cubes."""
    num_frames, height, width = video_BCTHW.shape[2:]
    if num_frames % cube_frames or height % patch_px or width % patch_px:
        raise ValueError(
            f"{num_frames} x {height} x {width} cannot be cut into cubes of {cube_frames} x {patch_px} x {patch_px}"
        )
    return CubeGrid(num_frames // cube_frames, height // patch_px, width // patch_px)


def cubes_of(video_BCTHW: Tensor, *, cube_frames: int, patch_px: int) -> Tensor:
    """Return the cubes of clips as a view [B, S, rows, columns, C, frames, p, p]."""
    grid = grid_of(video_BCTHW, cube_frames=cube_frames, patch_px=patch_px)
    b, c = video_BCTHW.shape[:2]
    cubes = video_BCTHW.reshape(b, c, grid.steps, cube_frames, grid.rows, patch_px, grid.columns, patch_px)
    return cubes.permute(0, 2, 4, 6, 1, 3, 5, 7)


def pick_cubes(cubes_BShw: Tensor, index_BK: Tensor) -> Tensor:
    """Select cubes [B, K, ...] from a view [B, S, h, w, ...] by int64 indices, and copy only the selected cubes."""
    rows, columns = cubes_BShw.shape[2:4]
    batch_B1 = torch.arange(len(cubes_BShw), device=cubes_BShw.device)[:, None]
    step_BK, patch_BK = index_BK // (rows * columns), index_BK % (rows * columns)
    return cubes_BShw[batch_B1, step_BK, patch_BK // columns, patch_BK % columns]


class CubeEmbedding(nn.Module):
    """Convolution that embeds cubes (CLIP's `conv1`), computed as a matrix product.

    `weight` is [D, C, p, p] for cubes of one frame, as in CLIP, and [D, C, t, p, p] for longer cubes, as in a Conv3d.
    VideoMAE's convolution has a bias, and CLIP's convolution has none.
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
        nn.init.uniform_(self.weight, -(fan_in**-0.5), fan_in**-0.5)  # as in torch's convolutions
        self.register_parameter("bias", nn.Parameter(torch.zeros(size.trunk.width)) if has_bias else None)

    def cut(self, video_BCTHW: Tensor) -> Tensor:
        """Cut clips into cubes, [B, S, P, C * t * p * p]; the cubes of a time step are in row-major order."""
        cubes = cubes_of(video_BCTHW, cube_frames=self.cube_frames, patch_px=self.patch_px)
        return cubes.flatten(4).flatten(2, 3)

    def forward(self, cubes: Tensor) -> Tensor:
        """Embed cubes [..., C * t * p * p] as [..., D]."""
        return nn.functional.linear(cubes, self.weight.flatten(1), self.bias)


class TokenTower(nn.Module):
    """Base class of our video towers, which compute tokens with `embed`, `transformer` and `finish`, in this order.

    All video towers have `tokens`, `token_width` and `features` (one vector per clip, before any projection).
    """

    size: VideoViTSize
    transformer: Stack

    def embed(self, video_BCTHW: Tensor, /) -> Tensor:
        """Embed normalised clips as input of the first block, [B, L, D]."""
        raise NotImplementedError

    def finish(self, x_BLD: Tensor, /) -> Tensor:
        """Convert the last block's output into the tower's output tokens."""
        raise NotImplementedError

    def tokens(self, video_BCTHW: Tensor) -> Tensor:
        """Return all tokens of normalised clips after the last norm, [B, L, D]."""
        return self.finish(self.transformer(self.embed(video_BCTHW)))

    @property
    def token_width(self) -> int:
        """Width D of the tokens."""
        return self.size.trunk.width


class VideoViT(TokenTower):
    """Video tower that embeds clips.

    Args:
        size: Dimensions of the tower.
        image_px: Side length of the square frames or latents.
        num_frames: Number of frames per clip, a multiple of the cube length.
        embedding_width: Width E of the embedding; None to omit the projection.
        attend: Attention function.
        temporal_std: Standard deviation of the initial temporal embedding. If it is 0, the order of frames initially
            has no effect.
        patch_dropout: Fraction of a clip's cubes that is dropped in training (FLIP, Li et al. 2023; AVION).
        drop_path: Probability, for each block, of skipping a branch for a clip in training; empty for none.
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
        grid = size.grid(image_px=image_px, num_frames=num_frames)
        self.size, width = size, size.trunk.width
        self.patch_dropout = patch_dropout
        self.conv1 = CubeEmbedding(size)
        self.class_embedding = nn.Parameter(width**-0.5 * torch.randn(width))
        self.positional_embedding = nn.Parameter(width**-0.5 * torch.randn(1 + grid.patches, width))
        self.temporal_embedding = nn.Parameter(temporal_std * torch.randn(grid.steps, width))
        self.transformer: Stack
        if size.is_divided:
            from clipmill.train.models.space_time import LN_PRE_EPS, SpaceTimeBlock

            self.ln_pre = LayerNorm(width, eps=LN_PRE_EPS)
            blocks = (SpaceTimeBlock(size.trunk, num_frames=grid.steps, attend=attend) for _ in range(size.trunk.depth))
            self.transformer = Stack(blocks, drop_path=drop_path)
        else:
            self.ln_pre = LayerNorm(width, eps=size.trunk.norm_eps)
            self.transformer = Transformer(size.trunk, attend=attend, drop_path=drop_path)
        self.ln_post = LayerNorm(width, eps=size.trunk.norm_eps)
        self.has_projection = embedding_width is not None
        self.register_parameter("proj", None)
        if embedding_width is not None:
            self.proj = nn.Parameter(width**-0.5 * torch.randn(width, embedding_width))

    def forward(self, video_BCTHW: Tensor) -> Tensor:
        """Embed normalised clips [B, C, T, H, W] as [B, E] (not unit-length), or [B, D] without a projection."""
        class_BD = self.features(video_BCTHW)
        return class_BD @ self.proj if self.has_projection else class_BD

    def features(self, video_BCTHW: Tensor) -> Tensor:
        """Return the class token before the projection, [B, D]."""
        return self.finish(self.transformer(self.embed(video_BCTHW))[:, 0])

    def embed(self, video_BCTHW: Tensor, /) -> Tensor:
        """Embed normalised clips as input of the first block: tokens with positional embeddings, [B, L, D]."""
        num_clips = len(video_BCTHW)
        cubes_BN = self.conv1.cut(video_BCTHW).flatten(1, 2)
        positions_SPD = self.positional_embedding[1:] + self.temporal_embedding[:, None]
        positions_BND = positions_SPD.flatten(0, 1).expand(num_clips, -1, -1)
        if self.training and self.patch_dropout:
            kept_BK = draw_cubes(num_clips, cubes_BN.shape[1], dropout=self.patch_dropout, device=cubes_BN.device)
            # Drop cubes before the embedding, which also saves the computation of their embeddings.
            cubes_BN, positions_BND = (choose_rows(x, kept_BK) for x in (cubes_BN, positions_BND))
        embedded_BND = self.conv1(cubes_BN)
        # From here on, values have the precision of this product, as in open_clip.
        x_BND = embedded_BND + positions_BND.to(embedded_BND.dtype)
        class_D = (self.class_embedding + self.positional_embedding[0]).to(x_BND.dtype)
        return cast(Tensor, self.ln_pre(torch.cat([class_D.expand(num_clips, 1, -1), x_BND], dim=1)))

    def finish(self, x: Tensor, /) -> Tensor:
        """Apply the final layer norm to the last block's output."""
        return cast(Tensor, self.ln_post(x))


def clip_tower(
    size: VideoViTSize, *, image_px: int, num_frames: int, embedding_width: int | None, attend: Attend, towers: Towers
) -> VideoViT:
    """Build a tower of the kind `clip` with these settings."""
    trunk = size.trunk
    return VideoViT(
        size,
        image_px=image_px,
        num_frames=num_frames,
        embedding_width=embedding_width,
        attend=attend,
        temporal_std=trunk.width**-0.5 if towers.temporal == "random" else 0.0,
        patch_dropout=towers.patch_dropout,
        drop_path=drop_path_of(towers.drop_path, depth=trunk.depth, is_rising=towers.drop_path_rule == "rising"),
    )


def draw_cubes(num_clips: int, num_cubes: int, *, dropout: float, device: torch.device) -> Tensor:
    """Draw the indices of the cubes that remain after patch dropout, int64 [B, K], ascending.

    K is max(1, floor(num_cubes * (1 - dropout))) for all clips. torch's global generator is used.
    """
    num_kept = max(1, int(num_cubes * (1 - dropout)))
    drawn_BN = torch.rand(num_clips, num_cubes, device=device)
    return drawn_BN.topk(num_kept, dim=1).indices.sort(dim=1).values


def choose_rows(x_BNV: Tensor, kept_BK: Tensor) -> Tensor:
    """Select rows of each sample: [B, K, V] from [B, N, V]."""
    return x_BNV.gather(1, kept_BK[..., None].expand(-1, -1, x_BNV.shape[2]))


def resample_temporal(embedding_SD: Tensor, num_steps: int) -> Tensor:
    """Resample a temporal embedding linearly to a different number of steps, as AVION does from 4 to 16 frames.

    Steps are equal parts of a clip, and each embedding belongs to the centre of its step. Before the first centre and
    after the last, values are constant.
    """
    if len(embedding_SD) == num_steps:
        return embedding_SD
    resampled_1DS = nn.functional.interpolate(embedding_SD.T[None], size=num_steps, mode="linear", align_corners=False)
    return resampled_1DS[0].T.contiguous()


def inflate_cubes(weight_DCPP: Tensor, cube_frames: int) -> Tensor:
    """Inflate CLIP's `conv1` to cubes of several frames (I3D). The output for identical frames does not change."""
    if cube_frames == 1:
        return weight_DCPP
    return (weight_DCPP / cube_frames)[:, :, None].repeat(1, 1, cube_frames, 1, 1)
