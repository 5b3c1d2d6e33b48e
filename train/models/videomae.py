"""VideoMAE's video tower: a vision transformer on cubes of a clip, all of them or some (Tong et al. 2022, section 3).

It differs from `video_vit` in what VideoMAE's weights were trained with: no class token, places told by fixed sines
and cosines of a cube's number, a bias in the embedding of cubes, biases of queries and values without one of keys.

Shape suffixes: B batch, C channels, T frames, H and W pixels, N cubes of a clip, K cubes that are seen, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from train.models.attention import Attend
from train.models.transformer import LayerNorm, SelfAttention, Transformer
from train.models.video_vit import CubeEmbedding, VideoViTSize


class VideoMAEEncoder(nn.Module):
    """Clips to one token a cube.

    Args:
        num_frames: of a clip; a multiple of the cubes' frames.
        has_last_norm: tokens go through `ln_post`; without it a classifier has its own norm, of their mean.
        drop_path: for each block, the probability that it is skipped for a clip in training; empty for none.
    """

    positions_ND: torch.Tensor

    def __init__(
        self,
        size: VideoViTSize,
        *,
        image_px: int,
        num_frames: int,
        attend: Attend,
        has_last_norm: bool = True,
        drop_path: Sequence[float] = (),
    ) -> None:
        super().__init__()
        if image_px % size.patch_px:
            raise ValueError(f"a picture of {image_px} px cannot be cut into patches of {size.patch_px} px")
        if num_frames % size.cube_frames:
            raise ValueError(f"{num_frames} frames cannot be cut into cubes of {size.cube_frames} frames")
        if size.trunk.has_key_bias:
            raise ValueError("a videomae tower's keys have no bias")
        self.size = size
        side = image_px // size.patch_px
        self.grid = CubeGrid(num_frames // size.cube_frames, side, side)
        width = size.trunk.width
        self.conv1 = CubeEmbedding(size, has_bias=True)
        self.register_buffer("positions_ND", sines(self.grid.cubes, width), persistent=False)
        self.transformer = Transformer(size.trunk, attend=attend, drop_path=drop_path)
        self.ln_post = LayerNorm(width, eps=size.trunk.norm_eps) if has_last_norm else None
        start_as_videomae(self.transformer)

    def forward(self, video_BCTHW: torch.Tensor, visible_BK: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens of the cubes of normalised clips, [B, K, D].

        Args:
            visible_BK: int64, numbers of the cubes that are seen (as many in each clip), in the order of the tokens;
                all of them when left out.
        """
        return self.finish(self.transformer(self.embed(video_BCTHW, visible_BK)))

    def embed(self, video_BCTHW: torch.Tensor, visible_BK: torch.Tensor | None = None) -> torch.Tensor:
        """What the first block is given: tokens with their places, [B, K, D]; see `forward`."""
        cubes = cubes_of(video_BCTHW, cube_frames=self.size.cube_frames, patch_px=self.size.patch_px)
        if visible_BK is None:
            seen_BK = cubes.flatten(4).flatten(1, 3)
            positions_BKD = self.positions_ND
        else:
            # Left out before they are embedded: that work is saved too.
            seen_BK = picked(cubes, visible_BK).flatten(2)
            positions_BKD = self.positions_ND[visible_BK]
        embedded_BKD = self.conv1(seen_BK)
        # All that follows is in the precision of that product.
        x_BKD: torch.Tensor = embedded_BKD + positions_BKD.to(embedded_BKD.dtype)
        return x_BKD

    def finish(self, x_BKD: torch.Tensor) -> torch.Tensor:
        """What the last block gave, normalised where the tower does that."""
        return x_BKD if self.ln_post is None else self.ln_post(x_BKD)

    def features(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """One vector a clip, [B, D]: the mean of the tokens of all its cubes."""
        return self(video_BCTHW).mean(1)


def sines(num_places: int, width: int) -> torch.Tensor:
    """Sines and cosines that tell places 0, 1, ... apart, float32 [num_places, width] (Vaswani et al. 2017, sec. 3.5).

    Column 2i has sin(place / 10000 ** (2i / width)), column 2i + 1 the cosine of the same. The places of VideoMAE are
    the numbers of the cubes, so one table tells time, height and width.
    """
    columns_D = torch.arange(width, dtype=torch.float64)
    periods_D = 10_000.0 ** (2 * (columns_D // 2) / width)
    angles_ND = torch.arange(num_places, dtype=torch.float64)[:, None] / periods_D
    return torch.where(columns_D % 2 == 0, angles_ND.sin(), angles_ND.cos()).float()


def start_as_videomae(module: nn.Module) -> None:
    """Fills linear layers as VideoMAE starts them: Glorot's uniform weights, no biases.

    Queries, keys and values count as one layer, with three times as many outputs.
    """
    for part in module.modules():
        if isinstance(part, SelfAttention):
            nn.init.xavier_uniform_(part.in_proj_weight)
        elif isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


# Clips cut into cubes, and some cubes of each clip picked out, without a copy of all of them.
#
# Shape suffixes: B batch, C channels, T frames, H and W pixels, S steps of time (T / t), h and w rows and columns of
# cubes, t frames and p side of a cube, N cubes of a clip (S * h * w, in the order of their numbers), M picked ones.


@dataclass(frozen=True)
class CubeGrid:
    """How many cubes a clip has along time, height and width; they are numbered in that order."""

    steps: int
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        """Cubes of one step."""
        return self.rows * self.columns

    @property
    def cubes(self) -> int:
        """Cubes of a clip."""
        return self.steps * self.patches


def grid_of(video_BCTHW: torch.Tensor, *, cube_frames: int, patch_px: int) -> CubeGrid:
    """The grid of clips.

    Raises:
        ValueError: they cannot be cut into such cubes.
    """
    num_frames, height, width = video_BCTHW.shape[2:]
    if num_frames % cube_frames or height % patch_px or width % patch_px:
        raise ValueError(
            f"{num_frames} x {height} x {width} cannot be cut into cubes of {cube_frames} x {patch_px} x {patch_px}"
        )
    return CubeGrid(num_frames // cube_frames, height // patch_px, width // patch_px)


def cubes_of(video_BCTHW: torch.Tensor, *, cube_frames: int, patch_px: int) -> torch.Tensor:
    """The cubes of clips, a view [B, S, h, w, C, t, p, p]."""
    grid = grid_of(video_BCTHW, cube_frames=cube_frames, patch_px=patch_px)
    b, c = video_BCTHW.shape[:2]
    cubes = video_BCTHW.reshape(b, c, grid.steps, cube_frames, grid.rows, patch_px, grid.columns, patch_px)
    return cubes.permute(0, 2, 4, 6, 1, 3, 5, 7)


def picked(cubes_BShw: torch.Tensor, numbers_BM: torch.Tensor) -> torch.Tensor:
    """Cubes by their numbers: [B, M, ...] of a view [B, S, h, w, ...]; only what is picked is copied.

    Args:
        numbers_BM: int64, from 0 to below N.
    """
    rows, columns = cubes_BShw.shape[2:4]
    batch_B1 = torch.arange(len(cubes_BShw), device=cubes_BShw.device)[:, None]
    step_BM, place_BM = numbers_BM // (rows * columns), numbers_BM % (rows * columns)
    return cubes_BShw[batch_B1, step_BM, place_BM // columns, place_BM % columns]
