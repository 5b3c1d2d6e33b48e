"""Load weights into a model, and report which tensors are copied, resized, created or dropped.

Shape suffixes: P image positions (1 + number of patches), L text positions, K text positions that are kept, N text
positions after stretching, D width, H and W patches per side of a frame.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.models.video_vit import inflate_cubes, resample_temporal
from clipmill.train.optim.parameters import plain_name
from clipmill.train.weights.conversion import (
    CONV,
    LOGIT_SCALE,
    PROJECTION,
    TEMPORAL_EMBEDDING,
    ConvertedStateDict,
    SourceFacts,
    require_finite,
)
from clipmill.train.weights.source import Say, Source

ChangeKind = Literal["resized", "created", "dropped", "missing", "unexpected", "reshaped"]
Shape = tuple[int, ...]

_PROJECTIONS = (PROJECTION, "text.text_projection")
# Parts that image models lack -> reason in the table of changes, which says how the part is initialised.
_INITIALISATIONS = {
    TEMPORAL_EMBEDDING: "initialised according to --towers.temporal",
    "video.view_embedding": "--towers.views concat: initialised to zero",
    ".temporal_attn.": "--towers.attention divided: attention over time, which initially adds nothing",
    ".ln_temporal.": "--towers.attention divided",
    "video.pool.": "--towers.pool-frames attention, which is initialised as the mean",
}
_KEPT_POSITIONS = 20  # number of text positions that stretching leaves unchanged (Long-CLIP)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A tensor that was not copied unchanged.

    Attributes:
        kind: Difference between the source and the model.
        name: Our name, or the name in the source if we have no name.
        origin: Name in the source; '' if the source lacks the tensor.
        old: Shape in the source; None if the source lacks the tensor.
        new: Shape in the model; None if the model lacks the tensor.
        why: Reason; '' for an unexplained change, which prevents training.
    """

    kind: ChangeKind
    name: str
    origin: str = ""
    old: Shape | None = None
    new: Shape | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class FittedWeights:
    """Weights with the names and shapes of a model.

    Attributes:
        tensors: Tensors with the model's shapes, keyed by our names. They omit parameters that the model initialises.
        logit_scale: log(1 / temperature) of the source; None if it is unknown, or if the projections are not used.
        num_copied: Number of tensors that were copied unchanged.
        changes: Tensors that were not copied unchanged.
    """

    tensors: dict[str, torch.Tensor]
    logit_scale: float | None
    num_copied: int
    changes: tuple[Change, ...]

    @property
    def unexplained_changes(self) -> tuple[Change, ...]:
        """Changes without a reason."""
        return tuple(change for change in self.changes if not change.why)


def fit_tensors(source: ConvertedStateDict, shapes: Mapping[str, Shape], *, allow: Sequence[str] = ()) -> FittedWeights:
    """Fit converted weights to the shapes of a model.

    Args:
        source: Converted weights.
        shapes: Shapes of the model's parameters, by name.
        allow: Name patterns (our names or the source's) of tensors that may differ without a reason.
    """
    tensors: dict[str, torch.Tensor] = {}
    changes: list[Change] = []
    num_copied = 0
    for name, new_shape in shapes.items():
        if name not in source.tensors:
            why = next((reason for part, reason in _INITIALISATIONS.items() if part in name), "")
            changes.append(Change(kind="created" if why else "missing", name=name, new=new_shape, why=why))
            continue
        tensor = source.tensors[name]
        old_shape = tuple(tensor.shape)
        if old_shape == new_shape:
            tensors[name] = tensor
            num_copied += 1
            continue
        kind, resized_tensor, why = _resize_tensor(name, tensor, new_shape)
        if resized_tensor is not None:
            tensors[name] = resized_tensor
        origin = source.origins[name]
        changes.append(Change(kind=kind, name=name, origin=origin, old=old_shape, new=new_shape, why=why))

    def record_unused(name: str, origin: str, tensor: torch.Tensor, why: str = "") -> None:
        kind: ChangeKind = "dropped" if why else "unexpected"
        changes.append(Change(kind=kind, name=name, origin=origin, old=tuple(tensor.shape), why=why))

    def allow_change(change: Change) -> Change:
        names = (change.name, change.origin)
        pattern = next((pattern for pattern in allow if any(fnmatchcase(name, pattern) for name in names)), None)
        return change if change.why or pattern is None else replace(change, why=f"allowed by --init.allow {pattern}")

    has_text_tower = any(name.startswith("text.") for name in shapes)
    for name, tensor in source.tensors.items():
        if name not in shapes and name != LOGIT_SCALE:
            is_text = name.startswith("text.") and not has_text_tower
            record_unused(name, source.origins[name], tensor, "this model has no text tower" if is_text else "")
    for name, tensor in source.unknown.items():
        record_unused(name, name, tensor)
    logit_scale = source.tensors.get(LOGIT_SCALE)
    # A model whose towers come from libraries may have none of these projections. Such a model keeps the temperature.
    if logit_scale is not None and shapes.keys() & set(_PROJECTIONS) and not tensors.keys() & set(_PROJECTIONS):
        why = "the projections are new, so the temperature is also new"
        record_unused(LOGIT_SCALE, source.origins[LOGIT_SCALE], logit_scale, why)
        logit_scale = None
    return FittedWeights(
        tensors=tensors,
        logit_scale=None if logit_scale is None else float(logit_scale),
        num_copied=num_copied,
        changes=tuple(map(allow_change, changes)),
    )


