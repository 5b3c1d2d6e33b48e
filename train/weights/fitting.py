"""Fits a converted state dict to a model: which tensors are copied, resized, created, dropped, or unexplained.

Shape suffixes: P positions (1 + patches), D width, H and W patches of a frame.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch.nn import functional

from clipmill.train.models.video_vit import inflated_cubes, resampled_temporal
from clipmill.train.weights.conversion import CONV, LOGIT_SCALE, PROJECTION, TEMPORAL_EMBEDDING, ConvertedStateDict

ChangeKind = Literal["resized", "created", "dropped", "missing", "unexpected", "reshaped"]
Shape = tuple[int, ...]

_PROJECTIONS = (PROJECTION, "text.text_projection")
# Parts that weights of images lack, and what says how they begin.
_CREATED = {
    TEMPORAL_EMBEDDING: "as --towers.temporal says",
    ".temporal_attn.": "--towers.attention divided: attention over time, which adds nothing at first",
    ".ln_temporal.": "--towers.attention divided",
    "video.pool.": "--towers.pool-frames attention, which begins as the mean",
}
_KEPT_POSITIONS = 20  # of a CLIP's texts when they are stretched (Long-CLIP)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A tensor that was not copied as it is.

    Attributes:
        name: ours, or the source's if there is none of ours.
        origin: its name in the source, '' if it is not there.
        old: shape in the source.
        new: shape in the model.
        why: the reason; '' if there is none, so that training must not begin.
    """

    kind: ChangeKind
    name: str
    origin: str = ""
    old: Shape | None = None
    new: Shape | None = None
    why: str = ""

    def as_json(self) -> dict[str, object]:
        """For run.json."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The weights of a model.

    Attributes:
        tensors: by our name, with the model's shapes; without those that the model initialises itself.
        logit_scale: log(1 / temperature) of the source; None if it has none, or if its projections are not used.
        num_copied: number of tensors that were copied as they are.
        changes: all the others.
    """

    tensors: dict[str, torch.Tensor]
    logit_scale: float | None
    num_copied: int
    changes: tuple[Change, ...]

    @property
    def unexplained(self) -> tuple[Change, ...]:
        """Changes without a reason."""
        return tuple(change for change in self.changes if not change.why)


def fit(source: ConvertedStateDict, wanted: Mapping[str, Shape], *, allow: Sequence[str] = ()) -> Fitted:
    """Fits weights to a model.

    Args:
        wanted: shapes of the model's parameters, by name.
        allow: patterns of names, ours or the source's, of tensors that may differ without a reason.
    """
    tensors: dict[str, torch.Tensor] = {}
    changes: list[Change] = []
    num_copied = 0
    for name, new in wanted.items():
        if name not in source.tensors:
            why = next((reason for part, reason in _CREATED.items() if part in name), "")
            changes.append(Change(kind="created" if why else "missing", name=name, new=new, why=why))
            continue
        tensor = source.tensors[name]
        old = tuple(tensor.shape)
        if old == new:
            tensors[name] = tensor
            num_copied += 1
            continue
        kind, fitted, why = _resize_tensor(name, tensor, new)
        if fitted is not None:
            tensors[name] = fitted
        changes.append(Change(kind=kind, name=name, origin=source.origins[name], old=old, new=new, why=why))

    def leave(name: str, origin: str, tensor: torch.Tensor, why: str = "") -> None:
        kind: ChangeKind = "dropped" if why else "unexpected"
        changes.append(Change(kind=kind, name=name, origin=origin, old=tuple(tensor.shape), why=why))

    has_text_tower = any(name.startswith("text.") for name in wanted)
    for name, tensor in source.tensors.items():
        if name not in wanted and name != LOGIT_SCALE:
            is_text = name.startswith("text.") and not has_text_tower
            leave(name, source.origins[name], tensor, "this model has no text tower" if is_text else "")
    for name, tensor in source.unknown.items():
        leave(name, name, tensor)
    logit_scale = source.tensors.get(LOGIT_SCALE)
    # Towers of libraries may have their own instead.
    if logit_scale is not None and wanted.keys() & set(_PROJECTIONS) and not tensors.keys() & set(_PROJECTIONS):
        why = "the projections are new, so their temperature is too"
        leave(LOGIT_SCALE, source.origins[LOGIT_SCALE], logit_scale, why)
        logit_scale = None
    return Fitted(
        tensors=tensors,
        logit_scale=None if logit_scale is None else float(logit_scale),
        num_copied=num_copied,
        changes=tuple(_allow_change(change, allow) for change in changes),
    )


