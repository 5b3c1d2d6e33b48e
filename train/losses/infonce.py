"""InfoNCE, CLIP's loss (van den Oord et al. 2018, eq. 4; Radford et al. 2021, figure 3), and FastCLIP's MBCL."""

import math

import torch
from torch import nn

from train.data.batch import Batch
from train.distributed.step import Step
from train.losses.cached import Inputs
from train.losses.contrastive import Contrast, ContrastiveObjective
from train.losses.scores import Scores, exponential_gradients, log_sums
from train.losses.settings import Loss


class InfoNCE(ContrastiveObjective):
    """Mean of the losses of finding each clip's caption and each caption's clip among those of the batch.

    MBCL (FastCLIP, section 3) divides by B - 1 under the logarithms and sums the two where InfoNCE averages them:
    MBCL / 2 + log(B - 1) = InfoNCE. FastCLIP's code has half of it.

    Two equal captions of a batch stay each other's negatives, as in CLIP: the least loss is then to give both the
    same share, which moves its value up and leaves the ranking of different captions alone. Retrieval is scored with
    equal captions as one (train.tasks.dual_encoder.retrieval).

    Attributes:
        logit_scale: log of 1 / temperature.
    """

    def __init__(self, inputs: Inputs, settings: Loss) -> None:
        super().__init__(inputs, settings)
        self._is_mbcl = settings.kind == "mbcl"
        self._factor = 1.0 if self._is_mbcl and settings.convention == "paper" else 0.5
        self._highest = -math.log(settings.min_temperature)
        start = torch.tensor(-math.log(settings.number("temperature")))
        self.logit_scale = nn.Parameter(start, requires_grad=not settings.freeze_temperature)

    def log_scale(self) -> torch.Tensor:
        """The parameter, detached."""
        return self.logit_scale.detach()

    def contrast(self, scores: Scores, batch: Batch, step: Step) -> Contrast:
        """The loss and its gradients, written out: W_ij = (p_ij + q_ij - 2 [i = j]) / (2 B temperature)."""
        scale = self.logit_scale.to(scores.pair_b.dtype).exp()
        scale_b, scale_B = scale.expand(len(scores.pair_b)), scale.expand(scores.num)
        pair_B, clip_log_sum_B, caption_log_sum_B = scores.gather(
            scores.pair_b, log_sums(scores.clips_bB, scale_b), log_sums(scores.captions_bB, scale_b)
        )
        clip_whole_B = torch.logaddexp(clip_log_sum_B, scale * pair_B)
        caption_whole_B = torch.logaddexp(caption_log_sum_B, scale * pair_B)
        loss = self._factor * (clip_whole_B + caption_whole_B - 2 * scale * pair_B).mean()
        if self._is_mbcl:
            loss = loss - self._factor * 2 * math.log(scores.num - 1)
        log_factor = (scale * self._factor / scores.num).log()
        video_grad_bE, text_grad_bE = exponential_gradients(
            scores,
            clip_sharpness_B=scale_B,
            clip_log_factor_B=log_factor - clip_whole_B,
            clip_log_sum_B=clip_log_sum_B,
            caption_sharpness_B=scale_B,
            caption_log_factor_B=log_factor - caption_whole_B,
            caption_log_sum_B=caption_log_sum_B,
        )
        own_grads = {"logit_scale": scores.by_factor(video_grad_bE)}
        return Contrast(loss=loss, video_grad_bE=video_grad_bE, text_grad_bE=text_grad_bE, own_grads=own_grads)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Holds the temperature between its limit and 1, as CLIP does."""
        self.logit_scale.clamp_(0, self._highest)
