"""Fits converted weights to a model: what is copied, resized, created, left over, missing. Nothing happens in silence.

Shape suffixes: P places (1 + patches), D width, H and W patches of a picture.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch.nn import functional

from train.models.video_vit import inflated_cubes, resampled_temporal
from train.weights.conversion import LOGIT_SCALE, TEMPORAL_EMBEDDING, ConvertedStateDict

Kind = Literal["resized", "created", "dropped", "missing", "unexpected", "reshaped"]
Shape = tuple[int, ...]

_PROJECTIONS = ("video.proj", "text.text_projection")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A tensor that was not simply copied.

    Attributes:
        name: ours, or for one that we have no name for its own.
        origin: its name in the source, '' where it has none.
        old: shape in the source, None where there is none.
        new: shape in the model, None where there is none.
        why: what explains it; '' where nothing does and training must not begin.
    """

    kind: Kind
    name: str
    origin: str = ""
    old: Shape | None = None
    new: Shape | None = None
    why: str = ""

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a model gets.

    Attributes:
        tensors: by our name, with the model's shapes; what the model shall keep as it is, is not there.
        logit_scale: log(1 / temperature) of the source; None where it has none, or where its projections are not used.
        num_copied: tensors that were taken as they are.
        changes: all the others.
    """

    tensors: dict[str, torch.Tensor]
    logit_scale: float | None
    num_copied: int
    changes: tuple[Change, ...]

    @property
    def unexplained(self) -> tuple[Change, ...]:
        """Changes for which there is no reason that anybody gave."""
        return tuple(change for change in self.changes if not change.why)


def fit(source: ConvertedStateDict, wanted: Mapping[str, Shape], *, allow: Sequence[str] = ()) -> Fitted:
    """Fits weights to a model.

    Args:
        wanted: shapes of the model's parameters, by name.
        allow: patterns of names, ours or the source's, of tensors that may drift without a reason.
    """
    has_text_tower = any(name.startswith("text.") for name in wanted)
    tensors: dict[str, torch.Tensor] = {}
    changes: list[Change] = []
    num_copied = 0
    for name, new in wanted.items():
        if name not in source.tensors:
            why = "as --towers.temporal says" if name == TEMPORAL_EMBEDDING else ""
            changes.append(Change(kind="created" if why else "missing", name=name, new=new, why=why))
            continue
        tensor = source.tensors[name]
        old = tuple(tensor.shape)
        if old == new:
            tensors[name] = tensor
            num_copied += 1
            continue
        kind, fitted, why = _resized(name, tensor, new)
        if fitted is not None:
            tensors[name] = fitted
        changes.append(Change(kind=kind, name=name, origin=source.origins[name], old=old, new=new, why=why))
    for name, tensor in source.tensors.items():
        if name not in wanted and name != LOGIT_SCALE:
            why = "" if has_text_tower or not name.startswith("text.") else "this model has no text tower"
            kind = "dropped" if why else "unexpected"
            changes.append(_left_over(kind, name, source.origins[name], tensor, why))
    changes += [_left_over("unexpected", name, name, tensor, "") for name, tensor in source.unknown.items()]
    logit_scale = source.tensors.get(LOGIT_SCALE)
    if logit_scale is not None and not set(_PROJECTIONS) & set(tensors):
        why = "the projections are new, so their temperature is too"
        changes.append(_left_over("dropped", LOGIT_SCALE, source.origins[LOGIT_SCALE], logit_scale, why))
        logit_scale = None
    return Fitted(
        tensors=tensors,
        logit_scale=None if logit_scale is None else float(logit_scale),
        num_copied=num_copied,
        changes=tuple(_allowed(change, allow) for change in changes),
    )


def _left_over(kind: Kind, name: str, origin: str, tensor: torch.Tensor, why: str) -> Change:
    return Change(kind=kind, name=name, origin=origin, old=tuple(tensor.shape), why=why)


def _allowed(change: Change, allow: Sequence[str]) -> Change:
    if change.why:
        return change
    for pattern in allow:
        if fnmatchcase(change.name, pattern) or fnmatchcase(change.origin, pattern):
            return Change(**{**vars(change), "why": f"allowed by --init.allow {pattern}"})
    return change


def _resized(name: str, tensor: torch.Tensor, new: Shape) -> tuple[Kind, torch.Tensor | None, str]:
    """The tensor in the shape `new`, or None where the model keeps its own; and why, '' where there is no reason."""
    old = tuple(tensor.shape)
    if name == "video.conv1.weight" and len(old) == 4 and len(new) == 5 and old == (*new[:2], *new[3:]):
        return "resized", inflated_cubes(tensor, new[2]), "a cube of equal frames gives what one frame gave"
    same_width = len(old) == len(new) == 2 and old[1] == new[1]
    if name in _PROJECTIONS and len(old) == 2 and old[0] == new[0]:
        return "dropped", None, f"the embedding has {new[1]} numbers here, {old[1]} there: a new projection is learned"
    if not same_width:
        return "reshaped", None, ""
    if name == "video.positional_embedding" and _is_square(old[0] - 1) and _is_square(new[0] - 1):
        return "resized", resize_positions(tensor, num_places=new[0]), "another resolution: bicubic, as open_clip does"
    if name == TEMPORAL_EMBEDDING:
        why = "another number of frames: interpolated along time"
        return "resized", resampled_temporal(tensor.float(), new[0]).to(tensor.dtype), why
    if name == "text.positional_embedding" and old[0] > new[0]:
        return "resized", tensor[: new[0]], f"captions are cut to {new[0]} tokens"
    if name == "text.token_embedding.weight" and old[0] > new[0]:
        return "resized", tensor[: new[0]], f"the tokenizer knows {new[0]} tokens: the rows behind are padding"
    return "reshaped", None, ""


def resize_positions(positions_PD: torch.Tensor, *, num_places: int) -> torch.Tensor:
    """Positional embeddings for another number of patches; the class token's own, the first, stays as it is."""
    class_1D, grid_PD = positions_PD[:1], positions_PD[1:]
    old, new = math.isqrt(len(grid_PD)), math.isqrt(num_places - 1)
    grid_1DHW = grid_PD.float().T.unflatten(1, (old, old))[None]
    resized_1DHW = functional.interpolate(grid_1DHW, size=(new, new), mode="bicubic", antialias=True)
    return torch.cat([class_1D, resized_1DHW[0].flatten(1).T.to(positions_PD.dtype)])


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


