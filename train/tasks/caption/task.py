"""Task `train caption`: samples, model and loss of a captioner, and its evaluation during training.

A captioner consists of a video tower and a decoder that reads the tower's tokens. A sample contains one or several
captions of its clip, as tokens with an end token, padded with `NO_TOKEN`. The decoder predicts each token from the
preceding tokens and from the clip. The loss is the mean over all tokens of the batch. An evaluation generates one
caption per clip, and compares it with all captions of the clip.

Shape suffixes: B clips on this rank, R rows of a microbatch, K captions per clip, L tokens, V vocabulary, C channels,
T frames, H and W pixels.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.shards.columns import VIDEO
from clipmill.train.config.model import Tower
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.chunks import clip_query
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.data.prefetch import broadcast_batches
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.query import loader_settings, open_folder
from clipmill.train.device.transfer import Scalar, send
from clipmill.train.distributed.pipeline import LayerCost, Pipeline, PipelineBatch
from clipmill.train.distributed.world import Step, World
from clipmill.train.engine.task import ClipTask
from clipmill.train.evaluation.identity import normalisation_of
from clipmill.train.evaluation.runner import sample_stride, split_metrics
from clipmill.train.losses.objective import Objective, backward_microbatches
from clipmill.train.models.captioner import Captioner
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.java import require_java
from clipmill.train.tasks.caption.language import (
    LANGUAGE_FOLDER,
    LanguageCaptioner,
    LanguageDecoder,
    add_language_adapters,
    language_blocks,
)
from clipmill.train.tasks.caption.metrics import find_wordless, score_captions
from clipmill.train.tasks.caption.model import (
    AnyCaptioner,
    Decoder,
    build_captioner,
    decoder_facts,
    decoder_of_start,
    fit_captioner,
    open_decoder,
    start_facts,
)
from clipmill.train.tasks.caption.spec import METRIC_LABELS, CaptionerSettings, DecodingSettings, fit_decoding
from clipmill.train.tasks.caption.stages import complete_captioner, layers_of, part_of
from clipmill.train.tasks.caption.tokenizer import NO_TOKEN, TOKENIZER_FILE, CaptionTokenizer, TargetCaptions
from clipmill.train.weights.loading import LoadedWeights
from clipmill.train.weights.source import Say, Source

if TYPE_CHECKING:
    from clipmill.train.data.chunks import ClipReader
    from clipmill.train.data.mixed_samples import MixedSamples
    from clipmill.train.data.samples import Samples

    AnySamples = Samples[ClipReader] | MixedSamples


class CaptionTask(ClipTask[CaptionerSettings, "AnySamples | None", AnyCaptioner]):
    """The task of `train caption`.

    Args:
        decoder: Decoder of an existing run. Default: the decoder that the settings select.
        say: Function that prints a log line.
    """

    name = "caption"
    columns: tuple[str, ...] = (VIDEO,)

    def __init__(
        self,
        settings: CaptionerSettings,
        *,
        decoder: Decoder | None = None,
        say: Say = print,
        **arguments: Any,
    ) -> None:
        super().__init__(settings, **arguments)
        self._say = say
        self._decoder, self._is_existing_run = decoder, decoder is not None
        self._evaluation_samples: dict[str, Samples[ClipReader]] = {}
        self._captions_per_clip: str | None = None  # mean number of captions per clip, formatted for run.json

    @property
    def decoder(self) -> Decoder:
        """Tokenizer, size and weights of the decoder."""
        assert self._decoder is not None  # passed to the constructor, or opened with the samples
        return self._decoder

    def facts(self) -> dict[str, Any]:
        """Return the entries for run.json: size and initial weights of the decoder, and number of parameters."""
        parts = self.decoder
        with torch.device("meta"):
            model = self.new_model()
        captions = {} if self._captions_per_clip is None else {"captions_per_clip": self._captions_per_clip}
        return {"decoder": decoder_facts(parts), **captions, **start_facts(model, parts), **super().facts()}

    def files(self) -> dict[str, bytes]:
        """Return the files that belong to the weights: the tokenizer and, for a language model, the configuration."""
        if isinstance(self.decoder, LanguageDecoder):
            return {f"{LANGUAGE_FOLDER}/{name}": content for name, content in self.decoder.files.items()}
        return {TOKENIZER_FILE: self.decoder.tokenizer.as_json()}

    def training_set(self, world: World) -> "AnySamples":
        """Open this rank's part of the clips and captions in the training split.

        Raises:
            UserError: The split is empty, the decoder cannot be opened, the decoder's context is too short, or the
                settings of an evaluation are invalid.
        """
        settings = self._settings
        sets: list[Samples[ClipReader]] = []

        # If a tokenizer is trained, train it on the captions of all folders.
        def tokenizer(_: Iterable[str]) -> CaptionTokenizer:
            return self._tokenizer(text for samples in sets for text in samples.captions.all_texts())

        def open_folder_of(task: CaptionTask) -> "Samples[ClipReader]":
            sets.append(task._open(settings.split, world, make_tokenizer=tokenizer))
            return sets[-1]

        samples = self.open_mixture(open_folder_of)
        _ = sets[0].captions.tokenizer  # create the tokenizer now, because the decoder depends on it
        self._captions_per_clip = f"{sum(samples.captions.num_entries for samples in sets) / sum(map(len, sets)):.3g}"
        # Check the decoding settings now, so that their errors are reported before training starts.
        self.decoding()
        if settings.evaluate.every and settings.evaluate.java:
            require_java(settings.evaluate.spice_jars)
        if settings.evaluate.every:
            for data in settings.evaluated_data():
                with data.explain_errors():
                    evaluation_samples = self.with_data(data.shards).samples(data.split, world)
                self._evaluation_samples[data.name] = evaluation_samples
                self.record_evaluation(data, evaluation_samples)
        return samples

    def samples(self, split: str, world: World) -> "Samples[ClipReader]":
        """Open this rank's part of the clips and captions of a split.

        Raises:
            UserError: The split is empty, or the decoder cannot be opened.
        """
        samples = self._open(split, world, make_tokenizer=self._tokenizer)
        _ = samples.captions.tokenizer  # create the tokenizer now, because the decoder depends on it
        return samples

    def _open(
        self, split: str, world: World, *, make_tokenizer: Callable[[Iterable[str]], CaptionTokenizer]
    ) -> "Samples[ClipReader]":
        settings = self._settings
        folder = open_folder(settings, reason="train caption reads data folders")
        return open_captioned_clips(
            clip_query(settings, folder, split=split, loading=loader_settings(settings, world, device=self._device)),
            captions=settings.captions,
            make_captions=partial(
                TargetCaptions,
                make_tokenizer=make_tokenizer,
                max_tokens=settings.decoder.max_tokens,
                per_visit=settings.captions_per_visit,
            ),
        )

    def new_model(self, samples: "AnySamples | None" = None) -> AnyCaptioner:
        """Build a captioner with random weights, except for a decoder that comes with weights."""
        return build_captioner(self._settings, self.decoder, attend=self._attention.attend)

    def fit_weights(self, model: AnyCaptioner, source: Source, *, say: Say) -> LoadedWeights:
        """Fit weights to the captioner, or to its tower if the weights have no decoder."""
        return fit_captioner(model, source, allow=self._settings.init.allow, say=say)

    def fit_all_parameters(self, model: AnyCaptioner, source: Source, *, say: Say) -> LoadedWeights:
        """Fit the weights of a captioner to the tower and the decoder."""
        return fit_captioner(model, source, allow=(), say=say)

    def build_model(self, samples: "AnySamples | None" = None) -> AnyCaptioner:
        """Build a captioner with its initial weights, and freeze the parts that the settings list."""
        return super().build_model(samples)

    def adapt(self, model: AnyCaptioner, tower: Tower) -> None:
        """Add adapters to a tower. In a language model, peft adds the adapters."""
        if tower == "decoder" and isinstance(model, LanguageCaptioner):
            add_language_adapters(model.decoder, self._settings.lora)
        else:
            super().adapt(model, tower)

    def pretrained_towers(self) -> Sequence[Tower]:
        """Return the towers whose adapters need initial weights. A language model always has weights."""
        has_weights = self._settings.decoder.lm is not None
        return [tower for tower in super().pretrained_towers() if not (has_weights and tower == "decoder")]

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of the tower and the decoder."""
        blocks = super().units(model)
        return [*blocks, *language_blocks(model.decoder)] if isinstance(model, LanguageCaptioner) else blocks

    def build_objective(self, samples: "AnySamples", world: World) -> Objective:
        """Build the objective: the cross-entropy of tokens."""
        inputs: Callable[[Batch, slice], torch.Tensor] = partial(self.inputs, is_training=True)
        decoder = self.decoder
        return CaptionLoss(
            inputs,
            end_id=decoder.tokenizer.end_id,
            label_smoothing=self._settings.label_smoothing,
            num_prefix_tokens=decoder.prefix_length - 1 if isinstance(decoder, LanguageDecoder) else None,
        )

    def layers(self, model: Captioner) -> list[LayerCost]:
        """Return the layers of a captioner, for distribution over the stages of a pipeline."""
        return layers_of(model)

    def extract_layers(self, model: Captioner, layers: range) -> nn.Module:
        """Return the pipeline stage that consists of the given layers of a captioner."""
        return part_of(model, layers)

    def inputs(self, batch: Batch, rows: slice = slice(None), *, is_training: bool = False) -> torch.Tensor:
        """Return the model's input, normalised clips [B, C, T, H, W], for the given rows of a batch."""
        if "video" not in batch:
            # Pipeline stages after the first stage need only the number of clips.
            return torch.empty(len(batch["position"][rows]), 0, device=self._device)
        mean, std = normalisation_of(self._settings)
        return self.pixels(batch, rows, mean=mean, std=std, is_training=is_training)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float | list[float]]:
        """Return the loss and the caption metrics on all evaluation data, as `<name>/<metric>`."""
        all_metrics: dict[str, float | list[float]] = {}
        for name, samples in self._evaluation_samples.items():
            metrics, losses = self._score_captions(model, samples, world)
            all_metrics |= {**split_metrics(name, metrics), f"{name}/loss of each batch": losses}
        return all_metrics

    def _score_captions(
        self, model: nn.Module, samples: "Samples[ClipReader]", world: World
    ) -> tuple[dict[str, float], list[float]]:
        evaluation = self._settings.evaluate
        batches = samples.evaluation_batches(stride=sample_stride(len(samples), at_most=evaluation.max_samples))
        generated = caption_clips(
            complete_captioner(model, stages=world.stages, device=self._device),
            broadcast_batches(batches, world.stages),
            inputs=self.inputs,
            tokenizer=self.decoder.tokenizer,
            decoding=self.decoding(),
            device=self._device,
        )
        parts = world.gather_objects(generated)

        def metrics() -> dict[str, float]:
            return metrics_of(
                parts,
                references=samples.captions.texts_of,
                with_java=evaluation.java,
                spice_jars=evaluation.spice_jars,
            )

        losses = [loss for part in parts for loss in part.batch_losses]
        # Run the Java program in one process only.
        return world.first(metrics) if evaluation.java else metrics(), losses

    def decoding(self, settings: DecodingSettings | None = None) -> DecodingSettings:
        """Return the effective decoding settings, limited by the decoder's context.

        Args:
            settings: Decoding settings. Default: the settings of the run.

        Raises:
            UserError: See `fit_decoding`.
        """
        is_stored = settings is None and self._is_existing_run
        return fit_decoding(settings or self._settings.decoding, self.decoder.context_length, is_stored=is_stored)

    def _tokenizer(self, texts: Iterable[str]) -> CaptionTokenizer:
        if self._decoder is None:
            initial_decoder = decoder_of_start(self._settings)
            self._decoder = initial_decoder or open_decoder(self._settings.decoder, texts, say=self._say)
        return self._decoder.tokenizer


