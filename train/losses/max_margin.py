"""The max-margin loss of EPIC-Kitchens' multi-instance retrieval (LaViLa's and AVION's fine-tuning)."""

import torch

from manifests.errors import UserError
from train.data.batch import Batch
from train.distributed.step import Step
from train.losses.cached import Inputs
from train.losses.contrastive import Contrast, ContrastiveObjective
from train.losses.scores import Scores, blocks
from train.losses.settings import Loss


class MaxMargin(ContrastiveObjective):
    """Mean over i != j of max(0, m + s_ij - s_ii) and max(0, m + s_ji - s_ii): 2 B (B - 1) terms.

    AVION's margin is one for all; LaViLa's adaptive one is `margin` times the relevancy of the pair.
    """

    def __init__(self, inputs: Inputs, settings: Loss) -> None:
        super().__init__(inputs, settings)
        self._margin = settings.number("margin")
        self._uses_relevancy = settings.use_relevancy

    def contrast(self, scores: Scores, batch: Batch, step: Step) -> Contrast:
        """The loss and its gradients, written out: W_ij counts the margins that s_ij breaks, 0, 1 or 2."""
        # What others' similarities must stay below.
        limit_b = scores.pair_b - self._margins(batch, scores.pair_b)
        of_clips, of_captions = _broken(scores.clips_bB, limit_b), _broken(scores.captions_bB, limit_b)
        limit_B, excess_B, count_B = scores.gather(
            limit_b, *(a + b for a, b in zip(of_clips, of_captions, strict=True))
        )
        num_terms = 2 * scores.num * (scores.num - 1)

        def weigh(scores_RB: torch.Tensor, row_1R: torch.Tensor, column_1B: torch.Tensor) -> torch.Tensor:
            by_row_RB, by_column_RB = scores_RB > row_1R[0, :, None], scores_RB > column_1B[0]
            return by_row_RB.to(scores_RB.dtype).add_(by_column_RB).div_(num_terms)

        video_grad_bE, text_grad_bE = scores.gradients(
            weigh, clips_KB=limit_B[None], captions_KB=limit_B[None], pair_B=-count_B / num_terms
        )
        return Contrast(loss=excess_B.sum() / num_terms, video_grad_bE=video_grad_bE, text_grad_bE=text_grad_bE)

    def _margins(self, batch: Batch, like_b: torch.Tensor) -> torch.Tensor:
        margin_b = torch.full_like(like_b, self._margin)
        if not self._uses_relevancy:
            return margin_b
        if "relevancy" not in batch:
            raise UserError(
                "these captions carry no relevancy (asked for by --loss.use-relevancy)",
                hint="use captions of a source that has it, or leave out --loss.use-relevancy",
            )
        return margin_b * batch["relevancy"].to(like_b)


def _broken(scores_bB: torch.Tensor, limit_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By how much each row exceeds its limit, summed, and how often, [b] each."""
    excess, count = [], []
    for rows in blocks(scores_bB):
        over_RB = (scores_bB[rows] - limit_b[rows, None]).clamp_(min=0)
        excess.append(over_RB.sum(dim=1))
        count.append((over_RB > 0).sum(dim=1).to(limit_b.dtype))
    return torch.cat(excess), torch.cat(count)
