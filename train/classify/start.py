"""The weights that a classifier starts from: those of a video tower, whoever trained it and for what."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from train.classify.model import VideoClassifier
from train.weights.converted import LOGIT_SCALE
from train.weights.loading import Loaded, fit_to
from train.weights.sources import Say, Source

_LEFT_ASIDE = ("text.", "head.", "video.proj", LOGIT_SCALE)


def start_of_classifier(model: VideoClassifier, source: Source, *, allow: Sequence[str], say: Say) -> Loaded:
    """Fits the video tower of `source` to a classifier, which may be on the meta device.

    Left aside are the text tower, the projection into the space of both, and another classifier's last layer.

    Raises:
        UserError: the tower does not fit.
    """
    aside = [name for name in source.converted.tensors if name.startswith(_LEFT_ASIDE)]
    tower = nn.Module()
    tower.video = model.video
    tensors = {name: tensor for name, tensor in source.converted.tensors.items() if name not in aside}
    if aside:
        kinds = sorted({name.split(".")[0] if name.startswith(("text.", "head.")) else name for name in aside})
        say(f"weights: left aside, as a classifier has no use for them: {', '.join(kinds)}")
    return fit_to(tower, replace(source, converted=replace(source.converted, tensors=tensors)), allow=allow, say=say)
