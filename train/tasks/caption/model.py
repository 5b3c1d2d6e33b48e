"""Build a captioner from its settings, and initialise it from weights: a captioner's, a video tower's, a GPT-2's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import LIBRARY, kind_of
from clipmill.train.engine.task import UNUSED_PARTS, without_parts
from clipmill.train.models.attention import Attend
from clipmill.train.models.captioner import Captioner, Gpt2, VideoTower
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.library_towers import LibraryImage, image_tower, num_heads_of
from clipmill.train.models.timesformer import TimeSformer, nearest_places, nearest_times
from clipmill.train.models.transformer import checkpoint_blocks, drop_path_of
from clipmill.train.models.video_vit import clip_tower
from clipmill.train.models.videomae import VideoMAEEncoder
from clipmill.train.optim.parameters import CROSS_ATTENTION
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.caption.decoder import Decoder, DecoderParts, kept_decoder, no_tokenizer
from clipmill.train.tasks.caption.language.model import LanguageCaptioner, VisualProjector, checkpoint_language_blocks
from clipmill.train.tasks.caption.language.opening import LanguageDecoder
from clipmill.train.tasks.caption.settings import CaptionerSettings, DecoderSettings, has_captioner
from clipmill.train.tasks.caption.tokenizer import has_tokenizer
from clipmill.train.weights.loading import Loaded, fit_to
from clipmill.train.weights.source import KINDS, Say, Source, effective_clip_settings
from clipmill.train.weights.sources import place_of_weights

_TOKENS, _DECODER_POSITIONS = "decoder.token_embedding.weight", "decoder.positional_embedding"
_OF_LANGUAGE = "projection.mlp.0.weight"
_POSITIONS, _TIMES = "video.positional_embedding", "video.temporal_embedding"
_UNUSED_PARTS = {
    **UNUSED_PARTS,
    "fc_norm.": "a classifier's norm (fc_norm)",
    "projection.": "the projection to the decoder (projection)",
}
AnyCaptioner = Captioner | LanguageCaptioner


def build_captioner(settings: CaptionerSettings, decoder: Decoder, *, attend: Attend) -> AnyCaptioner:
    """A captioner with the decoder's weights if there are any; otherwise they are new, from torch's generator.

    Raises:
        UserError: the tower's width is not a multiple of its heads; the decoder's weights do not fit; or a clip has
            too few tokens for the prefix of a language model.
    """
    tower = _tower(settings, attend=attend)
    captioner: AnyCaptioner
    if isinstance(decoder, LanguageDecoder):
        captioner = _language_captioner(settings, decoder, tower)
    else:
        captioner = Captioner(tower, Gpt2(decoder.size, attend=attend, dropout=settings.decoder.dropout))
        copy_decoder(captioner, decoder)
    if settings.towers.activation_checkpointing:
        checkpoint_blocks(captioner)
        if isinstance(captioner, LanguageCaptioner):
            checkpoint_language_blocks(captioner.decoder)
    return captioner


def _language_captioner(settings: CaptionerSettings, decoder: LanguageDecoder, tower: nn.Module) -> LanguageCaptioner:
    width = cast(VideoTower, tower).token_width
    if isinstance(tower, LibraryImage):
        cells, num_heads = settings.num_frames * tower.frame_tokens, num_heads_of(width)
    else:
        size = size_of(settings.model, settings.towers).video
        cells = size.grid(image_px=settings.size_px, num_frames=settings.num_frames).cubes
        num_heads = size.trunk.num_heads
    if decoder.reducer == "pool" and cells < decoder.num_visual:
        raise UserError(
            f"--decoder.visual-tokens is {decoder.num_visual}, and the encoder has {cells} tokens for a clip",
            hint=f"use {cells} or fewer, or more --num-frames",
            flags=("--decoder.visual-tokens",),
        )
    language = decoder.new_model()
    projection = VisualProjector(
        width,
        language.get_input_embeddings().embedding_dim,
        num_tokens=decoder.num_visual,
        num_heads=num_heads if decoder.reducer == "attention" else None,
    )
    return LanguageCaptioner(tower, projection, language, before=decoder.before, after=decoder.after)


def _tower(settings: CaptionerSettings, *, attend: Attend) -> nn.Module:
    towers, size = settings.towers, size_of(settings.model, settings.towers).video
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
        case kind:
            build = image_tower if kind == LIBRARY else clip_tower
            return build(
                size, image_px=image_px, num_frames=num_frames, embedding_width=None, attend=attend, towers=towers
            )


@torch.no_grad()
def copy_decoder(captioner: Captioner, parts: DecoderParts) -> None:
    """Copy the decoder's weights, if there are any, into a captioner; missing cross-attention keeps its new weights.

    Raises:
        UserError: anything else is missing, left over, or of another shape.
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


def effective_settings(settings: CaptionerSettings, source: Source | None, *, say: Say) -> CaptionerSettings:
    """The settings that take effect with the weights of `source`; the tower is a TimeSformer unless they say otherwise.

    Raises:
        UserError: the settings contradict the weights.
    """
    has_kind = settings.towers.kind is not None or settings.towers.image is not None
    if not has_kind and (source is None or source.kind is None):
        settings = replace(settings, towers=replace(settings.towers, kind="timesformer"))
    if (kind := settings.towers.kind) not in (None, *KINDS):
        raise UserError(
            f"--towers.kind is {kind}, a tower that this task does not support",
            hint=f"use {', '.join(KINDS)}",
            flags=("--towers.kind",),
        )
    if source is not None:
        settings = with_decoder_of(settings, source, say=say)
    return effective_clip_settings(settings, source, say=say)