def _resize_tensor(name: str, tensor: torch.Tensor, new_shape: Shape) -> tuple[ChangeKind, torch.Tensor | None, str]:
    """Return the kind of change, the tensor with the new shape (None if the model initialises it), and the reason."""
    old_shape = tuple(tensor.shape)
    if name == CONV and len(old_shape) == 4 and len(new_shape) == 5 and old_shape == (*new_shape[:2], *new_shape[3:]):
        return (
            "resized",
            inflate_cubes(tensor, new_shape[2]),
            "a cube of identical frames gives the same result as one frame",
        )
    if name in _PROJECTIONS and len(old_shape) == 2 and old_shape[0] == new_shape[0]:
        return (
            "dropped",
            None,
            f"embedding width {new_shape[1]} in the model, {old_shape[1]} in the weights: a new projection is learned",
        )
    if len(old_shape) != 2 or len(new_shape) != 2 or old_shape[1] != new_shape[1]:
        return "reshaped", None, ""
    if name == "video.positional_embedding" and _is_square(old_shape[0] - 1) and _is_square(new_shape[0] - 1):
        return (
            "resized",
            resize_positions(tensor, num_positions=new_shape[0]),
            "a different resolution: bicubic interpolation, as in open_clip",
        )
    if name == TEMPORAL_EMBEDDING:
        why = "a different number of frames: interpolated along time"
        return "resized", resample_temporal(tensor.float(), new_shape[0]).to(tensor.dtype), why
    if name in _TEXT_POSITIONS and old_shape[0] > new_shape[0]:
        return "resized", tensor[: new_shape[0]], f"shorter captions: the first {new_shape[0]} positions are kept"
    if name in _TEXT_POSITIONS and old_shape[0] > _KEPT_POSITIONS:
        why = f"longer captions: {_KEPT_POSITIONS} positions kept, the others stretched, as in Long-CLIP"
        return "resized", stretched_positions(tensor, new_shape[0]), why
    if name == "text.token_embedding.weight" and old_shape[0] > new_shape[0]:
        return "resized", tensor[: new_shape[0]], f"the tokenizer has {new_shape[0]} tokens: the other rows are padding"
    return "reshaped", None, ""


# Positional embeddings of our text tower, and of CLIP text towers from open_clip and transformers.
_TEXT_POSITIONS = (
    "text.positional_embedding",
    "text.model.positional_embedding",
    "text.model.text_model.embeddings.position_embedding.weight",
)


