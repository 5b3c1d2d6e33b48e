"""Settings of the contrastive loss, `--loss.*`. Which loss takes which, with what default: `registry.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal, cast

from cyclopts import Parameter

from manifests.errors import UserError
from train.losses.registry import LOSSES, LossSpec

Convention = Literal["paper", "fast_clip"]
GammaSchedule = Literal["constant", "cosine"]

_KINDS = f"Contrastive loss, with formulas in docs/losses.md: {', '.join(LOSSES)}"
ADAPTIVE_MARGIN = 0.4  # LaViLa's, scaled by the relevancy of each caption

_POSITIVE: tuple[Callable[[Any], bool], str] = (lambda value: 0 < value < inf, "more than 0")
_NOT_NEGATIVE: tuple[Callable[[Any], bool], str] = (lambda value: 0 <= value < inf, "0 or more")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": _POSITIVE,
    "min_temperature": (lambda value: 0 < value <= 1, "more than 0 and at most 1"),
    "temperature_lr": _POSITIVE,
    "rho": _NOT_NEGATIVE,
    "gamma": (lambda value: 0 < value <= 1, "more than 0 and at most 1"),
    "gamma_epochs": (lambda value: value >= 1, "at least 1"),
    "epsilon": (lambda value: 0 <= value < 1, "0 or more, and less than 1"),
    "margin": _NOT_NEGATIVE,
}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Contrastive loss and its hyperparameters.

    Raises:
        UserError: with all `mistakes`.
    """

    kind: Annotated[str, Parameter(help=_KINDS)] = "infonce"
    convention: Convention = "fast_clip"
    """Gradients of the FastCLIP losses where the paper and its public code differ. The published hyperparameters are
    those of the code."""
    temperature: float | None = None
    """Initial temperature. Default: the published value of the loss."""
    freeze_temperature: Annotated[bool, Parameter(negative="")] = False
    """Keep the temperature at its initial value (infonce, siglip, mbcl)."""
    min_temperature: float = 0.01
    """Lower bound of a trained temperature, at most 1."""
    temperature_lr: float | None = None
    """Learning rate of the temperature. Default: the published value of the loss, or else the model's rate."""
    rho: float | None = None
    """Weight of the temperature in the robust losses (isogclr, fastclip-v2, fastclip-v3). Default: as published."""
    gamma: float | None = None
    """Weight of the new value in the moving averages of the global losses, at most 1; with the cosine schedule, its
    final value. Default: as published."""
    gamma_schedule: GammaSchedule | None = None
    """Schedule of gamma, by epoch. cosine: from 1 down to --loss.gamma. Default: as published."""
    gamma_epochs: int | None = None
    """Number of epochs of the cosine schedule. Default: half of the run."""
    epsilon: float = 1e-14
    """Constant added to the moving averages of the global losses before the logarithm."""
    margin: float | None = None
    """Minimum difference between the similarity of a pair and those of its negatives (max-margin). Default: 0.2, or
    0.4 with --loss.use-relevancy."""
    use_relevancy: Annotated[bool, Parameter(negative="")] = False
    """Multiply the margin by the relevancy of the caption, as LaViLa does (max-margin)."""

    def __post_init__(self) -> None:
        if found := list(mistakes(self)):
            raise UserError("; ".join(map(str, found)), hint="; ".join(str(one.hint) for one in found))

    @property
    def spec(self) -> LossSpec:
        """The row of the loss."""
        return LOSSES[self.kind]

    def number(self, name: str) -> float:
        """The effective value of `temperature`, `rho`, `gamma` or `margin`: as given, or the default of the loss."""
        given: float | None = getattr(self, name)
        if given is None and name == "margin" and self.use_relevancy:
            return ADAPTIVE_MARGIN
        return cast(float, self.spec.settings[name] if given is None else given)

    @property
    def own_temperature_lr(self) -> float | None:
        """Learning rate of the temperature; None where it is the model's."""
        return cast(float | None, self.temperature_lr or self.spec.settings.get("temperature_lr"))

    @property
    def effective_gamma_schedule(self) -> GammaSchedule:
        """The schedule as given, or the default of the loss."""
        return cast(GammaSchedule, self.gamma_schedule or self.spec.settings["gamma_schedule"])


def mistakes(loss: Loss) -> Iterator[UserError]:
    """Yield every mistake in the settings: a kind that does not exist, values out of range, settings without use."""
    spec = LOSSES.get(loss.kind)
    if spec is None:
        yield _out_of_range("kind", loss.kind, f"one of: {', '.join(LOSSES)}")
    for name, (is_in_range, rule) in _RANGES.items():
        value = getattr(loss, name)
        if value is not None and not is_in_range(value):
            yield _out_of_range(name, value, rule)
    if spec is None:
        return
    for name in dict.fromkeys(name for other in LOSSES.values() for name in other.settings):
        value = getattr(loss, name)
        if name not in spec.settings and value not in (None, False):
            users = sorted(other.name for other in LOSSES.values() if name in other.settings)
            yield UserError(
                f"{_flag(name)} is {value}, and {loss.kind} has no use for it",
                hint=f"leave out {_flag(name)}, or use --loss.kind with one of: {', '.join(users)}",
            )
    if "temperature" in spec.settings and 0 < (start := loss.number("temperature")) < loss.min_temperature:
        yield _out_of_range("temperature", start, f"at least --loss.min-temperature, {loss.min_temperature}")


def _flag(name: str) -> str:
    return f"--loss.{name.replace('_', '-')}"


def _out_of_range(name: str, value: object, rule: str) -> UserError:
    return UserError(f"{_flag(name)} is {value}", hint=f"{_flag(name)} must be {rule}")
