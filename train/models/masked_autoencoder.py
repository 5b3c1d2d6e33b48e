"""VideoMAE: an encoder of the few cubes that are seen, and a small decoder that says what the others hold.

Tong et al. 2022, "VideoMAE", section 3; with a decoder that says it of a part of the others only, Wang et al. 2023,
"VideoMAE V2", section 3.2.

Shape suffixes: B batch, C channels, T frames, H and W pixels, N cubes of a clip, K cubes that are seen, M cubes that
are predicted, L = K + M, D width of the encoder, E width of the decoder, V values of a cube.
"""

from dataclasses import replace

import torch
from torch import nn

from train.config.model import Towers
from train.models.attention import Attend
from train.models.transformer import LayerNorm, Transformer, TransformerSize, checkpoint_blocks, drop_path_of
from train.models.video_vit import VideoViTSize
from train.models.videomae import VideoMAEEncoder, sines, start_as_videomae

_LAST_NORM_EPS = 1e-5  # of the decoder, whatever the blocks have: as in transformers' model
_MASK_TOKEN_STD = 0.02


def decoder_size(encoder: TransformerSize, *, depth: int) -> TransformerSize:
    """The decoder of an encoder: half its width, in heads of the same width (192 / 3 for S, 384 / 6, 512 / 8 for L)."""
    return replace(encoder, width=encoder.width // 2, depth=depth, num_heads=encoder.num_heads // 2)


class MaskedDecoder(nn.Module):
    """Tokens of seen cubes to the values of cubes that are not."""

    positions_NE: torch.Tensor

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
        start_as_videomae(self)
        nn.init.trunc_normal_(self.mask_token, std=_MASK_TOKEN_STD)

    def forward(self, tokens_BKD: torch.Tensor, visible_BK: torch.Tensor, predicted_BM: torch.Tensor) -> torch.Tensor:
        """Values of the predicted cubes, [B, M, V], given the encoder's tokens and both kinds' numbers."""
        x_BKE = self.embed(tokens_BKD)
        positions_NE = self.positions_NE.to(x_BKE.dtype)
        masked_BME = self.mask_token.to(x_BKE.dtype) + positions_NE[predicted_BM]
        x_BLE = self.transformer(torch.cat([x_BKE + positions_NE[visible_BK], masked_BME], dim=1))
        # The norm and the head, which is as wide as a cube, are for what the loss sees.
        values_BMV: torch.Tensor = self.head(self.ln_post(x_BLE[:, visible_BK.shape[1] :]))
        return values_BMV


class MaskedAutoencoder(nn.Module):
    """Clips and masks to what the masked cubes hold.

    Parameters are `video.*` (the tower, which is kept) and `decoder.*`.

    Args:
        size: of the encoder, of the kind videomae.
        decoder_depth: blocks of the decoder.
        towers: how it is trained: what is skipped, what saves memory.
    """

    def __init__(
        self,
        size: VideoViTSize,
        *,
        decoder_depth: int,
        image_px: int,
        num_frames: int,
        attend: Attend,
        towers: Towers,
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
        video_BCTHW: torch.Tensor,
        masked_BN: torch.Tensor,
        decoded_BN: torch.Tensor | None = None,
        *,
        num_masked: int | None = None,
        num_predicted: int | None = None,
    ) -> torch.Tensor:
        """Predicts the cubes that are masked and decoded.

        Args:
            video_BCTHW: normalised clips.
            masked_BN: bool, cubes that the encoder does not see; as many in each clip.
            decoded_BN: bool, cubes that the decoder may predict; all of them when left out. As many of them are
                masked in each clip.
            num_masked, num_predicted: how many are masked, and masked and decoded, of each clip. Counted when left
                out, for which the host waits for the device.

        Returns:
            [B, M, V], cubes in the order of their numbers, the values of each in VideoMAE's order (t p p c).

        Raises:
            ValueError: clips have different counts, where they are counted.
        """
        num_cubes = masked_BN.shape[1]
        num_masked = counted(masked_BN) if num_masked is None else num_masked
        visible_BK = numbers_of(~masked_BN, num_cubes - num_masked)
        predicted_BM = predicted_cubes(masked_BN, decoded_BN, count=num_masked if decoded_BN is None else num_predicted)
        values_BMV: torch.Tensor = self.decoder(self.video(video_BCTHW, visible_BK), visible_BK, predicted_BM)
        return values_BMV


def predicted_cubes(
    masked_BN: torch.Tensor, decoded_BN: torch.Tensor | None = None, *, count: int | None = None
) -> torch.Tensor:
    """Numbers of the cubes that are masked and decoded, int64 [B, M], in rising order: those that a loss is about."""
    chosen_BN = masked_BN if decoded_BN is None else masked_BN & decoded_BN
    return numbers_of(chosen_BN, counted(chosen_BN) if count is None else count)


def counted(chosen_BN: torch.Tensor) -> int:
    """How many are chosen in each row. The host waits for the device.

    Raises:
        ValueError: not the same number in each.
    """
    counts = set(chosen_BN.sum(1).tolist())
    if len(counts) != 1:
        raise ValueError(f"clips of a batch have different numbers of cubes: {sorted(counts)}")
    return int(counts.pop())


def numbers_of(chosen_BN: torch.Tensor, count: int) -> torch.Tensor:
    """Where rows are true, int64 [B, count], in rising order, given how often each is: the device is not waited for."""
    # A stable sort leaves equals in their order.
    return chosen_BN.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :count]
