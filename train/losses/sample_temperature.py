"""Global losses with a temperature for each clip and each caption: iSogCLR and FastCLIP v2 (RGCL)."""

import torch

from train.distributed.world import World
from train.losses.cached import Inputs
from train.losses.global_contrast import Estimate, GlobalContrast, GlobalSet, Side
from train.losses.moving_average import group_means
from train.losses.scores import Scores, mean_scores
from train.losses.settings import Loss

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # Adam's; the public code's as well
_LONGEST = 5.0  # of a temperature's gradient, in the public code
_HIGHEST = 1.0  # temperature, in the public code
# Columns of the state, after log u.
_TEMPERATURE, _MEAN, _SQUARE, _VISITS = 1, 2, 3, 4


class SampleTemperature(GlobalContrast):
    """RGCL: mean of tau_i (log(epsilon + g_i) + rho) over clips and over captions.

    Temperatures move when their clip or caption is visited, by Adam with a count of its own for each (procedure 4
    without decay). The public code leaves out the momentum of the first visit and, unlike Adam, divides by the mean
    square itself rather than by its root.
    """

    def __init__(self, inputs: Inputs, settings: Loss, whole: GlobalSet, *, world: World) -> None:
        state = (settings.number("temperature"), 0.0, 0.0, 0.0)
        super().__init__(inputs, settings, whole, world=world, further_state=state)
        self._is_code = settings.convention == "fast_clip"

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """Each its own."""
        return state_BC[:, _TEMPERATURE]

    def outer(self, temperature_B: torch.Tensor) -> torch.Tensor:
        """Each one's temperature (equations 6, 7); in the public code 1."""
        return torch.ones_like(temperature_B) if self._is_code else temperature_B

    def value(self, side: Side, log_inner_B: torch.Tensor) -> torch.Tensor:
        """RGCL."""
        return side.temperature_B * (log_inner_B + self._settings.number("rho"))

    def mean_similarities(
        self, scores: Scores, sides: tuple[Side, Side], log_sums_b: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Mean similarity of own clips, then own captions, with others, weighed as in g."""
        return tuple(
            mean_scores(rows_bB, 1 / side.temperature_B[scores.own], log_sum_b)
            for rows_bB, side, log_sum_b in zip((scores.clips_bB, scores.captions_bB), sides, log_sums_b, strict=True)
        )

    def moved_state(
        self,
        side: Side,
        estimate: Estimate,
        pair_B: torch.Tensor,
        further_B: tuple[torch.Tensor, ...],
        group_B: torch.Tensor,
    ) -> torch.Tensor:
        """Averages, and temperatures moved along equation 9; where an id occurs twice, along the mean of both."""
        (mean_B,) = further_B
        inside_B = (estimate.log_g_B - estimate.log_inner_B).exp() * (mean_B - pair_B) / side.temperature_B
        gradient_B = estimate.log_inner_B + self._settings.number("rho") - inside_B
        size = self._sizes[side.name]
        gradient_B = gradient_B.clamp(-_LONGEST, _LONGEST) if self._is_code else gradient_B / size
        gradient_B = group_means(gradient_B, group_B)
        state_BC = side.state_BC.clone()
        state_BC[:, 0] = estimate.log_u_B
        visits_B = state_BC[:, _VISITS] = side.state_BC[:, _VISITS] + 1
        beta1, beta2 = torch.full_like(pair_B, _BETA1), torch.full_like(pair_B, _BETA2)
        if self._is_code:
            beta1, beta2 = torch.where(visits_B > 1, beta1, 0), torch.where(visits_B > 1, beta2, 0)
        state_BC[:, _MEAN] = beta1 * side.state_BC[:, _MEAN] + (1 - beta1) * gradient_B
        state_BC[:, _SQUARE] = beta2 * side.state_BC[:, _SQUARE] + (1 - beta2) * gradient_B**2
        mean_grad_B = state_BC[:, _MEAN] / (1 - beta1**visits_B)
        square_B = state_BC[:, _SQUARE] / (1 - beta2**visits_B)
        divisor_B = (square_B if self._is_code else square_B.sqrt()) + _EPS
        rate = self._settings.own_temperature_lr
        assert rate is not None
        highest = _HIGHEST if self._is_code else None
        state_BC[:, _TEMPERATURE] = (side.temperature_B - rate * mean_grad_B / divisor_B).clamp(
            self._settings.min_temperature, highest
        )
        return state_BC
