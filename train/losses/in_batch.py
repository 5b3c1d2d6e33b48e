"""Losses of a batch, with gradients in closed form: InfoNCE and FastCLIP's MBCL, SigLIP, max-margin."""

import math

import torch
from torch import nn
from torch.nn import functional

from clipmill.manifests.errors import UserError
from clipmill.train.data.batch import Batch
from clipmill.train.distributed.step import Step
from clipmill.train.distributed.world import World
from clipmill.train.losses.contrastive import (
    Contrast,
    ContrastiveObjective,
    DatasetSize,
    Inputs,
    Similarities,
    blocks,
    exponential_gradients,
    log_sums,
)
from clipmill.train.losses.settings import Loss

_INITIAL_BIAS = -10.0  # Zhai et al. 2023: near the log of the share of true pairs, for small gradients at first


class InfoNCE(ContrastiveObjective):
    """InfoNCE, CLIP's loss (van den Oord et al. 2018, eq. 4; Radford et al. 2021, figure 3), and MBCL.

    The mean cross-entropy of each clip's caption and of each caption's clip among those of the batch.

    MBCL (FastCLIP, section 3) divides by B - 1 inside the logarithms, and sums the two halves that InfoNCE averages:
    MBCL / 2 + log(B - 1) = InfoNCE. FastCLIP's code has half of it.

    Two equal captions of a batch are each other's negatives, as in CLIP. The loss is then lowest where both have equal
    probability, which raises its value but does not change the ranking of different captions. Retrieval counts equal
    captions as one (clipmill.train.tasks.dual_encoder.metrics).
    """

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """The loss and its gradients: W_ij = (p_ij + q_ij - 2 [i = j]) / (2 B temperature)."""
        assert self.logit_scale is not None
        is_mbcl, num_pairs = self._settings.kind == "mbcl", similarities.num_pairs
        factor = 1.0 if is_mbcl and self._settings.convention == "paper" else 0.5
        scale = self.logit_scale.to(similarities.pair_b.dtype).exp()
        scale_b, scale_B = scale.expand(len(similarities.pair_b)), scale.expand(num_pairs)
        pair_B, clip_log_sum_B, caption_log_sum_B = similarities.gather(
            similarities.pair_b, log_sums(similarities.clips_bB, scale_b), log_sums(similarities.captions_bB, scale_b)
        )
        clip_whole_B = torch.logaddexp(clip_log_sum_B, scale * pair_B)
        caption_whole_B = torch.logaddexp(caption_log_sum_B, scale * pair_B)
        loss = factor * (clip_whole_B + caption_whole_B - 2 * scale * pair_B).mean()
        if is_mbcl:
            loss = loss - factor * 2 * math.log(num_pairs - 1)
        log_factor = (scale * factor / num_pairs).log()
        video_grad_bE, text_grad_bE = exponential_gradients(
            similarities,
            clips_3B=torch.stack([scale_B, log_factor - clip_whole_B, clip_log_sum_B]),
            captions_3B=torch.stack([scale_B, log_factor - caption_whole_B, caption_log_sum_B]),
        )
        own_grads = {"logit_scale": similarities.scale_gradient(video_grad_bE)}
        return Contrast(loss=loss, video_grad_bE=video_grad_bE, text_grad_bE=text_grad_bE, own_grads=own_grads)


