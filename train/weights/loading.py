"""Fits weights to a model and puts them into it, or says why not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manifests.errors import UserError
from train.weights.fitting import Fitted, Shape, fit
from train.weights.misfits import architecture_of, hint_about
from train.weights.numbers import require_finite
from train.weights.report import summary_of, table_of
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
