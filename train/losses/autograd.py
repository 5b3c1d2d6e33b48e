"""Losses as functions: a forward pass over the embeddings of all ranks, whose gradients autograd computes.

b: pairs of this rank. B: pairs of all ranks, in the order of ranks. E: embedding width.

The embeddings of all ranks are gathered with their gradient: each rank computes the loss of its own pairs, and in the
backward pass each embedding gets the sum of its gradients on all ranks. With `backward_through`, that holds for batches
in microbatches too, and the function knows of neither.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from train.data.batch import Batch
from train.distributed.step import Step
from train.distributed.world import World
from train.losses.contrastive import Contrast, ContrastiveObjective
from train.losses.settings import Loss
from train.losses.similarities import Similarities, exact_products


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Embeddings of a batch, of unit length and with gradient; float32 whatever the towers compute in.

    Attributes:
        video_bE, text_bE: this rank's clips and captions; row i of both is a pair.
        video_BE, text_BE: those of all ranks.
        target_b: row of each own pair among those of all ranks, int64.
        scale: 1 / temperature, a scalar with gradient where the temperature is trained; 1 for a loss without one.
        batch: this rank's samples: `clip_id`, `caption_id`, `relevancy` and others.
    """

    video_bE: torch.Tensor
    text_bE: torch.Tensor
    video_BE: torch.Tensor
    text_BE: torch.Tensor
    target_b: torch.Tensor
    scale: torch.Tensor
    batch: Batch


# The mean loss of this rank's pairs, a scalar; the loss of the batch is its mean over ranks.
LossFunction = Callable[[Pairs, Loss], torch.Tensor]


class AutogradObjective(ContrastiveObjective):
    """A loss of the batch, in a row of `LOSSES` as a function or, with further parameters, as a subclass of this."""

    def value(self, pairs: Pairs) -> torch.Tensor:
        """The mean loss of this rank's pairs, a scalar with gradient."""
        function: LossFunction = self._settings.spec.load()
        return function(pairs, self._settings)

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """The loss, and its gradients by autograd."""
        own = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        with torch.enable_grad(), exact_products(similarities.pair_b.device):
            video_bE, text_bE = (one.detach().requires_grad_() for one in (similarities.video_bE, similarities.text_bE))
            video_BE, text_BE = video_bE, text_bE
            if step.world.size > 1:
                both_b2E = torch.cat([video_bE, text_bE], dim=1)
                both_B2E = _AllRanks.apply(both_b2E, similarities.both_B2E, step.world, similarities.own)
                video_BE, text_BE = cast(torch.Tensor, both_B2E).split(video_bE.shape[1], dim=1)
            pairs = Pairs(
                video_bE=video_bE,
                text_bE=text_bE,
                video_BE=video_BE,
                text_BE=text_BE,
                target_b=torch.arange(similarities.own.start, similarities.own.stop, device=video_bE.device),
                scale=video_bE.new_ones(()) if self.logit_scale is None else self.logit_scale.to(video_bE.dtype).exp(),
                batch=batch,
            )
            loss = self.value(pairs)
            video_grad_bE, text_grad_bE, *own_grads = torch.autograd.grad(
                loss, [video_bE, text_bE, *own.values()], allow_unused=True, materialize_grads=True
            )
        return Contrast(
            loss=step.world.sum(loss) / step.world.size,
            video_grad_bE=video_grad_bE,
            text_grad_bE=text_grad_bE,
            own_grads=dict(zip(own, own_grads, strict=True)),
        )


class _AllRanks(torch.autograd.Function):
    """The rows of all ranks as a function of this rank's: the backward pass sums the gradients of a row over ranks."""

    @staticmethod
    def forward(ctx: Any, own_bF: torch.Tensor, all_BF: torch.Tensor, world: World, own: slice) -> torch.Tensor:
        ctx.world, ctx.own = world, own
        return all_BF.view_as(all_BF)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_BF,) = grads
        return ctx.world.sum(grad_BF)[ctx.own], None, None, None
