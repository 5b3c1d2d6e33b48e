"""Base classes for contrastive objectives. An objective computes the loss of a global batch and its gradients.

The global batch contains the pairs of all ranks, in the order of the ranks.

Shape suffixes: b pairs on this rank, B pairs in the global batch, E embedding width, F = 2 E, K values
per clip or caption, R pairs in a microbatch or rows in a block.

The loss needs the embeddings of the entire global batch at the same time, but not the activations of all samples
(GradCache, Gao et al. 2021). The first pass embeds the microbatches without a graph, and computes the gradients of
the loss with respect to the embeddings. The second pass embeds each microbatch again, with the same dropout, and
backpropagates the microbatch's slice of these gradients.

The gradients with respect to the embeddings are computed by autograd (`AutogradObjective`) or in closed form
(`Similarities`). A closed form requires a loss that is a function of the similarities s_ij of clip i and caption j.
Each rank computes the similarities between its clips and all captions, and between its captions and all clips. The
ranks gather embeddings and a few values per pair, but never gradients (FastCLIP, section 4). The loss must therefore
provide the weights W_ij, which are the derivatives of the loss with respect to s_ij, in the form

    W_ij = h(s_ij, x_i) + h(s_ij, y_j)   for i != j, and a separate value for each positive pair (i = j)

Here, x_i stands for a few values per clip, and y_j for a few values per caption. The ranks exchange these values. The
closed form makes at most three passes over each similarity matrix, block by block, and does not copy the matrix.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from clipmill.train.data.batch import Batch
from clipmill.train.device.transfer import Scalar, keep_buffers
from clipmill.train.distributed.world import Step, World
from clipmill.train.losses.objective import Objective
from clipmill.train.losses.settings import LOSSES, Loss

# Value that replaces the similarity of a positive pair, so that no loss treats the pair as a negative. The value is
# finite, because 0 times infinity would be NaN.
MASK_VALUE = -1e4
# Number of similarities per block. A block (8 MB in float32) and its temporary copies fit in the CPU cache.
_BLOCK = 1 << 21

# The function h of the module docstring. Its arguments are a block of similarities [R, B], and K values per row
# [K, R, 1] or per column [K, 1, B].
Weights = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Similarities:
    """Similarities between this rank's clips and all captions, and between this rank's captions and all clips.

    All captions and clips belong to the global batch. The similarities are not tracked by autograd.

    Args:
        video_bE: Unit-length embeddings of this rank's clips. Half-precision embeddings are cast to float32, because
            dividing by the temperature magnifies rounding errors.
        text_bE: Unit-length embeddings of the clips' captions, cast like `video_bE`.
        world: Ranks that share the global batch.

    Attributes:
        video_bE, text_bE: Embeddings of this rank's clips and captions, at least float32.
        pairs_B2E: Embeddings of the global batch. Each row is a clip embedding followed by its caption embedding.
        video_to_text_bB: Similarities of this rank's clips with all captions; MASK_VALUE for positive pairs.
        text_to_video_bB: Similarities of this rank's captions with all clips; MASK_VALUE for positive pairs.
        world: Ranks that share the global batch.
        pair_b: Similarities of this rank's positive pairs.
        nearest_b: Similarity between each of this rank's clips and its nearest negative.
        num_pairs: Number of pairs in the global batch, B.
        local_rows: Rows of the global batch that contain this rank's pairs.
    """

    def __init__(self, video_bE: torch.Tensor, text_bE: torch.Tensor, world: World) -> None:
        self.video_bE, self.text_bE = _widen(video_bE), _widen(text_bE)
        self.world = world
        width = video_bE.shape[1]
        # Gather clips and captions in a single exchange.
        self.pairs_B2E = world.gather(torch.cat([self.video_bE, self.text_bE], dim=1))
        self._video_BE, self._text_BE = self.pairs_B2E[:, :width], self.pairs_B2E[:, width:]
        self.num_pairs = len(self.pairs_B2E)
        self.local_rows = slice(world.rank * len(video_bE), (world.rank + 1) * len(video_bE))
        with exact_products(video_bE.device):
            self.video_to_text_bB = self.video_bE @ self._text_BE.T
            self.pair_b = self.video_to_text_bB[:, self.local_rows].diagonal().clone()
            self.video_to_text_bB[:, self.local_rows].fill_diagonal_(MASK_VALUE)
            if world.size == 1:
                self.text_to_video_bB = self.video_to_text_bB.T
            else:
                self.text_to_video_bB = self.text_bE @ self._video_BE.T
                self.text_to_video_bB[:, self.local_rows].fill_diagonal_(MASK_VALUE)
        self.nearest_b = self.video_to_text_bB.amax(dim=1)

    def gather(self, *values_b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gather tensors of shape [b] from all ranks into tensors of shape [B], in a single exchange."""
        return self.world.gather(torch.stack(values_b, dim=1)).unbind(dim=1)

    def gradients(
        self, weights: Weights, *, clips_KB: torch.Tensor, captions_KB: torch.Tensor, pair_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients with respect to the embeddings of this rank's clips and captions, [b, E] each.

        The average of these gradients over the ranks is the gradient of the loss of the global batch.

        Args:
            weights: Function that returns h for a block of similarities, or W if h takes no values (K = 0). The rows
                of a block are clips in some calls and captions in others.
            clips_KB: Values x of all clips.
            captions_KB: Values y of all captions.
            pair_B: Weights W of the positive pairs.
        """

        def block(rows_bB: torch.Tensor, rows: slice, row_KB: torch.Tensor, column_KB: torch.Tensor) -> torch.Tensor:
            global_rows = slice(self.local_rows.start + rows.start, self.local_rows.start + rows.stop)
            weight_RB = weights(rows_bB[rows], row_KB[:, global_rows, None])
            if len(row_KB):
                weight_RB.add_(weights(rows_bB[rows], column_KB[:, None]))
            weight_RB[:, global_rows].diagonal().copy_(pair_B[global_rows])
            return weight_RB

        with exact_products(self.pair_b.device):
            video_bE = torch.empty_like(self.video_bE)
            text_bE = torch.zeros_like(self.text_bE)
            for rows in blocks(self.video_to_text_bB):
                weight_RB = block(self.video_to_text_bB, rows, clips_KB, captions_KB)
                torch.mm(weight_RB, self._text_BE, out=video_bE[rows])
                if self.world.size == 1:
                    text_bE.addmm_(weight_RB.T, self.video_bE[rows])
            if self.world.size > 1:
                for rows in blocks(self.text_to_video_bB):
                    weight_RB = block(self.text_to_video_bB, rows, captions_KB, clips_KB)
                    torch.mm(weight_RB, self._video_BE, out=text_bE[rows])
        return video_bE.mul_(self.world.size), text_bE.mul_(self.world.size)

    def log_scale_gradient(self, video_grad_bE: torch.Tensor) -> torch.Tensor:
        """Return the derivative of the loss with respect to the logarithm of a factor that scales all similarities.

        The derivative is sum_ij W_ij s_ij = sum_i <v_i, dL/dv_i>, so no pass over the pairs is needed. The average of
        this value over the ranks is the derivative for the global batch.

        Args:
            video_grad_bE: Gradient with respect to the embeddings of this rank's clips, from `gradients`.
        """
        return (self.video_bE * video_grad_bE).sum()


def blocks(similarity_bB: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows that divide the matrix into blocks of about `_BLOCK` similarities."""
    num_rows, num_columns = similarity_bB.shape
    step = max(1, _BLOCK // num_columns)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def log_sums(similarity_bB: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """Return log sum_j exp(scale_i s_ij) for each row, [b]. The result cannot overflow, regardless of the scale."""
    parts = [torch.logsumexp(similarity_bB[rows] * scale_b[rows, None], dim=1) for rows in blocks(similarity_bB)]
    return torch.cat(parts)


def softmax_means(similarity_bB: torch.Tensor, scale_b: torch.Tensor, log_sum_b: torch.Tensor) -> torch.Tensor:
    """Return the mean of the similarities in each row, weighted by softmax_j(scale_i s_ij), [b].

    Args:
        log_sum_b: Results of `log_sums` for the same rows and scales.
    """
    parts = []
    for rows in blocks(similarity_bB):
        weight_RB = (similarity_bB[rows] * scale_b[rows, None]).sub_(log_sum_b[rows, None]).exp_()
        parts.append(weight_RB.mul_(similarity_bB[rows]).sum(dim=1))
    return torch.cat(parts)


def exponential_gradients(
    similarities: Similarities, *, clips_3B: torch.Tensor, captions_3B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a loss with respect to this rank's clip and caption embeddings, [b, E] each.

    The loss must be a function of sum_j exp((s_ij - s_ii) / tau_i) for each clip, and of the corresponding sum over
    clips for each caption. The derivative of the loss with respect to s_ij must be exp(scale_i s_ij + log factor_i) for
    clip i, plus the same expression for caption j. The derivative with respect to s_ii is minus the sum of both
    expressions over all negatives.

    Args:
        clips_3B: Scale, log factor and `log_sums` of each clip.
        captions_3B: Scale, log factor and `log_sums` of each caption.
    """
    pair_B = (clips_3B[1] + clips_3B[2]).exp() + (captions_3B[1] + captions_3B[2]).exp()
    return similarities.gradients(
        lambda similarity_RB, values_2: (similarity_RB * values_2[0]).add_(values_2[1]).exp_(),
        clips_KB=clips_3B[:2],
        captions_KB=captions_3B[:2],
        pair_B=-pair_B,
    )


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Disable autocast and TF32 inside the block, so that matrix products have full precision."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(previous)


def _widen(features: torch.Tensor) -> torch.Tensor:
    features = features.detach()
    return features.float() if features.dtype in (torch.bfloat16, torch.float16) else features


# Function that converts a batch to the model's arguments, and may draw random numbers from torch's generators.
Inputs = Callable[[Batch], tuple[Any, ...]]
FeatureGradients = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_TOLERANCE = 1e-5  # maximum rounding difference between a clip's similarities to two equal captions


@dataclass(frozen=True, kw_only=True)
class DatasetSize:
    """Size of the training set. Global losses store an average, and perhaps a temperature, for each clip and caption.

    Attributes:
        num_clips: Number of clips. Clip IDs range from 0 to num_clips - 1.
        num_captions: Number of captions. Caption IDs range from 0 to num_captions - 1.
        num_epochs: Number of times that the run iterates over the training set.
    """

    num_clips: int
    num_captions: int
    num_epochs: float


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Loss of the global batch, and its gradients on this rank.

    The mean of the gradients over all ranks is the gradient of the loss.

    Attributes:
        loss: Loss of the global batch (scalar).
        video_grad_bE: Gradient with respect to the embeddings of this rank's clips.
        text_grad_bE: Gradient with respect to the embeddings of this rank's captions.
        parameter_grads: Gradients with respect to the objective's parameters, by parameter name.
        metrics: Scalars to log. Their values are the same on all ranks.
    """

    loss: torch.Tensor
    video_grad_bE: torch.Tensor
    text_grad_bE: torch.Tensor
    parameter_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, Scalar] = field(default_factory=dict)


class ContrastiveObjective(Objective):
    """Base class for objectives with a contrastive loss over pairs of clips and captions.

    The model must return unit-length embeddings of clips and captions, [b, E] each.

    Args:
        inputs: Function that converts a batch to the model's arguments.
        dataset: Size of the training set; None if the loss stores no values for clips and captions.
        world: Ranks that share the global batch and the state of the loss.

    Attributes:
        logit_scale: Logarithm of 1 / temperature, as in CLIP. None for losses without a temperature. Global losses
            define their temperatures themselves.
    """

    logit_scale: nn.Parameter | None
    # Class that gathers the embeddings and computes similarities. `train bench` replaces this class to compare two
    # implementations.
    exchange: type[Similarities] = Similarities

    def __init__(self, settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World) -> None:
        super().__init__()
        self._inputs = inputs
        self._settings = settings
        self.register_parameter("logit_scale", None)
        if "temperature" in settings.spec.settings and not settings.spec.is_global:
            self.add_logit_scale(is_trained=not settings.freeze_temperature)

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """Return the loss of the global batch and its gradients, and update stored values of clips and captions.

        The caller must have disabled autograd.
        """
        raise NotImplementedError

    def add_logit_scale(self, *, is_trained: bool) -> None:
        """Add the parameter `logit_scale`, initialised from the temperature in the settings."""
        start = torch.tensor(-math.log(self._settings.number("temperature")))
        self.logit_scale = nn.Parameter(start, requires_grad=is_trained)

    def log_scale(self) -> torch.Tensor | None:
        """Return the detached logarithm of 1 / temperature; None for a loss without a temperature."""
        return None if self.logit_scale is None else self.logit_scale.detach()

    def learning_rate(self, model_lr: float) -> Scalar:
        """Return the learning rate of the temperature.

        Args:
            model_lr: Current learning rate of the model, used unless the settings define a rate for the temperature.
        """
        return self._settings.effective_temperature_lr or model_lr

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Clamp the temperature to [`min_temperature`, 1], as open_clip does."""
        if self.logit_scale is not None:
            self.logit_scale.clamp_(0, -math.log(self._settings.min_temperature))

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Backpropagate the loss of the global batch, and accumulate the gradients of all parameters.

        Returns:
            Metrics of the step: `loss`; `batch_accuracy`, the fraction of clips whose nearest caption is correct;
            `temperature` before the step, if the loss has a temperature; and the loss's additional metrics.
        """
        metrics: dict[str, Scalar] = {}

        def gradients(video_bE: torch.Tensor, text_bE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                similarities = self.exchange(video_bE, text_bE, step.world)
                contrast = self.contrast(similarities, batch, step)
                for name, gradient in contrast.parameter_grads.items():
                    if (parameter := self.get_parameter(name)).requires_grad:
                        gradient = step.scale(gradient).to(parameter.dtype)
                        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                # If another pair has the same caption, both captions are equally near, and the clip counts as correct.
                is_correct_b = similarities.pair_b >= similarities.nearest_b - _TOLERANCE
                num_correct = step.world.sum(is_correct_b.to(contrast.loss.dtype).sum())
                metrics["loss"] = contrast.loss
                metrics["batch_accuracy"] = num_correct / similarities.num_pairs
                if (log_scale := self.log_scale()) is not None:
                    metrics["temperature"] = (-log_scale).exp()
                metrics.update(contrast.metrics)
            return contrast.video_grad_bE, contrast.text_grad_bE

        backward_through(model, self._inputs, batch, step, gradients)
        return metrics


# GradCache


def backward_through(model: nn.Module, inputs: Inputs, batch: Batch, step: Step, gradients: FeatureGradients) -> None:
    """Backpropagate a loss over all embeddings through the model, `step.microbatch` samples at a time.

    Args:
        gradients: Function that takes this rank's clip and caption embeddings, [b, E] each, and returns the gradients
            with respect to the embeddings. The function is called once.
    """

    def embed(microbatch: Batch, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with step.autocast():
            video_RE, text_RE = model(*inputs(microbatch), **options)
        return video_RE, text_RE

    microbatches = split(batch, step.microbatch)
    if len(microbatches) == 1:
        with step.sync_context(True), step.seed_generators(0):
            embeddings = embed(batch)
            _backpropagate(embeddings, gradients(*(embedding_bE.detach() for embedding_bE in embeddings)), step)
        return
    first_pass = []
    with torch.no_grad():
        # Restore the buffers after the first pass, so that only the second pass updates them.
        with keep_buffers(model):
            for index, microbatch in enumerate(microbatches):
                with step.seed_generators(index):
                    first_pass.append(embed(microbatch))
        video_bE, text_bE = (torch.cat(embeddings_RE) for embeddings_RE in zip(*first_pass, strict=True))
        grads_bE = gradients(video_bE, text_bE)
    sizes = [len(video_RE) for video_RE, _ in first_pass]
    grads_RE = zip(*(grad_bE.split(sizes) for grad_bE in grads_bE), strict=True)
    # The second pass skips a frozen tower. (A wrapper for data parallelism stores the model in `module`.)
    has_frozen_tower = getattr(getattr(model, "module", model), "has_frozen_tower", False)
    options = {"skips_frozen": True} if has_frozen_tower else {}
    for index, (microbatch, grads) in enumerate(zip(microbatches, grads_RE, strict=True)):
        with step.sync_context(index == len(microbatches) - 1), step.seed_generators(index):
            _backpropagate(embed(microbatch, **options), grads, step)


def split(batch: Batch, size: int | None) -> list[Batch]:
    """Split a batch into microbatches of `size` samples; None returns the batch as a single microbatch.

    The last microbatch may be smaller.
    """
    num_samples = len(batch["caption_id"])
    if size is None or size >= num_samples:
        return [batch]
    # A string applies to all samples. All other values have one entry per sample.
    return [
        {
            name: value if isinstance(value, str) else value[start : start + size]  # type: ignore[misc,index]
            for name, value in batch.items()
        }
        for start in range(0, num_samples, size)
    ]


def _backpropagate(embeddings: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...], step: Step) -> None:
    # Scale the gradients before casting them, because small values underflow in half precision. Skip frozen towers,
    # whose embeddings do not require gradients.
    pairs = [
        (embedding, step.scale(gradient).to(embedding.dtype))
        for embedding, gradient in zip(embeddings, gradients, strict=True)
        if embedding.requires_grad
    ]
    torch.autograd.backward([embedding for embedding, _ in pairs], [gradient for _, gradient in pairs])


# Losses that are defined as functions and differentiated by autograd.
#
# The embeddings of all ranks are gathered by a differentiable operation. Each rank computes the loss of its pairs, and
# the backward pass sums the gradients of each embedding over all ranks. `backward_through` splits the batch into
# microbatches. The loss function therefore handles neither ranks nor microbatches.


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Unit-length embeddings of a batch, tracked by autograd.

    The dtype is at least float32, regardless of the precision of the towers.

    Attributes:
        video_bE, text_bE: Embeddings of this rank's clips and captions. Row i of both tensors is a pair.
        video_BE, text_BE: Embeddings of all clips and captions in the global batch.
        target_b: Row of each of this rank's pairs in the global batch (int64).
        scale: 1 / temperature (scalar), tracked by autograd if the temperature is trained; 1 for a loss without a
            temperature.
        batch: Batch of this rank, with `clip_id`, `caption_id`, `relevancy` and other fields.
    """

    video_bE: torch.Tensor
    text_bE: torch.Tensor
    video_BE: torch.Tensor
    text_BE: torch.Tensor
    target_b: torch.Tensor
    scale: torch.Tensor
    batch: Batch


# Function that returns the mean loss over this rank's pairs (scalar). The mean over the ranks is the loss of the global
# batch.
LossFunction = Callable[[Pairs, Loss], torch.Tensor]


class AutogradObjective(ContrastiveObjective):
    """Objective whose gradients are computed by autograd.

    The loss function comes from a row of `LOSSES`. A loss with additional parameters is defined as a subclass instead.
    """

    def value(self, pairs: Pairs) -> torch.Tensor:
        """Return the mean loss over this rank's pairs (scalar, tracked by autograd).

        Raises:
            TypeError: The loss function did not return a scalar tensor that requires a gradient.
        """
        function: LossFunction = self._settings.spec.load()
        loss = function(pairs, self._settings)
        if not isinstance(loss, torch.Tensor) or loss.shape or not loss.requires_grad:
            kind = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TypeError(f"the loss {self._settings.kind} returned {kind}, not a scalar tensor with a gradient")
        return loss

    def contrast(self, similarities: Similarities, batch: Batch, step: Step) -> Contrast:
        """Return the loss of the global batch, and its gradients from autograd."""
        parameters = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        with torch.enable_grad(), exact_products(similarities.pair_b.device):
            video_bE, text_bE = (
                embedding_bE.detach().requires_grad_() for embedding_bE in (similarities.video_bE, similarities.text_bE)
            )
            video_BE, text_BE = video_bE, text_bE
            if step.world.size > 1:
                pairs_b2E = torch.cat([video_bE, text_bE], dim=1)
                pairs_B2E = _DifferentiableGather.apply(pairs_b2E, similarities.pairs_B2E, step.world)
                video_BE, text_BE = cast(torch.Tensor, pairs_B2E).split(video_bE.shape[1], dim=1)
            pairs = Pairs(
                video_bE=video_bE,
                text_bE=text_bE,
                video_BE=video_BE,
                text_BE=text_BE,
                target_b=torch.arange(
                    similarities.local_rows.start, similarities.local_rows.stop, device=video_bE.device
                ),
                scale=video_bE.new_ones(()) if self.logit_scale is None else self.logit_scale.to(video_bE.dtype).exp(),
                batch=batch,
            )
            loss = self.value(pairs)
            video_grad_bE, text_grad_bE, *parameter_grads = torch.autograd.grad(
                loss, [video_bE, text_bE, *parameters.values()], allow_unused=True, materialize_grads=True
            )
        return Contrast(
            loss=step.world.sum(loss) / step.world.size,
            video_grad_bE=video_grad_bE,
            text_grad_bE=text_grad_bE,
            parameter_grads=dict(zip(parameters, parameter_grads, strict=True)),
        )


class _DifferentiableGather(torch.autograd.Function):
    """Differentiable gather. The backward pass sums the gradients of each row over all ranks.

    The forward pass returns `global_BF`, which the caller has already gathered.
    """

    @staticmethod
    def forward(ctx: Any, local_bF: torch.Tensor, global_BF: torch.Tensor, world: World) -> torch.Tensor:
        ctx.world = world
        return global_BF.view_as(global_BF)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_BF,) = grads
        return ctx.world.reduce_scatter(grad_BF), None, None


def build_contrast(
    settings: Loss, *, inputs: Inputs, dataset: DatasetSize | None, world: World
) -> ContrastiveObjective:
    """Build the objective that the `--loss.*` settings select.

    Args:
        inputs: Function that converts a batch to the model's arguments.
        dataset: Size of the training set; required by global losses, and ignored by other losses.
        world: Ranks that share the global batch.

    Raises:
        KeyError: The value of `--loss.kind` is not the name of a loss.
        UnusablePart: The package that provides the loss cannot be imported.
    """
    loss = LOSSES[settings.kind].load()
    objective: type[ContrastiveObjective] = loss if isinstance(loss, type) else AutogradObjective
    return objective(settings, inputs=inputs, dataset=dataset, world=world)
