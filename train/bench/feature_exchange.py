"""OpenCLIP's exchange of a contrastive loss, the baseline of FastCLIP's tables 15 to 22; `train bench` alone uses it.

Embeddings are gathered with their gradient: each rank computes the losses of its own clips and captions as anchors,
and with them gradients of the embeddings of all ranks, which REDUCE_SCATTER sums: 2 B E numbers, where the exchange of
training (clipmill.train.losses.similarities) sends a few for each pair. Loss and gradients are the same.
"""

import torch

from clipmill.train.losses.similarities import Similarities, Weights, blocks, exact_products


class FeatureExchange(Similarities):
    """Similarities whose gradients are summed over ranks, not computed from gathered values."""

    def gradients(
        self, weights: Weights, *, clips_KB: torch.Tensor, captions_KB: torch.Tensor, pair_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Similarities.gradients`; the ranks' `pair_B` and values of other ranks' pairs are not used."""
        width = self.video_bE.shape[1]
        videos, texts = slice(0, width), slice(width, None)
        grad_B2E = torch.zeros_like(self.both_B2E)
        sides = ((self.clips_bB, clips_KB, videos, texts), (self.captions_bB, captions_KB, texts, videos))
        with exact_products(self.pair_b.device):
            for rows_bB, values_KB, own, other in sides:
                for rows in blocks(rows_bB):
                    among_all = slice(self.own.start + rows.start, self.own.start + rows.stop)
                    weight_RB = weights(rows_bB[rows], values_KB[:, among_all, None])
                    if not len(values_KB):  # W itself, of which each side has half
                        weight_RB.div_(2)
                    weight_RB[:, among_all].diagonal().copy_(pair_B[among_all] / 2)
                    grad_B2E[among_all, own].addmm_(weight_RB, self.both_B2E[:, other])
                    grad_B2E[:, other].addmm_(weight_RB.T, self.both_B2E[among_all, own])
        grad_b2E = self.world.reduce_scatter(grad_B2E).mul_(self.world.size)
        return grad_b2E[:, videos], grad_b2E[:, texts]
