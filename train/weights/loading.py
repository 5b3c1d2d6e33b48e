"""Loads weights into a model, with a table of how each tensor was used, or an error with a hint."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.optim.parameters import plain_name
from clipmill.train.weights.conversion import CONV, TEMPORAL_EMBEDDING, SourceFacts, require_finite
from clipmill.train.weights.fitting import Change, Fitted, Shape
from clipmill.train.weights.fitting import fit as fit_tensors
from clipmill.train.weights.source import Say, Source

_MAX_LINES, _MAX_NAMES = 40, 3


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Weights that fit a model.

    Attributes:
        title: origin and format.
        fitted: how each tensor was used.
    """

    title: str
    fitted: Fitted

    @property
    def logit_scale(self) -> float | None:
        """log(1 / temperature) that the weights were trained with, if it is of use to the model."""
        return self.fitted.logit_scale

    def as_json(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "source": self.title,
            "num_copied": self.fitted.num_copied,
            "changes": [change.as_json() for change in self.fitted.changes],
            "logit_scale": self.fitted.logit_scale,
        }


def fit_to(model: nn.Module, source: Source, *, allow: Sequence[str] = (), say: Say) -> Loaded:
    """Fits the weights of `source` to a model, which may be on the meta device and is not changed.

    Args:
        allow: patterns of names of tensors that may differ without a reason.
        say: prints how the tensors were used.

    Raises:
        UserError: a tensor is missing, unexpected or of another shape without a reason, or not finite; or the number of
            attention heads differs.
    """
    here = {name: tuple(tensor.shape) for name, tensor in _tensors_of(model).items()}
    source = _without_second_names(source, model.state_dict().keys() - here.keys())
    there = {name: tuple(tensor.shape) for name, tensor in source.converted.tensors.items()}
    _check_heads(model, source.facts, there=there, here=here, title=source.title)
    fitted = fit_tensors(source.converted, here, allow=allow)
    say(f"weights: {source.title}: {fitted.num_copied} of {len(here)} tensors of the model copied as they are")
    lines = _table_of(fitted.changes)
    for line in lines[:_MAX_LINES]:
        say(f"  {line}")
    if len(lines) > _MAX_LINES:
        say(f"  and {len(lines) - _MAX_LINES} more")
    if fitted.unexplained:
        differs = [_architecture_of(one) for one in (there, here)]
        described = f": {differs[0]}; the model: {differs[1]}" if differs[0] != differs[1] else ""
        raise UserError(
            f"{source.title} does not fit the model{described}: {_summary_of(fitted.unexplained)}",
            hint=_hint_about(fitted.unexplained, source.facts, there=there, here=here),
        )
    origins = source.converted.origins
    require_finite({origins[name]: tensor for name, tensor in fitted.tensors.items()}, source=source.title)
    return Loaded(title=source.title, fitted=fitted)


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that weights may have: neither counters nor second names of tied ones."""
    found, seen = dict[str, torch.Tensor](), set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and id(tensor) not in seen:
            found[name] = tensor
            seen.add(id(tensor))
    return found


def _without_second_names(source: Source, second: Collection[str]) -> Source:
    """Weights without the tensors that a model has under other names, which those of a run have too."""
    tensors = {name: one for name, one in source.converted.tensors.items() if name not in second}
    return replace(source, converted=replace(source.converted, tensors=tensors))


@torch.no_grad()
def copy_into(model: nn.Module, loaded: Loaded) -> None:
    """Copies fitted weights into a model; parameters that they lack stay as they are."""
    parameters = {plain_name(name): one for name, one in model.state_dict().items()}
    for name, tensor in loaded.fitted.tensors.items():
        parameters[name].copy_(tensor)


def load_whole(model: nn.Module, source: Source, *, fit: Callable[..., Loaded], say: Say) -> None:
    """Fills a model that will not be trained: each parameter has its values in `source`, or is interpolated from them.

    Args:
        fit: (model, source, say=) fits all parameters of the model.

    Raises:
        UserError: a parameter has no values there.
    """
    loaded = fit(model, source, say=say)
    # Only parameters of the model have a new shape.
    changed = [one.name for one in loaded.fitted.changes if one.new is not None]
    if new := [name for name in changed if name not in loaded.fitted.tensors and name != TEMPORAL_EMBEDDING]:
        raise UserError(
            f"{source.title} does not have all of the model: {', '.join(new[:_MAX_NAMES])} would be random",
            hint="use weights of the whole model",
        )
    copy_into(model, loaded)
    if TEMPORAL_EMBEDDING in changed and TEMPORAL_EMBEDDING not in loaded.fitted.tensors:
        model.get_parameter(TEMPORAL_EMBEDDING).detach().zero_()  # an image model; its initial zeros have random signs


_HEADS_OF_DECODER = (
    "the size of the model decides how many heads its decoder has; the encoder alone can be the --init.weights of "
    "another task"
)


def _check_heads(
    model: nn.Module, facts: SourceFacts, *, there: Mapping[str, Shape], here: Mapping[str, Shape], title: str
) -> None:
    """The number of heads shows in no shape. A configuration may name that of a part that the weights do not have."""
    for tower, what, heads, flag in (
        ("video", "video tower", facts.video_heads, "--towers.heads"),
        ("text", "text tower", facts.text_heads, "--towers.text-heads"),
        ("decoder", "decoder", facts.decoder_heads, "--decoder.heads"),
    ):
        part = getattr(model, tower, None)
        if part is None or heads is None or not any(name.startswith(f"{tower}.") for name in there):
            continue
        of_model = next(module.num_heads for module in part.modules() if hasattr(module, "num_heads"))
        if of_model != heads:
            flags = _size_flags(there, here, facts) or f"{flag} {heads}"
            raise UserError(
                f"{title}: the {what} has {heads} heads, that of the model has {of_model}",
                hint=_HEADS_OF_DECODER if tower == "decoder" else f"use the --model of the weights, or {flags}",
            )


# The table of changes.

_NOT_USED, _NEW = "not used", "new, not there"
_TITLES = {
    "resized": "resized",
    "created": "created",
    "dropped": _NOT_USED,
    "missing": "MISSING",
    "unexpected": "UNEXPECTED",
    "reshaped": "OTHER SHAPE",
}


def _table_of(changes: Sequence[Change]) -> list[str]:
    """Lines that show the changes; equal ones of several blocks share a line."""
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        pattern = re.sub(r"\.\d+\.", ".*.", change.origin or change.name)
        groups.setdefault((_title(change), pattern, _shapes(change), change.why), []).append(change)
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


def _shapes(change: Change) -> str:
    shapes = [shape for shape in (change.old, change.new) if shape is not None]
    return " -> ".join("one number" if shape == () else " x ".join(map(str, shape)) for shape in shapes)


# Errors and hints, from names and shapes.

# A captioner's decoder, and what brings the tower's tokens to the decoder's width.
_TOKENS, _OF_CAPTIONS = "decoder.token_embedding.weight", ("decoder.", "projection.")
# Parts that a model may have and its weights lack, or the other way round, and that can be learned anew.
_PARTS = ("decoder.", "video.ln_post.", "fc_norm.", "head.")


def _summary_of(changes: Sequence[Change]) -> str:
    """The unexplained changes in one line."""
    parts = []
    for kind, words in (("missing", "missing"), ("unexpected", "left over"), ("reshaped", "of another shape")):
        names = [change.origin or change.name for change in changes if change.kind == kind]
        if names:
            more = ", ..." if len(names) > _MAX_NAMES else ""
            parts.append(f"{len(names)} {words} ({', '.join(names[:_MAX_NAMES])}{more})")
    return "; ".join(parts)


def _architecture_of(shapes: Mapping[str, Shape]) -> str:
    """Width, depth and patches, as far as names and shapes show them."""
    parts = []
    for tower in ("video", "text", "decoder"):
        gains = [shape for name, shape in shapes.items() if name.startswith(tower) and name.endswith("ln_1.weight")]
        if depth := depth_of(shapes, tower):
            parts.append(f"{tower} of width {gains[0][0] if gains else '?'} and {count_noun(depth, 'block')}")
    if conv := shapes.get(CONV):
        parts.append(f"patches of {' x '.join(map(str, conv[1:]))}")
    return ", ".join(parts) or "no towers"


def _hint_about(
    unexplained: Sequence[Change], facts: SourceFacts, *, there: Mapping[str, Shape], here: Mapping[str, Shape]
) -> str:
    """The hint for weights that do not fit, by the shapes of the weights and of the model."""
    if CONV in there and CONV in here and there[CONV][1] != here[CONV][1]:
        return (
            f"the weights see {there[CONV][1]} channels, the model {here[CONV][1]} (pixels have 3, latents others): "
            "use the --input of the weights"
        )
    cubes = [_cube_frames(shapes) for shapes in (there, here)]
    if cubes[0] != cubes[1] and {change.name for change in unexplained} == {CONV}:
        return f"use --towers.tubelet {cubes[0]}, the number of frames of a cube in the weights"
    if _TOKENS in there and _TOKENS in here and all(change.name.startswith(_OF_CAPTIONS) for change in unexplained):
        num_tokens, width = there[_TOKENS]
        context, depth = there.get("decoder.positional_embedding", ("?",))[0], depth_of(there, "decoder")
        return (
            f"use --decoder.width {width} --decoder.depth {depth} --decoder.max-tokens {context}, and as "
            f"--decoder.tokenizer the one of {num_tokens:,} tokens that the weights were trained with"
        )
    depths = [depth_of(shapes, "decoder") for shapes in (there, here)]
    if all(depths) and depths[0] != depths[1]:
        return f"use --decoder-depth {depths[0]}, that of the weights"
    parts = {next((part for part in _PARTS if change.name.startswith(part)), "") for change in unexplained}
    if "" not in parts and not all(depths):
        patterns = " ".join(f"'{part}*'" for part in sorted(parts))
        return f"these are parts for another purpose: to continue without them, use --init.allow {patterns}"
    if all(change.kind == "reshaped" and ".mlp." in change.name for change in unexplained):
        which = "weights of MLPs that are 4 times as wide as their tower, which those here are"
    else:
        flags = _size_flags(there, here, facts)
        which = f"the --model of the weights, or {flags}" if flags else "the --model of the weights"
    return f"use {which}; or name what may differ: --init.allow PATTERN"


def _size_flags(there: Mapping[str, Shape], here: Mapping[str, Shape], facts: SourceFacts) -> str:
    """The flags that give the towers of a model the size of the weights; '' if the shapes do not differ."""
    (wanted, found), heads = map(_sizes_of, (there, here)), {"width": ("heads", facts.video_heads)}
    heads["text-width"] = ("text-heads", facts.text_heads)
    flags = []
    for name, value in wanted.items():
        if name in found and found[name] != value:
            of_width, number = heads.get(name, ("", None))
            flags += [f"--towers.{name} {value}", *([f"--towers.{of_width} {number}"] if number else [])]
    return " ".join(flags)


def _sizes_of(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Settings of the towers that shapes show."""
    sizes = {f"{tower}depth": depth_of(shapes, of) for tower, of in (("", "video"), ("text-", "text"))}
    if conv := shapes.get(CONV):
        sizes |= {"width": conv[0], "patch-px": conv[-1]}
    if gain := shapes.get("text.ln_final.weight"):
        sizes["text-width"] = gain[0]
    if projection := shapes.get("video.proj"):
        sizes["embedding-width"] = projection[1]
    return {name: size for name, size in sizes.items() if size}


def _cube_frames(shapes: Mapping[str, Shape]) -> int:
    conv = shapes.get(CONV, ())
    return conv[2] if len(conv) == 5 else 1


def depth_of(shapes: Mapping[str, Shape], tower: str) -> int:
    """Number of blocks of a tower."""
    return len({name.split(".")[3] for name in shapes if name.startswith(f"{tower}.transformer.resblocks.")})
