"""Contrastive losses that compare only the pairs of a batch: InfoNCE, MBCL (FastCLIP), SigLIP and max-margin.

The function `info_nce` is the reference implementation of InfoNCE, and is differentiated by autograd. Training uses the
classes, which compute gradients in closed form, block by block. The classes do not store the logits and probabilities
that autograd would store, and take half the CPU time (docs/losses.md).

Shape suffixes: b pairs on this rank, B pairs in the global batch (all ranks), E embedding width, R rows in a block.
"""

import math

import torch
from torch import nn
from torch.nn import functional

from clipmill.manifests.errors import UserError
from clipmill.train.data.batch import Batch
from clipmill.train.distributed.world import Step, World
from clipmill.train.losses.contrastive import (
    Contrast,
    ContrastiveObjective,
    DatasetSize,
    Inputs,
    Pairs,
    Similarities,
    blocks,
    exponential_gradients,
    log_sums,
)
from clipmill.train.losses.settings import Loss

_INITIAL_BIAS = -10.0  # from Zhai et al. 2023: most pairs are negative, so a low bias keeps the first gradients small


def info_nce(pairs: Pairs, settings: Loss) -> torch.Tensor:
    """Return InfoNCE, the loss of CLIP (van den Oord et al. 2018, eq. 4; Radford et al. 2021, figure 3).

    InfoNCE is the mean of two cross-entropies: one identifies each clip's caption among all captions in the global
    batch, and the other one identifies each caption's clip among all clips. The class `InfoNCE` computes the same value
    and gradients (tests/train/losses/test_closed_forms.py).

    If a batch contains two equal captions, each caption is a negative for the clip of the other caption, as in CLIP.
    The loss is then lowest if both captions have the same probability. Equal captions raise the minimum of the loss,
    but do not affect how different captions are ranked. Retrieval metrics count equal captions as one caption
    (clipmill.train.tasks.dual_encoder.metrics).

    Returns:
        Mean loss over this rank's pairs (scalar).
    """
    clip_logits_bB = pairs.scale * pairs.video_bE @ pairs.text_BE.T
    caption_logits_bB = pairs.scale * pairs.text_bE @ pairs.video_BE.T
    clip_loss = functional.cross_entropy(clip_logits_bB, pairs.target_b)
    caption_loss = functional.cross_entropy(caption_logits_bB, pairs.target_b)
    return (clip_loss + caption_loss) / 2


class InfoNCE(ContrastiveObjective):
    """InfoNCE and MBCL, with gradients in closed form.

    The gradient of InfoNCE is dL/ds_ij = (p_ij + q_ij - 2 [i = j]) / (2 B temperature), where p_ij is the softmax of
    clip i's similarities over all captions, and q_ij is the softmax of caption j's similarities over all clips. The
    first pass over the similarities computes the logarithms of the softmax denominators, B for p and B for q. The
    second pass computes the gradients.

    MBCL (FastCLIP, section 3) divides by B - 1 inside the logarithms, and adds the two cross-entropies instead of
    averaging them: MBCL / 2 + log(B - 1) = InfoNCE. FastCLIP's code computes half of MBCL.
    """

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """Return the loss of the global batch and its gradients."""
        assert self.logit_scale is not None
        is_mbcl, num_pairs = self._settings.kind == "mbcl", similarities.num_pairs
        factor = 1.0 if is_mbcl and self._settings.convention == "paper" else 0.5
        scale = self.logit_scale.to(similarities.pair_b.dtype).exp()
        scale_b, scale_B = scale.expand(len(similarities.pair_b)), scale.expand(num_pairs)
        pair_B, clip_log_sum_B, caption_log_sum_B = similarities.gather(
            similarities.pair_b,
            log_sums(similarities.video_to_text_bB, scale_b),
            log_sums(similarities.text_to_video_bB, scale_b),
        )
        # `log_sums` covers only negatives, as the gradients of positive pairs require. A softmax denominator also
        # includes the positive pair.
        clip_denominator_B = torch.logaddexp(clip_log_sum_B, scale * pair_B)
        caption_denominator_B = torch.logaddexp(caption_log_sum_B, scale * pair_B)
        loss = factor * (clip_denominator_B + caption_denominator_B - 2 * scale * pair_B).mean()
        if is_mbcl:
            loss = loss - factor * 2 * math.log(num_pairs - 1)
        log_factor = (scale * factor / num_pairs).log()
        video_grad_bE, text_grad_bE = exponential_gradients(
            similarities,
            clips_3B=torch.stack([scale_B, log_factor - clip_denominator_B, clip_log_sum_B]),
            captions_3B=torch.stack([scale_B, log_factor - caption_denominator_B, caption_log_sum_B]),
        )
        parameter_grads = {"logit_scale": similarities.log_scale_gradient(video_grad_bE)}
        return Contrast(
            loss=loss, video_grad_bE=video_grad_bE, text_grad_bE=text_grad_bE, parameter_grads=parameter_grads
        )


