"""The weights that a classifier starts from: those of a video tower, whoever trained it and for what."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from train.tasks.classify.model import VideoClassifier
from train.weights.converted import LOGIT_SCALE
from train.weights.loading import Loaded, fit_to
from train.weights.sources import Say, Source

_HEAD = "head."
_FEATURE_NORM = "fc_norm."
# What a classifier has no use for, by how the names begin, and in which words that is said.
_OTHER_PARTS = {
    "text.": "the text tower",
    _HEAD: "another classifier's last layer (head)",
    "video.proj": "the projection (video.proj)",
    LOGIT_SCALE: "the temperature (logit_scale)",
    "decoder.": "the decoder and its mask token (decoder)",
}
_LAST_NORM = {"video.ln_post.": "the encoder's last norm (video.ln_post), in whose place is a new one of their mean"}


def start_of_classifier(model: VideoClassifier, source: Source, *, allow: Sequence[str], say: Say) -> Loaded:
    """Fits the video tower of `source` to a classifier, which may be on the meta device.

    Left aside are the text tower, the projection into the space of both, a decoder, another classifier's last layer,
    and the last norm of a masked autoencoder's encoder. The norm of another classifier's features is taken.

    Raises:
        UserError: the tower does not fit.
    """
    tensors = source.converted.tensors
    wanted = _tower_of(model, tensors)
    parts = dict(_OTHER_PARTS)
    if not any(name.startswith("video.ln_post.") for name in wanted.state_dict()):
        parts |= _LAST_NORM
    aside = {name: begin for name in tensors for begin in parts if name.startswith(begin)}
    if aside:
        said = ", ".join(words for begin, words in parts.items() if begin in aside.values())
        say(f"weights: left aside, as a classifier has no use for them: {said}")
    kept = {name: tensor for name, tensor in tensors.items() if name not in aside}
    return fit_to(wanted, replace(source, converted=replace(source.converted, tensors=kept)), allow=allow, say=say)


def _tower_of(model: VideoClassifier, names: Iterable[str]) -> nn.Module:
    """The parts of a classifier that are asked of weights with these names."""
    wanted = nn.Module()
    wanted.video = model.video
    norm = getattr(model, "fc_norm", None)
    if norm is not None and any(name.startswith(_FEATURE_NORM) for name in names):
        wanted.fc_norm = norm
    return wanted