def stretched_positions(positions_LD: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Stretch positional embeddings for longer texts: keep the first 20, and interpolate the others linearly.

    Positions beyond the last embedding are extrapolated from the last two. Long-CLIP (Zhang et al. 2024) stretches 77
    positions to 248 in this way.
    """
    kept_KD, rest_LD = positions_LD[:_KEPT_POSITIONS], positions_LD[_KEPT_POSITIONS:].double()
    step = len(rest_LD) / (num_positions - _KEPT_POSITIONS)
    position_N = torch.arange(num_positions - _KEPT_POSITIONS, dtype=torch.float64) * step
    low_N = position_N.long().clamp(max=len(rest_LD) - 2)
    fraction_N1 = (position_N - low_N)[:, None]
    stretched_ND = rest_LD[low_N] * (1 - fraction_N1) + rest_LD[low_N + 1] * fraction_N1
    return torch.cat([kept_KD, stretched_ND.to(positions_LD.dtype)])


def resize_positions(positions_PD: torch.Tensor, *, num_positions: int) -> torch.Tensor:
    """Resize positional embeddings to a different number of patches. The embedding of the class token is unchanged."""
    class_1D, grid_PD = positions_PD[:1], positions_PD[1:]
    old_side, new_side = math.isqrt(len(grid_PD)), math.isqrt(num_positions - 1)
    grid_1DHW = grid_PD.float().T.unflatten(1, (old_side, old_side))[None]
    resized_1DHW = functional.interpolate(grid_1DHW, size=(new_side, new_side), mode="bicubic", antialias=True)
    return torch.cat([class_1D, resized_1DHW[0].flatten(1).T.to(positions_PD.dtype)])


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


_MAX_LINES, _MAX_NAMES = 40, 3


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """Weights that fit a model.

    Attributes:
        title: Source and format, shown to the user.
        fitted: Tensors with the model's names and shapes, and the changes.
    """

    title: str
    fitted: FittedWeights

    @property
    def logit_scale(self) -> float | None:
        """log(1 / temperature) that the weights were trained with; None if it is unknown or not used."""
        return self.fitted.logit_scale

    def as_json(self) -> dict[str, Any]:
        """Return the entry for run.json."""
        return {
            "source": self.title,
            "num_copied": self.fitted.num_copied,
            "changes": [asdict(change) for change in self.fitted.changes],
            "logit_scale": self.fitted.logit_scale,
        }


def fit_to(model: nn.Module, source: Source, *, allow: Sequence[str] = (), say: Say) -> LoadedWeights:
    """Fit the weights of `source` to a model, without changing the model. The model may be on the meta device.

    Args:
        model: Model whose names and shapes the weights must have.
        source: Weights to fit.
        allow: Name patterns of tensors that may differ without a reason.
        say: Function that prints a line of the table of changes.

    Raises:
        UserError: A tensor is missing or unexpected or has a different shape, without a reason; a tensor contains
            non-finite values; or the number of attention heads differs.
    """
    # Compare only floating-point tensors (no counters), and each tied tensor only under its first name. Drop the other
    # names of tied tensors, because the weights of a run also contain these names.
    model_shapes: dict[str, Shape] = {}
    seen_ids = set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and id(tensor) not in seen_ids:
            model_shapes[name] = tuple(tensor.shape)
            seen_ids.add(id(tensor))
    second_names = model.state_dict().keys() - model_shapes.keys()
    tensors = {name: tensor for name, tensor in source.converted.tensors.items() if name not in second_names}
    source = replace(source, converted=replace(source.converted, tensors=tensors))
    source_shapes = {name: tuple(tensor.shape) for name, tensor in source.converted.tensors.items()}
    _check_heads(model, source.facts, source_shapes=source_shapes, model_shapes=model_shapes, title=source.title)
    fitted = fit_tensors(source.converted, model_shapes, allow=allow)
    say(f"weights: {source.title}: {fitted.num_copied} of {len(model_shapes)} tensors of the model copied unchanged")
    lines = _format_table(fitted.changes)
    for line in lines[:_MAX_LINES]:
        say(f"  {line}")
    if len(lines) > _MAX_LINES:
        say(f"  and {len(lines) - _MAX_LINES} more")
    if fitted.unexplained_changes:
        weights_text, model_text = (_describe_architecture(shapes) for shapes in (source_shapes, model_shapes))
        difference = f" (weights: {weights_text}; model: {model_text})" if weights_text != model_text else ""
        raise UserError(
            f"{source.title} does not fit the model{difference}: {_summarise_changes(fitted.unexplained_changes)}",
            hint=_find_hint(
                fitted.unexplained_changes, source.facts, source_shapes=source_shapes, model_shapes=model_shapes
            ),
        )
    origins = source.converted.origins
    require_finite({origins[name]: tensor for name, tensor in fitted.tensors.items()}, source=source.title)
    return LoadedWeights(title=source.title, fitted=fitted)


@torch.no_grad()
def copy_into(model: nn.Module, loaded: LoadedWeights) -> None:
    """Copy weights into the model that they were fitted to. Parameters that the weights lack keep their values."""
    parameters = {plain_name(name): parameter for name, parameter in model.state_dict().items()}
    for name, tensor in loaded.fitted.tensors.items():
        parameters[name].copy_(tensor)


def load_all_parameters(model: nn.Module, source: Source, *, fit: Callable[..., LoadedWeights], say: Say) -> None:
    """Load all parameters of a model that will not be trained. Each parameter is copied from `source`, or interpolated.

    If `source` lacks the temporal embedding, the embedding is set to zero.

    Args:
        model: Model to fill.
        source: Weights to load.
        fit: Function (model, source, say=) that fits the weights to the model, such as `fit_to`.
        say: Function that prints a line of the table of changes.

    Raises:
        UserError: `source` lacks any other parameter.
    """
    loaded = fit(model, source, say=say)
    # Only changes to parameters of the model have a new shape.
    changed_names = [change.name for change in loaded.fitted.changes if change.new is not None]
    tensors = loaded.fitted.tensors
    if missing_names := [name for name in changed_names if name not in tensors and name != TEMPORAL_EMBEDDING]:
        raise UserError(
            f"{source.title} is not a complete model: {', '.join(missing_names[:_MAX_NAMES])} would have random values",
            hint="use weights of the complete model",
        )
    copy_into(model, loaded)
    if TEMPORAL_EMBEDDING in changed_names and TEMPORAL_EMBEDDING not in tensors:
        # The weights come from an image model. Zero the embedding, because it may have random initial values, or zeros
        # with random signs.
        model.get_parameter(TEMPORAL_EMBEDDING).detach().zero_()


_DECODER_HEADS_HINT = (
    "use the --model of the weights, which determines the number of heads; or use the weights in a task without a "
    "decoder"
)


def _check_heads(
    model: nn.Module,
    facts: SourceFacts,
    *,
    source_shapes: Mapping[str, Shape],
    model_shapes: Mapping[str, Shape],
    title: str,
) -> None:
    """Raise a UserError if the numbers of attention heads differ. Tensor shapes do not reveal this.

    Parts that the weights lack are skipped, because the configuration may still describe them.
    """
    for tower, what, heads, flag in (
        ("video", "video tower", facts.video_heads, "--towers.heads"),
        ("text", "text tower", facts.text_heads, "--towers.text-heads"),
        ("decoder", "decoder", facts.decoder_heads, "--decoder.heads"),
    ):
        part = getattr(model, tower, None)
        if part is None or heads is None or not any(name.startswith(f"{tower}.") for name in source_shapes):
            continue
        model_heads = next(module.num_heads for module in part.modules() if hasattr(module, "num_heads"))
        if model_heads != heads:
            flags = _size_flags(source_shapes, model_shapes, facts) or f"{flag} {heads}"
            raise UserError(
                f"{title}: the {what} has {heads} heads, but the {what} of the model has {model_heads}",
                hint=_DECODER_HEADS_HINT if tower == "decoder" else f"use the --model of the weights, or {flags}",
            )


# The table of changes.

_NOT_USED, _NEW = "not used", "new, not in the weights"
_TITLES = {
    "resized": "resized",
    "created": "created",
    "dropped": _NOT_USED,
    "missing": "MISSING",
    "unexpected": "UNEXPECTED",
    "reshaped": "DIFFERENT SHAPE",
}


def _format_table(changes: Sequence[Change]) -> list[str]:
    """Format the changes as lines. Identical changes in several blocks share a line."""
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        pattern = re.sub(r"\.\d+\.", ".*.", change.origin or change.name)
        shapes = " -> ".join(
            "one number" if shape == () else " x ".join(map(str, shape))
            for shape in (change.old, change.new)
            if shape is not None
        )
        groups.setdefault((_title(change), pattern, shapes, change.why), []).append(change)
    rows = []
    for (title, pattern, shapes, why), group in groups.items():
        name = f"{pattern} ({len(group)} tensors)" if len(group) > 1 else group[0].origin or group[0].name
        rows.append((title, name, shapes, why))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
        for row in rows
    ]


def _title(change: Change) -> str:
    if not change.why or change.kind in ("resized", "created"):
        return _TITLES[change.kind]
    return _NEW if change.kind == "missing" else _NOT_USED


# Errors and hints, derived from names and shapes.

# Token embedding of a captioner's decoder; name prefixes of the decoder and of the projection to the decoder's width.
_TOKENS, _CAPTIONER_PARTS = "decoder.token_embedding.weight", ("decoder.", "projection.")
# Name prefixes of parts that only some tasks have.
_PARTS = ("decoder.", "video.ln_post.", "fc_norm.", "head.")


def _summarise_changes(changes: Sequence[Change]) -> str:
    """Describe the unexplained changes on one line."""
    parts = []
    for kind, label in (("missing", "missing"), ("unexpected", "unexpected"), ("reshaped", "with a different shape")):
        names = [change.origin or change.name for change in changes if change.kind == kind]
        if names:
            ending = ", ..." if len(names) > _MAX_NAMES else ""
            parts.append(f"{len(names)} {label} ({', '.join(names[:_MAX_NAMES])}{ending})")
    return "; ".join(parts)


def _describe_architecture(shapes: Mapping[str, Shape]) -> str:
    """Describe the towers' width and depth and the patches, as far as names and shapes reveal them."""
    parts = []
    for tower in ("video", "text", "decoder"):
        gains = [shape for name, shape in shapes.items() if name.startswith(tower) and name.endswith("ln_1.weight")]
        if depth := depth_of(shapes, tower):
            parts.append(f"{tower} with width {gains[0][0] if gains else '?'} and {count_noun(depth, 'block')}")
    if conv := shapes.get(CONV):
        parts.append(f"patches of {' x '.join(map(str, conv[1:]))}")
    return ", ".join(parts) or "no towers"


def _find_hint(
    unexplained_changes: Sequence[Change],
    facts: SourceFacts,
    *,
    source_shapes: Mapping[str, Shape],
    model_shapes: Mapping[str, Shape],
) -> str:
    """Return the hint for weights that do not fit, derived from the shapes of the weights and of the model."""
    if CONV in source_shapes and CONV in model_shapes and source_shapes[CONV][1] != model_shapes[CONV][1]:
        return (
            f"use the --input that the weights were trained with: they take {source_shapes[CONV][1]} channels, but the "
            f"model takes {model_shapes[CONV][1]} (pixels have 3; the number of latent channels depends on the codec)"
        )
    convs = (source_shapes.get(CONV, ()), model_shapes.get(CONV, ()))
    cubes = [conv[2] if len(conv) == 5 else 1 for conv in convs]
    if cubes[0] != cubes[1] and {change.name for change in unexplained_changes} == {CONV}:
        return f"use --towers.tubelet {cubes[0]}, the number of frames per cube in the weights"
    if (
        _TOKENS in source_shapes
        and _TOKENS in model_shapes
        and all(change.name.startswith(_CAPTIONER_PARTS) for change in unexplained_changes)
    ):
        num_tokens, width = source_shapes[_TOKENS]
        context, depth = (
            source_shapes.get("decoder.positional_embedding", ("?",))[0],
            depth_of(source_shapes, "decoder"),
        )
        return (
            f"use --decoder.width {width} --decoder.depth {depth} --decoder.max-tokens {context}, and set "
            f"--decoder.tokenizer to the tokenizer of the weights, which has {num_tokens:,} tokens"
        )
    depths = [depth_of(shapes, "decoder") for shapes in (source_shapes, model_shapes)]
    if all(depths) and depths[0] != depths[1]:
        return f"use --decoder-depth {depths[0]}, as in the weights"
    parts = {next((part for part in _PARTS if change.name.startswith(part)), "") for change in unexplained_changes}
    if "" not in parts and not all(depths):
        patterns = " ".join(f"'{part}*'" for part in sorted(parts))
        return f"use --init.allow {patterns} to continue without these parts, which only some tasks have"
    if all(change.kind == "reshaped" and ".mlp." in change.name for change in unexplained_changes):
        alternative = "weights with MLPs that are 4 times as wide as their tower, as in the model"
    else:
        flags = _size_flags(source_shapes, model_shapes, facts)
        alternative = f"the --model of the weights, or {flags}" if flags else "the --model of the weights"
    return f"use {alternative}; or allow the difference with --init.allow PATTERN"


def _size_flags(source_shapes: Mapping[str, Shape], model_shapes: Mapping[str, Shape], facts: SourceFacts) -> str:
    """Return flags that give the model's towers the dimensions of the weights; '' if the dimensions are equal."""
    source_sizes, model_sizes = map(_read_sizes, (source_shapes, model_shapes))
    heads = {"width": ("heads", facts.video_heads), "text-width": ("text-heads", facts.text_heads)}
    flags = []
    for name, value in source_sizes.items():
        if name in model_sizes and model_sizes[name] != value:
            heads_flag, number = heads.get(name, ("", None))
            flags += [f"--towers.{name} {value}", *([f"--towers.{heads_flag} {number}"] if number else [])]
    return " ".join(flags)


def _read_sizes(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the values of `--towers.*` settings that follow from shapes, by setting."""
    sizes = {f"{prefix}depth": depth_of(shapes, tower) for prefix, tower in (("", "video"), ("text-", "text"))}
    if conv := shapes.get(CONV):
        sizes |= {"width": conv[0], "patch-px": conv[-1]}
    if gain := shapes.get("text.ln_final.weight"):
        sizes["text-width"] = gain[0]
    if projection := shapes.get("video.proj"):
        sizes["embedding-width"] = projection[1]
    return {name: size for name, size in sizes.items() if size}


def depth_of(shapes: Mapping[str, Shape], tower: str) -> int:
    """Return the number of blocks in a tower."""
    return len({name.split(".")[3] for name in shapes if name.startswith(f"{tower}.transformer.resblocks.")})
