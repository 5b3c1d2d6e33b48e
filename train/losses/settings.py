"""Contrastive losses for `--loss.kind`, and the settings `--loss.*`.

`LOSSES` has one row per loss, for clipmill's losses and for losses from installed packages. A row lists the settings
that the loss uses, with their defaults.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.plugins import Parts, import_object
from clipmill.manifests.settings import FRACTION, Range
from clipmill.train.config.fields import FIRST_RUN, Choice, Published


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """A loss, with the information that the command line needs.

    Attributes:
        name: Value of `--loss.kind`.
        loss: Function of `Pairs` and settings, differentiated by autograd; or a subclass of ContrastiveObjective, for
            gradients in closed form or for values stored for each sample. A string "module:name" is imported when a
            run needs the loss.
        settings: `--loss.*` settings of this loss that other losses may not use, with their published defaults. None
            means that the default depends on the run. `convention`, `min_temperature` and `epsilon` are not listed,
            because they are accepted with every loss.
    """

    name: str
    loss: str | Callable[..., Any]
    settings: Mapping[str, float | str | bool | None]

    @property
    def is_global(self) -> bool:
        """True if the loss keeps a moving average for each clip and each caption of the training set."""
        return "gamma" in self.settings

    def load(self) -> Any:
        """Return the function or class of the loss. A string is imported."""
        return import_object(self.loss) if isinstance(self.loss, str) else self.loss


def _row(name: str, loss: str, **settings: float | str | bool | None) -> LossSpec:
    return LossSpec(name=name, loss=f"clipmill.train.losses.{loss}", settings=settings)


_TRAINED_TEMPERATURE = {"freeze_temperature": False, "temperature_lr": None}
_CONSTANT_GAMMA = {"gamma_schedule": "constant", "gamma_epochs": None}
_COSINE_GAMMA = {"gamma_schedule": "cosine", "gamma_epochs": None}
_SHARED_TAU, _SAMPLE_TAU = "global_losses:SharedTemperature", "global_losses:SampleTemperature"
# SigLIP has no temperature_lr, because the rate would also apply to its bias. The defaults of the global losses are the
# medium-scale values in FastCLIP's appendix B.
_ROWS = (
    _row("infonce", "in_batch:InfoNCE", temperature=0.07, **_TRAINED_TEMPERATURE),
    _row("siglip", "in_batch:SigLIP", temperature=0.1, freeze_temperature=False),
    _row("max-margin", "in_batch:MaxMargin", margin=0.2, use_relevancy=False),
    _row("mbcl", "in_batch:InfoNCE", temperature=0.07, **_TRAINED_TEMPERATURE),
    _row("sogclr", _SHARED_TAU, temperature=0.03, gamma=0.6, **_CONSTANT_GAMMA),
    _row("isogclr", _SAMPLE_TAU, temperature=0.03, gamma=0.6, temperature_lr=1e-2, rho=9.0, **_CONSTANT_GAMMA),
    _row("fastclip-v0", _SHARED_TAU, temperature=0.03, gamma=0.2, temperature_lr=None, **_COSINE_GAMMA),
    _row("fastclip-v1", _SHARED_TAU, temperature=0.03, gamma=0.2, **_COSINE_GAMMA),
    _row("fastclip-v2", _SAMPLE_TAU, temperature=0.03, gamma=0.2, temperature_lr=1e-2, rho=7.0, **_COSINE_GAMMA),
    _row("fastclip-v3", _SHARED_TAU, temperature=0.07, gamma=0.2, temperature_lr=2e-4, rho=6.5, **_COSINE_GAMMA),
)


def _find_fault(spec: LossSpec) -> str:
    unknown = sorted(set(spec.settings) - set(SETTINGS))
    return f"has settings that --loss does not define: {', '.join(unknown)}" if unknown else ""


LOSSES = Parts("loss", group="losses", kind=LossSpec, builtin={spec.name: spec for spec in _ROWS}, fault=_find_fault)
# Settings that only some losses use.
SETTINGS = tuple(dict.fromkeys(name for spec in _ROWS for name in spec.settings))

# Published settings by preset (Wei et al. 2024). `--preset NAME --loss.kind KIND` uses the row of KIND.
_TABLE_8 = "FastCLIP, table 8 and appendix B"
_TABLES_8_9 = "FastCLIP, tables 8 and 9 and appendix B"
_TEMPERATURE = "FastCLIP, appendix B, temperature"


def _published_row(source: str, **values: Any) -> Published:
    return Published(source, {"loss": values} if values else {})


def _constant_gamma(gamma: float) -> dict[str, Any]:
    return {"gamma": gamma, "gamma_schedule": "constant"}


def _cosine_gamma(gamma: float, *, epochs: int) -> dict[str, Any]:
    return {"gamma": gamma, "gamma_schedule": "cosine", "gamma_epochs": epochs}


# Rows of the presets. FastCLIP's table 3 has different values for v2.
_MBCL = _published_row("FastCLIP, appendix B, scaling performance")
_MEDIUM = {
    "mbcl": _MBCL,
    "sogclr": _published_row(_TABLE_8, temperature=0.03, **_constant_gamma(0.6)),
    "isogclr": _published_row(_TABLE_8, temperature=0.03, temperature_lr=1e-2, rho=9.0, **_constant_gamma(0.6)),
    "fastclip-v0": _published_row(_TEMPERATURE, temperature=0.03, **_cosine_gamma(0.2, epochs=18)),
    "fastclip-v1": _published_row(_TABLE_8, temperature=0.03, **_cosine_gamma(0.2, epochs=18)),
    "fastclip-v2": _published_row(
        _TABLES_8_9, temperature=0.03, temperature_lr=1e-2, rho=7.0, **_cosine_gamma(0.2, epochs=18)
    ),
    "fastclip-v3": _published_row(
        _TABLES_8_9, temperature=0.07, temperature_lr=2e-4, rho=6.5, **_cosine_gamma(0.2, epochs=18)
    ),
}
_LARGE_V2 = "FastCLIP, table 9 and appendix B, temperature"
_LARGE = {
    "mbcl": _MBCL,
    "sogclr": _published_row(_TABLE_8, temperature=0.03, **_constant_gamma(0.6)),
    "isogclr": _published_row(_TABLE_8, temperature=0.03, temperature_lr=1e-2, rho=9.0, **_constant_gamma(0.8)),
    "fastclip-v0": _published_row(_TEMPERATURE, temperature=0.03, **_cosine_gamma(0.2, epochs=16)),
    "fastclip-v1": _published_row(_TABLE_8, temperature=0.03, **_cosine_gamma(0.2, epochs=16)),
    "fastclip-v2": _published_row(
        _LARGE_V2, temperature=0.03, temperature_lr=1e-4, rho=8.5, **_cosine_gamma(0.2, epochs=16)
    ),
    "fastclip-v3": _published_row(
        _TABLES_8_9, temperature=0.07, temperature_lr=1e-4, rho=8.5, **_cosine_gamma(0.2, epochs=16)
    ),
}
_XLARGE = {
    "mbcl": _MBCL,
    "fastclip-v3": _published_row(
        _TABLES_8_9, temperature=0.07, temperature_lr=5e-5, rho=16.0, **_cosine_gamma(0.8, epochs=10)
    ),
}
PUBLISHED = {
    "fastclip-medium": _MEDIUM,
    "fastclip-medium-images": _MEDIUM,
    "fastclip-large": _LARGE,
    "fastclip-xlarge": _XLARGE,
}


Convention = Literal["paper", "fast_clip"]
Exchange = Literal["scalars", "features"]
GammaSchedule = Literal["constant", "cosine"]

_KINDS = f"Contrastive loss (docs/losses.md): {', '.join(LOSSES)}"
_POSITIVE, _PORTION = Range(above=0), Range(above=0, most=1)
ADAPTIVE_MARGIN = 0.4  # LaViLa's margin for a caption with relevancy 1


@dataclass(frozen=True, kw_only=True)
class Loss(Choice):
    """Contrastive loss and its hyperparameters."""

    prefix = "loss"
    parts = {"kind": LOSSES}  # noqa: RUF012 - a ClassVar of the base
    choice = "kind"
    published = PUBLISHED

    kind: Annotated[str, FIRST_RUN, Parameter(help=_KINDS)] = "infonce"
    convention: Convention = "fast_clip"
    """Source of the formulas of the FastCLIP losses. paper: the paper; fast_clip: its public code, which differs from
    the paper. The published hyperparameters are for the code."""
    temperature: Annotated[float | None, _POSITIVE] = None
    """Initial temperature. Default: the published value of the loss."""
    freeze_temperature: Annotated[bool, Parameter(negative="")] = False
    """Do not train the temperature (infonce, siglip, mbcl)."""
    min_temperature: Annotated[float, _PORTION] = 0.01
    """Lower bound of a trained temperature."""
    temperature_lr: Annotated[float | None, _POSITIVE] = None
    """Learning rate of the temperature, scaled with the batch size like --lr (--optimizer.lr-batch). Default: the
    published value of the loss or, if there is none, the model's learning rate."""
    rho: Annotated[float | None, Range(least=0)] = None
    """Weight of the temperature in the robust losses (isogclr, fastclip-v2, fastclip-v3). Default: the published value
    of the loss."""
    gamma: Annotated[float | None, _PORTION] = None
    """Weight of the new value in the moving averages of the global losses (sogclr, isogclr, fastclip-v0 to v3); with
    the cosine schedule, the final weight. Default: the published value of the loss."""
    gamma_schedule: GammaSchedule | None = None
    """Schedule of gamma over epochs. cosine: from 1 down to --loss.gamma. Default: the published schedule of the
    loss."""
    gamma_epochs: Annotated[int | None, Range(least=1)] = None
    """Number of epochs of the cosine schedule. Default: half of the run's epochs."""
    epsilon: Annotated[float, FRACTION] = 1e-14
    """Constant added to the moving averages of the global losses before the logarithm."""
    margin: Annotated[float | None, Range(least=0)] = None
    """Minimum difference between the similarity of a pair and the similarities of its negatives (max-margin). Default:
    0.2, or 0.4 with --loss.use-relevancy."""
    use_relevancy: Annotated[bool, Parameter(negative="")] = False
    """Multiply the margin by the relevancy of the caption, as LaViLa does (max-margin)."""

    @classmethod
    def hyperparameters(cls) -> dict[str, Mapping[str, float | str | bool | None]]:
        """Return the published defaults of each loss's settings."""
        return {spec.name: spec.settings for spec in LOSSES.list_usable()}

    def rules(self) -> Iterator[UserError]:
        """Yield errors for settings that the loss does not use, and for a temperature below the minimum."""
        spec = LOSSES.find_usable(self.kind)
        if spec is None:
            return
        yield from self.unused_hyperparameters()
        if "temperature" in spec.settings and (start := self.number("temperature")) < self.min_temperature:
            yield UserError(
                f"--loss.temperature {start} is lower than --loss.min-temperature {self.min_temperature}",
                hint="use a higher --loss.temperature, or a lower --loss.min-temperature",
                flags=("--loss.temperature",),
            )

    @property
    def spec(self) -> LossSpec:
        """Row of the loss in `LOSSES`."""
        return LOSSES[self.kind]

    def number(self, name: str) -> float:
        """Return the effective value of `temperature`, `rho`, `gamma` or `margin`: as set, or the loss's default."""
        value: float | None = getattr(self, name)
        if value is None and name == "margin" and self.use_relevancy:
            return ADAPTIVE_MARGIN
        return cast(float, self.spec.settings[name] if value is None else value)

    @property
    def effective_temperature_lr(self) -> float | None:
        """Learning rate of the temperature, as set or the loss's default; None for the model's learning rate."""
        return cast(float | None, self.temperature_lr or self.spec.settings.get("temperature_lr"))

    def with_scaled_lr(self, scale: float) -> "Loss":
        """Return settings whose `effective_temperature_lr` is multiplied by `scale` (FastCLIP, appendix B)."""
        lr = self.effective_temperature_lr
        return self if lr is None or scale == 1 else replace(self, temperature_lr=lr * scale)

    @property
    def effective_gamma_schedule(self) -> GammaSchedule:
        """Schedule of gamma, as set or the loss's default."""
        return cast(GammaSchedule, self.gamma_schedule or self.spec.settings["gamma_schedule"])
