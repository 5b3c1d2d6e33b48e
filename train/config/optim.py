"""Settings of the optimizer: a group of the training settings.

`--lr`, `--warmup-steps`, `--weight-decay` and `--max-grad-norm` stand beside them, at the top.
"""

from dataclasses import dataclass
from typing import Literal

from manifests.errors import UserError

OptimizerName = Literal["adamw", "lamb", "lion", "sgd"]

# Which of the numbers below an optimizer has, and their values where none are given.
DEFAULTS: dict[str, dict[str, float]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.98, "eps": 1e-8},  # beta2: CLIP, table 18
    "lamb": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6},  # You et al. 2020, section 4
    "lion": {"beta1": 0.9, "beta2": 0.99},  # Chen et al. 2023, program 1
    "sgd": {"momentum": 0.9},
}


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Which optimizer, which learning rate for which parameter at which step, and the average of weights."""

    name: OptimizerName = "adamw"
    """adamw; lamb: You et al. 2020; lion: Chen et al. 2023; sgd: with momentum."""
    beta1: float | None = None
    """Of adamw, lamb, lion; the optimizer's own when left out."""
    beta2: float | None = None
    """Of adamw, lamb, lion; the optimizer's own when left out."""
    eps: float | None = None
    """Of adamw, lamb; the optimizer's own when left out."""
    momentum: float | None = None
    """Of sgd; 0.9 when left out."""
    lamb_alpha: Literal["all", "decayed"] = "all"
    """Weights that lamb scales steps for: all (the paper's), decayed: those with decay (FastCLIP's code)."""
    schedule: Literal["cosine", "linear", "fixed"] = "cosine"
    """Way of the learning rate from --lr to --optimizer.end-lr after the warm-up; fixed: it stays."""
    end_lr: float = 0.0
    """Learning rate that the schedule ends at."""
    lr_batch: int | None = None
    """Batch that --lr and --optimizer.end-lr are meant for: they are multiplied by --batch / this; left out: by 1."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each block to the one below it."""
    ema: float = 0.0
    """Decay of a moving average of the weights, which is what is evaluated; 0: none is kept."""

    def __post_init__(self) -> None:
        own = DEFAULTS[self.name]
        for name in ("beta1", "beta2", "eps", "momentum"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in own:
                users = ", ".join(other for other, numbers in DEFAULTS.items() if name in numbers)
                raise UserError(
                    f"--optimizer.{name} is {value}, and {self.name} has no {name}",
                    hint=f"leave it out, or use --optimizer.name with one of: {users}",
                )
            if name == "eps" and not 0 < value < 1:
                raise UserError(f"--optimizer.eps is {value}", hint="it must be more than 0 and less than 1")
        for name in ("beta1", "beta2", "momentum", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UserError(f"--optimizer.{name} is {value}", hint="it must be 0 or more, and less than 1")
        if self.lr_batch is not None and not 1 <= self.lr_batch <= 10**6:
            raise UserError(f"--optimizer.lr-batch is {self.lr_batch}", hint="it must be from 1 to 1,000,000")
        if not 0 < self.layer_decay <= 1:
            raise UserError(
                f"--optimizer.layer-decay is {self.layer_decay}", hint="it must be more than 0 and at most 1"
            )
        if not 0 <= self.end_lr < float("inf"):
            raise UserError(f"--optimizer.end-lr is {self.end_lr}", hint="it must be 0 or more, and at most --lr")

    def lr_scale(self, batch: int) -> float:
        """Factor of the learning rates for batches of this size: linear scaling (Goyal et al. 2017, section 2.1)."""
        return 1.0 if self.lr_batch is None else batch / self.lr_batch

    def number(self, name: str) -> float:
        """The value of `beta1`, `beta2`, `eps` or `momentum` that takes effect."""
        given: float | None = getattr(self, name)
        return DEFAULTS[self.name][name] if given is None else given
