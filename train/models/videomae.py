"""VideoMAE's masked autoencoder, and its video tower, which can process some or all cubes of a clip (Tong et al. 2022).

VideoMAE's weights require these differences from `video_vit`: no class token, fixed sinusoidal positional embeddings of
the cube index, a bias in the cube embedding, and biases for queries and values but not for keys.

Shape suffixes: B batch, C channels, T frames, H and W pixels, N cubes of a clip, K visible cubes, D width.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from clipmill.train.config.model import Towers
from clipmill.train.models.attention import Attend
from clipmill.train.models.transformer import (
    LayerNorm,
    SelfAttention,
    Transformer,
    TransformerSize,
    checkpoint_blocks,
    drop_path_of,
)
from clipmill.train.models.video_vit import CubeEmbedding, TokenTower, VideoViTSize, cubes_of, pick_cubes


class VideoMAEEncoder(TokenTower):
    """Video tower that returns one token per cube.

    Args:
        size: Dimensions of the tower.
        image_px: Side length of the square frames or latents.
        num_frames: Number of frames per clip, a multiple of the cube length.
        attend: Attention function.
        has_last_norm: True to apply `ln_post` to the tokens. A classifier normalises the mean of the tokens instead.
        drop_path: Probability, for each block, of skipping a branch for a clip in training; empty for none.
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
            raise ValueError("a videomae tower must not have a bias for keys")
        self.size, width = size, size.trunk.width
        self.grid = size.grid(image_px=image_px, num_frames=num_frames)
        self.conv1 = CubeEmbedding(size, has_bias=True)
        self.register_buffer("positions_ND", sines(self.grid.cubes, width), persistent=False)
        self.transformer = Transformer(size.trunk, attend=attend, drop_path=drop_path)
        self.ln_post = LayerNorm(width, eps=size.trunk.norm_eps) if has_last_norm else None
        init_as_videomae(self.transformer)

    def forward(self, video_BCTHW: Tensor, visible_BK: Tensor | None = None) -> Tensor:
        """Return the tokens [B, K, D] of the visible cubes of normalised clips.

        Args:
            visible_BK: Indices of the visible cubes, int64; None for all cubes.
        """
        return self.finish(self.transformer(self.embed(video_BCTHW, visible_BK)))

    def embed(self, video_BCTHW: Tensor, /, visible_BK: Tensor | None = None) -> Tensor:
        """Embed visible cubes as input of the first block, with positional embeddings, [B, K, D]; see `forward`."""
        cubes = cubes_of(video_BCTHW, cube_frames=self.size.cube_frames, patch_px=self.size.patch_px)
        if visible_BK is None:
            cubes_BK, positions_BKD = cubes.flatten(4).flatten(1, 3), self.positions_ND
        else:
            # Select the cubes before the embedding, so that other cubes are not embedded.
            cubes_BK, positions_BKD = pick_cubes(cubes, visible_BK).flatten(2), self.positions_ND[visible_BK]
        embedded_BKD = self.conv1(cubes_BK)
        # The result has the dtype of `embedded_BKD`, which autocast may lower.
        x_BKD: Tensor = embedded_BKD + positions_BKD.to(embedded_BKD.dtype)
        return x_BKD

    def finish(self, x_BKD: Tensor, /) -> Tensor:
        """Apply the final layer norm to the last block's output, if the tower has one."""
        return x_BKD if self.ln_post is None else self.ln_post(x_BKD)

    def features(self, video_BCTHW: Tensor) -> Tensor:
        """Return the mean of the tokens of all cubes, [B, D]."""
        return self(video_BCTHW).mean(1)