class SigLIP(ContrastiveObjective):
    """-1/B sum_ij log sigmoid(z_ij (t s_ij + b)), z = 1 for pairs, else -1 (Zhai et al. 2023, algorithm 1).

    Attributes:
        logit_bias: b; `logit_scale` is log t.
    """

    def __init__(self, settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World) -> None:
        super().__init__(settings, inputs=inputs, dataset=dataset, world=world)
        self.logit_bias = nn.Parameter(torch.tensor(_INITIAL_BIAS))

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """The loss and its gradients: W_ij = t sigmoid(t s_ij + b) / B of a negative."""
        assert self.logit_scale is not None
        dtype, num_pairs = similarities.pair_b.dtype, similarities.num_pairs
        scale, bias = self.logit_scale.to(dtype).exp(), self.logit_bias.to(dtype)
        negative_loss, negative_sum = torch.zeros_like(bias), torch.zeros_like(bias)
        for rows in blocks(similarities.clips_bB):
            logits_RB = similarities.clips_bB[rows] * scale + bias
            negative_loss += functional.softplus(logits_RB).sum()
            negative_sum += logits_RB.sigmoid_().sum()
        (pair_B,) = similarities.gather(similarities.pair_b)
        miss_B = (-(scale * pair_B + bias)).sigmoid()
        negative_loss, negative_sum = step.world.sum(torch.stack([negative_loss, negative_sum]))

        def weights(similarity_RB: torch.Tensor, values_0: torch.Tensor) -> torch.Tensor:
            return (similarity_RB * scale).add_(bias).sigmoid_().mul_(scale / num_pairs)

        none_0B = pair_B.new_empty((0, num_pairs))
        video_grad_bE, text_grad_bE = similarities.gradients(
            weights, clips_KB=none_0B, captions_KB=none_0B, pair_B=-scale / num_pairs * miss_B
        )
        return Contrast(
            loss=(negative_loss + functional.softplus(-(scale * pair_B + bias)).sum()) / num_pairs,
            video_grad_bE=video_grad_bE,
            text_grad_bE=text_grad_bE,
            own_grads={
                "logit_scale": similarities.scale_gradient(video_grad_bE),
                "logit_bias": (negative_sum - miss_B.sum()) / num_pairs,
            },
            metrics={"bias": bias.detach().clone()},
        )


class MaxMargin(ContrastiveObjective):
    """Max-margin loss of EPIC-Kitchens' multi-instance retrieval, as LaViLa and AVION fine-tune with it.

    The mean over i != j of max(0, m + s_ij - s_ii) and max(0, m + s_ji - s_ii): 2 B (B - 1) terms. AVION's margin is a
    constant; LaViLa's adaptive margin is `margin` times the relevancy of the pair.
    """

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """The loss and its gradients: W_ij is the number of margins that s_ij violates, 0, 1 or 2."""
        # The highest similarity of a negative that costs nothing.
        limit_b = similarities.pair_b - self._margins(batch, similarities.pair_b)
        of_both_2b = _violations(similarities.clips_bB, limit_b) + _violations(similarities.captions_bB, limit_b)
        limit_B, excess_B, count_B = similarities.gather(limit_b, *of_both_2b)
        num_terms = 2 * similarities.num_pairs * (similarities.num_pairs - 1)

        def weights(similarity_RB: torch.Tensor, limits_1: torch.Tensor) -> torch.Tensor:
            return (similarity_RB > limits_1[0]).to(similarity_RB.dtype).div_(num_terms)

        video_grad_bE, text_grad_bE = similarities.gradients(
            weights, clips_KB=limit_B[None], captions_KB=limit_B[None], pair_B=-count_B / num_terms
        )
        return Contrast(loss=excess_B.sum() / num_terms, video_grad_bE=video_grad_bE, text_grad_bE=text_grad_bE)

    def _margins(self, batch: Batch, like_b: torch.Tensor) -> torch.Tensor:
        margin_b = torch.full_like(like_b, self._settings.number("margin"))
        if not self._settings.use_relevancy:
            return margin_b
        if "relevancy" not in batch:
            raise UserError(
                "these captions carry no relevancy (asked for by --loss.use-relevancy)",
                hint="use captions of a source that has it, or leave out --loss.use-relevancy",
                flags=("--loss.use-relevancy",),
            )
        return margin_b * batch["relevancy"].to(like_b)


def _violations(similarity_bB: torch.Tensor, limit_b: torch.Tensor) -> torch.Tensor:
    """Return the sum of what the similarities of each row exceed its limit by, and their number, [2, b]."""
    parts = []
    for rows in blocks(similarity_bB):
        over_RB = (similarity_bB[rows] - limit_b[rows, None]).clamp_(min=0)
        parts.append(torch.stack([over_RB.sum(dim=1), (over_RB > 0).sum(dim=1).to(limit_b.dtype)]))
    return torch.cat(parts, dim=1)
