"""Settings of the contrastive loss: a group of the training settings.

Numbers that are left out have the values that the loss was published with (`PUBLISHED`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from manifests.errors import UserError
from train.config.fields import Checked, caught
from train.config.groups import FIRST_RUN

Kind = Literal[
    "infonce",
    "siglip",
    "max-margin",
    "mbcl",
    "sogclr",
    "isogclr",
    "fastclip-v0",
    "fastclip-v1",
    "fastclip-v2",
    "fastclip-v3",
]
Convention = Literal["paper", "fast_clip"]
GammaSchedule = Literal["constant", "cosine"]

# Which numbers a loss has, and with which values it was published. FastCLIP: appendix B, the medium setting.
PUBLISHED: dict[str, dict[str, float]] = {
    "infonce": {"temperature": 0.07},
    "siglip": {"temperature": 0.1},
    "max-margin": {"margin": 0.2},
    "mbcl": {"temperature": 0.07},
    "sogclr": {"temperature": 0.03, "gamma": 0.6},
    "isogclr": {"temperature": 0.03, "gamma": 0.6, "temperature_lr": 1e-2, "rho": 9.0},
    "fastclip-v0": {"temperature": 0.03, "gamma": 0.2},
    "fastclip-v1": {"temperature": 0.03, "gamma": 0.2},
    "fastclip-v2": {"temperature": 0.03, "gamma": 0.2, "temperature_lr": 1e-2, "rho": 7.0},
    "fastclip-v3": {"temperature": 0.07, "gamma": 0.2, "temperature_lr": 2e-4, "rho": 6.5},
}
ADAPTIVE_MARGIN = 0.4  # LaViLa's, where each caption's relevancy scales it

# Losses of the whole set, which keep a number for each clip and each caption.
GLOBAL = frozenset(kind for kind, numbers in PUBLISHED.items() if "gamma" in numbers)
# Losses that have a temperature for each clip and each caption.
PER_SAMPLE = frozenset({"isogclr", "fastclip-v2"})
_FREEZABLE = frozenset({"infonce", "siglip", "mbcl"})
# SigLIP's bias would learn at that rate as well.
_OWN_RATE = frozenset({"infonce", "mbcl", "fastclip-v0", "fastclip-v3", *PER_SAMPLE})
_CONSTANT_GAMMA = frozenset({"sogclr", "isogclr"})


@dataclass(frozen=True, kw_only=True)
class Loss(Checked):
    """Which contrastive loss, and its numbers."""

    prefix = "loss"

    kind: Annotated[Kind, FIRST_RUN] = "infonce"
    """infonce: CLIP's; siglip; max-margin: EPIC-Kitchens'; mbcl, sogclr, isogclr, fastclip-v0 to v3: FastCLIP's."""
    convention: Convention = "fast_clip"
    """Where FastCLIP's paper and public code differ: whose gradients (the published numbers are the code's)."""
    temperature: float | None = None
    """At the start; the kind's own when left out, and so below."""
    freeze_temperature: Annotated[bool, Parameter(negative="")] = False
    """The temperature stays as it was at the start (of infonce, siglip, mbcl)."""
    min_temperature: float = 0.01
    """A trained temperature falls no lower."""
    temperature_lr: float | None = None
    """Learning rate of the temperature, where it has one of its own; else it is the model's."""
    rho: float | None = None
    """Weight of the temperature itself in the robust losses (isogclr, fastclip-v2, v3)."""
    gamma: float | None = None
    """Part of the new in the moving averages of the global losses; with cosine, the least part."""
    gamma_schedule: GammaSchedule | None = None
    """cosine: from 1 to --loss.gamma, epoch by epoch; constant."""
    gamma_epochs: int | None = None
    """Epochs of the cosine; half of the run's when left out."""
    epsilon: float = 1e-14
    """What the global losses add to an average before its logarithm."""
    margin: float | None = None
    """By how much a pair's similarity shall exceed others' (max-margin)."""
    use_relevancy: Annotated[bool, Parameter(negative="")] = False
    """The margin is that times the pair's relevancy, as LaViLa's (max-margin)."""

    def rules(self) -> Iterator[UserError]:
        """The mistakes that `_check` raises."""
        yield from caught(self._check)

    def _check(self) -> None:
        _require("kind", self.kind in PUBLISHED, self.kind, f"one of: {', '.join(PUBLISHED)}")
        own = PUBLISHED[self.kind]
        for name in ("temperature", "temperature_lr", "rho", "gamma", "margin"):
            self._check_number(name)
        self._check_use("gamma_schedule", GLOBAL)
        self._check_use("gamma_epochs", GLOBAL)
        self._check_use("freeze_temperature", _FREEZABLE)
        self._check_use("use_relevancy", frozenset({"max-margin"}))
        _require("gamma", self.gamma is None or self.gamma <= 1, self.gamma, "a part: more than 0 and at most 1")
        _require("gamma_epochs", self.gamma_epochs is None or self.gamma_epochs >= 1, self.gamma_epochs, "at least 1")
        _require("epsilon", 0 <= self.epsilon < 1, self.epsilon, "0 or more, and less than 1")
        _require("min_temperature", 0 < self.min_temperature <= 1, self.min_temperature, "more than 0 and at most 1")
        if "temperature" in own:
            start = self.number("temperature")
            rule = f"at least --loss.min-temperature, {self.min_temperature}"
            _require("temperature", start >= self.min_temperature, start, rule)

    def number(self, name: str) -> float:
        """The value of `temperature`, `rho`, `gamma` or `margin` that takes effect."""
        given: float | None = getattr(self, name)
        if given is None and name == "margin" and self.use_relevancy:
            return ADAPTIVE_MARGIN
        return PUBLISHED[self.kind][name] if given is None else given

    @property
    def own_temperature_lr(self) -> float | None:
        """The temperature's own learning rate; None where it has the model's."""
        return self.temperature_lr or PUBLISHED[self.kind].get("temperature_lr")

    @property
    def effective_gamma_schedule(self) -> GammaSchedule:
        """The schedule that takes effect."""
        return self.gamma_schedule or ("constant" if self.kind in _CONSTANT_GAMMA else "cosine")

    def _check_number(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        users = frozenset(kind for kind, numbers in PUBLISHED.items() if name in numbers)
        # It is optional where none was published.
        self._check_use(name, _OWN_RATE if name == "temperature_lr" else users)
        may_be_zero = name in ("rho", "margin")
        holds = math.isfinite(value) and (value >= 0 if may_be_zero else value > 0)
        _require(name, holds, value, "0 or more" if may_be_zero else "more than 0")

    def _check_use(self, name: str, users: frozenset[str]) -> None:
        value = getattr(self, name)
        if value in (None, False) or self.kind in users:
            return
        raise UserError(
            f"{_flag(name)} is {value}, and {self.kind} has no use for it",
            hint=f"leave it out, or use --loss.kind with one of: {', '.join(sorted(users))}",
        )


def _flag(name: str) -> str:
    return f"--loss.{name.replace('_', '-')}"


def _require(name: str, holds: bool, value: object, rule: str) -> None:
    if not holds:
        raise UserError(f"{_flag(name)} is {value}", hint=f"it must be {rule}")
