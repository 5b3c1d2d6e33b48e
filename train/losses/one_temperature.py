"""Global losses with one temperature: SogCLR and FastCLIP v1 (constant), v0 and v3 (trained)."""

import math

import torch
from torch import nn

from train.device.transfer import Scalar
from train.distributed.step import Step
from train.distributed.world import World
from train.losses.cached import Inputs
from train.losses.global_contrast import Estimate, GlobalContrast, GlobalSet, Side
from train.losses.settings import Loss

_SLOW_BELOW = 0.03  # FastCLIP, appendix B: v3's temperature then learns at a third of its rate
_SLOWER = 3


class OneTemperature(GlobalContrast):
    """GCL (SogCLR, v0, v1) and RGCL-g (v3).

    The paper trains the temperature itself, the public code the log of its inverse: their optimizers take other ways.

    Attributes:
        temperature: the paper's parameter.
        logit_scale: the public code's instead, log of 1 / temperature.
        is_slow: whether v3's temperature learns at a third of its rate: in the paper once it was below 0.03, in the
            public code as long as it is at most that.
    """

    is_slow: torch.Tensor

    def __init__(self, inputs: Inputs, settings: Loss, whole: GlobalSet, *, world: World) -> None:
        super().__init__(inputs, settings, whole, world=world)
        self._is_code = settings.convention == "fast_clip"
        self._is_v0, self._is_v3 = settings.kind == "fastclip-v0", settings.kind == "fastclip-v3"
        start = settings.number("temperature")
        is_trained = self._is_v0 or self._is_v3
        if self._is_code:
            self.logit_scale = nn.Parameter(torch.tensor(-math.log(start)), requires_grad=is_trained)
        else:
            self.temperature = nn.Parameter(torch.tensor(start), requires_grad=is_trained)
        self.register_buffer("is_slow", torch.tensor(False))
        self._note_speed()

    def log_scale(self) -> torch.Tensor:
        """log of 1 / temperature, detached."""
        return self.logit_scale.detach() if self._is_code else -self.temperature.detach().log()

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """One for all."""
        return (-self.log_scale()).exp().to(state_BC.dtype).expand(len(state_BC))

    def outer(self, temperature_B: torch.Tensor) -> torch.Tensor:
        """The temperature; 1 in v0, and in the public code for all but v3 (its commands scale v3 alone)."""
        is_scaled = self._is_v3 or not (self._is_v0 or self._is_code)
        return temperature_B if is_scaled else torch.ones_like(temperature_B)

    def value(self, side: Side, log_inner_B: torch.Tensor) -> torch.Tensor:
        """GCL, scaled as its gradient is, or RGCL-g."""
        rho = self._settings.number("rho") if self._is_v3 else 0.0
        return self.outer(side.temperature_B) * (log_inner_B + rho)

    def parameter_gradients(
        self, estimates: tuple[Estimate, Estimate], by_factor: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Equations 8 (v0) and 10 (v3).

        In the public code the two terms of v3 that are not from inside of g weigh half, and the third does not: the
        published rho belongs to that.
        """
        if not (self._is_v0 or self._is_v3):
            return {}
        temperature = (-self.log_scale()).exp().to(by_factor.dtype)
        # Of what depends on the temperature inside of g; the features' gradients are halved, this is not.
        gradient = -by_factor / self.side_weight / temperature
        if self._is_v3:
            logs_B = [estimate.log_u_B if self._is_code else estimate.log_inner_B for estimate in estimates]
            gradient = gradient + self.side_weight * ((logs_B[0] + logs_B[1]).mean() + 2 * self._settings.number("rho"))
        return {"logit_scale": -temperature * gradient} if self._is_code else {"temperature": gradient}

    def learning_rate(self, scheduled: float) -> Scalar:
        """The temperature's own, where it has one; a third of it where v3 has become slow, as the device knows."""
        own = super().learning_rate(scheduled)
        if not self._is_v3 or isinstance(own, torch.Tensor):
            return own
        device = self.is_slow.device
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        rate = torch.full((), own, dtype=dtype, device=device)
        return torch.where(self.is_slow, rate / _SLOWER, rate)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Holds the temperature above its limit; in the public code also at or below 1."""
        if self._is_code:
            self.logit_scale.clamp_(0, -math.log(self._settings.min_temperature))
        else:
            self.temperature.clamp_(min=self._settings.min_temperature)
        self._note_speed()

    def _note_speed(self) -> None:
        temperature = (-self.log_scale()).exp()
        if self._is_code:
            self.is_slow.copy_(temperature <= _SLOW_BELOW)
        else:
            self.is_slow.logical_or_(temperature < _SLOW_BELOW)
