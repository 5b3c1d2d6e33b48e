"""TimeSformer: divided space-time attention (Bertasius et al. 2021, section 3.3, "T+S").

Each patch first attends over time, to the patches at its position in all frames, and then over space, to the patches of
its frame and the class token. The class token takes part only in spatial attention: it is repeated for each frame, and
its outputs are averaged.

Shape suffixes: B batch, C channels, T frames, H and W pixels, P patches of a frame, N patches of a clip (T * P, frame
by frame), L tokens (1 + N), D width, h heads, K width of a head.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipmill.train.models.attention import Attend
from clipmill.train.models.space_time import attend_short
from clipmill.train.models.transformer import LayerNorm, Linear, Mlp, SelfAttention, Stack, TransformerSize
from clipmill.train.models.video_vit import CubeEmbedding, TokenTower, VideoViTSize

NORM_EPS = 1e-6  # as in the published weights
_STD = 0.02


class DividedBlock(nn.Module):
    """Pre-norm block with temporal attention, a linear layer after it (`time_proj`), spatial attention, and an MLP."""

    num_branches = 3

    def __init__(self, size: TransformerSize, *, num_frames: int, attend: Attend) -> None:
        super().__init__()
        self.num_frames = num_frames
        self.attend = attend
        self.ln_time = LayerNorm(size.width, eps=size.norm_eps)
        self.time_attn = SelfAttention(size.width, size.num_heads, attend=attend)
        self.time_proj = Linear(size.width, size.width)
        self.ln_1 = LayerNorm(size.width, eps=size.norm_eps)
        self.attn = SelfAttention(size.width, size.num_heads, attend=attend)
        self.ln_2 = LayerNorm(size.width, eps=size.norm_eps)
        self.mlp = Mlp(size.width, size.mlp_width, size.activation)
        for linear in (self.time_attn.out_proj, self.attn.out_proj, self.mlp.c_fc, self.mlp.c_proj):
            nn.init.trunc_normal_(linear.weight, std=_STD)
            nn.init.zeros_(linear.bias)
        for attention in (self.time_attn, self.attn):
            nn.init.trunc_normal_(attention.in_proj_weight, std=_STD)
        # With a zero projection, temporal attention initially adds nothing. The block then equals a block of an image
        # transformer, whose pretrained weights can be loaded into the other layers.
        nn.init.zeros_(self.time_proj.weight)
        nn.init.zeros_(self.time_proj.bias)

    def forward(self, x_BLD: Tensor, *, branches: Tensor | None = None) -> Tensor:
        """Compute the block's output [B, L, D]; `branches` [3, B, 1, 1] scales the three branches for each sample."""
        time_scale, space_scale, mlp_scale = (None, None, None) if branches is None else branches
        # Split instead of slicing, because the gradient of a slice has the full size and is mostly zero.
        class_B1D, x_BND = x_BLD.split([1, x_BLD.shape[1] - 1], dim=1)
        x_BND = x_BND + _scale(self._attend_time(x_BND), time_scale)
        x_BLD = self._attend_space(class_B1D, x_BND, space_scale)
        hidden = linear_of(self.mlp.c_fc, self.ln_2, x_BLD)
        return x_BLD + _scale(linear_of(self.mlp.c_proj, self.mlp.activate, hidden), mlp_scale)

    def _attend_time(self, x_BND: Tensor) -> Tensor:
        attention = self.time_attn
        # Reorder the rows of the matrix by head, so that patches and heads are contiguous in memory. Then every patch
        # can act as a head, without a copy of its tokens.
        head_shape = (attention.num_heads, 3, x_BND.shape[2] // attention.num_heads)

        def order_by_head(rows: Tensor) -> Tensor:
            return rows.unflatten(0, (3, head_shape[0], head_shape[2])).transpose(0, 1).flatten(0, 2)

        def layer(x_BND: Tensor) -> Tensor:
            return attention.product(x_BND, order_by_head(attention.in_proj_bias), arrange=order_by_head)

        qkv = linear_of(layer, self.ln_time, x_BND)
        qkv_BPT = qkv.view(len(x_BND), self.num_frames, -1, *head_shape).transpose(1, 2)
        out_BPThK = attend_short(self.attend, *qkv_BPT.unbind(4))
        out_BND = out_BPThK.transpose(1, 2).reshape(x_BND.shape)
        # Combine the two consecutive linear layers, because multiplying their matrices is cheaper than a second pass
        # over the tokens.
        first_layer, second_layer = attention.out_proj, self.time_proj
        second_DD = second_layer.effective_weight()
        bias_D = nn.functional.linear(first_layer.bias, second_DD, second_layer.bias)
        return nn.functional.linear(out_BND, second_DD @ first_layer.effective_weight(), bias_D)

    def _attend_space(self, class_B1D: Tensor, x_BND: Tensor, factors_B11: Tensor | None) -> Tensor:
        """Add spatial attention to the class token and the patches, [B, L, D]."""
        attention = self.attn
        layer = partial(attention.product, bias=attention.in_proj_bias)
        qkv = linear_of(layer, self._normalize_frames, class_B1D, x_BND)
        q, k, v = qkv.unflatten(2, (3, attention.num_heads, -1)).unbind(2)
        outputs = attention.out_proj(self.attend(q, k, v).flatten(2)).unflatten(0, (-1, self.num_frames))
        class_BT1D, patches_BTPD = outputs.split([1, outputs.shape[2] - 1], dim=2)
        class_B1D = class_B1D + _scale(class_BT1D.mean(1), factors_B11)
        factors_B111 = None if factors_B11 is None else factors_B11[:, None]
        x_BTPD = x_BND.unflatten(1, (self.num_frames, -1)) + _scale(patches_BTPD, factors_B111)
        return torch.cat([class_B1D, x_BTPD.flatten(1, 2)], dim=1)

    def _normalize_frames(self, class_B1D: Tensor, x_BND: Tensor) -> Tensor:
        """Apply `ln_1`, and return the class token and the patches of each frame, [B * T, 1 + P, D]."""
        class_BT1D = self.ln_1(class_B1D)[:, None].expand(-1, self.num_frames, -1, -1)
        x_BTPD = self.ln_1(x_BND).unflatten(1, (self.num_frames, -1))
        return torch.cat([class_BT1D, x_BTPD], dim=2).flatten(0, 1)


def _scale(output: Tensor, factors: Tensor | None) -> Tensor:
    return output if factors is None else output * factors


class TimeSformer(TokenTower):
    """Video tower that returns the class token and then the patches, frame by frame.

    Args:
        size: Dimensions of the tower.
        image_px: Side length of the square frames or latents.
        num_frames: Number of frames per clip.
        attend: Attention function.
        temporal_std: Standard deviation of the initial temporal embedding. If it is 0, the order of frames initially
            has no effect.
        drop_path: Probability, for each block, of skipping a branch for a clip in training; empty for none.
    """

    def __init__(
        self,
        size: VideoViTSize,
        *,
        image_px: int,
        num_frames: int,
        attend: Attend,
        temporal_std: float = 0.0,
        drop_path: Sequence[float] = (),
    ) -> None:
        super().__init__()
        if size.cube_frames != 1:
            raise ValueError(f"TimeSformer's patches span one frame, not {size.cube_frames}")
        self.size, trunk = size, size.trunk
        num_patches = size.grid(image_px=image_px, num_frames=num_frames).patches
        self.conv1 = CubeEmbedding(size, has_bias=True)
        self.class_embedding = nn.Parameter(torch.empty(trunk.width))
        self.positional_embedding = nn.Parameter(torch.empty(1 + num_patches, trunk.width))
        self.temporal_embedding = nn.Parameter(temporal_std * torch.randn(num_frames, trunk.width))
        self.transformer = Stack(
            (DividedBlock(trunk, num_frames=num_frames, attend=attend) for _ in range(trunk.depth)), drop_path=drop_path
        )
        self.ln_post = LayerNorm(trunk.width, eps=trunk.norm_eps)
        for embedding in (self.class_embedding, self.positional_embedding):
            nn.init.trunc_normal_(embedding, std=_STD)

    def forward(self, video_BCTHW: Tensor) -> Tensor:
        """Return the tokens of normalised clips, [B, L, D]."""
        return self.tokens(video_BCTHW)

    def features(self, video_BCTHW: Tensor) -> Tensor:
        """Return the class token, [B, D]."""
        return self(video_BCTHW)[:, 0]

    def embed(self, video_BCTHW: Tensor, /) -> Tensor:
        """Embed normalised clips as input of the first block: tokens with positional embeddings, [B, L, D]."""
        patches_BTPD = self.conv1(self.conv1.cut(video_BCTHW))
        # From here on, values have the precision of this product.
        dtype = patches_BTPD.dtype
        positions_TPD = self.positional_embedding[1:] + self.temporal_embedding[:, None]
        class_D = (self.class_embedding + self.positional_embedding[0]).to(dtype)
        x_BND = (patches_BTPD + positions_TPD.to(dtype)).flatten(1, 2)
        return torch.cat([class_D.expand(len(x_BND), 1, -1), x_BND], dim=1)

    def finish(self, x_BLD: Tensor, /) -> Tensor:
        """Apply the final layer norm to the last block's output, [B, L, D]."""
        return cast(Tensor, self.ln_post(x_BLD))


def interpolate_positions(embedding_LD: Tensor, num_patches: int) -> Tensor:
    """Resize a square positional embedding by nearest-neighbour interpolation, as transformers does.

    Raises:
        ValueError: The old or the new patches do not fill a square.
    """
    sides = [round(count**0.5) for count in (len(embedding_LD) - 1, num_patches)]
    if sides[0] ** 2 != len(embedding_LD) - 1 or sides[1] ** 2 != num_patches:
        raise ValueError(f"cannot resize {len(embedding_LD) - 1} patches to {num_patches}: both must fill a square")
    if sides[0] == sides[1]:
        return embedding_LD
    grid_1Dhw = embedding_LD[1:].T.unflatten(1, (sides[0], sides[0]))[None]
    resized_1Dhw = nn.functional.interpolate(grid_1Dhw, size=(sides[1], sides[1]), mode="nearest")
    return torch.cat([embedding_LD[:1], resized_1Dhw[0].flatten(1).T])


def interpolate_times(embedding_TD: Tensor, num_frames: int) -> Tensor:
    """Resize a temporal embedding by nearest-neighbour interpolation, as transformers does."""
    if len(embedding_TD) == num_frames:
        return embedding_TD
    return nn.functional.interpolate(embedding_TD.T[None], size=num_frames, mode="nearest")[0].T.contiguous()


# Minimum number of input values for which recomputation is worth its fixed cost of a few tenths of a millisecond.
MIN_RECOMPUTED_VALUES = 2**18


def linear_of(layer: Callable[[Tensor], Tensor], prepare: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Compute `layer(prepare(*inputs))`, and save only the inputs for the backward pass.

    `prepare` is a layer norm, an activation or a copy. All of them are cheap compared to the matrix product at the end
    of `layer`. torch stops the recomputation once it has the tensors that the backward pass needs, so the product is
    not computed again. `prepare` must be deterministic, and the last input must be the largest.
    """

    def product(*inputs: Tensor) -> Tensor:
        return layer(prepare(*inputs))

    # torch.compile decides by itself what to save, and torch.export must not encounter a condition on the batch size.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or inputs[-1].numel() < MIN_RECOMPUTED_VALUES:
        return product(*inputs)
    out: Tensor = checkpoint(product, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out
