"""Which captioner the settings mean."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from manifests.errors import UserError
from train.config.model import kind_of
from train.models.attention import Attend
from train.models.captioner import Captioner
from train.models.dual_encoder import size_of
from train.models.gpt2 import Gpt2, Gpt2Size, gpt2_size
from train.models.timesformer import TimeSformer
from train.models.transformer import TransformerSize, checkpoint_blocks, drop_path_of
from train.models.video_vit import VideoViT, VideoViTSize
from train.models.videomae import VideoMAEEncoder
from train.tasks.caption.settings import CaptionerSettings, CaptionTowers, DecoderSettings, Frozen
from train.tasks.caption.start import CROSS_ATTENTION, DecoderParts


def build_captioner(settings: CaptionerSettings, decoder: Gpt2Size, *, attend: Attend) -> Captioner:
    """A captioner with new weights, from torch's generator.

    Raises:
        UserError: the tower's heads cannot share its width.
    """
    captioner = Captioner(
        _tower(settings, attend=attend), Gpt2(decoder, attend=attend, dropout=settings.decoder.dropout)
    )
    if settings.towers.activation_checkpointing:
        checkpoint_blocks(captioner)
    return captioner


@torch.no_grad()
def copy_decoder(captioner: Captioner, parts: DecoderParts) -> None:
    """Gives a captioner the decoder's weights, where there are some; cross-attention that they lack stays new.

    Raises:
        UserError: something else is missing or left over, or of another shape.
    """
    if not parts.tensors:
        return
    wanted = {name: one for name, one in captioner.state_dict().items() if name.startswith("decoder.")}
    missing = [name for name in wanted if name not in parts.tensors and not any(one in name for one in CROSS_ATTENTION)]
    strange = [name for name, one in parts.tensors.items() if name not in wanted or one.shape != wanted[name].shape]
    if missing or strange:
        raise UserError(
            f"the decoder's weights do not fit its config.json: {', '.join((missing + strange)[:3])}",
            hint="get the folder of --decoder.weights again",
        )
    for name, tensor in parts.tensors.items():
        wanted[name].copy_(tensor)


def freeze(captioner: nn.Module, parts: Iterable[Frozen]) -> None:
    """Has training leave parts of a captioner as they are."""
    for name, parameter in captioner.named_parameters():
        if any(_is_of(name, part) for part in parts):
            parameter.requires_grad_(False)


def _is_of(name: str, part: Frozen) -> bool:
    if part == "encoder":
        return name.startswith("video.")
    is_of_decoder = name.startswith("decoder.")
    return is_of_decoder and (part == "decoder" or not any(one in name for one in CROSS_ATTENTION))


def _tower(settings: CaptionerSettings, *, attend: Attend) -> nn.Module:
    towers, size = settings.towers, tower_size(settings)
    image_px, num_frames = settings.size_px, settings.num_frames
    temporal_std = size.trunk.width**-0.5 if towers.temporal == "random" else 0.0
    drop_path = drop_path_of(towers.drop_path, depth=size.trunk.depth, is_rising=towers.drop_path_rule == "rising")
    match kind_of(towers):
        case "timesformer":
            return TimeSformer(
                size,
                image_px=image_px,
                num_frames=num_frames,
                attend=attend,
                temporal_std=temporal_std,
                drop_path=drop_path,
            )
        case "videomae":
            return VideoMAEEncoder(size, image_px=image_px, num_frames=num_frames, attend=attend, drop_path=drop_path)
        case "clip":
            return VideoViT(
                size,
                image_px=image_px,
                num_frames=num_frames,
                embedding_width=None,
                attend=attend,
                temporal_std=temporal_std,
                patch_dropout=towers.patch_dropout,
                drop_path=drop_path,
            )


# How large tower and decoder of a captioner with new weights are.


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
