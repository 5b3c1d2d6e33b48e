"""Settings of the contrastive loss, `--loss.*`. Which loss takes which, with what default: `registry.py`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import SHARE, Range
from clipmill.train.config.fields import FIRST_RUN, Choice
from clipmill.train.losses.registry import LOSSES, PUBLISHED, LossSpec

Convention = Literal["paper", "fast_clip"]
Exchange = Literal["scalars", "features"]
GammaSchedule = Literal["constant", "cosine"]

_KINDS = f"Contrastive loss (docs/losses.md): {', '.join(LOSSES)}"
_POSITIVE, _PORTION = Range(above=0), Range(above=0, most=1)
ADAPTIVE_MARGIN = 0.4  # LaViLa's, scaled by the relevancy of each caption


@dataclass(frozen=True, kw_only=True)
class Loss(Choice):
    """Contrastive loss and its hyperparameters."""

    prefix = "loss"
    parts = {"kind": LOSSES}  # noqa: RUF012 - a ClassVar of the base
    choice = "kind"
    published = PUBLISHED

    kind: Annotated[str, FIRST_RUN, Parameter(help=_KINDS)] = "infonce"
    convention: Convention = "fast_clip"
    """Gradients of the FastCLIP losses where the paper and its public code differ. The published hyperparameters are
    those of the code."""
    temperature: Annotated[float | None, _POSITIVE] = None
    """Initial temperature. Default: the published value of the loss."""
    freeze_temperature: Annotated[bool, Parameter(negative="")] = False
    """Keep the temperature at its initial value (infonce, siglip, mbcl)."""
    min_temperature: Annotated[float, _PORTION] = 0.01
    """Lower bound of a trained temperature."""
    temperature_lr: Annotated[float | None, _POSITIVE] = None
    """Learning rate of the temperature, scaled with the batch size as --lr is (--optimizer.lr-batch). Default: the
    published value of the loss, or else the model's rate."""
    rho: Annotated[float | None, Range(least=0)] = None
    """Weight of the temperature in the robust losses (isogclr, fastclip-v2, fastclip-v3). Default: as published."""
    gamma: Annotated[float | None, _PORTION] = None
    """Weight of the new value in the moving averages of the global losses; with the cosine schedule, its final
    value. Default: as published."""
    gamma_schedule: GammaSchedule | None = None
    """Schedule of gamma, by epoch. cosine: from 1 down to --loss.gamma. Default: as published."""
    gamma_epochs: Annotated[int | None, Range(least=1)] = None
    """Number of epochs of the cosine schedule. Default: half of the run."""
    epsilon: Annotated[float, SHARE] = 1e-14
    """Constant added to the moving averages of the global losses before the logarithm."""
    margin: Annotated[float | None, Range(least=0)] = None
    """Minimum difference between the similarity of a pair and those of its negatives (max-margin). Default: 0.2, or
    0.4 with --loss.use-relevancy."""
    use_relevancy: Annotated[bool, Parameter(negative="")] = False
    """Multiply the margin by the relevancy of the caption, as LaViLa does (max-margin)."""

    @classmethod
    def hyperparameters(cls) -> dict[str, Mapping[str, float | str | bool | None]]:
        """Those of each loss, with its published defaults."""
        return {spec.name: spec.settings for spec in LOSSES.list_usable()}

    def rules(self) -> Iterator[UserError]:
        """Yields settings that the loss does not have."""
        spec = LOSSES.find_usable(self.kind)
        if spec is None:
            return
        yield from self.not_taken()
        if "temperature" in spec.settings and (start := self.number("temperature")) < self.min_temperature:
            yield UserError(
                f"--loss.temperature is {start}",
                hint=f"--loss.temperature must be at least --loss.min-temperature, {self.min_temperature}",
                flags=("--loss.temperature",),
            )

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

    def with_scaled_lr(self, scale: float) -> "Loss":
        """These settings, with `own_temperature_lr` scaled as the rate of the model is (FastCLIP, appendix B)."""
        own = self.own_temperature_lr
        return self if own is None or scale == 1 else replace(self, temperature_lr=own * scale)

    @property
    def effective_gamma_schedule(self) -> GammaSchedule:
        """The schedule as given, or the default of the loss."""
        return cast(GammaSchedule, self.gamma_schedule or self.spec.settings["gamma_schedule"])
