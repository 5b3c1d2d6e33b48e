"""Train a captioner: a video tower, and a decoder that attends to its tokens.

Shape suffixes: B batch, C channels, T frames, H and W pixels.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from clipmill.shards.columns import VIDEO
from clipmill.train.config.tuning import Tower
from clipmill.train.data.batch import Batch
from clipmill.train.data.chunks import clip_query
from clipmill.train.data.inputs import open_folder
from clipmill.train.data.prefetch import batches_on_all_stages
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.query import loader_settings
from clipmill.train.distributed.stages import LayerCost
from clipmill.train.distributed.world import World
from clipmill.train.engine.task import ClipTask
from clipmill.train.evaluation.identity import normalisation_of
from clipmill.train.evaluation.runner import every_for, split_metrics
from clipmill.train.losses.objective import Objective
from clipmill.train.models.captioner import Captioner
from clipmill.train.tasks.caption.decoder import (
    Decoder,
    decoder_facts,
    decoder_files,
    decoder_of_start,
    open_decoder,
    start_facts,
)
from clipmill.train.tasks.caption.generation import captions_of, metrics_of
from clipmill.train.tasks.caption.language.model import LanguageCaptioner, add_language_adapters, language_blocks
from clipmill.train.tasks.caption.language.opening import LanguageDecoder
from clipmill.train.tasks.caption.metrics.java import require_java
from clipmill.train.tasks.caption.model import AnyCaptioner, build_captioner, start_of_captioner
from clipmill.train.tasks.caption.objective import CaptionLoss
from clipmill.train.tasks.caption.samples import TargetCaptions
from clipmill.train.tasks.caption.settings import CaptionerSettings, DecodingSettings, fit_decoding
from clipmill.train.tasks.caption.stages import layers_of, part_of, whole_captioner
from clipmill.train.tasks.caption.tokenizer import CaptionTokenizer
from clipmill.train.weights.loading import Loaded
from clipmill.train.weights.source import Say, Source

if TYPE_CHECKING:
    from clipmill.train.data.clip_reader import ClipReader
    from clipmill.train.data.mixed_samples import MixedSamples
    from clipmill.train.data.samples import Samples

    AnySamples = Samples[ClipReader] | MixedSamples


class CaptionTask(ClipTask[CaptionerSettings, "AnySamples | None", AnyCaptioner]):
    """The task of `train caption`.

    Args:
        decoder: of an existing run; otherwise the one that the settings name.
    """

    name = "caption"
    columns: tuple[str, ...] = (VIDEO,)

    def __init__(
        self,
        settings: CaptionerSettings,
        *,
        decoder: Decoder | None = None,
        say: Say = print,
        **opened: Any,
    ) -> None:
        super().__init__(settings, **opened)
        self._say = say
        self._decoder, self._is_of_run = decoder, decoder is not None
        self._held_out: dict[str, Samples[ClipReader]] = {}
        self._captions_per_clip: str | None = None  # of the training set

    @property
    def decoder(self) -> Decoder:
        """Tokenizer, size and weights of the decoder."""
        assert self._decoder is not None  # given, or made by training_set
        return self._decoder

    def facts(self) -> dict[str, Any]:
        """Entries of run.json: size of the decoder, its weights, number of parameters."""
        parts = self.decoder
        with torch.device("meta"):
            model = self.new_model()
        captions = {} if self._captions_per_clip is None else {"captions_per_clip": self._captions_per_clip}
        return {"decoder": decoder_facts(parts), **captions, **start_facts(model, parts), **super().facts()}

    def files(self) -> dict[str, bytes]:
        """Tokenizer, and configuration of a language model, which the weights cannot be used without."""
        return decoder_files(self.decoder)

    def training_set(self, world: World) -> "AnySamples":
        """This rank's part of the clips and captions of the split that the settings name.

        Raises:
            UserError: there are none, or the named decoder is not available or has too short a context.
        """
        settings = self._settings
        sets: list[Samples[ClipReader]] = []

        def open_one(task: CaptionTask) -> "Samples[ClipReader]":
            # The words of all folders decide about the tokens of each.
            def tokenizer(_: Iterable[str]) -> CaptionTokenizer:
                return self._tokenizer(text for one in sets for text in one.captions.all_texts())

            sets.append(task._open(settings.split, world, make_tokenizer=tokenizer))
            return sets[-1]

        samples = self.open_mixture(open_one)
        _ = sets[0].captions.tokenizer  # made now, as the decoder depends on it
        self._captions_per_clip = f"{sum(one.captions.num_entries for one in sets) / sum(map(len, sets)):.3g}"
        # Checked now, so that a mistake in --decoding is reported before training starts.
        self.decoding()
        if settings.evaluate.every and settings.evaluate.java:
            require_java(settings.evaluate.spice_jars)
        if settings.evaluate.every:
            for one in settings.evaluated():
                with one.opening():
                    self._held_out[one.name] = found = self.on(one.shards).samples(one.split, world)
                self.note_evaluation(one, found)
        return samples

    def samples(self, split: str, world: World) -> "Samples[ClipReader]":
        """This rank's part of the clips and captions of any split.

        Raises:
            UserError: there are none, or the named decoder is not available.
        """
        samples = self._open(split, world, make_tokenizer=self._tokenizer)
        _ = samples.captions.tokenizer  # made now, as the decoder depends on it
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
        """A captioner with new weights, and those of `--decoder.weights`."""
        return build_captioner(self._settings, self.decoder, attend=self._attention.attend)

    def fit_weights(self, model: AnyCaptioner, source: Source, *, say: Say) -> Loaded:
        """Fit weights to the captioner, or to its tower."""
        return start_of_captioner(model, source, allow=self._settings.init.allow, say=say)

    def fit_whole(self, model: AnyCaptioner, source: Source, *, say: Say) -> Loaded:
        """Fit tower and decoder to a captioner's weights."""
        return start_of_captioner(model, source, allow=(), say=say)

    def build_model(self, samples: "AnySamples | None" = None) -> AnyCaptioner:
        """A captioner with the weights to start from, and frozen parts."""
        return super().build_model(samples)

    def adapt(self, model: AnyCaptioner, tower: Tower) -> None:
        """Add adapters to a tower; those of a language model are peft's."""
        if tower == "decoder" and isinstance(model, LanguageCaptioner):
            add_language_adapters(model.decoder, self._settings.lora)
        else:
            super().adapt(model, tower)

    def towers_of_start(self) -> Sequence[Tower]:
        """The towers with adapters but a language model, which has weights of its own."""
        is_own = self._settings.decoder.lm is not None
        return [one for one in super().towers_of_start() if not (is_own and one == "decoder")]

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks of tower and decoder."""
        own = super().units(model)
        return [*own, *language_blocks(model.decoder)] if isinstance(model, LanguageCaptioner) else own

    def build_objective(self, samples: "AnySamples", world: World) -> Objective:
        """Cross-entropy of tokens."""
        inputs: Callable[[Batch, slice], torch.Tensor] = partial(self.inputs, is_training=True)
        decoder = self.decoder
        return CaptionLoss(
            inputs,
            end_id=decoder.tokenizer.end_id,
            label_smoothing=self._settings.label_smoothing,
            num_before=decoder.prefix_length - 1 if isinstance(decoder, LanguageDecoder) else None,
        )

    def layers(self, model: Captioner) -> list[LayerCost]:
        """The layers that a pipeline is cut between."""
        return layers_of(model)

    def part(self, model: Captioner, layers: range) -> nn.Module:
        """Some layers of a captioner, for a stage of a pipeline."""
        return part_of(model, layers)

    def inputs(self, batch: Batch, rows: slice = slice(None), *, is_training: bool = False) -> torch.Tensor:
        """Clips [B, C, T, H, W] of some rows of a batch, as the model takes them."""
        if "video" not in batch:
            # On later pipeline stages, only the number of clips matters.
            return torch.empty(len(batch["position"][rows]), 0, device=self._device)
        mean, std = normalisation_of(self._settings)
        return self.pixels(batch, rows, mean=mean, std=std, is_training=is_training)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float | list[float]]:
        """Loss, metrics and exact matches on the data that the settings name, as `<name>/<metric>`."""
        found: dict[str, float | list[float]] = {}
        for name, samples in self._held_out.items():
            metrics, losses = self._said(model, samples, world)
            found |= {**split_metrics(name, metrics), f"{name}/loss of each batch": losses}
        return found

    def _said(
        self, model: nn.Module, samples: "Samples[ClipReader]", world: World
    ) -> tuple[dict[str, float], list[float]]:
        most = self._settings.evaluate.max_samples
        batches = samples.evaluation_batches(every=every_for(len(samples), at_most=most))
        own = captions_of(
            whole_captioner(model, stages=world.stages, device=self._device),
            batches_on_all_stages(batches, world.stages),
            inputs=self.inputs,
            tokenizer=self.decoder.tokenizer,
            decoding=self.decoding(),
            device=self._device,
        )
        parts, how = world.gather_objects(own), self._settings.evaluate

        def metrics() -> dict[str, float]:
            return metrics_of(
                parts, references=samples.captions.texts_of, with_java=how.java, spice_jars=how.spice_jars
            )

        losses = [loss for part in parts for loss in part.batch_losses]
        # One program of Java, not one for each process.
        return world.first(metrics) if how.java else metrics(), losses

    def decoding(self, wanted: DecodingSettings | None = None) -> DecodingSettings:
        """Settings of decoding: the given ones, or the run's; limited by the decoder's context.

        Raises:
            UserError: a requested limit exceeds the context.
        """
        is_of_run = wanted is None and self._is_of_run
        return fit_decoding(wanted or self._settings.decoding, self.decoder.context_length, is_of_run=is_of_run)

    def _tokenizer(self, texts: Iterable[str]) -> CaptionTokenizer:
        if self._decoder is None:
            of_start = decoder_of_start(self._settings)
            self._decoder = of_start or open_decoder(self._settings.decoder, texts, say=self._say)
        return self._decoder.tokenizer
