"""Cross-entropy of the tokens of captions.

Shape suffixes: B batch of a rank, R rows of a microbatch, K captions of a clip, L tokens, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from clipmill.train.data.batch import Batch
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.pipeline import Pipeline, PipelineBatch
from clipmill.train.distributed.step import Step
from clipmill.train.losses.objective import Objective, backward_microbatches
from clipmill.train.tasks.caption.tokenizer import NO_TOKEN


class CaptionLoss(Objective):
    """Next-token cross-entropy, mean over all tokens of the whole batch, including end tokens.

    Every token has the same weight, on whichever rank and in whichever microbatch it is; padding has none.

    Args:
        inputs: clips [R, C, T, H, W] of some rows of a batch.
        end_id: token that the decoder is given before the first one of a caption.
        label_smoothing: (Szegedy et al. 2016, section 7).
    """

    def __init__(self, inputs: Callable[[Batch, slice], torch.Tensor], *, end_id: int, label_smoothing: float) -> None:
        super().__init__()
        self._inputs, self._end_id, self._label_smoothing = inputs, end_id, label_smoothing

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Add the gradients of this rank's share of the batch; return the loss of the whole batch."""
        longest = int(batch["length"].max()) if "length" in batch else None
        targets_BKL = without_padding(batch["targets"], longest=longest)
        num_samples = len(targets_BKL)
        num_tokens = step.world.sum((targets_BKL != NO_TOKEN).sum())

        def loss(logits: torch.Tensor, targets_RKL: torch.Tensor) -> torch.Tensor:
            return summed_loss(logits, targets_RKL, label_smoothing=self._label_smoothing) / num_tokens

        def loss_of(rows: slice) -> torch.Tensor:
            with step.autocast():
                logits = model(self._inputs(batch, rows), shifted(targets_BKL[rows], end_id=self._end_id))
            return loss(logits, targets_BKL[rows])

        if isinstance(model, Pipeline):
            pipelined = PipelineBatch(
                inputs=partial(self._inputs, batch),
                tokens_BKL=shifted(targets_BKL, end_id=self._end_id),
                targets_BKL=targets_BKL,
                loss=loss,
            )
            total = model.backward(pipelined, step)
        else:
            # Losses are summands of the whole batch's, and gradients are averaged over ranks.
            losses = backward_microbatches(loss_of, num_samples=num_samples, step=step, gradient_factor=step.world.size)
            total = sum((loss.double() for loss in losses[1:]), losses[0].double())
        return {"loss": step.world.sum(total), "num_tokens": num_tokens}


def without_padding(targets_BKL: torch.Tensor, *, longest: int | None = None) -> torch.Tensor:
    """The targets without trailing positions that are padding in all captions; at least one position remains.

    Args:
        longest: number of tokens of the longest caption. If it is left out, the host waits for the device to count.
    """
    if longest is None:
        longest = int((targets_BKL != NO_TOKEN).sum(dim=-1).max())
    return targets_BKL[..., : max(1, longest)]


def shifted(targets: torch.Tensor, *, end_id: int) -> torch.Tensor:
    """Decoder inputs for targets: each position has the token before its target, the first one the end token.

    Args:
        targets: int64 [..., L].
    """
    before = torch.roll(targets, 1, dims=-1)
    before[..., 0] = end_id
    # Positions after the end may hold any token: they have no target, and attention is causal.
    return before.masked_fill(before == NO_TOKEN, end_id)


def summed_loss(logits: torch.Tensor, targets_RKL: torch.Tensor, *, label_smoothing: float = 0.0) -> torch.Tensor:
    """Cross-entropy summed over tokens, computed in at least float32.

    Args:
        logits: [R * K, L, V].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(
        logits.flatten(0, -2),
        targets_RKL.flatten(),
        ignore_index=NO_TOKEN,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