def with_decoder_of(settings: CaptionerSettings, source: Source, *, say: Say) -> CaptionerSettings:
    """The settings of a captioner that starts from `source`, with its decoder if it has one.

    Raises:
        UserError: the settings name another decoder, or captions longer than its context; or there is no tokenizer.
    """
    tensors, wanted = source.converted.tensors, settings.decoder
    folder = place_of_weights(settings.init.weights or "")
    if _OF_LANGUAGE in tensors:
        return _with_language_of(settings, source, folder)
    if not has_decoder(tensors) or wanted.lm is not None:
        return settings
    if wanted.weights is not None:
        raise UserError(
            f"two decoders are named: {source.title} has one, and --decoder.weights is {wanted.weights}",
            hint="leave --decoder.weights out, or name weights without a decoder with --init.weights",
            flags=("--decoder.weights",),
        )
    if wanted.tokenizer is None and not (has_captioner(folder) and has_tokenizer(folder)):
        raise no_tokenizer(source.title)
    context_length = len(tensors[_DECODER_POSITIONS])
    if wanted.max_tokens <= context_length:
        return settings
    if wanted.max_tokens != DecoderSettings.max_tokens:
        raise UserError(
            f"--decoder.max-tokens is {wanted.max_tokens}, and the decoder of {source.title} has a context of "
            f"{context_length}",
            hint="use fewer",
            flags=("--decoder.max-tokens",),
        )
    say(f"weights: their decoder has a context of {context_length} tokens: --decoder.max-tokens {context_length}")
    return replace(settings, decoder=replace(wanted, max_tokens=context_length))


def _with_language_of(settings: CaptionerSettings, source: Source, folder: Path) -> CaptionerSettings:
    """The settings of a captioner that starts from one with a language model."""
    wanted, decoder = settings.decoder, kept_decoder(RunFolder(folder))["decoder"]
    assert isinstance(decoder, LanguageDecoder)
    if (named := wanted.lm or wanted.weights) is not None:
        flag = wanted.flag("lm" if wanted.lm else "weights")
        raise UserError(
            f"two decoders are named: {source.title} has one, and {flag} is {named}",
            hint="leave the latter out, or name weights without a decoder with --init.weights",
            flags=(flag,),
        )
    if any(".lora_A." in name for name in source.converted.tensors):
        raise UserError(
            f"the language model of {source.title} has adapters, which a new run cannot start from",
            hint="continue it with --resume, or start from a run without --lora.towers decoder",
        )
    if wanted.max_tokens > decoder.context_length:
        raise UserError(
            f"--decoder.max-tokens is {wanted.max_tokens}, and the decoder of {source.title} has room for "
            f"{decoder.context_length}",
            hint="use fewer",
            flags=("--decoder.max-tokens",),
        )
    its = replace(
        wanted,
        lm=decoder.source,
        visual_tokens=decoder.num_visual,
        reducer=decoder.reducer,
        prompt=decoder.prompt,
    )
    return replace(settings, decoder=its)


def has_decoder(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether weights are those of a whole captioner."""
    return _TOKENS in tensors or _OF_LANGUAGE in tensors


def start_of_captioner(model: AnyCaptioner, source: Source, *, allow: Sequence[str], say: Say) -> Loaded:
    """Fit a whole captioner, or the video tower of other weights, to a captioner that may be on the meta device.

    Raises:
        UserError: they do not fit.
    """
    wanted: nn.Module = model
    if (_OF_LANGUAGE if isinstance(model, LanguageCaptioner) else _TOKENS) not in source.converted.tensors:
        wanted = nn.Module()
        wanted.video = model.video
        source = without_parts(source, _UNUSED_PARTS, model="a captioner", say=say)
    if isinstance(model.video, TimeSformer):
        tensors = _resized_embeddings(source.converted.tensors, model.video, say=say)
        source = replace(source, converted=replace(source.converted, tensors=tensors))
    return fit_to(wanted, source, allow=allow, say=say)


def _resized_embeddings(
    tensors: Mapping[str, torch.Tensor], tower: TimeSformer, *, say: Say
) -> dict[str, torch.Tensor]:
    """A TimeSformer's position and time embeddings, resized to other clips by nearest neighbours as in transformers."""
    fitted = dict(tensors)
    for name, what in ((_POSITIONS, "positional"), (_TIMES, "temporal")):
        if name not in tensors:
            continue
        wanted = len(tower.positional_embedding if name == _POSITIONS else tower.temporal_embedding)
        if len(tensors[name]) != wanted:
            say(f"weights: {what} embeddings resized from {len(tensors[name])} to {wanted} (nearest)")
            resize = nearest_times if name == _TIMES else (lambda old, count: nearest_places(old, count - 1))
            fitted[name] = resize(tensors[name], wanted)
    return fitted
