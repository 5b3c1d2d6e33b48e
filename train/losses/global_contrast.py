"""Global contrastive losses: SogCLR, iSogCLR, FastCLIP v0 to v3 (Wei et al. 2024, algorithm 1, procedures 2 to 5).

B: pairs of the batch of all ranks; b: of this rank. n: clips, or captions, of the whole set.

What the paper calls g_i compares pair i with all others of the *set*. A batch estimates it; u_i, a moving average over
the visits of i, estimates it better, and the gradient is that of log(epsilon + g_i) with u_i in the place of g_i, held
constant. Clips and captions have ids, and averages, of their own: a clip may meet another caption at each visit.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from manifests.errors import UserError
from train.data.batch import Batch
from train.device.transfer import sent
from train.distributed.sharded import ShardedRows
from train.distributed.step import Step
from train.distributed.world import World
from train.losses.cached import Inputs
from train.losses.contrastive import Contrast, ContrastiveObjective
from train.losses.moving_average import UNSEEN, averaged, groups, inner_rate
from train.losses.scores import Scores, exponential_gradients, log_sums
from train.losses.settings import Loss


@dataclass(frozen=True, kw_only=True)
class GlobalSet:
    """The set that a global loss compares with.

    Attributes:
        num_clips: ids of clips are 0 ... num_clips - 1.
        num_captions: ids of captions likewise.
        num_epochs: visits of the whole set in the run.
    """

    num_clips: int
    num_captions: int
    num_epochs: float


@dataclass(frozen=True, kw_only=True)
class Side:
    """What the clips of a batch, or its captions, have of their own.

    Attributes:
        name: "clip" or "caption".
        ids_B: of all ranks' clips or captions.
        state_BC: their rows of the table before the step.
        temperature_B: theirs.
    """

    name: Literal["clip", "caption"]
    table: ShardedRows
    ids_B: torch.Tensor
    state_BC: torch.Tensor
    temperature_B: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a side knows of its g after the step's batch was averaged in.

    Attributes:
        log_sum_B: log sum_j exp(s_ij / temperature) over all others.
        log_g_B: log g_i of this batch.
        log_u_B: log of the new average.
        log_inner_B: log(epsilon + u).
    """

    log_sum_B: torch.Tensor
    log_g_B: torch.Tensor
    log_u_B: torch.Tensor
    log_inner_B: torch.Tensor


