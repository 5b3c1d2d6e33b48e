"""Fits weights to a model and puts them into it, or says why not."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manifests.errors import UserError
from train.weights.conversion import require_finite
from train.weights.fitting import Change, Fitted, Shape, architecture_of, fit, hint_about
from train.weights.sources import Say, Source

_MAX_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Weights that fit a model.

    Attributes:
        title: where from, and in which format.
        fitted: what became of each tensor.
    """

    title: str
    fitted: Fitted

    @property
    def logit_scale(self) -> float | None:
        """log(1 / temperature) that the weights were trained with, where it is of use to the model."""
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
        say: told what became of the tensors.

    Raises:
        UserError: something is missing, left over or of another shape, and nothing explains it; or what the model
            would get is not finite.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    _check_heads(model, source)
    fitted = fit(source.converted, shapes, allow=allow)
    say(f"weights: {source.title}: {fitted.num_copied} of {len(shapes)} tensors of the model copied as they are")
    lines = table_of(fitted.changes)
    for line in lines[:_MAX_SHOWN]:
        say(f"  {line}")
    if len(lines) > _MAX_SHOWN:
        say(f"  and {len(lines) - _MAX_SHOWN} more")
    if fitted.unexplained:
        there, here = (architecture_of(one) for one in (_shapes_of(source), shapes))
        differs = f": {there}; the model: {here}" if there != here else ""
        raise UserError(
            f"{source.title} does not fit the model{differs}: {summary_of(fitted.unexplained)}",
            hint=hint_about(fitted.unexplained, there=_shapes_of(source), here=shapes),
        )
    origins = source.converted.origins
    require_finite({origins[name]: tensor for name, tensor in fitted.tensors.items()}, source=source.title)
    return Loaded(title=source.title, fitted=fitted)


@torch.no_grad()
def copy_into(model: nn.Module, loaded: Loaded) -> None:
    """Gives a model the weights that were fitted to one of its kind; what they lack stays as it is."""
    parameters = model.state_dict()
    for name, tensor in loaded.fitted.tensors.items():
        parameters[name].copy_(tensor)


def _check_heads(model: nn.Module, source: Source) -> None:
    """The number of heads shows in no shape; a configuration may say one of a part that the weights do not have."""
    facts = source.facts
    towers = (("video", facts.video_heads), ("text", facts.text_heads), ("decoder", facts.decoder_heads))
    titles = {"video": "video tower", "text": "text tower", "decoder": "decoder"}
    for tower, heads in towers:
        part = getattr(model, tower, None)
        has_tensors = any(name.startswith(f"{tower}.") for name in source.converted.tensors)
        if part is None or heads is None or not has_tensors:
            continue
        here = next(module.num_heads for module in part.modules() if hasattr(module, "num_heads"))
        if here != heads:
            raise UserError(
                f"{source.title}: the {titles[tower]} has {heads} heads, that of the model has {here}",
                hint="use the --model that the weights are of",
            )


def _shapes_of(source: Source) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in source.converted.tensors.items()}


# What became of each tensor, for the console and for run.json.


_MAX_NAMED = 3
_NOT_USED, _NEW = "not used", "new, not there"
_TITLES = {
    "resized": "resized",
    "created": "created",
    "dropped": _NOT_USED,
    "missing": "MISSING",
    "unexpected": "UNEXPECTED",
    "reshaped": "OTHER SHAPE",
}


def table_of(changes: Sequence[Change]) -> list[str]:
    """Lines that show the changes, equal ones of several blocks in one."""
    rows = []
    for group in _grouped(changes):
        first = group[0]
        name = _pattern(first.origin or first.name) if len(group) > 1 else (first.origin or first.name)
        count = f" ({len(group)} tensors)" if len(group) > 1 else ""
        rows.append((_title(first), f"{name}{count}", _shapes(first), first.why))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
        for row in rows
    ]


def summary_of(changes: Sequence[Change]) -> str:
    """What nothing explains, in one line."""
    parts = []
    for kind, words in (("missing", "missing"), ("unexpected", "left over"), ("reshaped", "of another shape")):
        names = [change.origin or change.name for change in changes if change.kind == kind]
        if names:
            more = ", ..." if len(names) > _MAX_NAMED else ""
            parts.append(f"{len(names)} {words} ({', '.join(names[:_MAX_NAMED])}{more})")
    return "; ".join(parts)


def _grouped(changes: Sequence[Change]) -> list[list[Change]]:
    groups: dict[tuple[object, ...], list[Change]] = {}
    for change in changes:
        key = (change.kind, _pattern(change.origin or change.name), change.old, change.new, change.why)
        groups.setdefault(key, []).append(change)
    return list(groups.values())


def _title(change: Change) -> str:
    if not change.why or change.kind in ("resized", "created"):
        return _TITLES[change.kind]
    return _NEW if change.kind == "missing" else _NOT_USED


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _shapes(change: Change) -> str:
    if change.old is None or change.new is None:
        return _shape(change.old if change.old is not None else change.new)
    return f"{_shape(change.old)} -> {_shape(change.new)}"


def _shape(shape: Shape | None) -> str:
    return "one number" if shape == () else " x ".join(map(str, shape or ()))
