"""Global losses with a temperature for each clip and each caption: iSogCLR and FastCLIP v2 (RGCL)."""

import math
from collections.abc import Mapping, Sequence

import torch

from manifests.errors import UserError
from train.distributed.step import Step
from train.distributed.world import World
from train.losses.cached import Inputs
from train.losses.global_contrast import Estimate, GlobalContrast, GlobalSet, Side
from train.losses.moving_average import group_means
from train.losses.scores import Scores, mean_scores
from train.losses.settings import Loss

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # Adam's; the public code's as well
_LONGEST = 5.0  # of a temperature's gradient, in the public code
_HIGHEST = 1.0  # temperature, in the public code
# Columns of the state, after log u. The public code counts epochs, not visits, and needs no column for them.
_TEMPERATURE, _MEAN, _SQUARE, _VISITS = 1, 2, 3, 4
_NUM_COLUMNS = {"paper": 5, "fast_clip": 4}


class SampleTemperature(GlobalContrast):
    """RGCL: mean of tau_i (log(epsilon + g_i) + rho) over clips and over captions.

    Temperatures move when their clip or caption is visited: by AdamW without decay (procedure 5, lines 8 and 9;
    procedure 4, lines 13 to 16), whose t is the number of the visit. The public code has epochs in the place of visits:
    in epoch 0 both betas are 0, afterwards t is the epoch + 1.
    """

    def __init__(self, inputs: Inputs, settings: Loss, whole: GlobalSet, *, world: World) -> None:
        state = (settings.number("temperature"), 0.0, 0.0, 0.0)
        num_further = _NUM_COLUMNS[settings.convention] - 1
        super().__init__(inputs, settings, whole, world=world, further_state=state[:num_further])
        self._is_code = settings.convention == "fast_clip"

    def check_resumable(self, sizes: Mapping[str, Sequence[int]], *, where: str) -> None:
        """Raises a UserError for state that began when `fast_clip` was the public code before October 2024.

        That one divided by the mean square rather than by its root; clipmill kept the number of visits beside it.
        """
        if self._is_code and list(sizes.get("clips.rows", ()))[1:] == [_NUM_COLUMNS["paper"]]:
            raise UserError(
                f"{where} has temperatures of {self._settings.kind} that moved by an older rule of --loss.convention "
                "fast_clip, which divided by the mean square of the gradient and not by its root",
                hint="begin a new run with another --out (--init.weights takes the weights of this one), or finish it "
                "with the version of clipmill that began it",
            )

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
        step: Step,
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
        count_B, beta1, beta2 = self._count(side, state_BC, step)
        state_BC[:, _MEAN] = beta1 * side.state_BC[:, _MEAN] + (1 - beta1) * gradient_B
        state_BC[:, _SQUARE] = beta2 * side.state_BC[:, _SQUARE] + (1 - beta2) * gradient_B**2
        mean_grad_B = state_BC[:, _MEAN] / (1 - beta1**count_B)
        square_B = state_BC[:, _SQUARE] / (1 - beta2**count_B)
        rate = self._settings.own_temperature_lr
        assert rate is not None
        highest = _HIGHEST if self._is_code else None
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
