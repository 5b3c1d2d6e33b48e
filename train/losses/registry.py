"""The contrastive losses that `--loss.kind` knows: those of clipmill, one row each, and those of installed packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clipmill.manifests.plugins import Parts, import_object
from clipmill.train.config.fields import Published


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """A loss, and what the command line needs to know of it.

    Attributes:
        name: value of `--loss.kind`.
        loss: a function of `Pairs` and settings, whose gradients autograd computes; or a ContrastiveObjective, for
            gradients in closed form or for state. "module:name" is imported when a run needs it.
        settings: the `--loss.*` settings that this loss takes and others may not, each with its published default.
            None: off unless given. All losses take `convention`, `min_temperature` and `epsilon`.
    """

    name: str
    loss: str | Callable[..., Any]
    settings: Mapping[str, float | str | bool | None]

    @property
    def is_global(self) -> bool:
        """Whether the loss keeps state for each clip and each caption of the training set."""
        return "gamma" in self.settings

    def load(self) -> Any:
        """The function or class of `loss`."""
        return import_object(self.loss) if isinstance(self.loss, str) else self.loss


def _row(name: str, loss: str, **settings: float | str | bool | None) -> LossSpec:
    return LossSpec(name=name, loss=f"clipmill.train.losses.{loss}", settings=settings)


_TRAINED = {"freeze_temperature": False, "temperature_lr": None}
_CONSTANT = {"gamma_schedule": "constant", "gamma_epochs": None}
_COSINE = {"gamma_schedule": "cosine", "gamma_epochs": None}
_ONE, _EACH = "global_losses:OneTemperature", "global_losses:SampleTemperature"
# SigLIP takes no temperature_lr: its bias would learn at that rate too. FastCLIP's numbers: appendix B, medium setting.
_ROWS = (
    _row("infonce", "in_batch:InfoNCE", temperature=0.07, **_TRAINED),
    _row("siglip", "in_batch:SigLIP", temperature=0.1, freeze_temperature=False),
    _row("max-margin", "in_batch:MaxMargin", margin=0.2, use_relevancy=False),
    _row("mbcl", "in_batch:InfoNCE", temperature=0.07, **_TRAINED),
    _row("sogclr", _ONE, temperature=0.03, gamma=0.6, **_CONSTANT),
    _row("isogclr", _EACH, temperature=0.03, gamma=0.6, temperature_lr=1e-2, rho=9.0, **_CONSTANT),
    _row("fastclip-v0", _ONE, temperature=0.03, gamma=0.2, temperature_lr=None, **_COSINE),
    _row("fastclip-v1", _ONE, temperature=0.03, gamma=0.2, **_COSINE),
    _row("fastclip-v2", _EACH, temperature=0.03, gamma=0.2, temperature_lr=1e-2, rho=7.0, **_COSINE),
    _row("fastclip-v3", _ONE, temperature=0.07, gamma=0.2, temperature_lr=2e-4, rho=6.5, **_COSINE),
)


def _fault(spec: LossSpec) -> str:
    unknown = sorted(set(spec.settings) - set(SETTINGS))
    return f"has settings that --loss does not have: {', '.join(unknown)}" if unknown else ""


LOSSES = Parts("loss", group="losses", kind=LossSpec, builtin={spec.name: spec for spec in _ROWS}, fault=_fault)
# The settings that some loss takes and others may not.
SETTINGS = tuple(dict.fromkeys(name for spec in _ROWS for name in spec.settings))

# Published settings by preset: `--preset NAME --loss.kind KIND` takes the row of KIND. Wei et al. 2024.
_TABLE_8 = "FastCLIP, table 8 and appendix B"
_TABLES_8_9 = "FastCLIP, tables 8 and 9 and appendix B"
_TEMPERATURE = "FastCLIP, appendix B, temperature"


def _published_row(source: str, **values: Any) -> Published:
    return Published(source, {"loss": values} if values else {})


def _constant_gamma(gamma: float) -> dict[str, Any]:
    return {"gamma": gamma, "gamma_schedule": "constant"}


def _cosine(gamma: float, *, epochs: int) -> dict[str, Any]:
    return {"gamma": gamma, "gamma_schedule": "cosine", "gamma_epochs": epochs}


# Table 3 has other pairs for v2 alone.
_MBCL = _published_row("FastCLIP, appendix B, scaling performance")
_MEDIUM = {
    "mbcl": _MBCL,
    "sogclr": _published_row(_TABLE_8, temperature=0.03, **_constant_gamma(0.6)),
    "isogclr": _published_row(_TABLE_8, temperature=0.03, temperature_lr=1e-2, rho=9.0, **_constant_gamma(0.6)),
    "fastclip-v0": _published_row(_TEMPERATURE, temperature=0.03, **_cosine(0.2, epochs=18)),
    "fastclip-v1": _published_row(_TABLE_8, temperature=0.03, **_cosine(0.2, epochs=18)),
    "fastclip-v2": _published_row(
        _TABLES_8_9, temperature=0.03, temperature_lr=1e-2, rho=7.0, **_cosine(0.2, epochs=18)
    ),
    "fastclip-v3": _published_row(
        _TABLES_8_9, temperature=0.07, temperature_lr=2e-4, rho=6.5, **_cosine(0.2, epochs=18)
    ),
}
_LARGE_V2 = "FastCLIP, table 9 and appendix B, temperature"
_LARGE = {
    "mbcl": _MBCL,
    "sogclr": _published_row(_TABLE_8, temperature=0.03, **_constant_gamma(0.6)),
    "isogclr": _published_row(_TABLE_8, temperature=0.03, temperature_lr=1e-2, rho=9.0, **_constant_gamma(0.8)),
    "fastclip-v0": _published_row(_TEMPERATURE, temperature=0.03, **_cosine(0.2, epochs=16)),
    "fastclip-v1": _published_row(_TABLE_8, temperature=0.03, **_cosine(0.2, epochs=16)),
    "fastclip-v2": _published_row(_LARGE_V2, temperature=0.03, temperature_lr=1e-4, rho=8.5, **_cosine(0.2, epochs=16)),
    "fastclip-v3": _published_row(
        _TABLES_8_9, temperature=0.07, temperature_lr=1e-4, rho=8.5, **_cosine(0.2, epochs=16)
    ),
}
_XLARGE = {
    "mbcl": _MBCL,
    "fastclip-v3": _published_row(
        _TABLES_8_9, temperature=0.07, temperature_lr=5e-5, rho=16.0, **_cosine(0.8, epochs=10)
    ),
}
PUBLISHED = {
    "fastclip-medium": _MEDIUM,
    "fastclip-medium-images": _MEDIUM,
    "fastclip-large": _LARGE,
    "fastclip-xlarge": _XLARGE,
}
