"""Contrastive objectives: towers embed pairs of clips and captions, a loss compares them all, gradients flow back.

b: pairs of this rank. B: pairs of all ranks. E: embedding width. R: pairs of a microbatch.

The loss needs all embeddings of a batch at once, the towers need not hold the activations of all (GradCache, Gao et al.
2021): embed the microbatches without a graph, compute the gradients of the loss with respect to the embeddings, embed
each microbatch again, with the same dropout, and backpropagate its part of the gradients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from clipmill.train.data.batch import Batch
from clipmill.train.device.transfer import Scalar, keep_buffers
from clipmill.train.distributed.step import Step
from clipmill.train.distributed.world import World
from clipmill.train.losses.objective import Objective
from clipmill.train.losses.registry import LOSSES
from clipmill.train.losses.settings import Loss
from clipmill.train.losses.similarities import Similarities, exact_products

# Turns a batch into the arguments of the model; may draw from torch's generators.
Inputs = Callable[[Batch], tuple[Any, ...]]
FeatureGradients = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_TOLERANCE = 1e-5  # similarities with equal captions differ by rounding


@dataclass(frozen=True, kw_only=True)
class DatasetSize:
    """What a global loss must know of the training set.

    Attributes:
        num_clips: clip ids are 0 ... num_clips - 1.
        num_captions: caption ids likewise.
        num_epochs: passes over the set in the whole run.
    """

    num_clips: int
    num_captions: int
    num_epochs: float


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Loss of a batch and its gradients. Averaged over ranks, the gradients are those of the whole batch.

    Attributes:
        loss: of the whole batch, a scalar.
        video_grad_bE: with respect to the embeddings of this rank's clips.
        text_grad_bE: of this rank's captions.
        own_grads: with respect to the objective's parameters, by name.
        metrics: scalars for the log, equal on all ranks.
    """

    loss: torch.Tensor
    video_grad_bE: torch.Tensor
    text_grad_bE: torch.Tensor
    own_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, Scalar] = field(default_factory=dict)


class ContrastiveObjective(Objective):
    """A loss of pairs. The model returns embeddings of clips and of captions, [b, E] each, of unit length.

    Args:
        inputs: turns a batch into the arguments of the model.
        dataset, world: for losses with state per sample.

    Attributes:
        logit_scale: log of 1 / temperature, as CLIP stores it. Each loss that takes `temperature` has it, except for
            global losses with another parameter; None in others.
    """

    logit_scale: nn.Parameter | None
    # How ranks exchange embeddings and gradients; `train bench` compares it with another one.
    exchange: type[Similarities] = Similarities

    def __init__(self, settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World) -> None:
        super().__init__()
        self._inputs = inputs
        self._settings = settings
        self.register_parameter("logit_scale", None)
        if "temperature" in settings.spec.settings and not settings.spec.is_global:
            self.add_logit_scale(is_trained=not settings.freeze_temperature)

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """Loss and gradients of a batch; updates state per sample. Called without grad mode."""
        raise NotImplementedError

    def add_logit_scale(self, *, is_trained: bool) -> None:
        """Add `logit_scale`, at the temperature of the settings."""
        start = torch.tensor(-math.log(self._settings.number("temperature")))
        self.logit_scale = nn.Parameter(start, requires_grad=is_trained)

    def log_scale(self) -> torch.Tensor | None:
        """log of 1 / temperature, detached; None for a loss without a temperature."""
        return None if self.logit_scale is None else self.logit_scale.detach()

    def learning_rate(self, scheduled: float) -> Scalar:
        """The temperature's own rate, where it has one."""
        return self._settings.own_temperature_lr or scheduled

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Clamp the temperature between its lower bound and 1, as CLIP does."""
        if self.logit_scale is not None:
            self.logit_scale.clamp_(0, -math.log(self._settings.min_temperature))

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Add the gradients of the loss over the batches of all ranks.

        Returns:
            loss; batch_accuracy: share of clips with no caption nearer than their own; temperature before the step,
            where the loss has one; and the metrics of the loss.
        """
        metrics: dict[str, Scalar] = {}

        def gradients(video_bE: torch.Tensor, text_bE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                similarities = self.exchange(video_bE, text_bE, step.world)
                contrast = self.contrast(similarities, batch, step)
                for name, gradient in contrast.own_grads.items():
                    _add_gradient(self.get_parameter(name), step.scale(gradient))
                # A caption equal to the clip's own is as near, and counts as correct.
                is_right_b = similarities.pair_b >= similarities.nearest_b - _TOLERANCE
                num_right = step.world.sum(is_right_b.to(contrast.loss.dtype).sum())
                metrics["loss"] = contrast.loss
                metrics["batch_accuracy"] = num_right / similarities.num_pairs
                if (log_scale := self.log_scale()) is not None:
                    metrics["temperature"] = (-log_scale).exp()
                metrics.update(contrast.metrics)
            return contrast.video_grad_bE, contrast.text_grad_bE

        backward_through(model, self._inputs, batch, step, gradients)
        return metrics


def _add_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    if not parameter.requires_grad:
        return
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


# GradCache


def backward_through(model: nn.Module, inputs: Inputs, batch: Batch, step: Step, gradients: FeatureGradients) -> None:
    """Add the gradients of a loss of all embeddings to the model's, `step.microbatch` samples at a time.

    Args:
        gradients: returns those with respect to the embeddings [b, E] of this rank's clips and captions; called once.
    """

    def embed(part: Batch, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with step.autocast():
            video_RE, text_RE = model(*inputs(part), **options)
        return video_RE, text_RE

    parts = split(batch, step.microbatch)
    if len(parts) == 1:
        with step.synced(True), step.seed_generators(0):
            embedded = embed(batch)
            _push(embedded, gradients(*(one.detach() for one in embedded)), step)
        return
    first = []
    with torch.no_grad():
        # The second pass begins with the same buffers, and leaves those of one pass over each microbatch.
        with keep_buffers(model):
            for number, part in enumerate(parts):
                with step.seed_generators(number):
                    first.append(embed(part))
        video_bE, text_bE = (torch.cat(side) for side in zip(*first, strict=True))
        grads_bE = gradients(video_bE, text_bE)
    grads_RE = zip(*(grad_bE.split([len(video_RE) for video_RE, _ in first]) for grad_bE in grads_bE), strict=True)
    # A frozen tower has no part in the second forward pass. (A model with replicas is in its wrapper's `module`.)
    skips = getattr(getattr(model, "module", model), "has_frozen_tower", False)
    options = {"only_trained": True} if skips else {}
    for number, (part, grads) in enumerate(zip(parts, grads_RE, strict=True)):
        with step.synced(number == len(parts) - 1), step.seed_generators(number):
            _push(embed(part, **options), grads, step)


def split(batch: Batch, size: int | None) -> list[Batch]:
    """Split a batch into microbatches of `size` samples, the last one possibly smaller; None keeps it whole."""
    num_samples = len(batch["caption_id"])
    if size is None or size >= num_samples:
        return [batch]
    return [_part(batch, slice(begin, begin + size)) for begin in range(0, num_samples, size)]


def _part(batch: Batch, rows: slice) -> Batch:
    # Strings apply to the whole batch; everything else has one entry per sample.
    part = {name: value if isinstance(value, str) else value[rows] for name, value in batch.items()}  # type: ignore[index]
    return part  # type: ignore[return-value]


def _push(embedded: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...], step: Step) -> None:
    # Scaled before the cast to half precision, in which small values underflow. Frozen towers get none.
    pairs = [
        (one, step.scale(gradient).to(one.dtype))
        for one, gradient in zip(embedded, gradients, strict=True)
        if one.requires_grad
    ]
    torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])


