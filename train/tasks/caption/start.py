"""The decoder of a captioner that another one starts from: its size and its tokens go with its weights.

The same number in another tokenizer is another piece of text, and no shape of a tensor shows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from manifests.errors import UserError
from train.models.captioner import Captioner
from train.models.gpt2 import Gpt2Size
from train.models.timesformer import TimeSformer, nearest_places, nearest_times
from train.run.folder import RunFolder
from train.tasks.caption.building import DecoderParts
from train.tasks.caption.runs import decoder_size_of
from train.tasks.caption.settings import CaptionerSettings, DecoderSettings, has_captioner
from train.tasks.caption.tokenizer import has_tokenizer, read_tokenizer
from train.weights.config_files import read_config
from train.weights.effective import effective_clip_settings
from train.weights.hf_caption_config import caption_config_of
from train.weights.loading import Loaded, fit_to
from train.weights.sources import Say, Source, is_run

_TOKENS, _DECODER_POSITIONS = "decoder.token_embedding.weight", "decoder.positional_embedding"


def has_decoder(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether weights are those of a whole captioner."""
    return _TOKENS in tensors


def with_decoder_of(settings: CaptionerSettings, source: Source, *, say: Say) -> CaptionerSettings:
    """The settings of a captioner that starts from weights, whose decoder it takes where they have one.

    Raises:
        UserError: the settings name another decoder, or captions that are longer than its context; or nothing says what
            its tokens are.
    """
    tensors, wanted = source.converted.tensors, settings.decoder
    if not has_decoder(tensors):
        return settings
    if wanted.weights is not None:
        raise UserError(
            f"two decoders are named: {source.title} has one, and --decoder.weights is {wanted.weights}",
            hint="leave --decoder.weights out, or name weights without a decoder with --init.weights",
        )
    if wanted.tokenizer is None and not _has_captioner_with_tokenizer(settings):
        raise _no_tokenizer(source.title)
    context_length = len(tensors[_DECODER_POSITIONS])
    if wanted.max_tokens <= context_length:
        return settings
    if wanted.max_tokens != DecoderSettings.max_tokens:
        raise UserError(
            f"--decoder.max-tokens is {wanted.max_tokens}, and the decoder of {source.title} has a context of "
            f"{context_length}",
            hint="use fewer",
        )
    say(f"weights: their decoder has a context of {context_length} tokens: --decoder.max-tokens {context_length}")
    return replace(settings, decoder=replace(wanted, max_tokens=context_length))


def decoder_of_start(settings: CaptionerSettings) -> DecoderParts | None:
    """Size and tokens of the decoder in the folder of `--init.weights`; None where that has no captioner.

    Raises:
        UserError: it has no tokenizer, and none is named; the settings name another tokenizer or another size; or a
            file is damaged.
    """
    named, wanted = settings.init.weights, settings.decoder
    if named is None or not has_captioner(Path(named)):
        return None
    folder = Path(named)
    size = _size_in(folder)
    if size is None:
        return None
    for name, its in (("width", size.trunk.width), ("depth", size.trunk.depth), ("heads", size.trunk.num_heads)):
        given = getattr(wanted, name)
        if given not in (None, its):
            raise UserError(
                f"--decoder.{name} is {given}, and the decoder of {folder} has {its} (--init.weights)",
                hint="leave it out: the decoder comes with these weights",
            )
    own = read_tokenizer(folder) if has_tokenizer(folder) else None
    other = None if wanted.tokenizer is None else read_tokenizer(Path(wanted.tokenizer))
    tokenizer = own or other
    if tokenizer is None:
        raise _no_tokenizer(named)
    if own is not None and other is not None and own.numbers() != other.numbers():
        raise UserError(
            f"--decoder.tokenizer {wanted.tokenizer} has other tokens than those that the decoder of {folder} was "
            "trained with (--init.weights)",
            hint="leave --decoder.tokenizer out: the tokenizer comes with these weights",
        )
    return DecoderParts(tokenizer=tokenizer, size=size)


def _size_in(folder: Path) -> Gpt2Size | None:
    if is_run(folder):
        return decoder_size_of(RunFolder(folder))
    return caption_config_of(read_config(folder / "config.json") or {}, source=str(folder)).decoder


def _has_captioner_with_tokenizer(settings: CaptionerSettings) -> bool:
    folder = Path(settings.init.weights or "")
    return has_captioner(folder) and has_tokenizer(folder)


def _no_tokenizer(title: str) -> UserError:
    return UserError(
        f"{title} has a decoder and no tokenizer, without which its tokens mean nothing",
        hint="name the folder of the tokenizer that it was trained with: --decoder.tokenizer FOLDER",
    )


# The weights that a captioner starts from: a whole captioner's, a video tower's, a GPT-2's.


_POSITIONS, _TIMES = "video.positional_embedding", "video.temporal_embedding"
# What a captioner has no use for, by how the names begin, and in which words that is said.
_OTHER_PARTS = {
    "text.": "the text tower",
    "head.": "a classifier's last layer (head)",
    "fc_norm.": "a classifier's norm (fc_norm)",
    "video.proj": "the projection (video.proj)",
    "logit_scale": "the temperature (logit_scale)",
    "decoder.": "the decoder and its mask token (decoder)",
}


def start_of_captioner(model: Captioner, source: Source, *, allow: Sequence[str], say: Say) -> Loaded:
    """Fits a whole captioner, or the video tower of other weights, to a captioner that may be on the meta device.

    Raises:
        UserError: they do not fit.
    """
    tensors: Mapping[str, torch.Tensor] = source.converted.tensors
    wanted: nn.Module = model
    if not has_decoder(tensors):
        wanted = nn.Module()
        wanted.video = model.video
        aside = {name: begin for name in tensors for begin in _OTHER_PARTS if name.startswith(begin)}
        if aside:
            said = ", ".join(words for begin, words in _OTHER_PARTS.items() if begin in aside.values())
            say(f"weights: left aside, as a captioner has no use for them: {said}")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in aside}
    if isinstance(model.video, TimeSformer):
        tensors = _in_other_places(tensors, model.video, say=say)
    converted = replace(source.converted, tensors=dict(tensors))
    return fit_to(wanted, replace(source, converted=converted), allow=allow, say=say)


def _in_other_places(tensors: Mapping[str, torch.Tensor], tower: TimeSformer, *, say: Say) -> dict[str, torch.Tensor]:
    """A TimeSformer's embeddings of places and times for clips of another size or length, as transformers resize."""
    fitted = dict(tensors)
    for name, what in ((_POSITIONS, "places"), (_TIMES, "times")):
        if name not in tensors:
            continue
        wanted = len(tower.positional_embedding if name == _POSITIONS else tower.temporal_embedding)
        if len(tensors[name]) != wanted:
            say(f"weights: {len(tensors[name])} {what} become {wanted}, each the nearest one")
            resize = nearest_times if name == _TIMES else (lambda old, count: nearest_places(old, count - 1))
            fitted[name] = resize(tensors[name], wanted)
    return fitted


def effective_settings(settings: CaptionerSettings, source: Source | None, *, say: Say) -> CaptionerSettings:
    """The same for a captioner, whose tower is a TimeSformer where neither the settings nor the weights say another.

    Raises:
        UserError: likewise; or the settings contradict a decoder that the weights have.
    """
    if settings.towers.kind is None and (source is None or source.kind is None):
        settings = replace(settings, towers=replace(settings.towers, kind="timesformer"))
    if source is not None:
        settings = with_decoder_of(settings, source, say=say)
    return effective_clip_settings(settings, source, say=say)
