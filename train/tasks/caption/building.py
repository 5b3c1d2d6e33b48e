"""Which captioner the settings mean."""

from collections.abc import Iterable

import torch
from torch import nn

from manifests.errors import UserError
from train.config.model import kind_of
from train.models.attention import Attend
from train.models.captioner import Captioner
from train.models.gpt2 import Gpt2, Gpt2Size
from train.models.timesformer import TimeSformer
from train.models.transformer import checkpoint_blocks, drop_path_of
from train.models.video_vit import VideoViT
from train.models.videomae import VideoMAEEncoder
from train.tasks.caption.decoder_weights import CROSS_ATTENTION, DecoderParts
from train.tasks.caption.settings import CaptionerSettings, Frozen
from train.tasks.caption.sizes import tower_size


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
