"""Cross-entropy of the tokens of captions.

Shape suffixes: B batch of a rank, R rows of a microbatch, K captions of a clip, L tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from clipmill.train.data.batch import Batch
from clipmill.train.device.transfer import Scalar, send
from clipmill.train.distributed.pipeline import Pipeline, PipelineBatch
from clipmill.train.distributed.step import Step
from clipmill.train.losses.objective import Objective, backward_microbatches
from clipmill.train.tasks.caption.tokenizer import NO_TOKEN

_NUM_BUCKETS, _MIN_BUCKET = 8, 8


class CaptionLoss(Objective):
    """Next-token cross-entropy, mean over all tokens of the whole batch, including end tokens.

    Every token has the same weight, on whichever rank and in whichever microbatch it is; padding has none.

    Args:
        inputs: clips [R, C, T, H, W] of some rows of a batch.
        end_id: token that the decoder is given before the first one of a caption.
        label_smoothing: (Szegedy et al. 2016, section 7).
        num_before: number of tokens of the decoder before those of a caption, which are computed for each caption;
            None for a decoder without any. With a number, microbatches hold captions of similar lengths.
    """

    def __init__(
        self,
        inputs: Callable[[Batch, slice], torch.Tensor],
        *,
        end_id: int,
        label_smoothing: float,
        num_before: int | None = None,
    ) -> None:
        super().__init__()
        self._inputs, self._end_id, self._label_smoothing = inputs, end_id, label_smoothing
        self._num_before = num_before

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Add the gradients of this rank's share of the batch; return the loss of the whole batch."""
        is_bucketed = self._num_before is not None
        if is_bucketed:
            batch, step = by_length(batch), in_buckets(step, num_samples=len(batch["targets"]))
        longest = int(batch["length"].max()) if "length" in batch else None
        targets_BKL = without_padding(batch["targets"], longest=longest)
        num_samples = len(targets_BKL)
        num_tokens = step.world.sum((targets_BKL != NO_TOKEN).sum())

        def loss(logits: torch.Tensor, targets_RKL: torch.Tensor) -> torch.Tensor:
            return summed_loss(logits, targets_RKL, label_smoothing=self._label_smoothing) / num_tokens

        num_computed = 0

        def loss_of(rows: slice) -> torch.Tensor:
            nonlocal num_computed
            targets_RKL = targets_BKL[rows]
            if is_bucketed:
                targets_RKL = without_padding(targets_RKL, longest=int(batch["length"][rows].max()))
                num_computed += targets_RKL.numel() + targets_RKL[..., 0].numel() * (self._num_before or 0)
            with step.autocast():
                logits = model(self._inputs(batch, rows), shift_targets(targets_RKL, end_id=self._end_id))
            return loss(logits, targets_RKL)

        if isinstance(model, Pipeline):
            pipelined = PipelineBatch(
                inputs=partial(self._inputs, batch),
                tokens_BKL=shift_targets(targets_BKL, end_id=self._end_id),
                targets_BKL=targets_BKL,
                loss=loss,
            )
            total = model.backward(pipelined, step)
        else:
            # Losses are summands of the whole batch's, and gradients are averaged over ranks.
            losses = backward_microbatches(loss_of, num_samples=num_samples, step=step, gradient_factor=step.world.size)
            total = sum((loss.double() for loss in losses[1:]), losses[0].double())
        found: dict[str, Scalar] = {"loss": step.world.sum(total), "num_tokens": num_tokens}
        if self._num_before is not None:
            num_captions = step.world.sum((targets_BKL[..., 0] != NO_TOKEN).sum())
            num_used = num_tokens + num_captions * self._num_before
            found["padding"] = 1 - num_used / step.world.sum(torch.full_like(num_tokens, num_computed))
        return found


def by_length(batch: Batch) -> Batch:
    """The tensors of a batch in the order of the lengths of captions; of K captions, of the longest."""
    order = batch["length"].argsort(stable=True)
    found = {name: one[send(order, one.device)] for name, one in batch.items() if isinstance(one, torch.Tensor)}
    return cast(Batch, {**batch, **found})


def in_buckets(step: Step, *, num_samples: int) -> Step:
    """The step with a microbatch of at most a fraction of the samples, if there are enough of them.

    Sorted by length, each is padded to its own longest caption. The number of microbatches depends on that of the
    samples alone, as FSDP gathers weights for each on all ranks.
    """
    size = max(_MIN_BUCKET, -(-num_samples // _NUM_BUCKETS))
    return replace(step, microbatch=min(size, step.microbatch or size))


def without_padding(targets_BKL: torch.Tensor, *, longest: int | None = None) -> torch.Tensor:
    """The targets without trailing positions that are padding in all captions; at least one position remains.

    Args:
        longest: number of tokens of the longest caption. If it is left out, the host waits for the device to count.
    """
    if longest is None:
        longest = int((targets_BKL != NO_TOKEN).sum(dim=-1).max())
    return targets_BKL[..., : max(1, longest)]


def shift_targets(targets: torch.Tensor, *, end_id: int) -> torch.Tensor:
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
