"""Cross-entropy of captions, a token at a time.

Shape suffixes: B batch of a rank, R a part of it, K captions of a clip, L tokens, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from train.data.batch import Batch
from train.device.transfer import Scalar
from train.distributed.pipeline import Pipeline, PipelineBatch
from train.distributed.step import Step
from train.losses.objective import Objective
from train.tasks.caption.tokenizer import NO_TOKEN


class CaptionLoss(Objective):
    """Mean over the tokens of the whole batch, ends included, of the cross-entropy of what follows.

    Each token counts alike, on whichever rank and in whichever part it is; padding does not.

    Args:
        inputs: clips [R, C, T, H, W] of some rows of a batch.
        end_id: token that a decoder is given before a caption's first.
        label_smoothing: part of a target that is spread over the vocabulary (Szegedy et al. 2016, section 7).
    """

    def __init__(self, inputs: Callable[[Batch, slice], torch.Tensor], *, end_id: int, label_smoothing: float) -> None:
        super().__init__()
        self._inputs, self._end_id, self._label_smoothing = inputs, end_id, label_smoothing

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Adds the gradients of this rank's share of the batch; says the whole batch's loss."""
        longest = int(batch["length"].max()) if "length" in batch else None
        targets_BKL = without_padding(batch["targets"], longest=longest)
        num_samples = len(targets_BKL)
        num_tokens = step.world.sum((targets_BKL != NO_TOKEN).sum())
        size = min(step.microbatch or num_samples, num_samples)
        if isinstance(model, Pipeline):
            total = model.backward(self._pipelined(batch, targets_BKL, num_tokens=num_tokens), step)
            return {"loss": step.world.sum(total), "num_tokens": num_tokens}
        total = torch.zeros((), dtype=torch.float64, device=targets_BKL.device)
        for part, begin in enumerate(range(0, num_samples, size)):
            rows = slice(begin, min(begin + size, num_samples))
            with step.synced(rows.stop == num_samples), step.random(part):
                with step.autocast():
                    logits = model(self._inputs(batch, rows), shifted(targets_BKL[rows], end_id=self._end_id))
                loss = summed_loss(logits, targets_BKL[rows], label_smoothing=self._label_smoothing) / num_tokens
                # Gradients are averaged over ranks, and this is a part of a sum.
                step.scale(loss * step.world.size).backward()
            total += loss.detach()
        return {"loss": step.world.sum(total), "num_tokens": num_tokens}

    def _pipelined(self, batch: Batch, targets_BKL: torch.Tensor, *, num_tokens: torch.Tensor) -> PipelineBatch:
        def loss(logits: torch.Tensor, targets_RKL: torch.Tensor) -> torch.Tensor:
            return summed_loss(logits, targets_RKL, label_smoothing=self._label_smoothing) / num_tokens

        return PipelineBatch(
            inputs=partial(self._inputs, batch),
            tokens_BKL=shifted(targets_BKL, end_id=self._end_id),
            targets_BKL=targets_BKL,
            loss=loss,
        )


def without_padding(targets_BKL: torch.Tensor, *, longest: int | None = None) -> torch.Tensor:
    """The targets without the last places, where no caption has a token; one place at least.

    Args:
        longest: tokens of the longest caption. Counted when left out, for which the host waits for the device.
    """
    if longest is None:
        longest = int((targets_BKL != NO_TOKEN).sum(dim=-1).max())
    return targets_BKL[..., : max(1, longest)]


def shifted(targets: torch.Tensor, *, end_id: int) -> torch.Tensor:
    """What the decoder is given at each place to say the target there: the token before it, the end at the first.

    Args:
        targets: int64 [..., L].
    """
    before = torch.roll(targets, 1, dims=-1)
    before[..., 0] = end_id
    # Behind a caption's end anything will do: no target there, and attention is causal.
    return before.masked_fill(before == NO_TOKEN, end_id)


def summed_loss(logits: torch.Tensor, targets_RKL: torch.Tensor, *, label_smoothing: float = 0.0) -> torch.Tensor:
    """Sum over tokens of the cross-entropy, in float32 at least.

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
