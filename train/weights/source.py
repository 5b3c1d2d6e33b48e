"""Pretrained weights, and the settings that follow from them.

A setting that the user left open (None) gets the value that the weights were trained with. A value that the user set
takes precedence, and a difference from the weights is reported. The kind of tower must match the weights. A run saves
the resulting settings, so it can be resumed, scored and exported without the original weights. The exceptions are runs
whose checkpoints contain only adapters: `Base` records the weights that they omit (clipmill.train.weights.sources).
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
    """Pretrained weights with our names, and facts about them.

    Attributes:
        title: Source and format, shown to the user.
        converted: Tensors with our names.
        facts: Properties of the weights that cannot be read from tensors.
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
        """Number of frames per cube; None if the patches cover a single frame, or if there is no video tower."""
        conv = self.converted.tensors.get(CONV)
        return int(conv.shape[2]) if conv is not None and conv.ndim == 5 else None


@dataclass(frozen=True, kw_only=True)
class Base:
    """Frozen tensors that checkpoints omit.

    Attributes:
        weights: Source of the weights, as in --init.weights.
        format: Value of --init.format.
        sha256: SHA-256 of the names, shapes and values of the tensors.
        tensors: Shapes of the tensors, by name.
        scale: Factor for the product of an adapter's matrices.
        text: Source of the text tower's weights, as in --init.text; None if `weights` contains the text tower.
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
    LIBRARY: "a tower from a library (--towers.image)",
}


def effective_clip_settings(settings: Clips, source: Source | None, *, say: Say) -> Clips:
    """Fill settings that the user left open with the values that the weights were trained with.

    These settings are the kind of tower, towers from libraries, the attention, the length of cubes, the activation, the
    epsilon of layer norms, and the pixel normalisation.

    Raises:
        UserError: The settings specify a different kind of tower than the weights, or a tower from a library is not
            available or specifies no pixel normalisation.
    """
    settings = _drop_idle_temporal(settings, source, say=say)
    if source is None:
        return _set_normalization(settings)
    settings = _set_towers(settings, source, say=say)
    facts, towers = source.facts, settings.towers
    for remark in facts.remarks:
        say(f"weights: {remark}")
    has_own_tower = towers.image is None or getattr(towers, "text", towers.image) is None
    if facts.activation is None and towers.activation is None and has_own_tower:
        say("weights: the activation is not recorded, so gelu is used (change it with --towers.activation)")
    # A kind of tower that an extension adds cannot be compared with the weights.
    model_kind = LIBRARY if towers.image is not None else towers.kind
    weights_kind = source.kind if model_kind is None or model_kind in KINDS else None
    if weights_kind is not None and model_kind not in (None, weights_kind):
        hint = "use weights of the same kind, or omit --towers.kind"
        if settings.only_kind is not None:
            hint = f"use weights of the kind {model_kind}, the only kind that train {settings.command} takes"
        raise UserError(
            f"{source.title}: the weights belong to {KINDS[weights_kind]}, but the model has {KINDS[model_kind]}",
            hint=hint,
        )
    towers = replace(
        towers,
        kind=weights_kind or towers.kind,
        tubelet=choose_value("--towers.tubelet", towers.tubelet, source.tubelet, say=say),
        activation=choose_value("--towers.activation", towers.activation, facts.activation, say=say),
        video_norm_eps=choose_value("--towers.video-norm-eps", towers.video_norm_eps, facts.video_eps, say=say),
    )
    kind, init = kind_of(towers), settings.init
    mean, std = _find_normalization(replace(settings, towers=towers))
    if None in (facts.mean, facts.std) and None in (init.pixel_mean, init.pixel_std) and not settings.reads_latents:
        name = towers.image or f"{kind} towers"
        mean_text, std_text = (
            " ".join(f"{value:.3g}" for value in values)
            for values in (init.pixel_mean or facts.mean or mean, init.pixel_std or facts.std or std)
        )
        say(
            f"weights: {source.title} does not record how pixels were normalised, so the values of {name} are used: "
            f"mean {mean_text}, standard deviation {std_text} (change them with --init.pixel-mean and --init.pixel-std)"
        )
    init = replace(
        init,
        pixel_mean=choose_value("--init.pixel-mean", init.pixel_mean, facts.mean or mean, say=say),
        pixel_std=choose_value("--init.pixel-std", init.pixel_std, facts.std or std, say=say),
    )
    if kind == "videomae" and facts.frame_px not in (None, settings.size_px):
        # The positional embeddings of a CLIP tower are resized. A VideoMAE tower computes its embeddings from indices.
        say(
            f"weights: positions are indices of cubes in frames of {facts.frame_px} px; with --size-px "
            f"{settings.size_px}, an index is a different position (use --size-px {facts.frame_px} to avoid this)"
        )
    return replace(settings, towers=towers, init=init)


def _drop_idle_temporal(settings: Clips, source: Source | None, *, say: Say) -> Clips:
    """Reset --towers.temporal for VideoMAE towers, which do not use it. Presets set it for all kinds of towers."""
    towers = settings.towers
    kind = towers.kind or (None if source is None else source.kind)
    if kind != "videomae" or towers.temporal == "zero":
        return settings
    say("towers: a videomae tower has fixed positional embeddings, so --towers.temporal has no effect")
    return replace(settings, towers=replace(towers, temporal="zero"))


def _set_normalization(settings: Clips) -> Clips:
    """Fill the pixel normalisation that the user left open with the values for the kind of tower."""
    kind, init = kind_of(settings.towers), settings.init
    if kind == "clip" or kind not in KINDS:
        return settings
    mean, std = _find_normalization(settings)
    init = replace(init, pixel_mean=init.pixel_mean or mean, pixel_std=init.pixel_std or std)
    return replace(settings, init=init)


def _find_normalization(settings: ClipSettings) -> tuple[Mean, Mean]:
    """Return the mean and standard deviation of pixels for the kind of tower, or for a tower from a library.

    Raises:
        UserError: The library does not specify the values, or the tower does not exist or takes a different resolution.
    """
    kind, towers, init = kind_of(settings.towers), settings.towers, settings.init
    if towers.image is None:
        return MEANS.get(kind, CLIP_MEAN), STDS.get(kind, CLIP_STD)
    from clipmill.train.models.hugging_face import PROCESSOR_FILES
    from clipmill.train.models.library_towers import image_outline, preprocessing_of

    image_outline(towers.image, settings.size_px)
    preprocessing = preprocessing_of(towers.image)
    mean, std = preprocessing.mean or init.pixel_mean, preprocessing.std or init.pixel_std
    if mean is None or std is None:
        raise UserError(
            f"{towers.image} does not specify how pixels are normalised: it contains no {' or '.join(PROCESSOR_FILES)} "
            "with image_mean and image_std",
            hint="add preprocessor_config.json next to config.json, or pass --init.pixel-mean and --init.pixel-std",
        )
    return mean, std


def _set_towers(settings: Clips, source: Source, *, say: Say) -> Clips:
    """Return the settings with the towers that the weights need.

    Weights of a run or of open_clip may need towers from a library, and weights of LaViLa need divided attention.
    """
    names, towers, source_towers = source.converted.tensors, settings.towers, source.facts.towers
    changes: dict[str, Any] = {}
    if source.kind == LIBRARY and towers.image is None and towers.kind in (None, LIBRARY):
        changes |= {name: source_towers.get(name) for name in ("image", "pool_frames")}
    is_text = any(name.startswith("text.model.") for name in names)
    if is_text and getattr(towers, "text", "") is None:
        changes |= {name: source_towers.get(name) for name in ("text", "text_pooling", "context_length")}
    if any(".temporal_attn." in name for name in names):
        changes["attention"] = choose_value("--towers.attention", towers.attention, "divided", say=say)
    changes = {name: value for name, value in changes.items() if value is not None}
    return replace(settings, towers=replace(towers, **changes))


def choose_value(flag: str, user_value: Value | None, weights_value: Value | None, *, say: Say) -> Value | None:
    """Return the user's value for a flag, or the value of the weights if the user set none. Report a difference."""
    if user_value is None:
        return weights_value
    if weights_value is not None and user_value != weights_value:
        say(f"weights: they were trained with {weights_value}, but {flag} is {user_value}; the flag takes precedence")
    return user_value
