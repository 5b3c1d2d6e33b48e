"""Global contrastive losses: SogCLR, iSogCLR, FastCLIP v0 to v3 (Wei et al. 2024, algorithm 1).

B: pairs of the batch of all ranks. b: pairs of this rank. C: columns in the state of a clip or caption.

The paper's g_i compares pair i with all other pairs of the *training set*. A batch gives a rough estimate of g_i; the
moving average u_i over the visits of i is a better estimate. The algorithm uses the gradient of log(epsilon + g_i) with
u_i in place of g_i, held constant. Clips and captions have separate IDs and averages, because a clip may have a
different caption in each epoch.

The losses differ in the temperature: one for all pairs (SogCLR, FastCLIP v0, v1, v3), or one per sample (iSogCLR, v2).
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.training import NEW_RUN
from clipmill.train.data.batch import Batch
from clipmill.train.device.transfer import Scalar, send
from clipmill.train.distributed.parallel import ShardedRows
from clipmill.train.distributed.step import Step
from clipmill.train.distributed.world import World
from clipmill.train.losses.contrastive import (
    Contrast,
    ContrastiveObjective,
    DatasetSize,
    Inputs,
    Similarities,
    exponential_gradients,
    log_sums,
    softmax_means,
)
from clipmill.train.losses.settings import Convention, GammaSchedule, Loss


@dataclass(frozen=True, kw_only=True)
class Side:
    """Clips or captions of a batch, with their state.

    Attributes:
        table: State of all clips, or all captions, of the training set.
        num_all: Number of clips or captions in the training set.
        ids_B: IDs of the clips or captions of all ranks.
        group_B: Group of each ID (`groups`).
        state_BC: Rows of the table for these IDs, before the step.
        temperature_B: Temperature of each clip or caption.
    """

    table: ShardedRows
    num_all: int
    ids_B: torch.Tensor
    group_B: torch.Tensor
    state_BC: torch.Tensor
    temperature_B: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimates of g for one side, including the batch of this step.

    Attributes:
        pair_B: Similarities of the pairs.
        further_B: `further_values` of all ranks.
        log_g_B: Logarithm of g_i in this batch.
        log_u_B: Logarithm of the new average.
        log_inner_B: log(epsilon + u).
    """

    pair_B: torch.Tensor
    further_B: list[torch.Tensor]
    log_g_B: torch.Tensor
    log_u_B: torch.Tensor
    log_inner_B: torch.Tensor


