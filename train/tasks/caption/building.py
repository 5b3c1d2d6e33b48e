"""Which captioner the settings mean."""

import re
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path

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
from train.tasks.caption.tokenizer import CaptionTokenizer, read_tokenizer, train_tokenizer
from train.weights.hf_caption import read_caption_folder
from train.weights.sources import Say

# The decoder and its tokens: those of a folder, those of a name that they are downloaded under, or new ones.


_FILES = ["config.json", "model.safetensors", "tokenizer.json", "vocab.json", "merges.txt"]
# As Hugging Face has them; all else can only be a folder.
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
# What a GPT-2 that has read nothing but text lacks.
CROSS_ATTENTION = (".cross_attn.", ".ln_cross.")


@dataclass(frozen=True, kw_only=True)
class DecoderParts:
    """What a captioner's decoder is made of.

    Attributes:
        tensors: its weights by a captioner's names; empty where they are new.
        source: where the weights are from, as the user named it.
        hint: what to do where tokenizer and decoder do not belong together.
    """

    tokenizer: CaptionTokenizer
    size: Gpt2Size
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    source: str = ""
    hint: InitVar[str] = "use the tokenizer that the decoder was trained with"

    def __post_init__(self, hint: str) -> None:
        if self.tokenizer.vocabulary_size > self.size.vocabulary_size:
            raise UserError(
                f"the tokenizer has {self.tokenizer.vocabulary_size:,} tokens, and the decoder "
                f"{self.size.vocabulary_size:,}: they do not belong together",
                hint=hint,
            )


def open_decoder(settings: DecoderSettings, texts: Iterable[str], *, say: Say) -> DecoderParts:
    """The decoder that the settings mean.

    Args:
        texts: captions, of which a tokenizer is made where none is named.

    Raises:
        UserError: a folder is missing, damaged, or of another model; tokenizer and decoder do not fit; the heads cannot
            share the width; captions may be longer than the decoder's context.
    """
    folder = None if settings.weights is None else decoder_folder(settings.weights, say=say)
    named = Path(settings.tokenizer) if settings.tokenizer is not None else folder
    if named is not None:
        tokenizer = read_tokenizer(named)
    else:
        tokenizer = train_tokenizer(texts, vocabulary_size=settings.vocabulary)
    if folder is None:
        size = decoder_size(settings, vocabulary_size=tokenizer.vocabulary_size)
        return DecoderParts(tokenizer=tokenizer, size=size)
    found = read_caption_folder(folder, needs_decoder=True)
    if found.config.decoder is None:
        raise UserError(f"{folder} has no GPT-2 (--decoder.weights)", hint="name a folder that has one")
    if settings.max_tokens > found.config.decoder.context_length:
        raise UserError(
            f"--decoder.max-tokens is {settings.max_tokens}, and the decoder of {folder} has a context of "
            f"{found.config.decoder.context_length}",
            hint="use fewer",
        )
    tensors = {name: one for name, one in found.converted.tensors.items() if name.startswith("decoder.")}
    hint = "name the tokenizer of the decoder, or leave --decoder.tokenizer out"
    if settings.tokenizer is None:
        hint = f"the tokenizer is that of {folder}: name the decoder's own with --decoder.tokenizer, or mend the folder"
    return DecoderParts(
        tokenizer=tokenizer, size=found.config.decoder, tensors=tensors, source=str(settings.weights), hint=hint
    )


def decoder_folder(wanted: str, *, say: Say) -> Path:
    """The folder of `--decoder.weights`: one that there is, or else what Hugging Face has under that name.

    Raises:
        UserError: there is neither.
    """
    folder = Path(wanted)
    if folder.is_dir():
        return folder
    if _NAME.fullmatch(wanted) is None:
        raise UserError(f"there is no folder {wanted} (--decoder.weights)", hint="name one with GPT-2's files")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    say(f"decoder: there is no folder {wanted} here; from Hugging Face's cache, or else downloaded")
    try:
        return Path(snapshot_download(wanted, allow_patterns=_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"there is no folder {wanted}, and nothing of that name in Hugging Face's cache or to be had: "
            f"{str(error).splitlines()[0]}",
            hint="is there a network? On a machine with one, fill the cache; or name a folder with GPT-2's files",
        ) from error


# Which captioner the settings mean.


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