@dataclass
class GeneratedCaptions:
    """Generated captions of this rank's clips.

    Attributes:
        captions: Captions by index of the clip.
        summed_loss: Cross-entropy of the first references of each clip, summed over all tokens.
        num_tokens: Number of tokens of these references.
        batch_losses: Mean cross-entropy per token of each batch.
        failed: Samples that could not be decoded.
    """

    captions: dict[int, str] = field(default_factory=dict)
    summed_loss: float = 0.0
    num_tokens: int = 0
    batch_losses: list[float] = field(default_factory=list)
    failed: list[FailedSample] = field(default_factory=list)


@torch.no_grad()  # not inference_mode, because training reuses tensors that the model caches
def caption_clips(
    model: nn.Module,
    batches: Iterable[LoadedBatch],
    *,
    inputs: Callable[[Batch], torch.Tensor],
    tokenizer: CaptionTokenizer,
    decoding: DecodingSettings,
    device: torch.device,
) -> GeneratedCaptions:
    """Generate one caption per clip with a captioner in evaluation mode.

    Args:
        inputs: Function that takes a batch and returns clips [B, C, T, H, W].
    """
    captions = GeneratedCaptions()
    for loaded in batches:
        captions.failed += loaded.failed
        if not loaded.batch:
            continue
        batch = to_device(loaded.batch, device)
        clips_BCTHW = inputs(batch)
        targets_BKL = remove_padding(batch["targets"])
        logits = model(clips_BCTHW, shift_targets(targets_BKL, end_id=tokenizer.end_id))
        loss, num_tokens = summed_loss(logits, targets_BKL).item(), int((targets_BKL != NO_TOKEN).sum())
        captions.summed_loss, captions.num_tokens = captions.summed_loss + loss, captions.num_tokens + num_tokens
        captions.batch_losses += [loss / num_tokens] if num_tokens else []
        indices = batch["clip_id"].tolist()
        generated = generate_captions(model, clips_BCTHW, decoding, end_id=tokenizer.end_id, samples=indices)  # type: ignore[arg-type]
        texts = (tokenizer.text(row) for row in generated.tokens_VL.tolist())
        captions.captions |= dict(zip(indices, texts, strict=True))
    return captions


