"""Similarities of all pairs of a batch that lies on several ranks, and gradients that flow back through them.

b: pairs of this rank. B: pairs of all ranks, in the order of ranks. E: width of embeddings. R: rows of a block.

Every loss here is a function of the similarities s_ij of clip i and caption j. A rank has the rows of its own clips
and of its own captions against all captions and clips: it gathers features and numbers per pair, never gradients
(FastCLIP, section 4). What a loss must know for that is W_ij, its derivative by s_ij, and all of them have the form

    W_ij = h(s_ij, x_i) + h(s_ij, y_j)   for i != j, and a number for each pair i = j

with a few numbers x_i for each clip and y_j for each caption, which the ranks tell one another. Gradients are written
out rather than left to autograd: the matrix is passed over three times, in blocks, and not copied.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from train.distributed.world import World

# Stands for the similarity of a pair's own two halves: no loss sees it among the others, and 0 times it is 0.
NEVER = -1e4
_BLOCK = 1 << 21  # similarities that are worked on at once: they and their copies stay in a cache or a few megabytes

Weigh = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Scores:
    """Similarities of this rank's clips and captions with those of all ranks. Nothing in it has a gradient.

    Args:
        video_bE: embeddings of unit length; half precision is widened to single, as temperatures magnify rounding.
        text_bE: of their captions.

    Attributes:
        clips_bB: similarities of own clips with all captions; that of a pair's own two halves is NEVER.
        captions_bB: of own captions with all clips, likewise.
        pair_b: similarities of the own pairs.
        nearest_b: of the own clips with the nearest caption that is not theirs.
        num: B.
    """

    def __init__(self, video_bE: torch.Tensor, text_bE: torch.Tensor, world: World) -> None:
        self._video_bE, self._text_bE = _widened(video_bE), _widened(text_bE)
        self._world = world
        width = video_bE.shape[1]
        # One exchange for both.
        both_B2E = world.gather(torch.cat([self._video_bE, self._text_bE], dim=1))
        self._video_BE, self._text_BE = both_B2E[:, :width], both_B2E[:, width:]
        self.num = len(both_B2E)
        self.own = slice(world.rank * len(video_bE), (world.rank + 1) * len(video_bE))
        with _exact_products(video_bE.device):
            self.clips_bB = self._video_bE @ self._text_BE.T
            self.pair_b = self.clips_bB[:, self.own].diagonal().clone()
            self.clips_bB[:, self.own].fill_diagonal_(NEVER)
            if world.size == 1:
                self.captions_bB = self.clips_bB.T
            else:
                self.captions_bB = self._text_bE @ self._video_BE.T
                self.captions_bB[:, self.own].fill_diagonal_(NEVER)
        self.nearest_b = self.clips_bB.amax(dim=1)

    def gather(self, *numbers_b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each [b] as [B], with one exchange for all."""
        return self._world.gather(torch.stack(numbers_b, dim=1)).unbind(dim=1)

    def gradients(
        self, weigh: Weigh, *, clips_KB: torch.Tensor, captions_KB: torch.Tensor, pair_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients by own embeddings of clips and of captions, [b, E] each, whose mean over ranks is the whole one's.

        Args:
            weigh: gives W of a block [R, B] of similarities, from numbers [K, R] of its rows and [K, B] of its columns;
                it may be asked with clips or with captions as rows.
            clips_KB: numbers of all clips.
            captions_KB: of all captions.
            pair_B: W of the pairs themselves.
        """
        with _exact_products(self.pair_b.device):
            video_bE = torch.empty_like(self._video_bE)
            text_bE = torch.zeros_like(self._text_bE)
            for rows in blocks(self.clips_bB):
                weight_RB = self._weights(weigh, self.clips_bB, rows, clips_KB, captions_KB, pair_B)
                torch.mm(weight_RB, self._text_BE, out=video_bE[rows])
                if self._world.size == 1:
                    text_bE.addmm_(weight_RB.T, self._video_bE[rows])
            if self._world.size > 1:
                for rows in blocks(self.captions_bB):
                    weight_RB = self._weights(weigh, self.captions_bB, rows, captions_KB, clips_KB, pair_B)
                    torch.mm(weight_RB, self._video_BE, out=text_bE[rows])
        return video_bE.mul_(self._world.size), text_bE.mul_(self._world.size)

    def _weights(
        self,
        weigh: Weigh,
        scores_bB: torch.Tensor,
        rows: slice,
        row_KB: torch.Tensor,
        column_KB: torch.Tensor,
        pair_B: torch.Tensor,
    ) -> torch.Tensor:
        among_all = slice(self.own.start + rows.start, self.own.start + rows.stop)
        weight_RB = weigh(scores_bB[rows], row_KB[:, among_all], column_KB)
        weight_RB[:, among_all].diagonal().copy_(pair_B[among_all])
        return weight_RB

    def by_factor(self, video_grad_bE: torch.Tensor) -> torch.Tensor:
        """Derivative of a loss by a factor of all similarities, at 1, from its gradient by the own clips' embeddings.

        sum_ij W_ij s_ij = sum_i <v_i, dL/dv_i>: it costs no pass over the pairs. Its mean over ranks is the whole one.
        """
        return (self._video_bE * video_grad_bE).sum()


def blocks(scores_bB: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that are few enough to work on at once."""
    num_rows, num_columns = scores_bB.shape
    step = max(1, _BLOCK // num_columns)
    return (slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))


def log_sums(scores_bB: torch.Tensor, sharpness_b: torch.Tensor) -> torch.Tensor:
    """log sum_j exp(sharpness_i s_ij) of each row, [b]; whatever the sharpness, nothing overflows."""
    parts = [torch.logsumexp(scores_bB[rows] * sharpness_b[rows, None], dim=1) for rows in blocks(scores_bB)]
    return torch.cat(parts)


def mean_scores(scores_bB: torch.Tensor, sharpness_b: torch.Tensor, log_sum_b: torch.Tensor) -> torch.Tensor:
    """Mean of each row's similarities, weighed by exp(sharpness_i s_ij), [b]; `log_sum_b` is that of `log_sums`."""
    parts = []
    for rows in blocks(scores_bB):
        share_RB = (scores_bB[rows] * sharpness_b[rows, None]).sub_(log_sum_b[rows, None]).exp_()
        parts.append(share_RB.mul_(scores_bB[rows]).sum(dim=1))
    return torch.cat(parts)


def exponential_gradients(
    scores: Scores,
    *,
    clip_sharpness_B: torch.Tensor,
    clip_log_factor_B: torch.Tensor,
    clip_log_sum_B: torch.Tensor,
    caption_sharpness_B: torch.Tensor,
    caption_log_factor_B: torch.Tensor,
    caption_log_sum_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a loss that is a function of sum_j exp((s_ij - s_ii) / tau_i) of clips, and the same of captions.

    Its derivative by s_ij is exp(sharpness_i s_ij + log factor_i) of clip i and the like of caption j; by s_ii it is
    minus the sum of both over all others, since all differences hold s_ii. The log sums are those of `log_sums`.
    """
    pair_B = (clip_log_factor_B + clip_log_sum_B).exp() + (caption_log_factor_B + caption_log_sum_B).exp()
    return scores.gradients(
        _exponentials,
        clips_KB=torch.stack([clip_sharpness_B, clip_log_factor_B]),
        captions_KB=torch.stack([caption_sharpness_B, caption_log_factor_B]),
        pair_B=-pair_B,
    )


def _exponentials(scores_RB: torch.Tensor, row_2R: torch.Tensor, column_2B: torch.Tensor) -> torch.Tensor:
    by_row_RB = (scores_RB * row_2R[0, :, None]).add_(row_2R[1, :, None]).exp_()
    by_column_RB = (scores_RB * column_2B[0]).add_(column_2B[1]).exp_()
    return by_row_RB.add_(by_column_RB)


@contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    """Keeps half precision and TF32, which a run may choose for its model, from products of embeddings."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def _widened(features: torch.Tensor) -> torch.Tensor:
    features = features.detach()
    return features.float() if features.dtype in (torch.bfloat16, torch.float16) else features