class SigLIP(ContrastiveObjective):
    """SigLIP, the pairwise sigmoid loss (Zhai et al. 2023, algorithm 1), with gradients in closed form.

    The loss is -1/B sum_ij log sigmoid(z_ij (t s_ij + b)), where z_ij is 1 for positive pairs and -1 for negatives.

    Attributes:
        logit_bias: Bias b (scalar).
        logit_scale: Logarithm of t (scalar).
    """

    def __init__(self, settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World) -> None:
        super().__init__(settings, inputs=inputs, dataset=dataset, world=world)
        self.logit_bias = nn.Parameter(torch.tensor(_INITIAL_BIAS))

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """Return the loss of the global batch and its gradients.

        For a negative, dL/ds_ij = t sigmoid(t s_ij + b) / B.
        """
        assert self.logit_scale is not None
        dtype, num_pairs = similarities.pair_b.dtype, similarities.num_pairs
        scale, bias = self.logit_scale.to(dtype).exp(), self.logit_bias.to(dtype)
        negative_loss, negative_sum = torch.zeros_like(bias), torch.zeros_like(bias)
        for rows in blocks(similarities.video_to_text_bB):
            logits_RB = similarities.video_to_text_bB[rows] * scale + bias
            negative_loss += functional.softplus(logits_RB).sum()
            negative_sum += logits_RB.sigmoid_().sum()
        (pair_B,) = similarities.gather(similarities.pair_b)
        miss_B = (-(scale * pair_B + bias)).sigmoid()
        negative_loss, negative_sum = step.world.sum(torch.stack([negative_loss, negative_sum]))

        def weights(similarity_RB: torch.Tensor, values_0: torch.Tensor) -> torch.Tensor:
            return (similarity_RB * scale).add_(bias).sigmoid_().mul_(scale / num_pairs)

        no_values_0B = pair_B.new_empty((0, num_pairs))
        video_grad_bE, text_grad_bE = similarities.gradients(
            weights, clips_KB=no_values_0B, captions_KB=no_values_0B, pair_B=-scale / num_pairs * miss_B
        )
        return Contrast(
            loss=(negative_loss + functional.softplus(-(scale * pair_B + bias)).sum()) / num_pairs,
            video_grad_bE=video_grad_bE,
            text_grad_bE=text_grad_bE,
            parameter_grads={
                "logit_scale": similarities.log_scale_gradient(video_grad_bE),
                "logit_bias": (negative_sum - miss_B.sum()) / num_pairs,
            },
            metrics={"bias": bias.detach().clone()},
        )


class MaxMargin(ContrastiveObjective):
    """Max-margin loss, which LaViLa and AVION use to fine-tune for multi-instance retrieval on EPIC-KITCHENS-100.

    The loss is the mean of the 2 B (B - 1) terms max(0, m + s_ij - s_ii) and max(0, m + s_ji - s_ii) for all i != j.
    AVION's margin m is constant. LaViLa's adaptive margin is `margin` times the relevancy of the positive pair.
    """

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """Return the loss of the global batch and its gradients.

        For a negative, dL/ds_ij is the number of margins that s_ij violates, divided by 2 B (B - 1).

        Raises:
            UserError: The margin is adaptive, but the captions have no relevancy.
        """
        margin_b = torch.full_like(similarities.pair_b, self._settings.number("margin"))
        if self._settings.use_relevancy:
            if "relevancy" not in batch:
                raise UserError(
                    "--loss.use-relevancy needs the relevancy of each caption, but these captions have no relevancies",
                    hint="use captions from a source with relevancies, or omit --loss.use-relevancy",
                    flags=("--loss.use-relevancy",),
                )
            margin_b = margin_b * batch["relevancy"].to(similarities.pair_b)
        # Highest similarity at which a negative does not contribute to the loss.
        limit_b = similarities.pair_b - margin_b
        excess_and_count_2b = _violations(similarities.video_to_text_bB, limit_b)
        excess_and_count_2b = excess_and_count_2b + _violations(similarities.text_to_video_bB, limit_b)
        limit_B, excess_B, count_B = similarities.gather(limit_b, *excess_and_count_2b)
        num_terms = 2 * similarities.num_pairs * (similarities.num_pairs - 1)

        def weights(similarity_RB: torch.Tensor, limits_1: torch.Tensor) -> torch.Tensor:
            return (similarity_RB > limits_1[0]).to(similarity_RB.dtype).div_(num_terms)

        video_grad_bE, text_grad_bE = similarities.gradients(
            weights, clips_KB=limit_B[None], captions_KB=limit_B[None], pair_B=-count_B / num_terms
        )
        return Contrast(loss=excess_B.sum() / num_terms, video_grad_bE=video_grad_bE, text_grad_bE=text_grad_bE)


def _violations(similarity_bB: torch.Tensor, limit_b: torch.Tensor) -> torch.Tensor:
    """Return two values per row, [2, b]: the sum of the excesses over the limit, and the number of excesses."""
    parts = []
    for rows in blocks(similarity_bB):
        excess_RB = (similarity_bB[rows] - limit_b[rows, None]).clamp_(min=0)
        parts.append(torch.stack([excess_RB.sum(dim=1), (excess_RB > 0).sum(dim=1).to(limit_b.dtype)]))
    return torch.cat(parts, dim=1)