def _allow_change(change: Change, allow: Sequence[str]) -> Change:
    names = (change.name, change.origin)
    pattern = next((one for one in allow if any(fnmatchcase(name, one) for name in names)), None)
    return change if change.why or pattern is None else replace(change, why=f"allowed by --init.allow {pattern}")


def _resize_tensor(name: str, tensor: torch.Tensor, new: Shape) -> tuple[ChangeKind, torch.Tensor | None, str]:
    """The tensor in the shape `new`, None if the model initialises it; and why, '' if there is no reason."""
    old = tuple(tensor.shape)
    if name == CONV and len(old) == 4 and len(new) == 5 and old == (*new[:2], *new[3:]):
        return "resized", inflated_cubes(tensor, new[2]), "a cube of equal frames gives what one frame gave"
    if name in _PROJECTIONS and len(old) == 2 and old[0] == new[0]:
        return "dropped", None, f"the embedding has {new[1]} numbers here, {old[1]} there: a new projection is learned"
    if len(old) != 2 or len(new) != 2 or old[1] != new[1]:
        return "reshaped", None, ""
    if name == "video.positional_embedding" and _is_square(old[0] - 1) and _is_square(new[0] - 1):
        return "resized", resize_positions(tensor, num_places=new[0]), "another resolution: bicubic, as open_clip does"
    if name == TEMPORAL_EMBEDDING:
        why = "another number of frames: interpolated along time"
        return "resized", resampled_temporal(tensor.float(), new[0]).to(tensor.dtype), why
    if name in _TEXT_POSITIONS and old[0] > new[0]:
        return "resized", tensor[: new[0]], f"captions are cut to {new[0]} tokens"
    if name in _TEXT_POSITIONS and old[0] > _KEPT_POSITIONS:
        why = f"longer captions: {_KEPT_POSITIONS} kept, the others stretched, as in Long-CLIP"
        return "resized", stretched_positions(tensor, new[0]), why
    if name == "text.token_embedding.weight" and old[0] > new[0]:
        return "resized", tensor[: new[0]], f"the tokenizer knows {new[0]} tokens: the rows behind are padding"
    return "reshaped", None, ""


# Of our text tower, and of CLIPs that open_clip or transformers build.
_TEXT_POSITIONS = (
    "text.positional_embedding",
    "text.model.positional_embedding",
    "text.model.text_model.embeddings.position_embedding.weight",
)


def stretched_positions(positions_LD: torch.Tensor, num_places: int) -> torch.Tensor:
    """Positional embeddings of longer texts: the first 20 stay, the others are interpolated linearly.

    Beyond the last one, the line through the last two goes on. From 77 to 248 as Long-CLIP (Zhang et al. 2024).
    """
    kept_KD, rest_LD = positions_LD[:_KEPT_POSITIONS], positions_LD[_KEPT_POSITIONS:].double()
    step = len(rest_LD) / (num_places - _KEPT_POSITIONS)
    at_N = torch.arange(num_places - _KEPT_POSITIONS, dtype=torch.float64) * step
    low_N = at_N.long().clamp(max=len(rest_LD) - 2)
    share_N1 = (at_N - low_N)[:, None]
    stretched_ND = rest_LD[low_N] * (1 - share_N1) + rest_LD[low_N + 1] * share_N1
    return torch.cat([kept_KD, stretched_ND.to(positions_LD.dtype)])


def resize_positions(positions_PD: torch.Tensor, *, num_places: int) -> torch.Tensor:
    """Positional embeddings for another number of patches; that of the class token, the first, stays as it is."""
    class_1D, grid_PD = positions_PD[:1], positions_PD[1:]
    old, new = math.isqrt(len(grid_PD)), math.isqrt(num_places - 1)
    grid_1DHW = grid_PD.float().T.unflatten(1, (old, old))[None]
    resized_1DHW = functional.interpolate(grid_1DHW, size=(new, new), mode="bicubic", antialias=True)
    return torch.cat([class_1D, resized_1DHW[0].flatten(1).T.to(positions_PD.dtype)])


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number
