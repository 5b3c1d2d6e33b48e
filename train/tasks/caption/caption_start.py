"""The weights that a captioner starts from: a whole captioner's, a video tower's, a GPT-2's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from train.models.captioner import Captioner
from train.models.timesformer import TimeSformer, nearest_places, nearest_times
from train.tasks.caption.start import has_decoder
from train.weights.loading import Loaded, fit_to
from train.weights.sources import Say, Source

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
