"""The settings that take effect once it is known which weights a run starts from.

Settings that the user left open (None) become those that the weights were trained with. Settings that the user gave are
kept, and a difference is reported. Only the kind of the tower cannot differ. The result is what the run saves: to
resume, score or export it, the weights are not needed again.
"""

from dataclasses import replace
from typing import TypeVar

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.model import kind_of
from clipmill.train.weights.conversion import CLIP_MEAN, CLIP_STD, MEANS, STDS
from clipmill.train.weights.sources import Say, Source

Value = TypeVar("Value")
Clips = TypeVar("Clips", bound=ClipSettings)

KINDS: dict[str, str] = {
    "clip": "a CLIP tower (clip)",
    "videomae": "a VideoMAE tower (videomae)",
    "timesformer": "a TimeSformer (timesformer)",
}


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
        say("weights: their activation is not recorded, so gelu is used (change it with --towers.activation)")
    # Of another package's tower, no file says that it holds the weights.
    of_weights = source.kind if towers.kind is None or towers.kind in KINDS else None
    if of_weights is not None and towers.kind not in (None, of_weights):
        raise UserError(
            f"{source.title}: the weights are of {KINDS[of_weights]}, and the model has {KINDS[towers.kind]}",
            hint=_weights_for(settings, towers.kind),
        )
    towers = replace(
        towers,
        kind=of_weights or towers.kind,
        tubelet=chosen("--towers.tubelet", towers.tubelet, source.tubelet, say=say),
        activation=chosen("--towers.activation", towers.activation, facts.activation, say=say),
        video_norm_eps=chosen("--towers.video-norm-eps", towers.video_norm_eps, facts.video_eps, say=say),
    )
    kind, init = kind_of(towers), settings.init
    init = replace(
        init,
        pixel_mean=chosen("--init.pixel-mean", init.pixel_mean, facts.mean or MEANS.get(kind, CLIP_MEAN), say=say),
        pixel_std=chosen("--init.pixel-std", init.pixel_std, facts.std or STDS.get(kind, CLIP_STD), say=say),
    )
    if kind == "videomae" and facts.picture_px not in (None, settings.size_px):
        # CLIP's tower has an embedding of each place, which is resized; here places are fixed and cannot be.
        say(
            f"weights: their positions are cube indices in frames of {facts.picture_px} px; with "
            f"--size-px {settings.size_px} an index is another position (--size-px {facts.picture_px} keeps theirs)"
        )
    return replace(settings, towers=towers, init=init)


def _weights_for(settings: ClipSettings, kind: str) -> str:
    """Return the hint for weights of another kind than `kind`; some tasks support a single kind."""
    if settings.only_kind is not None:
        return f"train {settings.command} takes weights of the kind {kind} and no other"
    return "use weights of the same kind, or leave --towers.kind out"


def _without_idle_temporal(settings: Clips, source: Source | None, *, say: Say) -> Clips:
    """The settings without a temporal embedding, which videomae towers lack: presets are for any kind of tower."""
    towers = settings.towers
    kind = towers.kind or (None if source is None else source.kind)
    if kind != "videomae" or towers.temporal == "zero":
        return settings
    say("towers: a videomae tower has fixed positional embeddings, so --towers.temporal has no effect")
    return replace(settings, towers=replace(towers, temporal="zero"))


def _with_normalisation(settings: Clips) -> Clips:
    """The settings with the normalisation of the tower's kind unless the user gave another."""
    kind, init = kind_of(settings.towers), settings.init
    if kind == "clip" or kind not in KINDS:
        return settings
    init = replace(init, pixel_mean=init.pixel_mean or MEANS[kind], pixel_std=init.pixel_std or STDS[kind])
    return replace(settings, init=init)


def chosen(flag: str, given: Value | None, known: Value | None, *, say: Say) -> Value | None:
    """The value that the user gave for a flag, else that of the weights; a difference is printed."""
    if given is None:
        return known
    if known is not None and given != known:
        say(f"weights: they were trained with {known}, but {flag} is {given}, which is used")
    return given