def mean_loss(parts: Sequence[GeneratedCaptions]) -> float:
    """Return the mean cross-entropy per token over the captions of all ranks.

    Raises:
        FailedWork: No clip could be decoded, or predictions are not finite.
    """
    num_tokens = sum(part.num_tokens for part in parts)
    if not num_tokens:
        raise FailedWork(f"no clip could be decoded ({sum(len(part.failed) for part in parts):,} failed)")
    loss = sum(part.summed_loss for part in parts) / num_tokens
    if not math.isfinite(loss):
        raise FailedWork("predictions are not finite: the weights have diverged")
    return loss


def metrics_of(
    parts: Sequence[GeneratedCaptions],
    *,
    references: Callable[[int], Sequence[str]],
    with_java: bool = False,
    spice_jars: Path | None = None,
) -> dict[str, float]:
    """Return the metrics of the captions of all ranks: loss, n-gram metrics, exact matches, and Java metrics.

    The result also includes the numbers of failed clips, empty captions, and clips whose references contain no words.
    A number that is 0 is omitted.

    Args:
        references: Function that takes the index of a clip and returns all its captions.
        with_java, spice_jars: Arguments of `score_captions`.

    Raises:
        FailedWork: See `mean_loss`; or a Java program failed.
        UserError: No clip has references with words.
    """
    loss = mean_loss(parts)
    captions = {str(index): text for part in parts for index, text in part.captions.items()}
    captions, all_references, wordless_clips = comparable_captions(
        captions, {name: references(int(name)) for name in captions}
    )
    scores = score_captions(captions, all_references, with_java=with_java, spice_jars=spice_jars)
    if with_java and (missing_metrics := scores.missing_reasons.keys() - ({"spice"} if spice_jars is None else set())):
        raise FailedWork(
            f"{METRIC_LABELS[min(missing_metrics)]} cannot be computed: {scores.missing_reasons[min(missing_metrics)]}"
        )
    counts = {
        "num_failed": sum(len(part.failed) for part in parts),
        "num_empty": len(scores.wordless_videos),
        "num_without_words": len(wordless_clips),
    }
    return {"loss": loss, **scores.means, **{name: float(count) for name, count in counts.items() if count}}


