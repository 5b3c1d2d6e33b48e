"""The global contrastive losses, by temperature: one for all (SogCLR, FastCLIP v0, v1, v3), or each sample its own."""

import math

import torch
from torch import nn

from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.step import Step
from clipmill.train.distributed.world import World
from clipmill.train.losses.contrastive import DatasetSize, Inputs
from clipmill.train.losses.global_contrast import Estimate, GlobalContrast, Side, group_means
from clipmill.train.losses.settings import Loss
from clipmill.train.losses.similarities import softmax_means

# FastCLIP, appendix B: below this temperature, v3 trains it at a third of its learning rate.
_SLOW_BELOW = 0.03
_SLOWER = 3

# Temperatures of samples
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # Adam's; the public code's as well
_MAX_GRADIENT, _MAX_TEMPERATURE = 5.0, 1.0  # in the public code
# Columns of the state, after log u. The public code counts epochs, not visits, and needs no column for them.
_TEMPERATURE, _MEAN, _SQUARE, _VISITS = 1, 2, 3, 4
_NUM_COLUMNS = {"paper": 5, "fast_clip": 4}


class OneTemperature(GlobalContrast):
    """GCL (SogCLR and v1 with a constant temperature, v0 with a trained one) and RGCL-g (v3, trained).

    The paper trains the temperature itself, the public code the log of its inverse (`logit_scale`): the optimizer takes
    different steps.

    Attributes:
        temperature: the paper's parameter; None in the public code's convention.
        is_slow: whether v3's temperature learns at a third of its rate: in the paper once it was below 0.03, in the
            public code as long as it is at most that.
    """

    temperature: nn.Parameter | None
    is_slow: torch.Tensor

    def __init__(self, settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World) -> None:
        super().__init__(settings, inputs=inputs, dataset=dataset, world=world)
        self._is_v0, self._is_v3 = settings.kind == "fastclip-v0", settings.kind == "fastclip-v3"
        is_trained = self._is_v0 or self._is_v3
        self.register_parameter("temperature", None)
        if self._is_code:
            self.add_logit_scale(is_trained=is_trained)
        else:
            self.temperature = nn.Parameter(torch.tensor(settings.number("temperature")), requires_grad=is_trained)
        self.register_buffer("is_slow", torch.tensor(False))
        self._update_speed()

    def log_scale(self) -> torch.Tensor:
        """log of 1 / temperature, detached."""
        parameter = self.logit_scale if self.temperature is None else -self.temperature.detach().log()
        assert parameter is not None
        return parameter.detach()

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """The one temperature, for all rows."""
        return (-self.log_scale()).exp().to(state_BC.dtype).expand(len(state_BC))

    def factors(self, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The temperature; 1 in v0, and in the public code for all but v3 (its commands scale v3 alone)."""
        is_scaled = self._is_v3 or not (self._is_v0 or self._is_code)
        factor_B = temperature_B if is_scaled else torch.ones_like(temperature_B)
        return factor_B, factor_B

    def parameter_gradients(
        self, estimates: tuple[Estimate, Estimate], scale_gradient: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Equations 8 (v0) and 10 (v3).

        In the public code the two terms of v3 that do not come from inside g have weight 1/2, and the third has not:
        the published rho belongs to that.
        """
        if not (self._is_v0 or self._is_v3):
            return {}
        temperature = (-self.log_scale()).exp().to(scale_gradient.dtype)
        # Of what depends on the temperature inside g; the gradients of embeddings are halved, this one is not.
        gradient = -scale_gradient / self.side_weight / temperature
        if self._is_v3:
            logs_B = [estimate.log_u_B if self._is_code else estimate.log_inner_B for estimate in estimates]
            gradient = gradient + self.side_weight * ((logs_B[0] + logs_B[1]).mean() + 2 * self.rho)
        return {"logit_scale": -temperature * gradient} if self._is_code else {"temperature": gradient}

    def learning_rate(self, scheduled: float) -> Scalar:
        """The temperature's own rate, where it has one; v3 divides it by 3 where `is_slow`, which the device knows."""
        own = super().learning_rate(scheduled)
        if not self._is_v3 or isinstance(own, torch.Tensor):
            return own
        device = self.is_slow.device
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        rate = torch.full((), own, dtype=dtype, device=device)
        return torch.where(self.is_slow, rate / _SLOWER, rate)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Clamp the temperature to its lower bound; in the public code also to 1."""
        super().after_step(step)
        if self.temperature is not None:
            self.temperature.clamp_(min=self._settings.min_temperature)
        self._update_speed()

    def _update_speed(self) -> None:
        temperature = (-self.log_scale()).exp()
        if self._is_code:
            self.is_slow.copy_(temperature <= _SLOW_BELOW)
        else:
            self.is_slow.logical_or_(temperature < _SLOW_BELOW)


class SampleTemperature(GlobalContrast):
    """RGCL, with a temperature for each clip and each caption (iSogCLR, v2): mean of tau_i (log(epsilon + g_i) + rho).

    A temperature is updated when its clip or caption is visited, by AdamW without decay (procedure 5, lines 8 and 9;
    procedure 4, lines 13 to 16), whose t is the number of the visit. The public code has epochs in place of visits: in
    epoch 0 both betas are 0, afterwards t is the epoch + 1.
    """

    def __init__(self, settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World) -> None:
        state = (settings.number("temperature"), 0.0, 0.0, 0.0)[: _NUM_COLUMNS[settings.convention] - 1]
        super().__init__(settings, inputs=inputs, dataset=dataset, world=world, further_state=state)

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """The temperature that each row stores."""
        return state_BC[:, _TEMPERATURE]

    def factors(self, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each one's temperature (equations 6, 7); in the gradient of the public code 1."""
        return temperature_B, torch.ones_like(temperature_B) if self._is_code else temperature_B

    def further_values(
        self, rows_bB: torch.Tensor, scale_b: torch.Tensor, log_sum_b: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Mean similarity with the negatives, weighted as in g."""
        return (softmax_means(rows_bB, scale_b, log_sum_b),)

    def moved_state(self, side: Side, estimate: Estimate, step: Step) -> torch.Tensor:
        """Averages, and temperatures after a step along equation 9, averaged over the occurrences of an id."""
        (mean_B,) = estimate.further_B
        inside_B = (estimate.log_g_B - estimate.log_inner_B).exp() * (mean_B - estimate.pair_B) / side.temperature_B
        gradient_B = estimate.log_inner_B + self.rho - inside_B
        gradient_B = gradient_B.clamp(-_MAX_GRADIENT, _MAX_GRADIENT) if self._is_code else gradient_B / side.num_all
        gradient_B = group_means(gradient_B, side.group_B)
        state_BC = side.state_BC.clone()
        state_BC[:, 0] = estimate.log_u_B
        count_B, beta1, beta2 = self._count(side, state_BC, step)
        state_BC[:, _MEAN] = beta1 * side.state_BC[:, _MEAN] + (1 - beta1) * gradient_B
        state_BC[:, _SQUARE] = beta2 * side.state_BC[:, _SQUARE] + (1 - beta2) * gradient_B**2
        mean_grad_B = state_BC[:, _MEAN] / (1 - beta1**count_B)
        square_B = state_BC[:, _SQUARE] / (1 - beta2**count_B)
        rate = self._settings.own_temperature_lr
        assert rate is not None
        highest = _MAX_TEMPERATURE if self._is_code else None
        state_BC[:, _TEMPERATURE] = (side.temperature_B - rate * mean_grad_B / (square_B.sqrt() + _EPS)).clamp(
            self._settings.min_temperature, highest
        )
        return state_BC

    def _count(self, side: Side, state_BC: torch.Tensor, step: Step) -> tuple[torch.Tensor, float, float]:
        """t + 1 of procedure 4 for each of B, and the betas; visits are counted in `state_BC`."""
        if not self._is_code:
            state_BC[:, _VISITS] = side.state_BC[:, _VISITS] + 1
            return state_BC[:, _VISITS], _BETA1, _BETA2
        epoch = math.floor(step.epoch)
        count_B = torch.full_like(side.temperature_B, epoch + 1)
        return (count_B, _BETA1, _BETA2) if epoch else (count_B, 0.0, 0.0)
