"""TimeSformer: attention divided into one over time and one over space (Bertasius et al. 2021, section 3.3, "T+S").

Each patch first attends to the patches at its place in all frames, then to the patches of its frame and the class
token. The class token takes no part in the first; in the second it is seen in each frame, and what the frames tell it
is averaged.

Shape suffixes: B batch, C channels, T frames, H and W pixels, P patches of a frame, N patches of a clip (T * P, by
frames), L tokens (1 + N), D width, h heads, K width of a head.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from train.models.attention import Attend
from train.models.transformer import LayerNorm, Mlp, SelfAttention, Stack, TransformerSize
from train.models.video_vit import CubeEmbedding, VideoViTSize

NORM_EPS = 1e-6  # that of the published weights
_STD = 0.02


class DividedBlock(nn.Module):
    """Attention over time, attention over space and an MLP, each behind a layer norm and a residual.

    What attention over time adds goes through one more linear layer, `time_proj`.
    """

    num_branches = 3

    def __init__(self, size: TransformerSize, *, num_frames: int, attend: Attend) -> None:
        super().__init__()
        self.num_frames = num_frames
        self.attend = attend
        self.ln_time = LayerNorm(size.width, eps=size.norm_eps)
        self.time_attn = SelfAttention(size.width, size.num_heads, attend=attend)
        self.time_proj = nn.Linear(size.width, size.width)
        self.ln_1 = LayerNorm(size.width, eps=size.norm_eps)
        self.attn = SelfAttention(size.width, size.num_heads, attend=attend)
        self.ln_2 = LayerNorm(size.width, eps=size.norm_eps)
        self.mlp = Mlp(size.width, size.activation)
        for linear in (self.time_attn.out_proj, self.attn.out_proj, self.mlp.c_fc, self.mlp.c_proj):
            nn.init.trunc_normal_(linear.weight, std=_STD)
            nn.init.zeros_(linear.bias)
        for attention in (self.time_attn, self.attn):
            nn.init.trunc_normal_(attention.in_proj_weight, std=_STD)
        # At first a block is that of pictures, whose weights may have filled the rest of it.
        nn.init.zeros_(self.time_proj.weight)
        nn.init.zeros_(self.time_proj.bias)

    def forward(self, x_BLD: torch.Tensor, *, branches: torch.Tensor | None = None) -> torch.Tensor:
        """The block's output, [B, L, D].

        Args:
            branches: [3, B, 1, 1], factors of what the three parts add, one an item.
        """
        of_time, of_space, of_mlp = (None, None, None) if branches is None else branches
        class_B1D, x_BND = _class_and_patches(x_BLD)
        x_BND = x_BND + _scaled(self._over_time(x_BND), of_time)
        x_BLD = self._over_space(class_B1D, x_BND, of_space)
        hidden = linear_of(self.mlp.c_fc, self.ln_2, x_BLD)
        return x_BLD + _scaled(linear_of(self.mlp.c_proj, self.mlp.activate, hidden), of_mlp)

    def _over_time(self, x_BND: torch.Tensor) -> torch.Tensor:
        attention = self.time_attn
        # The rows of the matrix head by head, so that patches and heads are one dimension in memory: every patch is a
        # head of its own, and no token has to be copied into another order.
        by_head = (attention.num_heads, 3, x_BND.shape[2] // attention.num_heads)

        def head_by_head(rows: torch.Tensor) -> torch.Tensor:
            return rows.unflatten(0, (3, by_head[0], by_head[2])).transpose(0, 1).flatten(0, 2)

        def layer(x_BND: torch.Tensor) -> torch.Tensor:
            weight, bias = head_by_head(attention.in_proj_weight), head_by_head(attention.in_proj_bias)
            return nn.functional.linear(x_BND, weight, bias)

        qkv = linear_of(layer, self.ln_time, x_BND)
        q, k, v = qkv.view(len(x_BND), self.num_frames, -1, *by_head[1:]).unbind(3)
        out_BND = self.attend(q, k, v).reshape(x_BND.shape)
        # Two linear layers with nothing between them are one: their product is cheaper than a second pass over tokens.
        last, first = self.time_proj, attention.out_proj
        bias_D = nn.functional.linear(first.bias, last.weight, last.bias)
        return nn.functional.linear(out_BND, last.weight @ first.weight, bias_D)

    def _over_space(
        self, class_B1D: torch.Tensor, x_BND: torch.Tensor, factors_B11: torch.Tensor | None
    ) -> torch.Tensor:
        """Class token and patches, with what attention over space adds, [B, L, D]."""
        attention = self.attn
        layer = partial(nn.functional.linear, weight=attention.in_proj_weight, bias=attention.in_proj_bias)
        qkv = linear_of(layer, self._frames, class_B1D, x_BND)
        q, k, v = qkv.unflatten(2, (3, attention.num_heads, -1)).unbind(2)
        added = attention.out_proj(self.attend(q, k, v).flatten(2)).unflatten(0, (-1, self.num_frames))
        class_BT1D, patches_BTPD = added.split([1, added.shape[2] - 1], dim=2)
        class_B1D = class_B1D + _scaled(class_BT1D.mean(1), factors_B11)
        factors_B111 = None if factors_B11 is None else factors_B11[:, None]
        x_BTPD = x_BND.unflatten(1, (self.num_frames, -1)) + _scaled(patches_BTPD, factors_B111)
        return torch.cat([class_B1D, x_BTPD.flatten(1, 2)], dim=1)

    def _frames(self, class_B1D: torch.Tensor, x_BND: torch.Tensor) -> torch.Tensor:
        """The class token and the patches of each frame, normalised, [B * T, 1 + P, D]."""
        class_BT1D = self.ln_1(class_B1D)[:, None].expand(-1, self.num_frames, -1, -1)
        x_BTPD = self.ln_1(x_BND).unflatten(1, (self.num_frames, -1))
        return torch.cat([class_BT1D, x_BTPD], dim=2).flatten(0, 1)


def _class_and_patches(x_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Split, not sliced: the gradients of two slices are two tensors as large as the whole, mostly of zeros.
    class_B1D, x_BND = x_BLD.split([1, x_BLD.shape[1] - 1], dim=1)
    return class_B1D, x_BND


def _scaled(added: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    return added if factors is None else added * factors


class TimeSformer(nn.Module):
    """Clips to tokens: the class token, then the patches frame by frame.

    Args:
        temporal_std: of the temporal embedding at the start; with 0 the order of frames does not count yet.
        drop_path: for each block, the probability that each of its parts is skipped for a clip in training; empty for
            none.
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
        if image_px % size.patch_px:
            raise ValueError(f"a picture of {image_px} px cannot be cut into patches of {size.patch_px} px")
        if size.cube_frames != 1:
            raise ValueError(f"TimeSformer's patches are of one frame, not of {size.cube_frames}")
        self.size = size
        trunk = size.trunk
        num_patches = (image_px // size.patch_px) ** 2
        self.conv1 = CubeEmbedding(size, has_bias=True)
        self.class_embedding = nn.Parameter(torch.empty(trunk.width))
        self.positional_embedding = nn.Parameter(torch.empty(1 + num_patches, trunk.width))
        self.temporal_embedding = nn.Parameter(temporal_std * torch.randn(num_frames, trunk.width))
        self.transformer = Stack(
            (DividedBlock(trunk, num_frames=num_frames, attend=attend) for _ in range(trunk.depth)),
            drop_path=drop_path,
        )
        self.ln_post = LayerNorm(trunk.width, eps=trunk.norm_eps)
        for embedding in (self.class_embedding, self.positional_embedding):
            nn.init.trunc_normal_(embedding, std=_STD)

    def forward(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Tokens of normalised clips, [B, L, D]."""
        return self.finish(self.transformer(self.embed(video_BCTHW)))

    def embed(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """What the first block is given of normalised clips [B, C, T, H, W]: tokens with their places, [B, L, D]."""
        patches_BTPD = self.conv1(self.conv1.cut(video_BCTHW))
        # All that follows is in the precision of that product.
        dtype = patches_BTPD.dtype
        places_TPD = self.positional_embedding[1:] + self.temporal_embedding[:, None]
        class_D = (self.class_embedding + self.positional_embedding[0]).to(dtype)
        x_BND = (patches_BTPD + places_TPD.to(dtype)).flatten(1, 2)
        return torch.cat([class_D.expand(len(x_BND), 1, -1), x_BND], dim=1)

    def finish(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """What the last block gave, normalised: the tokens, [B, L, D]."""
        x_BLD = self.ln_post(x_BLD)
        return x_BLD


def nearest_places(embedding_LD: torch.Tensor, num_patches: int) -> torch.Tensor:
    """A positional embedding for square pictures of another size, each place the nearest old one (as transformers do).

    Raises:
        ValueError: the patches of a picture do not fill a square.
    """
    sides = [round(count**0.5) for count in (len(embedding_LD) - 1, num_patches)]
    if sides[0] ** 2 != len(embedding_LD) - 1 or sides[1] ** 2 != num_patches:
        raise ValueError(f"{len(embedding_LD) - 1} patches for {num_patches}: both must fill a square")
    if sides[0] == sides[1]:
        return embedding_LD
    grid_1Dhw = embedding_LD[1:].T.unflatten(1, (sides[0], sides[0]))[None]
    resized_1Dhw = nn.functional.interpolate(grid_1Dhw, size=(sides[1], sides[1]), mode="nearest")
    return torch.cat([embedding_LD[:1], resized_1Dhw[0].flatten(1).T])


def nearest_times(embedding_TD: torch.Tensor, num_frames: int) -> torch.Tensor:
    """A temporal embedding for another number of frames, each the nearest old one (as transformers do)."""
    if len(embedding_TD) == num_frames:
        return embedding_TD
    return nn.functional.interpolate(embedding_TD.T[None], size=num_frames, mode="nearest")[0].T.contiguous()


# Cheap steps before a matrix product, computed again in the backward pass instead of kept for it.


# Numbers below which they are kept after all: to compute again costs some tenths of a millisecond at least.
SMALL = 2**18


def linear_of(
    layer: Callable[[torch.Tensor], torch.Tensor], prepare: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> torch.Tensor:
    """`layer(prepare(*inputs))`, of which only the inputs are kept for the backward pass.

    For layer norms, activations and copies, which cost little beside the product: torch stops computing again once
    it has what the backward pass asks for, so the product itself is computed once.

    Args:
        layer: ends with a matrix product.
        prepare: draws nothing at random.
        inputs: the last is the largest.
    """

    def product(*inputs: torch.Tensor) -> torch.Tensor:
        return layer(prepare(*inputs))

    is_small = inputs[-1].numel() < SMALL
    # What torch.compile keeps is its own choice.
    if is_small or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return product(*inputs)
    out: torch.Tensor = checkpoint(product, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out
