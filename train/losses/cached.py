"""Gradients of a loss over more pairs than the model can hold activations for (Gao et al. 2021, GradCache).

The loss needs all embeddings at once, the towers do not: embed part by part without gradients, ask the loss for its
gradients by the embeddings, embed each part again, with the same dropout, and send its gradients back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from train.data.batch import Batch
from train.distributed.step import Step

# Clips and captions, and what else the model is to be told of them.
Inputs = Callable[[Batch], tuple[Any, ...]]
FeatureGradients = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def backward_through(model: nn.Module, inputs: Inputs, batch: Batch, step: Step, gradients: FeatureGradients) -> None:
    """Adds the gradients of a loss of all embeddings to the model's, `step.microbatch` samples at a time.

    Args:
        model: takes clips and captions, gives their embeddings, [b, E] each.
        inputs: clips and captions of a batch, as the model takes them; may draw from torch's generators.
        gradients: the loss's gradients by embeddings [b, E] of this rank's clips and captions; called once.
    """
    parts = split(batch, step.microbatch)
    if len(parts) == 1:
        with step.synced(True), step.random(0):
            embedded = _embed(model, inputs, batch, step)
            _push(embedded, gradients(*(one.detach() for one in embedded)), step)
        return
    first = []
    with torch.no_grad():
        for number, part in enumerate(parts):
            with step.random(number):
                first.append(_embed(model, inputs, part, step))
        video_bE, text_bE = (torch.cat(side) for side in zip(*first, strict=True))
        video_grad_bE, text_grad_bE = gradients(video_bE, text_bE)
    begin = 0
    for number, (part, (video_RE, _)) in enumerate(zip(parts, first, strict=True)):
        rows = slice(begin, begin + len(video_RE))
        begin = rows.stop
        with step.synced(number == len(parts) - 1), step.random(number):
            _push(_embed(model, inputs, part, step), (video_grad_bE[rows], text_grad_bE[rows]), step)


def split(batch: Batch, size: int | None) -> list[Batch]:
    """The batch in parts of `size` samples, the last perhaps smaller; None leaves it whole."""
    num_samples = len(batch["caption_id"])
    if size is None or size >= num_samples:
        return [batch]
    return [_part(batch, slice(begin, begin + size)) for begin in range(0, num_samples, size)]


def _part(batch: Batch, rows: slice) -> Batch:
    # What the whole batch has in common is a string; all else has one entry a sample.
    part = {name: value if isinstance(value, str) else value[rows] for name, value in batch.items()}  # type: ignore[index]
    return part  # type: ignore[return-value]


def _embed(model: nn.Module, inputs: Inputs, batch: Batch, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    with step.autocast():
        video_bE, text_bE = model(*inputs(batch))
    return video_bE, text_bE


def _push(embedded: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...], step: Step) -> None:
    # Scaled before it becomes half precision, in which small numbers are lost. Frozen towers get none.
    pairs = [
        (one, step.scale(gradient).to(one.dtype))
        for one, gradient in zip(embedded, gradients, strict=True)
        if one.requires_grad
    ]
    torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