class GlobalContrast(ContrastiveObjective):
    """What the global losses share; they differ in their temperatures and in the weights of pairs.

    Attributes:
        clips: state of each clip: log u, then what a loss adds.
        captions: state of each caption likewise.
    """

    def __init__(
        self, inputs: Inputs, settings: Loss, whole: GlobalSet, *, world: World, further_state: tuple[float, ...] = ()
    ) -> None:
        super().__init__(inputs, settings)
        self._gamma_epochs = settings.gamma_epochs or max(1, round(whole.num_epochs / 2))
        self._log_epsilon = math.log(settings.epsilon) if settings.epsilon else -math.inf
        # The public code averages the losses of clips and captions, and so halves the gradient of the paper's sum.
        self.side_weight = 0.5 if settings.convention == "fast_clip" else 1.0
        self._sizes = {"clip": whole.num_clips, "caption": whole.num_captions}
        self.clips = ShardedRows(whole.num_clips, start=(UNSEEN, *further_state), world=world)
        self.captions = ShardedRows(whole.num_captions, start=(UNSEEN, *further_state), world=world)

    def temperatures(self, state_BC: torch.Tensor) -> torch.Tensor:
        """Temperature of each of B rows of a table."""
        raise NotImplementedError

    def outer(self, temperature_B: torch.Tensor) -> torch.Tensor:
        """Factor of the gradient of each log(epsilon + g)."""
        raise NotImplementedError

    def value(self, side: Side, log_inner_B: torch.Tensor) -> torch.Tensor:
        """The published loss of each of a side."""
        raise NotImplementedError

    def mean_similarities(
        self, scores: Scores, sides: tuple[Side, Side], log_sums_b: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Further numbers [b] of own clips, then of own captions, that `moved_state` needs of all ranks."""
        return ()

    def moved_state(
        self,
        side: Side,
        estimate: Estimate,
        pair_B: torch.Tensor,
        further_B: tuple[torch.Tensor, ...],
        group_B: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """New rows [B, C] of a side's table."""
        return estimate.log_u_B[:, None]

    def parameter_gradients(
        self, estimates: tuple[Estimate, Estimate], by_factor: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Gradients of own parameters; `by_factor`: this rank's derivative of the loss by a factor of similarities."""
        return {}

    def contrast(self, scores: Scores, batch: Batch, step: Step) -> Contrast:
        """Moves the averages on and computes the gradient estimators of equations 2 to 7."""
        gamma = inner_rate(
            math.floor(step.epoch),
            least=self._settings.number("gamma"),
            schedule=self._settings.effective_gamma_schedule,
            num_epochs=self._gamma_epochs,
            convention=self._settings.convention,
        )
        sides = self._sides(scores, batch, step)
        own_sums_b = tuple(
            log_sums(rows_bB, 1 / side.temperature_B[scores.own])
            for rows_bB, side in zip((scores.clips_bB, scores.captions_bB), sides, strict=True)
        )
        further_b = self.mean_similarities(scores, sides, own_sums_b)
        pair_B, *gathered_B = scores.gather(scores.pair_b, *own_sums_b, *further_b)
        estimates, values_B, terms = [], [], {}
        for number, side in enumerate(sides):
            group_B = groups(side.ids_B)
            estimate = self._estimate(side, gathered_B[number], pair_B, group_B, gamma=gamma)
            further_B = tuple(gathered_B[2 + number :: 2])
            state_BC = self.moved_state(side, estimate, pair_B, further_B, group_B, step)
            side.table.write(side.ids_B, state_BC)
            estimates.append(estimate)
            values_B.append(self.value(side, estimate.log_inner_B))
            factor_B = self.side_weight * self.outer(side.temperature_B) / side.temperature_B
            terms[f"{side.name}_sharpness_B"] = 1 / side.temperature_B
            terms[f"{side.name}_log_sum_B"] = estimate.log_sum_B
            terms[f"{side.name}_log_factor_B"] = (
                (factor_B / (scores.num * (scores.num - 1))).log() - pair_B / side.temperature_B - estimate.log_inner_B
            )
        video_grad_bE, text_grad_bE = exponential_gradients(scores, **terms)
        return Contrast(
            loss=self.side_weight * (values_B[0] + values_B[1]).mean(),
            video_grad_bE=video_grad_bE,
            text_grad_bE=text_grad_bE,
            own_grads=self.parameter_gradients((estimates[0], estimates[1]), scores.by_factor(video_grad_bE)),
            numbers={
                "temperature": (sides[0].temperature_B + sides[1].temperature_B).mean() / 2,
                "log_u": (estimates[0].log_u_B + estimates[1].log_u_B).mean() / 2,
                "gamma": gamma,
            },
        )

    def _sides(self, scores: Scores, batch: Batch, step: Step) -> tuple[Side, Side]:
        if "clip_id" not in batch:
            raise UserError(
                f"--loss.kind {self._settings.kind} needs clips that have ids, and these have none",
                hint="use --loss.kind infonce with these data",
            )
        own_b2 = torch.stack(
            [self._checked("clip", batch["clip_id"]), self._checked("caption", batch["caption_id"])], dim=1
        )
        ids_B2 = step.world.gather(sent(own_b2, scores.pair_b.device))
        return (
            self._side("clip", self.clips, ids_B2[:, 0], scores),
            self._side("caption", self.captions, ids_B2[:, 1], scores),
        )

    def _side(self, name: Literal["clip", "caption"], table: ShardedRows, ids_B: torch.Tensor, scores: Scores) -> Side:
        state_BC = table.read(ids_B).to(scores.pair_b.dtype)
        return Side(name=name, table=table, ids_B=ids_B, state_BC=state_BC, temperature_B=self.temperatures(state_BC))

    def _checked(self, name: str, ids_b: torch.Tensor) -> torch.Tensor:
        """The ids, still where the loader left them: a look at them then waits for no device."""
        size = self._sizes[name]
        is_outside_b = (ids_b < 0) | (ids_b >= size)
        if is_outside_b.any():
            outside = ids_b[is_outside_b].unique().tolist()
            named = ", ".join(str(one) for one in outside[:5]) + (", ..." if len(outside) > 5 else "")
            raise UserError(
                f"{name} ids {named}: the loss keeps a number for each of {size} {name}s, 0 to {size - 1}",
                hint="the data have changed since the run began: begin a new run, with another --out",
            )
        return ids_b

    def _estimate(
        self, side: Side, log_sum_B: torch.Tensor, pair_B: torch.Tensor, group_B: torch.Tensor, *, gamma: float
    ) -> Estimate:
        log_g_B = log_sum_B - pair_B / side.temperature_B - math.log(len(pair_B) - 1)
        log_u_B = averaged(side.state_BC[:, 0], log_g_B, group_B, gamma=gamma)
        return Estimate(
            log_sum_B=log_sum_B,
            log_g_B=log_g_B,
            log_u_B=log_u_B,
            log_inner_B=torch.logaddexp(log_u_B, torch.full_like(log_u_B, self._log_epsilon)),
        )
