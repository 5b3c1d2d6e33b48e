"""SigLIP: each pair of a clip and a caption is judged by itself (Zhai et al. 2023, section 3.1, algorithm 1)."""

import math

import torch
from torch import nn
from torch.nn import functional

from train.data.batch import Batch
from train.distributed.step import Step
from train.losses.cached import Inputs
from train.losses.contrastive import Contrast, ContrastiveObjective
from train.losses.scores import Scores, blocks
from train.losses.settings import Loss

_INITIAL_BIAS = -10.0  # Zhai et al. 2023: near log of the share of true pairs, so that the first steps are calm


class SigLIP(ContrastiveObjective):
    """-1/B sum_ij log sigmoid(z_ij (t s_ij + b)), z = 1 for pairs and -1 for all others.

    Attributes:
        logit_scale: log t.
        logit_bias: b.
    """

    def __init__(self, inputs: Inputs, settings: Loss) -> None:
        super().__init__(inputs, settings)
        self._highest = -math.log(settings.min_temperature)
        start = torch.tensor(-math.log(settings.number("temperature")))
        self.logit_scale = nn.Parameter(start, requires_grad=not settings.freeze_temperature)
        self.logit_bias = nn.Parameter(torch.tensor(_INITIAL_BIAS))

    def log_scale(self) -> torch.Tensor:
        """The parameter, detached."""
        return self.logit_scale.detach()

    def contrast(self, scores: Scores, batch: Batch, step: Step) -> Contrast:
        """The loss and its gradients, written out: W_ij = t sigmoid(t s_ij + b) / B of what is not a pair."""
        dtype = scores.pair_b.dtype
        scale, bias = self.logit_scale.to(dtype).exp(), self.logit_bias.to(dtype)
        others, falsely = torch.zeros_like(bias), torch.zeros_like(bias)
        for rows in blocks(scores.clips_bB):
            logits_RB = scores.clips_bB[rows] * scale + bias
            others += functional.softplus(logits_RB).sum()
            falsely += logits_RB.sigmoid_().sum()
        (pair_B,) = scores.gather(scores.pair_b)
        miss_B = (-(scale * pair_B + bias)).sigmoid()
        others, falsely = step.world.sum(torch.stack([others, falsely]))

        def weigh(scores_RB: torch.Tensor, row_KR: torch.Tensor, column_KB: torch.Tensor) -> torch.Tensor:
            return (scores_RB * scale).add_(bias).sigmoid_().mul_(scale / scores.num)

        nothing_0B = pair_B.new_empty((0, scores.num))
        video_grad_bE, text_grad_bE = scores.gradients(
            weigh, clips_KB=nothing_0B, captions_KB=nothing_0B, pair_B=-scale / scores.num * miss_B
        )
        return Contrast(
            loss=(others + functional.softplus(-(scale * pair_B + bias)).sum()) / scores.num,
            video_grad_bE=video_grad_bE,
            text_grad_bE=text_grad_bE,
            own_grads={
                "logit_scale": scores.by_factor(video_grad_bE),
                "logit_bias": (falsely - miss_B.sum()) / scores.num,
            },
            numbers={"bias": bias.detach().clone()},
        )

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Holds the temperature between its limit and 1."""
        self.logit_scale.clamp_(0, self._highest)
