"""Weights that were read, and the settings that apply with them.

If the user left a setting open (None), it gets the value that the weights were trained with. If the user set it, the
value is kept, and a difference is reported. Only the kind of the tower cannot differ. A run saves the resulting
settings, so it can be resumed, scored and exported without the weights.

`Base` records the weights that checkpoints omit (clipmill.train.weights.sources).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.model import LIBRARY, FormatChoice, Kind, kind_of
from clipmill.train.weights.conversion import (
    CLIP_MEAN,
    CLIP_STD,
    CONV,
    MEANS,
    STDS,
    ConvertedStateDict,
    Mean,
    SourceFacts,
    kind_of_tensors,
)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Weights that were read from a source.

    Attributes:
        title: Origin and format, for the user.
        converted: Tensors with our names.
        facts: Facts that no tensor shows.
    """

    title: str
    converted: ConvertedStateDict
    facts: SourceFacts

    @property
    def kind(self) -> Kind | None:
        """Kind of the video tower; None without a video tower."""
        return kind_of_tensors(self.converted.tensors)

    @property
    def tubelet(self) -> int | None:
        """Frames per cube of the video tower; None if it has patches, or is missing."""
        conv = self.converted.tensors.get(CONV)
        return int(conv.shape[2]) if conv is not None and conv.ndim == 5 else None


@dataclass(frozen=True, kw_only=True)
class Base:
    """Frozen tensors that checkpoints omit.

    Attributes:
        weights: Origin of the weights: a path or a NAME:TAG; `format` is the value of --init.format.
        sha256: SHA-256 of their names, shapes and values.
        tensors: Shapes of the tensors by name.
        scale: Scale of the adapters.
        text: Origin of the text tower's weights, if it differs.
    """

    weights: str
    format: FormatChoice
    sha256: str
    tensors: dict[str, list[int]]
    scale: float
    text: str | None = None


Value = TypeVar("Value")
Clips = TypeVar("Clips", bound=ClipSettings)

KINDS: dict[str, str] = {
    "clip": "a CLIP tower (clip)",
    "videomae": "a VideoMAE tower (videomae)",
    "timesformer": "a TimeSformer (timesformer)",
    LIBRARY: "a tower of a library (--towers.image)",
}


def effective_clip_settings(settings: Clips, source: Source | None, *, say: Say) -> Clips:
    """Return the settings with kind, cubes, activation, epsilon and normalisation of the tower in the weights.

    Raises:
        UserError: The settings name another kind of tower than the weights have.
    """
    settings = _without_idle_temporal(settings, source, say=say)
    if source is None:
        return _with_normalisation(settings)
    settings = _with_modules_of(settings, source, say=say)
    facts, towers = source.facts, settings.towers
    for remark in facts.remarks:
        say(f"weights: {remark}")
    are_ours = towers.image is None or getattr(towers, "text", towers.image) is None
    if facts.activation is None and towers.activation is None and are_ours:
        say("weights: their activation is not recorded, so gelu is used (change it with --towers.activation)")
    # If the tower comes from another package, no file says that it contains the weights.
    kind_of_model = LIBRARY if towers.image is not None else towers.kind
    of_weights = source.kind if kind_of_model is None or kind_of_model in KINDS else None
    if of_weights is not None and kind_of_model not in (None, of_weights):
        hint = "use weights of the same kind, or omit --towers.kind"
        if settings.only_kind is not None:
            hint = f"train {settings.command} only takes weights of the kind {kind_of_model}"
        raise UserError(
            f"{source.title}: the weights are of {KINDS[of_weights]}, and the model has {KINDS[kind_of_model]}",
            hint=hint,
        )
    towers = replace(
        towers,
        kind=of_weights or towers.kind,
        tubelet=choose_value("--towers.tubelet", towers.tubelet, source.tubelet, say=say),
        activation=choose_value("--towers.activation", towers.activation, facts.activation, say=say),
        video_norm_eps=choose_value("--towers.video-norm-eps", towers.video_norm_eps, facts.video_eps, say=say),
    )
    kind, init = kind_of(towers), settings.init
    mean, std = _normalisation_of(replace(settings, towers=towers))
    if None in (facts.mean, facts.std) and None in (init.pixel_mean, init.pixel_std) and not settings.reads_latents:
        of = towers.image or f"{kind} towers"
        mean_text, std_text = (
            " ".join(f"{value:.3g}" for value in values)
            for values in (init.pixel_mean or facts.mean or mean, init.pixel_std or facts.std or std)
        )
        say(
            f"weights: no file of {source.title} says how pixels were normalised, so the values of {of} are used: mean "
            f"{mean_text}, standard deviation {std_text} (change them with --init.pixel-mean and --init.pixel-std)"
        )
    init = replace(
        init,
        pixel_mean=choose_value("--init.pixel-mean", init.pixel_mean, facts.mean or mean, say=say),
        pixel_std=choose_value("--init.pixel-std", init.pixel_std, facts.std or std, say=say),
    )
    if kind == "videomae" and facts.picture_px not in (None, settings.size_px):
        # CLIP's tower has an embedding for each place, which is resized. In this tower, places are fixed.
        say(
            f"weights: their positions are cube indices in frames of {facts.picture_px} px; with "
            f"--size-px {settings.size_px} an index is another position (--size-px {facts.picture_px} keeps theirs)"
        )
    return replace(settings, towers=towers, init=init)


