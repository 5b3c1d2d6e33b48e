"""VideoMAE's video tower: a vision transformer on all or some cubes of a clip (Tong et al. 2022, section 3).

It differs from `video_vit` as VideoMAE's weights require: no class token, fixed sinusoidal positional embeddings of the
cube index, a bias in the cube embedding, and biases of queries and values but not of keys.

Shape suffixes: B batch, C channels, T frames, H and W pixels, N cubes of a clip, K visible cubes, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipmill.train.models.attention import Attend
from clipmill.train.models.transformer import LayerNorm, SelfAttention, Transformer
from clipmill.train.models.video_vit import CubeEmbedding, TokenTower, VideoViTSize, cubes_of, pick_cubes


class VideoMAEEncoder(TokenTower):
    """Video tower that returns one token per cube.

    Args:
        num_frames: frames of a clip, a multiple of the cube length.
        has_last_norm: apply `ln_post` to the tokens; a classifier normalises their mean instead.
        drop_path: probability, for each block, of skipping a clip's branch in training; empty for none.
    """

    positions_ND: Tensor

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
        if size.trunk.has_key_bias:
            raise ValueError("a videomae tower's keys have no bias")
        self.size, width = size, size.trunk.width
        self.grid = size.grid(image_px=image_px, num_frames=num_frames)
        self.conv1 = CubeEmbedding(size, has_bias=True)
        self.register_buffer("positions_ND", sines(self.grid.cubes, width), persistent=False)
        self.transformer = Transformer(size.trunk, attend=attend, drop_path=drop_path)
        self.ln_post = LayerNorm(width, eps=size.trunk.norm_eps) if has_last_norm else None
        start_as_videomae(self.transformer)

    def forward(self, video_BCTHW: Tensor, visible_BK: Tensor | None = None) -> Tensor:
        """Tokens [B, K, D] of the visible cubes of normalised clips, given by int64 indices; None for all cubes."""
        return self.finish(self.transformer(self.embed(video_BCTHW, visible_BK)))

    def embed(self, video_BCTHW: Tensor, /, visible_BK: Tensor | None = None) -> Tensor:
        """Embed cubes as input of the first block, with positional embeddings, [B, K, D]; see `forward`."""
        cubes = cubes_of(video_BCTHW, cube_frames=self.size.cube_frames, patch_px=self.size.patch_px)
        if visible_BK is None:
            seen_BK, positions_BKD = cubes.flatten(4).flatten(1, 3), self.positions_ND
        else:
            # Selected before the embedding, which saves that work for the others.
            seen_BK, positions_BKD = pick_cubes(cubes, visible_BK).flatten(2), self.positions_ND[visible_BK]
        embedded_BKD = self.conv1(seen_BK)
        # From here on in the precision of that product.
        x_BKD: Tensor = embedded_BKD + positions_BKD.to(embedded_BKD.dtype)
        return x_BKD

    def finish(self, x_BKD: Tensor, /) -> Tensor:
        """Apply the final layer norm, if the tower has one, to the last block's output."""
        return x_BKD if self.ln_post is None else self.ln_post(x_BKD)

    def features(self, video_BCTHW: Tensor) -> Tensor:
        """The mean of the tokens of all cubes, [B, D]."""
        return self(video_BCTHW).mean(1)


def sines(num_places: int, width: int) -> Tensor:
    """Sinusoidal positional embeddings, float32 [num_places, width] (Vaswani et al. 2017, section 3.5).

    Column 2i is sin(place / 10000 ** (2i / width)) and column 2i + 1 its cosine. VideoMAE's places are cube indices, so
    that one table encodes time, height and width.
    """
    columns_D = torch.arange(width, dtype=torch.float64)
    periods_D = 10_000.0 ** (2 * (columns_D // 2) / width)
    angles_ND = torch.arange(num_places, dtype=torch.float64)[:, None] / periods_D
    return torch.where(columns_D % 2 == 0, angles_ND.sin(), angles_ND.cos()).float()


def start_as_videomae(module: nn.Module) -> None:
    """Initialise linear layers as VideoMAE does: Glorot-uniform weights and zero biases.

    Queries, keys and values count as one layer with 3 D outputs.
    """
    for part in module.modules():
        if isinstance(part, SelfAttention):
            nn.init.xavier_uniform_(part.in_proj_weight)
        elif isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
