"""Settings of the optimizer. `--lr`, `--warmup-steps`, `--weight-decay` and `--max-grad-norm` are at the top level."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import SHARE, GoesWith, Range
from clipmill.train.config.fields import Choice, Published

OptimizerName = Literal["adamw", "lamb", "lion", "sgd"]

# The hyperparameters of each optimizer, and their defaults.
DEFAULTS: dict[str, dict[str, float]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.98, "eps": 1e-8},  # beta2: CLIP, table 18
    "lamb": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6},  # You et al. 2020, section 4
    "lion": {"beta1": 0.9, "beta2": 0.99},  # Chen et al. 2023, program 1
    "sgd": {"momentum": 0.9},
}


def _rows(
    beta1: float, beta2: float, eps: float, *, source: str = "FastCLIP, tables 7 and 10", **rates: tuple[float, float]
) -> dict[str, Published]:
    """The rows of a setting of FastCLIP: its betas and epsilon, and the rate and weight decay of each optimizer."""
    given = {"beta1": beta1, "beta2": beta2, "eps": eps}
    rows = {}
    for name, (lr, weight_decay) in rates.items():
        values = {"lr": lr, "weight_decay": weight_decay}
        taken = {key: given[key] for key in DEFAULTS[name] if key in given}
        row = Published(source, values | {"optimizer": taken}) if taken else Published("FastCLIP, table 10", values)
        rows[name] = row
    return rows


# Wei et al. 2024: table 7 has betas and epsilon, table 10 rates and decays. Its public code passes the same betas and
# epsilon to LAMB.
_MEDIUM = _rows(0.9, 0.999, 1e-8, adamw=(1e-3, 0.1), lamb=(2e-3, 0.1), lion=(2e-4, 0.3), sgd=(1.0, 3e-6))
PUBLISHED = {
    "fastclip-medium": _MEDIUM,
    "fastclip-medium-images": _MEDIUM,
    "fastclip-large": _rows(0.9, 0.98, 1e-6, adamw=(4e-4, 0.1), lamb=(2e-3, 0.1), lion=(1e-4, 0.3), sgd=(2.0, 3e-6)),
    "fastclip-xlarge": _rows(0.9, 0.98, 1e-6, source="FastCLIP, table 7", adamw=(2e-4, 0.2)),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Choice):
    """Optimizer, learning rate of each parameter at each step, and the average of the weights."""

    prefix = "optimizer"
    choice = "name"
    published = PUBLISHED

    name: OptimizerName = "adamw"
    """Optimizer. lamb: You et al. 2020; lion: Chen et al. 2023; sgd: with momentum."""
    beta1: Annotated[float | None, SHARE] = None
    """First beta of adamw, lamb and lion. Default: 0.9."""
    beta2: Annotated[float | None, SHARE] = None
    """Second beta. Default: 0.98 for adamw, 0.999 for lamb, 0.99 for lion."""
    eps: Annotated[float | None, Range(above=0, below=1)] = None
    """Epsilon of adamw and lamb. Default: 1e-8 for adamw, 1e-6 for lamb."""
    momentum: Annotated[float | None, SHARE] = None
    """Momentum of sgd. Default: 0.9."""
    lamb_alpha: Annotated[Literal["all", "decayed"], GoesWith("name", ("lamb",))] = "all"
    """Parameters whose steps lamb scales: all (paper), or those with weight decay (FastCLIP's code)."""
    schedule: Literal["cosine", "linear", "fixed"] = "cosine"
    """Learning rate schedule after warmup, from --lr to --optimizer.end-lr. fixed: constant at --lr."""
    start_lr: Annotated[float | None, Range(above=0, hint="it must be more than 0, and at most --lr")] = None
    """Learning rate of the first warmup step (AVION: 1e-6); the last one has --lr. Default: --lr / --warmup-steps."""
    end_lr: Annotated[float, Range(least=0, hint="it must be 0 or more, and at most --lr")] = 0.0
    """Final learning rate of the schedule."""
    lr_batch: Annotated[int | None, Range(1, 10**6)] = None
    """Reference batch size: learning rates are multiplied by --batch / this (linear scaling). Default: no scaling."""
    layer_decay: Annotated[float, Range(above=0, most=1)] = 1.0
    """Layer-wise learning rate decay: factor from each block to the one below."""
    ema: Annotated[float, SHARE] = 0.0
    """Decay of an exponential moving average of the weights, which is then the model that is evaluated; 0: none."""

    @classmethod
    def hyperparameters(cls) -> dict[str, dict[str, float]]:
        """Those of each optimizer, with its defaults."""
        return DEFAULTS

    def rules(self) -> Iterator[UserError]:
        """Yields hyperparameters that the optimizer does not have."""
        yield from self.not_taken()

    def lr_scale(self, batch: int) -> float:
        """Factor of the learning rates for a batch size: linear scaling (Goyal et al. 2017, section 2.1)."""
        return 1.0 if self.lr_batch is None else batch / self.lr_batch

    def number(self, name: str) -> float:
        """The effective value of `beta1`, `beta2`, `eps` or `momentum`: as given, or the optimizer's default."""
        given: float | None = getattr(self, name)
        return DEFAULTS[self.name][name] if given is None else given