class GlobalContrast(ContrastiveObjective):
    """Base class of global losses, without temperatures and weights of pairs.

    Args:
        further_state: Initial values of the state's columns after log u.

    Attributes:
        clips: State of each clip: log u, then the columns of `further_state`.
        captions: State of each caption, with the same columns.
    """

    def __init__(
        self,
        settings: Loss,
        *,
        inputs: Inputs,
        dataset: DatasetSize | None,
        world: World,
        further_state: tuple[float, ...] = (),
    ) -> None:
        super().__init__(settings, inputs=inputs, dataset=dataset, world=world)
        assert dataset is not None, "a global loss keeps state for each clip and caption of a dataset"
        self._is_code = settings.convention == "fast_clip"
        self._gamma_epochs = settings.gamma_epochs or max(1, round(dataset.num_epochs / 2))
        self._log_epsilon = math.log(settings.epsilon) if settings.epsilon else -math.inf
        self.rho = settings.number("rho") if "rho" in settings.spec.settings else 0.0
        # The public code averages the losses of clips and captions; the paper adds them, which doubles the gradient.
        self.side_weight = 0.5 if self._is_code else 1.0
        self._dataset = dataset
        self.clips = ShardedRows(dataset.num_clips, start=(UNSEEN, *further_state), world=world)
        self.captions = ShardedRows(dataset.num_captions, start=(UNSEEN, *further_state), world=world)

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """Return the temperature of each of B rows of a table, [B]."""
        raise NotImplementedError

    def factors(self, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors [B] of log(epsilon + g) in the published loss, and in its gradient."""
        raise NotImplementedError

    def further_values(
        self, rows_bB: torch.Tensor, scale_b: torch.Tensor, log_sum_b: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return values [b] of this rank's clips or captions that `moved_state` needs; see `softmax_means`."""
        return ()

    def moved_state(self, side: Side, estimate: Estimate, step: Step) -> torch.Tensor:
        """Return the new rows [B, C] of one side's table."""
        return estimate.log_u_B[:, None]

    def parameter_gradients(
        self, estimates: tuple[Estimate, Estimate], scale_gradient: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return gradients of the objective's parameters, from this rank's `Similarities.scale_gradient`."""
        return {}

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """Update the averages and compute the gradient estimators of equations 2 to 7."""
        gamma = inner_rate(
            math.floor(step.epoch),
            least=self._settings.number("gamma"),
            schedule=self._settings.effective_gamma_schedule,
            num_epochs=self._gamma_epochs,
            convention=self._settings.convention,
        )
        sides = self._sides(similarities, batch, step)
        values_b = [similarities.pair_b]
        for rows_bB, side in zip((similarities.clips_bB, similarities.captions_bB), sides, strict=True):
            scale_b = 1 / side.temperature_B[similarities.own]
            log_sum_b = log_sums(rows_bB, scale_b)
            values_b += [log_sum_b, *self.further_values(rows_bB, scale_b, log_sum_b)]
        pair_B, *gathered_B = similarities.gather(*values_b)
        num_each, num_terms = len(gathered_B) // 2, similarities.num_pairs * (similarities.num_pairs - 1)
        estimates, losses_B, exponents_3B = [], [], []
        for side, (log_sum_B, *further_B) in zip(sides, (gathered_B[:num_each], gathered_B[num_each:]), strict=True):
            log_g_B = log_sum_B - pair_B / side.temperature_B - math.log(len(pair_B) - 1)
            log_u_B = average_logs(side.state_BC[:, 0], log_g_B, side.group_B, gamma=gamma)
            log_inner_B = torch.logaddexp(log_u_B, torch.full_like(log_u_B, self._log_epsilon))
            estimate = Estimate(
                pair_B=pair_B, further_B=further_B, log_g_B=log_g_B, log_u_B=log_u_B, log_inner_B=log_inner_B
            )
            side.table.write(side.ids_B, self.moved_state(side, estimate, step))
            estimates.append(estimate)
            loss_factor_B, gradient_factor_B = self.factors(side.temperature_B)
            losses_B.append(loss_factor_B * (estimate.log_inner_B + self.rho))
            factor_B = self.side_weight * gradient_factor_B / side.temperature_B
            log_factor_B = (factor_B / num_terms).log() - pair_B / side.temperature_B - estimate.log_inner_B
            exponents_3B.append(torch.stack([1 / side.temperature_B, log_factor_B, log_sum_B]))
        video_grad_bE, text_grad_bE = exponential_gradients(
            similarities, clips_3B=exponents_3B[0], captions_3B=exponents_3B[1]
        )
        scale_gradient = similarities.scale_gradient(video_grad_bE)
        return Contrast(
            loss=self.side_weight * (losses_B[0] + losses_B[1]).mean(),
            video_grad_bE=video_grad_bE,
            text_grad_bE=text_grad_bE,
            own_grads=self.parameter_gradients((estimates[0], estimates[1]), scale_gradient),
            metrics={
                "temperature": (sides[0].temperature_B + sides[1].temperature_B).mean() / 2,
                "log_u": (estimates[0].log_u_B + estimates[1].log_u_B).mean() / 2,
                "gamma": gamma,
            },
        )

    def _sides(self, similarities: Similarities, batch: Batch, step: Step) -> tuple[Side, Side]:
        if "clip_id" not in batch:
            raise UserError(
                f"--loss.kind {self._settings.kind} needs clips with ids, but these clips have none",
                hint="use --loss.kind infonce with these data",
                flags=("--loss.kind",),
            )
        num_all = (self._dataset.num_clips, self._dataset.num_captions)
        clip_id_b = _check_ids(batch["clip_id"], "clip", num_all[0])
        caption_id_b = _check_ids(batch["caption_id"], "caption", num_all[1])
        ids_B2 = step.world.gather(send(torch.stack([clip_id_b, caption_id_b], dim=1), similarities.pair_b.device))
        sides = []
        for side, table in enumerate((self.clips, self.captions)):
            ids_B = ids_B2[:, side]
            state_BC = table.read(ids_B).to(similarities.pair_b.dtype)
            rows = {"ids_B": ids_B, "group_B": groups(ids_B), "state_BC": state_BC}
            sides.append(Side(table=table, num_all=num_all[side], temperature_B=self.temperatures(state_BC), **rows))
        return sides[0], sides[1]


def _check_ids(ids_b: torch.Tensor, name: str, size: int) -> torch.Tensor:
    """Return the IDs after a check on the host, where the loader left them, without synchronising with a device."""
    is_outside_b = (ids_b < 0) | (ids_b >= size)
    if is_outside_b.any():
        outside = ids_b[is_outside_b].unique().tolist()
        ids = ", ".join(map(str, outside[:5])) + (", ..." if len(outside) > 5 else "")
        raise UserError(
            f"{name} ids {ids} are out of range: the loss has state for {size} {name}s, with ids 0 to {size - 1}",
            hint=f"the data have changed since the run began: {NEW_RUN}",
        )
    return ids_b


# Moving averages are stored as logarithms. exp((s_ij - s_ii) / tau) overflows float32 at tau = 0.01 if a negative is
# nearer than the pair by 0.89, and underflows if a sample is well separated. log u does neither.

UNSEEN = -math.inf  # log u before the first visit


def inner_rate(epoch: int, *, least: float, schedule: GammaSchedule, num_epochs: int, convention: Convention) -> float:
    """Return gamma, the weight of the new value in the averages, for epoch 0, 1, ... (FastCLIP, section 5).

    Gamma is constant within an epoch. In the public code, the constant schedule also starts with an epoch of gamma = 1.
    """
    if schedule == "constant":
        return 1.0 if convention == "fast_clip" and epoch == 0 else least
    if epoch >= num_epochs:
        return least
    return 0.5 * (1 + math.cos(math.pi * epoch / num_epochs)) * (1 - least) + least


def groups(ids_B: torch.Tensor) -> torch.Tensor:
    """Number the distinct IDs: int64 [B], 0 to B - 1, equal for equal IDs, without synchronising with the device."""
    sorted_B, order_B = ids_B.sort(stable=True)
    is_new_B = torch.ones_like(sorted_B)
    is_new_B[1:] = (sorted_B[1:] != sorted_B[:-1]).to(is_new_B)
    return torch.empty_like(order_B).scatter_(0, order_B, is_new_B.cumsum(0) - 1)


def group_means(values_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return, for each of B values, the mean over its group."""
    zeros_B = torch.zeros_like(values_B)
    sums_B = zeros_B.index_add(0, group_B, values_B)
    return (sums_B / zeros_B.index_add(0, group_B, torch.ones_like(values_B)).clamp(min=1))[group_B]


def log_group_means(log_values_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return, for each of B values, the logarithm of the mean of exp over its group."""
    highest_B = torch.full_like(log_values_B, -math.inf).scatter_reduce(0, group_B, log_values_B, "amax")[group_B]
    return highest_B + group_means((log_values_B - highest_B).exp(), group_B).log()


def average_logs(log_u_B: torch.Tensor, log_g_B: torch.Tensor, group_B: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Return log of (1 - gamma) u + gamma g (FastCLIP, eq. 1), the same within a group; g itself on the first visit.

    If an ID occurs more than once in a batch, on any ranks, g is the mean over its occurrences.
    """
    log_g_B = log_group_means(log_g_B, group_B)
    if gamma == 1:
        return log_g_B
    moved_B = torch.logaddexp(log_u_B + math.log(1 - gamma), log_g_B + math.log(gamma))
    return torch.where(log_u_B == UNSEEN, log_g_B, moved_B)


# FastCLIP, appendix B: below this temperature, v3 trains the temperature at a third of its learning rate.
_SLOW_BELOW = 0.03
_SLOWER = 3

# Temperatures per sample.
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # Adam's values, which the public code also uses
_MAX_GRADIENT, _MAX_TEMPERATURE = 5.0, 1.0  # as in the public code
# Columns of the state after log u. The public code counts epochs, not visits, and needs no column for visits.
_TEMPERATURE, _MEAN, _SQUARE, _VISITS = 1, 2, 3, 4
_NUM_COLUMNS = {"paper": 5, "fast_clip": 4}


class OneTemperature(GlobalContrast):
    """GCL (SogCLR and v1: constant temperature; v0: trained temperature) and RGCL-g (v3: trained temperature).

    The paper trains the temperature itself. The public code trains the logarithm of its inverse (`logit_scale`), for
    which the optimizer takes different steps.

    Attributes:
        temperature: The paper's parameter; None in the public code's convention.
        is_slow: True while v3's temperature learns at a third of its rate: in the paper, from the first time that it is
            below 0.03; in the public code, as long as it is at most 0.03.
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
        """Return the logarithm of 1 / temperature, detached."""
        parameter = self.logit_scale if self.temperature is None else -self.temperature.detach().log()
        assert parameter is not None
        return parameter.detach()

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """Return the common temperature for all rows."""
        return (-self.log_scale()).exp().to(state_BC.dtype).expand(len(state_BC))

    def factors(self, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the temperature as both factors; 1 in v0.

        The public code also uses 1, except for v3 (its commands scale only v3).
        """
        is_scaled = self._is_v3 or not (self._is_v0 or self._is_code)
        factor_B = temperature_B if is_scaled else torch.ones_like(temperature_B)
        return factor_B, factor_B

    def parameter_gradients(
        self, estimates: tuple[Estimate, Estimate], scale_gradient: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Compute equations 8 (v0) and 10 (v3).

        In the public code, the two terms of v3 that do not come from inside g have weight 1/2, and the third term has
        weight 1. The published rho belongs to this convention.
        """
        if not (self._is_v0 or self._is_v3):
            return {}
        temperature = (-self.log_scale()).exp().to(scale_gradient.dtype)
        # The term from inside g. The gradients of embeddings are halved, but this gradient is not.
        gradient = -scale_gradient / self.side_weight / temperature
        if self._is_v3:
            logs_B = [estimate.log_u_B if self._is_code else estimate.log_inner_B for estimate in estimates]
            gradient = gradient + self.side_weight * ((logs_B[0] + logs_B[1]).mean() + 2 * self.rho)
        return {"logit_scale": -temperature * gradient} if self._is_code else {"temperature": gradient}

    def learning_rate(self, scheduled: float) -> Scalar:
        """Return the temperature's learning rate, which may differ from the model's rate.

        For v3, the device divides the rate by 3 if `is_slow`.
        """
        temperature_lr = super().learning_rate(scheduled)
        if not self._is_v3 or isinstance(temperature_lr, torch.Tensor):
            return temperature_lr
        device = self.is_slow.device
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        rate = torch.full((), temperature_lr, dtype=dtype, device=device)
        return torch.where(self.is_slow, rate / _SLOWER, rate)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Clamp the temperature to its lower bound and, in the public code, to at most 1."""
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
    """RGCL, with a temperature for each clip and caption (iSogCLR, v2): mean of tau_i (log(epsilon + g_i) + rho).

    A temperature is updated when its clip or caption is visited, by AdamW without decay (procedure 5, lines 8 and 9;
    procedure 4, lines 13 to 16). AdamW's t is the number of the visit. The public code uses epochs instead of visits:
    both betas are 0 in epoch 0; after that, t is the epoch + 1.
    """

    def __init__(self, settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World) -> None:
        state = (settings.number("temperature"), 0.0, 0.0, 0.0)[: _NUM_COLUMNS[settings.convention] - 1]
        super().__init__(settings, inputs=inputs, dataset=dataset, world=world, further_state=state)

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """Return the temperature that each row stores."""
        return state_BC[:, _TEMPERATURE]

    def factors(self, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the temperature of each sample (equations 6, 7); 1 in the gradient of the public code."""
        return temperature_B, torch.ones_like(temperature_B) if self._is_code else temperature_B

    def further_values(
        self, rows_bB: torch.Tensor, scale_b: torch.Tensor, log_sum_b: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the mean similarity [b] with the negatives, weighted as in g."""
        return (softmax_means(rows_bB, scale_b, log_sum_b),)

    def moved_state(self, side: Side, estimate: Estimate, step: Step) -> torch.Tensor:
        """Return new averages, and temperatures after a step along equation 9; both are averaged over equal IDs."""
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
        """Return t + 1 of procedure 4 for each of B samples, and the betas. Visits are counted in `state_BC`."""
        if not self._is_code:
            state_BC[:, _VISITS] = side.state_BC[:, _VISITS] + 1
            return state_BC[:, _VISITS], _BETA1, _BETA2
        epoch = math.floor(step.epoch)
        count_B = torch.full_like(side.temperature_B, epoch + 1)
        return (count_B, _BETA1, _BETA2) if epoch else (count_B, 0.0, 0.0)
