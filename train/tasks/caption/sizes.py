"""How large tower and decoder of a captioner with new weights are."""

from dataclasses import replace

from manifests.errors import UserError
from train.models.dual_encoder import size_of
from train.models.gpt2 import Gpt2Size, gpt2_size
from train.models.transformer import TransformerSize
from train.models.video_vit import VideoViTSize
from train.tasks.caption.settings import CaptionerSettings, CaptionTowers, DecoderSettings


def tower_size(settings: CaptionerSettings) -> VideoViTSize:
    """The size of the video tower: that of `--model`, with what the settings change in it.

    Raises:
        UserError: the heads cannot share the width.
    """
    towers = settings.towers
    size = size_of(settings.model, towers).video
    return replace(size, trunk=_changed(size.trunk, towers, flag="--towers"), patch_px=towers.patch_px or size.patch_px)


def decoder_size(settings: DecoderSettings, *, vocabulary_size: int) -> Gpt2Size:
    """The size of the decoder: that of `--decoder.name`, with what the settings change in it.

    Raises:
        UserError: the heads cannot share the width.
    """
    size = gpt2_size(settings.name, vocabulary_size=vocabulary_size, context_length=settings.max_tokens)
    return replace(size, trunk=_changed(size.trunk, settings, flag="--decoder"))


def _changed(trunk: TransformerSize, settings: CaptionTowers | DecoderSettings, *, flag: str) -> TransformerSize:
    changed = replace(
        trunk,
        width=settings.width or trunk.width,
        depth=settings.depth or trunk.depth,
        num_heads=settings.heads or trunk.num_heads,
    )
    if changed.width % changed.num_heads:
        raise UserError(
            f"{flag}.width is {changed.width}, which {changed.num_heads} heads cannot share",
            hint=f"use a multiple of {changed.num_heads}, or other {flag}.heads",
        )
    return changed
