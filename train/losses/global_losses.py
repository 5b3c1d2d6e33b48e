"""Global contrastive losses: SogCLR, iSogCLR, and FastCLIP v0 to v3 (Wei et al. 2024, algorithm 1).

Shape suffixes: b pairs on this rank, B pairs in the global batch, C columns in the state of a clip or caption.

In the paper, g_i compares pair i with all other pairs of the *training set*. A single batch gives only a rough estimate
of g_i. The moving average u_i of the estimates from all visits to pair i is more accurate. In the gradient of
log(epsilon + g_i), u_i replaces the value of g_i and is treated as a constant. Clips and captions have separate IDs and
averages, because a clip may have a different caption in each epoch.

The losses differ in their temperatures: SogCLR and FastCLIP v0, v1 and v3 have one temperature for all pairs; iSogCLR
and FastCLIP v2 have one temperature per sample. The state of a clip or caption is a row of numbers: log u_i and, if the
sample has a temperature, the temperature and the moments of its optimizer.
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
from clipmill.train.distributed.world import Step, World
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
class Modality:
    """IDs, state and temperatures of the clips, or of the captions, in a global batch.

    Attributes:
        table: State of all clips, or of all captions, in the training set.
        num_ids: Number of clip IDs, or of caption IDs, in the training set.
        ids_B: IDs of the clips or captions in the global batch.
        group_B: Group index of each ID (`groups`).
        state_BC: Rows of the table for these IDs, before the step.
        temperature_B: Temperature of each clip or caption.
    """

    table: ShardedRows
    num_ids: int
    ids_B: torch.Tensor
    group_B: torch.Tensor
    state_BC: torch.Tensor
    temperature_B: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimates of g for one modality, updated with the current batch.

    Attributes:
        pair_B: Similarities of the positive pairs.
        extra_B: Results of `extra_values`, gathered from all ranks.
        log_g_B: Logarithm of g_i, estimated from this batch.
        log_u_B: Logarithm of the updated average u_i.
        log_inner_B: log(epsilon + u_i).
    """

    pair_B: torch.Tensor
    extra_B: list[torch.Tensor]
    log_g_B: torch.Tensor
    log_u_B: torch.Tensor
    log_inner_B: torch.Tensor