# Why weights do not fit a model, and what to do: pure functions of names and shapes.


_CONV = "video.conv1.weight"
# Of a captioner alone: its decoder, and what brings the tower's tokens to the decoder's width.
_TOKENS, _OF_CAPTIONS = "decoder.token_embedding.weight", ("decoder.", "projection.")
# Parts that a model may have and its weights lack, or the other way round, and that can be learned anew.
_PARTS = ("decoder.", "video.ln_post.", "fc_norm.", "head.")
_ANYHOW = "use the --model (and --input) that the weights are of, or name what may differ: --init.allow PATTERN"


def architecture_of(shapes: Mapping[str, Shape]) -> str:
    """Width, depth and patch, as far as the names and shapes tell."""
    parts = []
    for tower in ("video", "text", "decoder"):
        gains = [shape for name, shape in shapes.items() if name.startswith(tower) and name.endswith("ln_1.weight")]
        if depth := _depth(shapes, tower):
            parts.append(f"{tower} of width {gains[0][0] if gains else '?'} and {depth} blocks")
    if conv := shapes.get(_CONV):
        parts.append(f"patches of {' x '.join(map(str, conv[1:]))}")
    return ", ".join(parts) or "no towers"


def hint_about(unexplained: Sequence[Change], *, there: Mapping[str, Shape], here: Mapping[str, Shape]) -> str:
    """What the user can do about changes that nothing explains, given the shapes of the weights and of the model."""
    if _CONV in there and _CONV in here and there[_CONV][1] != here[_CONV][1]:
        return (
            f"the weights see {there[_CONV][1]} channels, the model {here[_CONV][1]} (pixels have 3, latents others): "
            "use the --input that the weights are of"
        )
    cubes = [_cube_frames(shapes) for shapes in (there, here)]
    if cubes[0] != cubes[1] and {change.name for change in unexplained} == {_CONV}:
        return f"use --towers.tubelet {cubes[0]}, the frames of a cube that the weights are of"
    if _TOKENS in there and _TOKENS in here and all(change.name.startswith(_OF_CAPTIONS) for change in unexplained):
        num_tokens, width = there[_TOKENS]
        context, depth = there.get("decoder.positional_embedding", ("?",))[0], _depth(there, "decoder")
        return (
            f"use --decoder.width {width} --decoder.depth {depth} --decoder.max-tokens {context}, and as "
            f"--decoder.tokenizer the one of {num_tokens:,} tokens that the weights were trained with"
        )
    depths = [_depth(shapes, "decoder") for shapes in (there, here)]
    if all(depths) and depths[0] != depths[1]:
        return f"use --decoder-depth {depths[0]}, which the weights are of"
    parts = {next((part for part in _PARTS if change.name.startswith(part)), "") for change in unexplained}
    if "" not in parts and not all(depths):
        patterns = " ".join(f"'{part}*'" for part in sorted(parts))
        return f"these are parts for another purpose: to go on without them, --init.allow {patterns}"
    return _ANYHOW


def _cube_frames(shapes: Mapping[str, Shape]) -> int:
    conv = shapes.get(_CONV, ())
    return conv[2] if len(conv) == 5 else 1


def _depth(shapes: Mapping[str, Shape], tower: str) -> int:
    return len({name.split(".")[3] for name in shapes if name.startswith(f"{tower}.transformer.resblocks.")})