def _without_idle_temporal(settings: Clips, source: Source | None, *, say: Say) -> Clips:
    """Drop a temporal embedding that videomae towers lack: presets are for any kind of tower."""
    towers = settings.towers
    kind = towers.kind or (None if source is None else source.kind)
    if kind != "videomae" or towers.temporal == "zero":
        return settings
    say("towers: a videomae tower has fixed positional embeddings, so --towers.temporal has no effect")
    return replace(settings, towers=replace(towers, temporal="zero"))


def _with_normalisation(settings: Clips) -> Clips:
    """Return the settings with the normalisation of the tower's kind, unless the user chose another one."""
    kind, init = kind_of(settings.towers), settings.init
    if kind == "clip" or kind not in KINDS:
        return settings
    mean, std = _normalisation_of(settings)
    init = replace(init, pixel_mean=init.pixel_mean or mean, pixel_std=init.pixel_std or std)
    return replace(settings, init=init)


def _normalisation_of(settings: ClipSettings) -> tuple[Mean, Mean]:
    """Return mean and standard deviation of pixels for a kind of tower, or for a library's tower by its name.

    Raises:
        UserError: The library does not state them; or the tower does not exist, or takes pictures of another size.
    """
    kind, towers, init = kind_of(settings.towers), settings.towers, settings.init
    if towers.image is None:
        return MEANS.get(kind, CLIP_MEAN), STDS.get(kind, CLIP_STD)
    from clipmill.train.models.hugging_face import PROCESSOR_FILES
    from clipmill.train.models.library_towers import image_outline, preprocessing_of

    image_outline(towers.image, settings.size_px)
    theirs = preprocessing_of(towers.image)
    mean, std = theirs.mean or init.pixel_mean, theirs.std or init.pixel_std
    if mean is None or std is None:
        raise UserError(
            f"{towers.image} does not say how pixels are normalised: it has none of {', '.join(PROCESSOR_FILES)} with "
            "image_mean and image_std",
            hint="put preprocessor_config.json next to its config.json, or give --init.pixel-mean and --init.pixel-std",
        )
    return mean, std


def _with_modules_of(settings: Clips, source: Source, *, say: Say) -> Clips:
    """Return the settings with the towers that the weights need: weights of a run, or with divided attention."""
    names, towers, theirs = source.converted.tensors, settings.towers, source.facts.towers
    changes: dict[str, Any] = {}
    if source.kind == LIBRARY and towers.image is None and towers.kind in (None, LIBRARY):
        changes |= {name: theirs.get(name) for name in ("image", "pool_frames")}
    is_text = any(name.startswith("text.model.") for name in names)
    if is_text and getattr(towers, "text", "") is None:
        changes |= {name: theirs.get(name) for name in ("text", "text_pooling", "context_length")}
    if any(".temporal_attn." in name for name in names):
        changes["attention"] = choose_value("--towers.attention", towers.attention, "divided", say=say)
    changes = {name: value for name, value in changes.items() if value is not None}
    return replace(settings, towers=replace(towers, **changes))


def choose_value(flag: str, given: Value | None, known: Value | None, *, say: Say) -> Value | None:
    """Return the user's value for a flag, or else the value of the weights; print a difference."""
    if given is None:
        return known
    if known is not None and given != known:
        say(f"weights: they were trained with {known}, but {flag} is {given}, which is used")
    return given