class GlobalContrast(ContrastiveObjective):
    """Base class for global losses. A subclass defines the temperatures and the factors of the loss.

    Args:
        dataset: Size of the training set, required.
        extra_state: Initial values of the state columns that follow log u.

    Attributes:
        clips: State of each clip: log u, followed by the columns of `extra_state`.
        captions: State of each caption, with the same columns.
    """

    def __init__(
        self,
        settings: Loss,
        *,
        inputs: Inputs,
        dataset: DatasetSize | None,
        world: World,
        extra_state: tuple[float, ...] = (),
    ) -> None:
        super().__init__(settings, inputs=inputs, dataset=dataset, world=world)
        assert dataset is not None, "a global loss keeps an average for each clip and caption of a dataset"
        self._follows_code = settings.convention == "fast_clip"
        self._gamma_epochs = settings.gamma_epochs or max(1, round(dataset.num_epochs / 2))
        self._log_epsilon = math.log(settings.epsilon) if settings.epsilon else -math.inf
        self.rho = settings.number("rho") if "rho" in settings.spec.settings else 0.0
        # The public code averages the losses of clips and captions. The paper adds them, which doubles the gradient.
        self.modality_weight = 0.5 if self._follows_code else 1.0
        self._dataset = dataset
        self.clips = ShardedRows(dataset.num_clips, start=(UNSEEN, *extra_state), world=world)
        self.captions = ShardedRows(dataset.num_captions, start=(UNSEEN, *extra_state), world=world)

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """Return the temperature for each row of `state_BC`, [B]."""
        raise NotImplementedError

    def factors(self, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors [B] of log(epsilon + g) in the loss, and in the gradient of the loss."""
        raise NotImplementedError

    def extra_values(
        self, rows_bB: torch.Tensor, scale_b: torch.Tensor, log_sum_b: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return additional values [b] for this rank's clips or captions. `next_state` receives all ranks' values.

        Args:
            rows_bB: Similarities, with a row per clip or caption.
            scale_b: 1 / temperature of each row.
            log_sum_b: Results of `log_sums` for these rows.
        """
        return ()

    def next_state(self, modality: Modality, estimate: Estimate, step: Step) -> torch.Tensor:
        """Return the updated rows [B, C] of one modality's table."""
        return estimate.log_u_B[:, None]

    def parameter_gradients(
        self, estimates: tuple[Estimate, Estimate], log_scale_gradient: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the gradients with respect to the objective's parameters, by name.

        Args:
            estimates: Estimates for clips and for captions.
            log_scale_gradient: This rank's `Similarities.log_scale_gradient`.
        """
        return {}

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """Return the loss and its gradients, estimated by equations 2 to 7, and update the averages.

        Raises:
            UserError: The clips have no IDs, or an ID is out of range.
        """
        gamma = inner_rate(
            math.floor(step.epoch),
            minimum=self._settings.number("gamma"),
            schedule=self._settings.effective_gamma_schedule,
            num_epochs=self._gamma_epochs,
            convention=self._settings.convention,
        )
        modalities = self._read_modalities(similarities, batch, step)
        values_b = [similarities.pair_b]
        for rows_bB, modality in zip(
            (similarities.video_to_text_bB, similarities.text_to_video_bB), modalities, strict=True
        ):
            scale_b = 1 / modality.temperature_B[similarities.local_rows]
            log_sum_b = log_sums(rows_bB, scale_b)
            values_b += [log_sum_b, *self.extra_values(rows_bB, scale_b, log_sum_b)]
        pair_B, *gathered_B = similarities.gather(*values_b)
        num_each, num_terms = len(gathered_B) // 2, similarities.num_pairs * (similarities.num_pairs - 1)
        estimates, losses_B, exponents_3B = [], [], []
        for modality, (log_sum_B, *extra_B) in zip(
            modalities, (gathered_B[:num_each], gathered_B[num_each:]), strict=True
        ):
            log_g_B = log_sum_B - pair_B / modality.temperature_B - math.log(len(pair_B) - 1)
            log_u_B = average_logs(modality.state_BC[:, 0], log_g_B, modality.group_B, gamma=gamma)
            log_inner_B = torch.logaddexp(log_u_B, torch.full_like(log_u_B, self._log_epsilon))
            estimate = Estimate(
                pair_B=pair_B, extra_B=extra_B, log_g_B=log_g_B, log_u_B=log_u_B, log_inner_B=log_inner_B
            )
            modality.table.write(modality.ids_B, self.next_state(modality, estimate, step))
            estimates.append(estimate)
            loss_factor_B, gradient_factor_B = self.factors(modality.temperature_B)
            losses_B.append(loss_factor_B * (estimate.log_inner_B + self.rho))
            factor_B = self.modality_weight * gradient_factor_B / modality.temperature_B
            log_factor_B = (factor_B / num_terms).log() - pair_B / modality.temperature_B - estimate.log_inner_B
            exponents_3B.append(torch.stack([1 / modality.temperature_B, log_factor_B, log_sum_B]))
        video_grad_bE, text_grad_bE = exponential_gradients(
            similarities, clips_3B=exponents_3B[0], captions_3B=exponents_3B[1]
        )
        log_scale_gradient = similarities.log_scale_gradient(video_grad_bE)
        return Contrast(
            loss=self.modality_weight * (losses_B[0] + losses_B[1]).mean(),
            video_grad_bE=video_grad_bE,
            text_grad_bE=text_grad_bE,
            parameter_grads=self.parameter_gradients((estimates[0], estimates[1]), log_scale_gradient),
            metrics={
                "temperature": (modalities[0].temperature_B + modalities[1].temperature_B).mean() / 2,
                "log_u": (estimates[0].log_u_B + estimates[1].log_u_B).mean() / 2,
                "gamma": gamma,
            },
        )

    def _read_modalities(self, similarities: Similarities, batch: Batch, step: Step) -> tuple[Modality, Modality]:
        if "clip_id" not in batch:
            raise UserError(
                f"--loss.kind {self._settings.kind} needs clip IDs, but these data have no IDs",
                hint="use --loss.kind infonce with these data",
                flags=("--loss.kind",),
            )
        dataset = self._dataset
        clip_id_b = _check_ids(batch["clip_id"], "clip", dataset.num_clips)
        caption_id_b = _check_ids(batch["caption_id"], "caption", dataset.num_captions)
        ids_B2 = step.world.gather(send(torch.stack([clip_id_b, caption_id_b], dim=1), similarities.pair_b.device))
        modalities = []
        tables = ((self.clips, dataset.num_clips), (self.captions, dataset.num_captions))
        for ids_B, (table, num_ids) in zip(ids_B2.unbind(dim=1), tables, strict=True):
            state_BC = table.read(ids_B).to(similarities.pair_b.dtype)
            modalities.append(
                Modality(
                    table=table,
                    num_ids=num_ids,
                    ids_B=ids_B,
                    group_B=groups(ids_B),
                    state_BC=state_BC,
                    temperature_B=self.temperatures(state_BC),
                )
            )
        return modalities[0], modalities[1]


def _check_ids(ids_b: torch.Tensor, name: str, size: int) -> torch.Tensor:
    """Return the IDs, after checking their range. The IDs are on the CPU, so the check does not wait for a device.

    Raises:
        UserError: An ID is out of range.
    """
    is_outside_b = (ids_b < 0) | (ids_b >= size)
    if is_outside_b.any():
        invalid_ids = ids_b[is_outside_b].unique().tolist()
        ids = ", ".join(map(str, invalid_ids[:5])) + (", ..." if len(invalid_ids) > 5 else "")
        raise UserError(
            f"{name} IDs {ids} are out of range: the loss keeps averages for {size} {name}s, with IDs 0 to {size - 1}",
            hint=f"the data have changed since the run began: {NEW_RUN}",
        )
    return ids_b


# Moving averages are stored as logarithms. At tau = 0.01, exp((s_ij - s_ii) / tau) overflows float32 if a negative's
# similarity exceeds the positive pair's by 0.89, and underflows if a sample is well separated. log u avoids both.

UNSEEN = -math.inf  # log u before the first visit


def inner_rate(
    epoch: int, *, minimum: float, schedule: GammaSchedule, num_epochs: int, convention: Convention
) -> float:
    """Return gamma, the weight of the new value in the averages, for an epoch 0, 1, ... (FastCLIP, section 5).

    Gamma is constant within an epoch. In the public code, even the constant schedule uses gamma = 1 in epoch 0.

    Args:
        minimum: Constant value, or final value of the cosine schedule.
        num_epochs: Length of the cosine schedule in epochs.
    """
    if schedule == "constant":
        return 1.0 if convention == "fast_clip" and epoch == 0 else minimum
    if epoch >= num_epochs:
        return minimum
    return 0.5 * (1 + math.cos(math.pi * epoch / num_epochs)) * (1 - minimum) + minimum


def groups(ids_B: torch.Tensor) -> torch.Tensor:
    """Return a group index for each ID, int64 [B], 0 to B - 1. Equal IDs have equal indices.

    This function does not synchronise with the device.
    """
    sorted_B, order_B = ids_B.sort(stable=True)
    is_new_B = torch.ones_like(sorted_B)
    is_new_B[1:] = (sorted_B[1:] != sorted_B[:-1]).to(is_new_B)
    return torch.empty_like(order_B).scatter_(0, order_B, is_new_B.cumsum(0) - 1)


def group_means(values_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return the mean of each value's group, [B]."""
    zeros_B = torch.zeros_like(values_B)
    sums_B = zeros_B.index_add(0, group_B, values_B)
    return (sums_B / zeros_B.index_add(0, group_B, torch.ones_like(values_B)).clamp(min=1))[group_B]


def log_group_means(log_values_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the mean of exp(log_values_B) in each value's group, [B]."""
    max_B = torch.full_like(log_values_B, -math.inf).scatter_reduce(0, group_B, log_values_B, "amax")[group_B]
    return max_B + group_means((log_values_B - max_B).exp(), group_B).log()


def average_logs(log_u_B: torch.Tensor, log_g_B: torch.Tensor, group_B: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Return log((1 - gamma) u + gamma g) (FastCLIP, eq. 1), or log g on the first visit, [B].

    If an ID occurs more than once in the global batch, g is the mean over the occurrences of the ID, so the result is
    the same for all occurrences.
    """
    log_g_B = log_group_means(log_g_B, group_B)
    if gamma == 1:
        return log_g_B
    averaged_B = torch.logaddexp(log_u_B + math.log(1 - gamma), log_g_B + math.log(gamma))
    return torch.where(log_u_B == UNSEEN, log_g_B, averaged_B)


# FastCLIP, appendix B: below this temperature, the learning rate of v3's temperature is divided by 3.
_SLOW_THRESHOLD = 0.03
_SLOW_DIVISOR = 3

# Constants for per-sample temperatures.
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # Adam's defaults, which the public code also uses
_MAX_GRADIENT, _MAX_TEMPERATURE = 5.0, 1.0  # limits in the public code
# Columns of the state after log u. The public code counts epochs instead of visits, so it needs no column for visits.
_TEMPERATURE, _MEAN, _SQUARE, _VISITS = 1, 2, 3, 4
_NUM_COLUMNS = {"paper": 5, "fast_clip": 4}


class SharedTemperature(GlobalContrast):
    """Global losses with one temperature: GCL and RGCL-g.

    GCL is the loss of SogCLR and v1, whose temperature is constant, and of v0, whose temperature is trained. RGCL-g is
    the loss of v3, whose temperature is trained. The paper trains the temperature itself. The public code trains the
    logarithm of 1 / temperature (`logit_scale`), so the optimizer takes different steps.

    Attributes:
        temperature: Temperature in the paper's convention (scalar); None in the public code's convention.
        is_slow: True while the learning rate of v3's temperature is divided by 3 (bool scalar). In the paper, this
            phase begins when the temperature falls below 0.03, and never ends. In the public code, the phase lasts as
            long as the temperature is at most 0.03.
    """

    temperature: nn.Parameter | None
    is_slow: torch.Tensor

    def __init__(self, settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World) -> None:
        super().__init__(settings, inputs=inputs, dataset=dataset, world=world)
        self._is_v0, self._is_v3 = settings.kind == "fastclip-v0", settings.kind == "fastclip-v3"
        is_trained = self._is_v0 or self._is_v3
        self.register_parameter("temperature", None)
        if self._follows_code:
            self.add_logit_scale(is_trained=is_trained)
        else:
            self.temperature = nn.Parameter(torch.tensor(settings.number("temperature")), requires_grad=is_trained)
        self.register_buffer("is_slow", torch.tensor(False))
        self._update_speed()

    def log_scale(self) -> torch.Tensor:
        """Return the detached logarithm of 1 / temperature."""
        parameter = self.logit_scale if self.temperature is None else -self.temperature.detach().log()
        assert parameter is not None
        return parameter.detach()

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """Return the shared temperature, expanded to all rows."""
        return (-self.log_scale()).exp().to(state_BC.dtype).expand(len(state_BC))

    def factors(self, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the temperature as both factors, or 1 for v0.

        The public code uses 1 for all losses except v3, because its training commands scale only the loss of v3.
        """
        is_scaled = self._is_v3 or not (self._is_v0 or self._follows_code)
        factor_B = temperature_B if is_scaled else torch.ones_like(temperature_B)
        return factor_B, factor_B

    def parameter_gradients(
        self, estimates: tuple[Estimate, Estimate], log_scale_gradient: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the gradient of the temperature (equations 8 and 10, for v0 and v3).

        In v3, one term comes from inside g, and two terms do not. The public code weights these two terms by 1/2, and
        the term from inside g by 1. The published rho is for this convention.
        """
        if not (self._is_v0 or self._is_v3):
            return {}
        temperature = (-self.log_scale()).exp().to(log_scale_gradient.dtype)
        # The term from inside g. Divide by the weight, because the public code halves only the embeddings' gradients.
        gradient = -log_scale_gradient / self.modality_weight / temperature
        if self._is_v3:
            logs_B = [estimate.log_u_B if self._follows_code else estimate.log_inner_B for estimate in estimates]
            gradient = gradient + self.modality_weight * ((logs_B[0] + logs_B[1]).mean() + 2 * self.rho)
        return {"logit_scale": -temperature * gradient} if self._follows_code else {"temperature": gradient}

    def learning_rate(self, model_lr: float) -> Scalar:
        """Return the learning rate of the temperature; for v3, a tensor, divided by 3 if `is_slow` is set."""
        temperature_lr = super().learning_rate(model_lr)
        if not self._is_v3 or isinstance(temperature_lr, torch.Tensor):
            return temperature_lr
        device = self.is_slow.device
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        rate = torch.full((), temperature_lr, dtype=dtype, device=device)
        return torch.where(self.is_slow, rate / _SLOW_DIVISOR, rate)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Clamp the temperature to at least `min_temperature` and, in the public code's convention, to at most 1."""
        super().after_step(step)
        if self.temperature is not None:
            self.temperature.clamp_(min=self._settings.min_temperature)
        self._update_speed()

    def _update_speed(self) -> None:
        temperature = (-self.log_scale()).exp()
        if self._follows_code:
            self.is_slow.copy_(temperature <= _SLOW_THRESHOLD)
        else:
            self.is_slow.logical_or_(temperature < _SLOW_THRESHOLD)


class SampleTemperature(GlobalContrast):
    """RGCL, the loss of iSogCLR and v2, with a temperature for each clip and each caption.

    The loss is the mean of tau_i (log(epsilon + g_i) + rho). A temperature is updated by AdamW without weight decay
    when its clip or caption is visited (procedure 5, lines 8 and 9; procedure 4, lines 13 to 16). The exponent of the
    bias correction is the number of visits. The public code counts epochs instead of visits: both betas are 0 in epoch
    0; in later epochs, the exponent is the epoch + 1.
    """

    def __init__(self, settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World) -> None:
        state = (settings.number("temperature"), 0.0, 0.0, 0.0)[: _NUM_COLUMNS[settings.convention] - 1]
        super().__init__(settings, inputs=inputs, dataset=dataset, world=world, extra_state=state)

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """Return the temperature stored in each row."""
        return state_BC[:, _TEMPERATURE]

    def factors(self, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the temperature of each sample (equations 6 and 7). The public code uses 1 in the gradient."""
        return temperature_B, torch.ones_like(temperature_B) if self._follows_code else temperature_B

    def extra_values(
        self, rows_bB: torch.Tensor, scale_b: torch.Tensor, log_sum_b: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return each row's mean similarity with its negatives, [b], weighted as in g."""
        return (softmax_means(rows_bB, scale_b, log_sum_b),)

    def next_state(self, modality: Modality, estimate: Estimate, step: Step) -> torch.Tensor:
        """Return the updated averages, and the temperatures after a step along the gradient in equation 9.

        If an ID occurs more than once, its average and its gradient are means over the occurrences.
        """
        (mean_B,) = estimate.extra_B
        inner_B = (estimate.log_g_B - estimate.log_inner_B).exp() * (mean_B - estimate.pair_B) / modality.temperature_B
        gradient_B = estimate.log_inner_B + self.rho - inner_B
        gradient_B = (
            gradient_B.clamp(-_MAX_GRADIENT, _MAX_GRADIENT) if self._follows_code else gradient_B / modality.num_ids
        )
        gradient_B = group_means(gradient_B, modality.group_B)
        state_BC = modality.state_BC.clone()
        state_BC[:, 0] = estimate.log_u_B
        count_B, beta1, beta2 = self._adam_steps(modality, state_BC, step)
        state_BC[:, _MEAN] = beta1 * modality.state_BC[:, _MEAN] + (1 - beta1) * gradient_B
        state_BC[:, _SQUARE] = beta2 * modality.state_BC[:, _SQUARE] + (1 - beta2) * gradient_B**2
        mean_grad_B = state_BC[:, _MEAN] / (1 - beta1**count_B)
        square_B = state_BC[:, _SQUARE] / (1 - beta2**count_B)
        rate = self._settings.effective_temperature_lr
        assert rate is not None
        max_temperature = _MAX_TEMPERATURE if self._follows_code else None
        state_BC[:, _TEMPERATURE] = (modality.temperature_B - rate * mean_grad_B / (square_B.sqrt() + _EPS)).clamp(
            self._settings.min_temperature, max_temperature
        )
        return state_BC

    def _adam_steps(self, modality: Modality, state_BC: torch.Tensor, step: Step) -> tuple[torch.Tensor, float, float]:
        """Return the exponents t + 1 of procedure 4, [B], and the two betas. Count visits in `state_BC`."""
        if not self._follows_code:
            state_BC[:, _VISITS] = modality.state_BC[:, _VISITS] + 1
            return state_BC[:, _VISITS], _BETA1, _BETA2
        epoch = math.floor(step.epoch)
        count_B = torch.full_like(modality.temperature_B, epoch + 1)
        return (count_B, _BETA1, _BETA2) if epoch else (count_B, 0.0, 0.0)
