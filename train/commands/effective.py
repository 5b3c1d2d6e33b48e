"""The settings that take effect once it is known which weights a run starts from.

What the user left open (None) becomes what the weights were trained with; what the user said stays, and a difference is
said aloud; only of another kind the tower cannot be. The result is what the run saves: to resume, score or export it,
the weights are not needed again.
"""

import math
from dataclasses import replace
from typing import TypeVar

from manifests.errors import UserError
from train.config.model import Kind, Towers, kind_of
from train.config.training import ClipSettings, DualEncoderSettings
from train.models.dual_encoder import size_of
from train.models.transformer import NORM_EPS
from train.tasks.caption.settings import CaptionerSettings
from train.tasks.caption.start import with_decoder_of
from train.tasks.mae.settings import MaeSettings
from train.weights.conversion import LOGIT_SCALE, MEANS, STDS, require_finite
from train.weights.sources import Say, Source

Value = TypeVar("Value")
Clips = TypeVar("Clips", bound=ClipSettings)

# Losses in which a temperature means what it means in CLIP's. The others have starting values of their own.
_CLIPS_TEMPERATURE = frozenset({"infonce", "mbcl"})
_KINDS = {
    "clip": "a tower as CLIP's (clip)",
    "videomae": "a tower as VideoMAE's (videomae)",
    "timesformer": "a TimeSformer (timesformer)",
}


def effective_settings(settings: DualEncoderSettings, source: Source | None, *, say: Say) -> DualEncoderSettings:
    """The settings with activation, eps, normalisation and temperature of the weights, where they say so.

    Raises:
        UserError: the weights need something that the towers do not have.
    """
    settings = replace(settings, towers=_of_clip(settings.towers))
    if source is None:
        return settings
    facts = source.facts
    if settings.text_tower == "trained" and facts.text_eps is not None and not math.isclose(facts.text_eps, NORM_EPS):
        raise UserError(
            f"{source.title}: the text tower's layer norms have eps {facts.text_eps:g}, here they have {NORM_EPS:g}",
            hint="use the weights of a plain CLIP",
        )
    settings = effective_clip_settings(settings, source, say=say)
    temperature = _temperature(settings, source)
    if temperature is not None:
        say(f"weights: the temperature starts at theirs, {temperature:.4g}")
        settings = replace(settings, loss=replace(settings.loss, temperature=temperature))
    return settings


def effective_clip_settings(settings: Clips, source: Source | None, *, say: Say) -> Clips:
    """The settings with the tower's kind, cubes, activation, eps and normalisation that the weights have.

    Raises:
        UserError: the settings say another kind of tower than the weights are of.
    """
    settings = _without_idle_temporal(settings, source, say=say)
    if source is None:
        return _with_normalisation(settings)
    facts, towers = source.facts, settings.towers
    for remark in facts.remarks:
        say(f"weights: {remark}")
    if facts.activation is None and towers.activation is None:
        say("weights: they do not say which activation they were trained with: gelu (else --towers.activation)")
    if source.kind is not None and towers.kind not in (None, source.kind):
        raise UserError(
            f"{source.title}: the weights are of {_KINDS[source.kind]}, and the model has {_KINDS[towers.kind]}",
            hint=_weights_for(settings, towers.kind),
        )
    towers = replace(
        towers,
        kind=source.kind or towers.kind,
        tubelet=_chosen("--towers.tubelet", towers.tubelet, source.tubelet, say=say),
        activation=_chosen("--towers.activation", towers.activation, facts.activation, say=say),
        video_norm_eps=_chosen("--towers.video-norm-eps", towers.video_norm_eps, facts.video_eps, say=say),
    )
    kind, init = kind_of(towers), settings.init
    init = replace(
        init,
        pixel_mean=_chosen("--init.pixel-mean", init.pixel_mean, facts.mean or MEANS[kind], say=say),
        pixel_std=_chosen("--init.pixel-std", init.pixel_std, facts.std or STDS[kind], say=say),
    )
    if kind == "videomae" and facts.picture_px not in (None, settings.size_px):
        # CLIP's tower has an embedding of each place, which is resized; here places are fixed and cannot be.
        say(
            f"weights: they know a place as the number of its cube in pictures of {facts.picture_px} px; with "
            f"--size-px {settings.size_px} the same number is another place (--size-px {facts.picture_px} has theirs)"
        )
    return replace(settings, towers=towers, init=init)


def effective_caption_settings(settings: CaptionerSettings, source: Source | None, *, say: Say) -> CaptionerSettings:
    """The same for a captioner, whose tower is a TimeSformer where neither the settings nor the weights say another.

    Raises:
        UserError: likewise; or the settings contradict a decoder that the weights have.
    """
    if settings.towers.kind is None and (source is None or source.kind is None):
        settings = replace(settings, towers=replace(settings.towers, kind="timesformer"))
    if source is not None:
        settings = with_decoder_of(settings, source, say=say)
    return effective_clip_settings(settings, source, say=say)


def _weights_for(settings: ClipSettings, kind: Kind) -> str:
    """What to do where the weights are of another kind than `kind`: some commands have but one."""
    for task, command in ((MaeSettings, "train mae"), (DualEncoderSettings, "train dual-encoder")):
        if isinstance(settings, task):
            return f"{command} takes weights of the kind {kind} and no other"
    return "use weights of the same kind, or leave --towers.kind out"


def _of_clip(towers: Towers) -> Towers:
    if towers.kind not in (None, "clip"):
        raise UserError(
            f"--towers.kind is {towers.kind}, and train dual-encoder has {_KINDS['clip']}", hint="leave it out"
        )
    return replace(towers, kind="clip")


def _without_idle_temporal(settings: Clips, source: Source | None, *, say: Say) -> Clips:
    """The settings without a temporal embedding that a videomae tower has not: presets are for any kind of tower."""
    towers = settings.towers
    kind = towers.kind or (None if source is None else source.kind)
    if kind != "videomae" or towers.temporal == "zero":
        return settings
    say("towers: a videomae tower knows time by fixed sines, and has no use for --towers.temporal")
    return replace(settings, towers=replace(towers, temporal="zero"))


def _with_normalisation(settings: Clips) -> Clips:
    """The settings with the normalisation of the tower's kind where nobody said another."""
    kind, init = kind_of(settings.towers), settings.init
    if kind == "clip":
        return settings
    init = replace(init, pixel_mean=init.pixel_mean or MEANS[kind], pixel_std=init.pixel_std or STDS[kind])
    return replace(settings, init=init)


def _chosen(flag: str, given: Value | None, known: Value | None, *, say: Say) -> Value | None:
    if given is None:
        return known
    if known is not None and given != known:
        say(f"weights: they were trained with {known}, and {flag} is {given}: that is used")
    return given


def _temperature(settings: DualEncoderSettings, source: Source) -> float | None:
    """The temperature of the weights where the loss shall start with it."""
    loss, tensors = settings.loss, source.converted.tensors
    if loss.temperature is not None or loss.kind not in _CLIPS_TEMPERATURE or LOGIT_SCALE not in tensors:
        return None
    projection = tensors.get("video.proj")
    width = size_of(settings.model, settings.towers).embedding_width
    if settings.text_tower == "frozen" or projection is None or projection.shape[-1] != width:
        return None
    require_finite({LOGIT_SCALE: tensors[LOGIT_SCALE]}, source=source.title)
    return max(math.exp(-float(tensors[LOGIT_SCALE])), loss.min_temperature)
