"""Similarities of all pairs of a batch that is spread over ranks, and gradients in closed form through them.

b: pairs of this rank. B: pairs of all ranks, in the order of ranks. E: embedding width. R: rows of a block.

A loss here is a function of the similarities s_ij of clip i and caption j. A rank has the rows of its own clips and of
its own captions against all captions and clips: it gathers embeddings and a few values per pair, never gradients
(FastCLIP, section 4). For that a loss must know the weights W_ij, its derivatives with respect to s_ij, of the form

    W_ij = h(s_ij, x_i) + h(s_ij, y_j)   for i != j, and one value for each pair i = j

with a few values x_i of each clip and y_j of each caption, which the ranks exchange. In closed form, three passes over
the matrix in blocks are enough, and it is not copied. Losses that leave their gradients to autograd use
clipmill.train.losses.contrastive.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from clipmill.train.distributed.world import World

# Stands for the similarity of a pair itself: no loss sees it among the negatives, and 0 times it is 0.
MASKED = -1e4
_BLOCK = 1 << 21  # similarities of a block: they and their copies stay in a cache or a few megabytes

# h of a block [R, B] of similarities, from K values [K, R, 1] of its rows or [K, 1, B] of its columns.
Weights = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Similarities:
    """Similarities of this rank's clips and captions with those of all ranks. Nothing in it has a gradient.

    Args:
        video_bE: embeddings of unit length; half precision is cast to float32, since temperatures magnify rounding.
        text_bE: of their captions.

    Attributes:
        video_bE, text_bE: the embeddings, at least float32.
        both_B2E: those of all ranks' clips and captions, side by side.
        clips_bB: similarities of own clips with all captions; MASKED for a pair itself.
        captions_bB: of own captions with all clips, likewise.
        world: the ranks.
        pair_b: similarities of the own pairs.
        nearest_b: of the own clips with their nearest negative.
        num_pairs: B.
        own: rows of the own pairs among those of all ranks.
    """

    def __init__(self, video_bE: torch.Tensor, text_bE: torch.Tensor, world: World) -> None:
        self.video_bE, self.text_bE = _widen(video_bE), _widen(text_bE)
        self.world = world
        width = video_bE.shape[1]
        # One exchange for both.
        self.both_B2E = world.gather(torch.cat([self.video_bE, self.text_bE], dim=1))
        self._video_BE, self._text_BE = self.both_B2E[:, :width], self.both_B2E[:, width:]
        self.num_pairs = len(self.both_B2E)
        self.own = slice(world.rank * len(video_bE), (world.rank + 1) * len(video_bE))
        with exact_products(video_bE.device):
            self.clips_bB = self.video_bE @ self._text_BE.T
            self.pair_b = self.clips_bB[:, self.own].diagonal().clone()
            self.clips_bB[:, self.own].fill_diagonal_(MASKED)
            if world.size == 1:
                self.captions_bB = self.clips_bB.T
            else:
                self.captions_bB = self.text_bE @ self._video_BE.T
                self.captions_bB[:, self.own].fill_diagonal_(MASKED)
        self.nearest_b = self.clips_bB.amax(dim=1)

    def gather(self, *values_b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gather each [b] to [B], with one exchange for all."""
        return self.world.gather(torch.stack(values_b, dim=1)).unbind(dim=1)

    def gradients(
        self, weights: Weights, *, clips_KB: torch.Tensor, captions_KB: torch.Tensor, pair_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients with respect to own embeddings, [b, E] each; averaged over ranks, those of the whole batch.

        Args:
            weights: returns h of a block of similarities; without values (K = 0) W itself. Rows are clips in some
                calls and captions in others.
            clips_KB: values x of all clips.
            captions_KB: values y of all captions.
            pair_B: W of the pairs themselves.
        """

        def block(rows_bB: torch.Tensor, rows: slice, row_KB: torch.Tensor, column_KB: torch.Tensor) -> torch.Tensor:
            among_all = slice(self.own.start + rows.start, self.own.start + rows.stop)
            weight_RB = weights(rows_bB[rows], row_KB[:, among_all, None])
            if len(row_KB):
                weight_RB.add_(weights(rows_bB[rows], column_KB[:, None]))
            weight_RB[:, among_all].diagonal().copy_(pair_B[among_all])
            return weight_RB

        with exact_products(self.pair_b.device):
            video_bE = torch.empty_like(self.video_bE)
            text_bE = torch.zeros_like(self.text_bE)
            for rows in blocks(self.clips_bB):
                weight_RB = block(self.clips_bB, rows, clips_KB, captions_KB)
                torch.mm(weight_RB, self._text_BE, out=video_bE[rows])
                if self.world.size == 1:
                    text_bE.addmm_(weight_RB.T, self.video_bE[rows])
            if self.world.size > 1:
                for rows in blocks(self.captions_bB):
                    weight_RB = block(self.captions_bB, rows, captions_KB, clips_KB)
                    torch.mm(weight_RB, self._video_BE, out=text_bE[rows])
        return video_bE.mul_(self.world.size), text_bE.mul_(self.world.size)

    def scale_gradient(self, video_grad_bE: torch.Tensor) -> torch.Tensor:
        """Derivative of a loss with respect to a factor of all similarities, at 1, from `gradients` of own clips.

        sum_ij W_ij s_ij = sum_i <v_i, dL/dv_i>, without a pass over pairs. Its mean over ranks is that of the batch.
        """
        return (self.video_bE * video_grad_bE).sum()


def blocks(similarity_bB: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that are few enough to work on at once."""
    num_rows, num_columns = similarity_bB.shape
    step = max(1, _BLOCK // num_columns)
    return (slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))


def log_sums(similarity_bB: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """log sum_j exp(scale_i s_ij) of each row, [b], without overflow at any scale."""
    parts = [torch.logsumexp(similarity_bB[rows] * scale_b[rows, None], dim=1) for rows in blocks(similarity_bB)]
    return torch.cat(parts)


def softmax_means(similarity_bB: torch.Tensor, scale_b: torch.Tensor, log_sum_b: torch.Tensor) -> torch.Tensor:
    """Mean of each row's similarities weighted by softmax(scale_i s_ij), [b]; `log_sum_b` is that of `log_sums`."""
    parts = []
    for rows in blocks(similarity_bB):
        share_RB = (similarity_bB[rows] * scale_b[rows, None]).sub_(log_sum_b[rows, None]).exp_()
        parts.append(share_RB.mul_(similarity_bB[rows]).sum(dim=1))
    return torch.cat(parts)


def exponential_gradients(
    similarities: Similarities, *, clips_3B: torch.Tensor, captions_3B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a loss that is a function of sum_j exp((s_ij - s_ii) / tau_i) of clips, and the same of captions.

    Its derivative with respect to s_ij is exp(scale_i s_ij + log factor_i) of clip i plus the same of caption j; with
    respect to s_ii it is minus the sum of both over all negatives.

    Args:
        clips_3B: scale, log factor and `log_sums` of all clips.
        captions_3B: the same of all captions.
    """
    pair_B = (clips_3B[1] + clips_3B[2]).exp() + (captions_3B[1] + captions_3B[2]).exp()
    return similarities.gradients(_exponentials, clips_KB=clips_3B[:2], captions_KB=captions_3B[:2], pair_B=-pair_B)


def _exponentials(similarity_RB: torch.Tensor, values_2: torch.Tensor) -> torch.Tensor:
    return (similarity_RB * values_2[0]).add_(values_2[1]).exp_()


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Keep autocast and TF32, which a run may use in its model, out of products of embeddings."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def _widen(features: torch.Tensor) -> torch.Tensor:
    features = features.detach()
    return features.float() if features.dtype in (torch.bfloat16, torch.float16) else features