def sines(num_positions: int, width: int) -> Tensor:
    """Return sinusoidal positional embeddings, float32 [num_positions, width] (Vaswani et al. 2017, section 3.5).

    Column 2i is sin(position / 10000 ** (2i / width)), and column 2i + 1 is the cosine of the same angle. VideoMAE's
    positions are cube indices, so a single table encodes time, height and width.
    """
    columns_D = torch.arange(width, dtype=torch.float64)
    periods_D = 10_000.0 ** (2 * (columns_D // 2) / width)
    angles_ND = torch.arange(num_positions, dtype=torch.float64)[:, None] / periods_D
    return torch.where(columns_D % 2 == 0, angles_ND.sin(), angles_ND.cos()).float()


def init_as_videomae(module: nn.Module) -> None:
    """Initialise linear layers as VideoMAE does: Glorot-uniform weights and zero biases.

    The projections of queries, keys and values are treated as one layer with 3 D outputs.
    """
    for part in module.modules():
        if isinstance(part, SelfAttention):
            nn.init.xavier_uniform_(part.in_proj_weight)
        elif isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


_LAST_NORM_EPS = 1e-5  # epsilon of the decoder's last norm; in transformers, the blocks have a different epsilon
_MASK_TOKEN_STD = 0.02


def decoder_size(encoder: TransformerSize, *, depth: int) -> TransformerSize:
    """Return a decoder size with half the encoder's width and heads (192 / 3 for S, 384 / 6 for B, 512 / 8 for L)."""
    return replace(encoder, width=encoder.width // 2, depth=depth, num_heads=encoder.num_heads // 2)


class MaskedDecoder(nn.Module):
    """Decoder that predicts the values of masked cubes from the tokens of visible cubes."""

    positions_NE: Tensor

    def __init__(
        self, size: TransformerSize, *, encoder_width: int, num_cubes: int, num_values: int, attend: Attend
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(encoder_width, size.width, bias=False)
        self.mask_token = nn.Parameter(torch.empty(size.width))
        self.register_buffer("positions_NE", sines(num_cubes, size.width), persistent=False)
        self.transformer = Transformer(size, attend=attend)
        self.ln_post = LayerNorm(size.width, eps=_LAST_NORM_EPS)
        self.head = nn.Linear(size.width, num_values)
        init_as_videomae(self)
        nn.init.trunc_normal_(self.mask_token, std=_MASK_TOKEN_STD)

    def forward(self, tokens_BKD: Tensor, visible_BK: Tensor, predicted_BM: Tensor) -> Tensor:
        """Return the values of the predicted cubes, [B, M, V].

        Args:
            tokens_BKD: Encoder tokens of the visible cubes.
            visible_BK, predicted_BM: Indices of the visible cubes and of the cubes to predict, int64.
        """
        x_BKE = self.embed(tokens_BKD)
        positions_NE = self.positions_NE.to(x_BKE.dtype)
        masked_BME = self.mask_token.to(x_BKE.dtype) + positions_NE[predicted_BM]
        x_BLE = self.transformer(torch.cat([x_BKE + positions_NE[visible_BK], masked_BME], dim=1))
        # Apply norm and head only to the predicted cubes, because the head's output is as wide as a cube.
        values_BMV: Tensor = self.head(self.ln_post(x_BLE[:, visible_BK.shape[1] :]))
        return values_BMV


# Masked autoencoder: the encoder processes the visible cubes, and a small decoder predicts the masked cubes (Tong et
# al. 2022, "VideoMAE", section 3). Decoder masking is described in Wang et al. 2023, "VideoMAE V2", section 3.2.
#
# Shape suffixes: N cubes of a clip, K visible cubes, M predicted cubes, L = K + M, D encoder width, E decoder width,
# V values of a cube.


class MaskedAutoencoder(nn.Module):
    """Masked autoencoder with the parameters `video.*` (the tower, which is used after training) and `decoder.*`.

    Args:
        size: Dimensions of the encoder, a tower of the kind videomae.
        decoder_depth: Number of decoder blocks.
        image_px: Side length of the square frames or latents.
        num_frames: Number of frames per clip.
        attend: Attention function.
        towers: Settings for drop path and activation checkpointing.
    """

    def __init__(
        self, size: VideoViTSize, *, decoder_depth: int, image_px: int, num_frames: int, attend: Attend, towers: Towers
    ) -> None:
        super().__init__()
        trunk = size.trunk
        self.video = VideoMAEEncoder(
            size,
            image_px=image_px,
            num_frames=num_frames,
            attend=attend,
            drop_path=drop_path_of(towers.drop_path, depth=trunk.depth, is_rising=towers.drop_path_rule == "rising"),
        )
        self.decoder = MaskedDecoder(
            decoder_size(trunk, depth=decoder_depth),
            encoder_width=trunk.width,
            num_cubes=self.video.grid.cubes,
            num_values=size.cube_frames * size.patch_px**2 * size.num_channels,
            attend=attend,
        )
        if towers.activation_checkpointing:
            checkpoint_blocks(self)

    def forward(
        self,
        video_BCTHW: Tensor,
        masked_BN: Tensor,
        decoded_BN: Tensor | None = None,
        *,
        num_masked: int | None = None,
        num_predicted: int | None = None,
    ) -> Tensor:
        """Predict the masked cubes, or the masked cubes that `decoded_BN` selects.

        Args:
            video_BCTHW: Normalised clips.
            masked_BN: Mask of the cubes that are hidden from the encoder, bool; the same number in each clip.
            decoded_BN: Mask of the cubes that the decoder may predict, bool; None for all cubes. All clips must have
                the same number of cubes that are both masked and decoded.
            num_masked: Number of masked cubes per clip.
            num_predicted: Number of cubes per clip that are both masked and decoded. If this or `num_masked` is None,
                cubes are counted, which synchronises with the device.

        Returns:
            Predicted cubes in ascending order, [B, M, V], with values in VideoMAE's order (t p p c).

        Raises:
            ValueError: Cubes are counted, and the masks select different numbers of cubes in different clips.
        """
        num_cubes = masked_BN.shape[1]
        num_masked = count_true(masked_BN) if num_masked is None else num_masked
        visible_BK = true_indices(~masked_BN, num_cubes - num_masked)
        predicted_BM = predicted_cubes(masked_BN, decoded_BN, count=num_masked if decoded_BN is None else num_predicted)
        values_BMV: Tensor = self.decoder(self.video(video_BCTHW, visible_BK), visible_BK, predicted_BM)
        return values_BMV


def predicted_cubes(masked_BN: Tensor, decoded_BN: Tensor | None = None, *, count: int | None = None) -> Tensor:
    """Return the ascending indices of cubes that are masked and decoded, int64 [B, M]. The loss uses these cubes."""
    mask_BN = masked_BN if decoded_BN is None else masked_BN & decoded_BN
    return true_indices(mask_BN, count_true(mask_BN) if count is None else count)


def count_true(mask_BN: Tensor) -> int:
    """Count the true values per row; raise ValueError if rows differ. This synchronises with the device."""
    counts = set(mask_BN.sum(1).tolist())
    if len(counts) != 1:
        raise ValueError(f"the masks of a batch select different numbers of cubes: {sorted(counts)}")
    return int(counts.pop())


def true_indices(mask_BN: Tensor, count: int) -> Tensor:
    """Return the ascending indices of the `count` true values in each row, int64 [B, count], without synchronising."""
    # A stable sort keeps equal values in order, so the indices of true values ascend.
    return mask_BN.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :count]
