"""What the initial weights of a dual encoder decide: towers, normalisation, widths, context, temperature."""

import math
from dataclasses import replace

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import LIBRARY, DualEncoderTowers, kind_of
from clipmill.train.config.towers import TOWERS
from clipmill.train.models.dual_encoder import library_width, size_of
from clipmill.train.models.text import CONTEXT_LENGTH
from clipmill.train.models.transformer import NORM_EPS
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.weights.conversion import LOGIT_SCALE, PROJECTION
from clipmill.train.weights.source import Say, Source, choose_value, effective_clip_settings

# Losses whose temperature has the meaning of CLIP's. The others have initial values of their own.
_CLIPS_TEMPERATURE = frozenset({"infonce", "mbcl"})


def effective_settings(settings: DualEncoderSettings, source: Source | None, *, say: Say) -> DualEncoderSettings:
    """The settings with what the initial weights define: activation, eps, normalisation, embedding width, temperature.

    Raises:
        UserError: the weights need something that the towers do not have.
    """
    if source is None or source.kind != LIBRARY:  # the weights of a run name its library's tower
        settings = replace(settings, towers=_of_dual_encoder(settings.towers))
    settings = with_towers_of(settings, source, say=say)
    if (has_text := settings.text_tower == "trained") and library_width(settings.towers) is not None:
        # As the run had it, whatever the library's configuration says later.
        own = size_of(settings.model, settings.towers).embedding_width
        settings = replace(settings, towers=replace(settings.towers, embedding_width=own))
    if source is None:
        return settings
    towers, projection = settings.towers, source.converted.tensors.get(PROJECTION)
    # Stored text embeddings have a width of their own.
    if projection is not None and has_text and towers.image is None:
        width = choose_value("--towers.embedding-width", towers.embedding_width, projection.shape[-1], say=say)
        settings = replace(settings, towers=replace(towers, embedding_width=width))
    temperature = _temperature(settings, source, say=say)
    if temperature is not None:
        say(f"weights: initial temperature {temperature:.4g}")
        settings = replace(settings, loss=replace(settings.loss, temperature=temperature))
    return settings


def with_towers_of(settings: DualEncoderSettings, source: Source | None, *, say: Say) -> DualEncoderSettings:
    """The settings with activation, eps and normalisation of weights.

    Raises:
        UserError: the weights need something that the towers do not have.
    """
    if source is None:
        return effective_clip_settings(settings, None, say=say)
    facts = source.facts
    if settings.text_tower == "trained" and facts.text_eps is not None and not math.isclose(facts.text_eps, NORM_EPS):
        raise UserError(
            f"{source.title}: the text tower's layer norms have eps {facts.text_eps:g}, here they have {NORM_EPS:g}",
            hint="use the weights of a plain CLIP",
        )
    settings = effective_clip_settings(settings, source, say=say)
    towers = settings.towers  # those of an exported video tower may be plain ones
    if settings.text_tower == "trained" and isinstance(towers, DualEncoderTowers) and not towers.text:
        positions = source.converted.tensors.get("text.positional_embedding")
        theirs = None if positions is None or len(positions) == CONTEXT_LENGTH else len(positions)
        length = choose_value("--towers.context-length", towers.context_length, theirs, say=say)
        settings = replace(settings, towers=replace(towers, context_length=length))
    return settings


def _of_dual_encoder(towers: DualEncoderTowers) -> DualEncoderTowers:
    kind = kind_of(towers)
    if TOWERS[kind].build is None:
        known = [tower.name for tower in TOWERS.list_usable() if tower.build is not None]
        raise UserError(
            f"--towers.kind is {kind}, a tower that train dual-encoder does not support",
            hint=f"leave it out, or use one of: {', '.join(known)}",
            flags=("--towers.kind",),
        )
    return replace(towers, kind=kind)


def _temperature(settings: DualEncoderSettings, source: Source, *, say: Say) -> float | None:
    """The temperature of the weights, if the loss starts with it; prints why if it does not."""
    loss, tensors = settings.loss, source.converted.tensors
    if LOGIT_SCALE not in tensors:
        return None
    theirs = math.exp(-float(tensors[LOGIT_SCALE]))
    projection, width = tensors.get(PROJECTION), settings.towers.embedding_width
    if loss.temperature is not None:
        is_theirs = math.isclose(loss.temperature, theirs, rel_tol=1e-4)
        reason = "" if is_theirs else f"--loss.temperature is {loss.temperature:g}"
    elif loss.kind not in _CLIPS_TEMPERATURE:
        reason = f"--loss.kind {loss.kind} does not start from it"
    elif settings.text_tower == "frozen":
        reason = "stored text embeddings take the place of the text tower"
    elif settings.towers.image is None and (projection is None or projection.shape[-1] != width):
        reason = "the projections are new"
    else:
        return max(theirs, loss.min_temperature)
    if reason:
        say(f"weights: their temperature of {theirs:.4g} is not used: {reason}")
    return None