def comparable_captions(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], dict[str, Sequence[str]], list[str]]:
    """Select the clips whose captions can be scored.

    Returns:
        Captions and references of these clips, and the names of clips whose references have no words.

    Raises:
        UserError: No clip has references with words.
    """
    wordless_clips = find_wordless(references)
    comparable_references = {name: texts for name, texts in references.items() if name not in set(wordless_clips)}
    if wordless_clips and not comparable_references:
        raise UserError(
            f"no reference contains words ({count_noun(len(wordless_clips), 'clip')}), so no caption can be scored",
            hint="check the captions of this split: they are empty, or contain only punctuation",
        )
    return {name: captions[name] for name in comparable_references}, comparable_references, wordless_clips


_NUM_BUCKETS, _MIN_BUCKET = 8, 8


class CaptionLoss(Objective):
    """Objective of a captioner: the cross-entropy of the next token, averaged over all tokens of the global batch.

    End tokens count as tokens. All tokens have the same weight, regardless of rank and microbatch. Padding has no
    weight.

    Args:
        inputs: Function that takes a batch and a slice of its rows, and returns normalised clips [R, C, T, H, W].
        end_id: Token that precedes the first token of a caption in the decoder's input.
        label_smoothing: Label smoothing (Szegedy et al. 2016, section 7).
        num_prefix_tokens: Number of prefix tokens without a target: all but the last one, which predicts the caption's
            first token. None for a decoder without a prefix. With a prefix, captions of similar length are grouped into
            microbatches.
    """

    def __init__(
        self,
        inputs: Callable[[Batch, slice], torch.Tensor],
        *,
        end_id: int,
        label_smoothing: float,
        num_prefix_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self._inputs, self._end_id, self._label_smoothing = inputs, end_id, label_smoothing
        self._num_prefix_tokens = num_prefix_tokens

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Accumulate this rank's gradients, and return metrics of the global batch.

        Returns:
            `loss`; `num_tokens`, the number of target tokens; and, with a prefix, `padding`, the fraction of the
            decoder's positions that are padding.
        """
        is_bucketed = self._num_prefix_tokens is not None
        if is_bucketed:
            batch, step = sort_by_length(batch), bucket_step(step, num_samples=len(batch["targets"]))
        longest = int(batch["length"].max()) if "length" in batch else None
        targets_BKL = remove_padding(batch["targets"], longest=longest)
        num_samples = len(targets_BKL)
        num_tokens = step.world.sum((targets_BKL != NO_TOKEN).sum())

        def loss(logits: torch.Tensor, targets_RKL: torch.Tensor) -> torch.Tensor:
            return summed_loss(logits, targets_RKL, label_smoothing=self._label_smoothing) / num_tokens

        num_computed = 0

        def compute_loss(rows: slice) -> torch.Tensor:
            nonlocal num_computed
            targets_RKL = targets_BKL[rows]
            if is_bucketed:
                targets_RKL = remove_padding(targets_RKL, longest=int(batch["length"][rows].max()))
                num_computed += targets_RKL.numel() + targets_RKL[..., 0].numel() * (self._num_prefix_tokens or 0)
            with step.autocast():
                logits = model(self._inputs(batch, rows), shift_targets(targets_RKL, end_id=self._end_id))
            return loss(logits, targets_RKL)

        if isinstance(model, Pipeline):
            pipeline_batch = PipelineBatch(
                inputs=partial(self._inputs, batch),
                tokens_BKL=shift_targets(targets_BKL, end_id=self._end_id),
                targets_BKL=targets_BKL,
                loss=loss,
            )
            total = model.backward(pipeline_batch, step)
        else:
            # The sum of all losses is the loss of the global batch, but gradients are averaged over ranks.
            losses = backward_microbatches(
                compute_loss, num_samples=num_samples, step=step, gradient_factor=step.world.size
            )
            total = sum((loss.double() for loss in losses[1:]), losses[0].double())
        metrics: dict[str, Scalar] = {"loss": step.world.sum(total), "num_tokens": num_tokens}
        if self._num_prefix_tokens is not None:
            num_captions = step.world.sum((targets_BKL[..., 0] != NO_TOKEN).sum())
            num_used = num_tokens + num_captions * self._num_prefix_tokens
            metrics["padding"] = 1 - num_used / step.world.sum(torch.full_like(num_tokens, num_computed))
        return metrics


def sort_by_length(batch: Batch) -> Batch:
    """Sort the rows of all tensors in a batch by the length of each clip's longest caption."""
    order = batch["length"].argsort(stable=True)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return cast(Batch, {**batch, **{name: value[send(order, value.device)] for name, value in tensors.items()}})


def bucket_step(step: Step, *, num_samples: int) -> Step:
    """Return the step, with smaller microbatches if there are enough samples.

    Samples are sorted by length, and each microbatch is padded only to its longest caption. The number of microbatches
    depends only on the number of samples, so it is the same on all ranks. FSDP requires the same number, because it
    gathers the weights on all ranks for each microbatch.
    """
    size = max(_MIN_BUCKET, -(-num_samples // _NUM_BUCKETS))
    return replace(step, microbatch=min(size, step.microbatch or size))


def remove_padding(targets_BKL: torch.Tensor, *, longest: int | None = None) -> torch.Tensor:
    """Remove the trailing positions that are padding in all captions, but keep at least one position.

    Args:
        longest: Number of tokens of the longest caption. Default: count the tokens, which makes the CPU wait for the
            device.
    """
    if longest is None:
        longest = int((targets_BKL != NO_TOKEN).sum(dim=-1).max())
    return targets_BKL[..., : max(1, longest)]


def shift_targets(targets: torch.Tensor, *, end_id: int) -> torch.Tensor:
    """Return the decoder's input for each target: the previous target, or the end token for the first target.

    Args:
        targets: Target tokens, int64 [..., L].
    """
    inputs = torch.roll(targets, 1, dims=-1)
    inputs[..., 0] = end_id
    # Positions after the end token may hold any token, because they have no target and attention is causal.
    return inputs.masked_fill(inputs == NO_TOKEN, end_id)


def summed_loss(logits: torch.Tensor, targets_RKL: torch.Tensor, *, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the cross-entropy, summed over all tokens and computed in at least float32 (scalar).

    Args:
        logits: Logits [R * K, L, V].
        targets_RKL: Target tokens; padding is ignored.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(
        logits.flatten(0, -2),
        targets_RKL.flatten(),
        ignore_index=NO_TOKEN,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