# Losses as functions: a forward pass over the embeddings of all ranks, whose gradients autograd computes.
#
# b: pairs of this rank. B: pairs of all ranks, in the order of ranks. E: embedding width.
#
# The embeddings of all ranks are gathered with their gradient: each rank computes the loss of its own pairs, and in
# the backward pass each embedding gets the sum of its gradients on all ranks. With `backward_through`, that holds for
# batches in microbatches too, and the function knows of neither.


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
        loss = function(pairs, self._settings)
        if not isinstance(loss, torch.Tensor) or loss.shape or not loss.requires_grad:
            got = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TypeError(f"the loss {self._settings.kind} returned {got}, not a scalar tensor with a gradient")
        return loss

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """The loss, and its gradients by autograd."""
        own = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        with torch.enable_grad(), exact_products(similarities.pair_b.device):
            video_bE, text_bE = (one.detach().requires_grad_() for one in (similarities.video_bE, similarities.text_bE))
            video_BE, text_BE = video_bE, text_bE
            if step.world.size > 1:
                both_b2E = torch.cat([video_bE, text_bE], dim=1)
                both_B2E = _AllRanks.apply(both_b2E, similarities.both_B2E, step.world)
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
    def forward(ctx: Any, own_bF: torch.Tensor, all_BF: torch.Tensor, world: World) -> torch.Tensor:
        ctx.world = world
        return all_BF.view_as(all_BF)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_BF,) = grads
        return ctx.world.reduce_scatter(grad_BF), None, None


def build_contrast(
    settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World
) -> ContrastiveObjective:
    """Build the objective of `--loss.*`.

    Args:
        inputs: turns a batch into the arguments of the model.
        dataset: what a global loss keeps state for; other losses ignore it.

    Raises:
        KeyError: there is no loss of that kind.
        UnusablePart: its package cannot be imported.
    """
    loss = LOSSES[settings.kind].load()
    objective: type[ContrastiveObjective] = loss if isinstance(loss, type) else AutogradObjective
    return objective(settings, inputs=inputs, dataset=dataset, world=world)
