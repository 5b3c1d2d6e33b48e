"""Captioning: what a decoder says of a clip that a video tower sees.

Shape suffixes: B batch, C channels, T frames, H and W pixels.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from train.augment.draws import draw
from train.augment.pictures import to_model_input
from train.config.model import kind_of
from train.data.batch import Batch
from train.data.decoding.clip import Views
from train.data.inputs import clip_shape, loader_settings, open_folder
from train.data.prefetch import batches_on_all_stages
from train.distributed.stages import LayerCost
from train.distributed.world import World
from train.evaluation.runner import every_for
from train.losses.objective import Objective
from train.models.attention import AttentionBackend
from train.models.captioner import Captioner
from train.models.transformer import blocks_of, compile_blocks
from train.tasks.caption.building import DecoderParts, build_captioner, copy_decoder, freeze, open_decoder, tower_size
from train.tasks.caption.generation import captions_of, numbers_of
from train.tasks.caption.objective import CaptionLoss
from train.tasks.caption.runs import decoder_facts, start_facts
from train.tasks.caption.samples import CaptionedClips
from train.tasks.caption.settings import CaptionerSettings, DecodingSettings, within
from train.tasks.caption.stages import layers_of, part_of, whole_captioner
from train.tasks.caption.start import decoder_of_start, start_of_captioner
from train.tasks.caption.tokenizer import TOKENIZER_FILE, CaptionTokenizer
from train.weights.conversion import MEANS, STDS
from train.weights.loading import Loaded, copy_into
from train.weights.sources import Say, Source


class CaptionTask:
    """The task of `train caption`.

    Args:
        decoder: of a run that there is; else the one that the settings name.
    """

    name = "caption"
    columns: tuple[str, ...] = ("video",)

    def __init__(
        self,
        settings: CaptionerSettings,
        *,
        attention: AttentionBackend,
        device: torch.device,
        decoder: DecoderParts | None = None,
        say: Say = print,
    ) -> None:
        tower_size(settings)  # a mistake in it ends the run before it begins
        self._settings, self._attention, self._device, self._say = settings, attention, device, say
        self._decoder, self._is_of_run = decoder, decoder is not None
        self._start: Loaded | None = None
        self._held_out: CaptionedClips | None = None

    @property
    def decoder(self) -> DecoderParts:
        """What says captions, and what they are in tokens."""
        assert self._decoder is not None  # given, or made by training_set
        return self._decoder

    def facts(self) -> dict[str, Any]:
        """For run.json."""
        model, parts = self._on_meta(), self.decoder
        freeze(model, self._settings.freeze)
        return {"decoder": decoder_facts(parts.size), **start_facts(model, parts, frozen=self._settings.freeze)}

    def files(self) -> dict[str, bytes]:
        """The tokenizer, without which a run's weights say nothing."""
        return {TOKENIZER_FILE: self.decoder.tokenizer.as_json()}

    def training_set(self, world: World) -> CaptionedClips:
        """This rank's part of the clips and captions of the split that the settings name.

        Raises:
            UserError: there are none, or the decoder that is named cannot be had or does not write so long captions.
        """
        settings = self._settings
        samples = self.samples(settings.split, world)
        # Mistakes in what writes captions later end the run before it begins.
        self.decoding()
        if settings.evaluate.every:
            self._held_out = self.samples(settings.evaluate.split, world)
        return samples

    def samples(self, split: str, world: World) -> CaptionedClips:
        """This rank's part of the clips and captions of any split.

        Raises:
            UserError: there are none, or the decoder that is named cannot be had.
        """
        settings = self._settings
        folder = open_folder(settings, reason="train caption reads data folders")
        return CaptionedClips(
            folder.path,
            split=split,
            shape=clip_shape(settings, views=Views()),
            make_tokenizer=self._tokenizer,
            max_tokens=settings.decoder.max_tokens,
            per_visit=settings.captions_per_visit,
            loading=loader_settings(settings, world, device=self._device),
            decode=settings.decode,
            captions=settings.captions,
            tars=folder.tars,
        )

    def start_from(self, source: Source, samples: CaptionedClips, *, say: Say) -> Loaded:
        """Has `build_model` give models these weights, once they fit.

        Raises:
            UserError: they do not, and nothing explains why.
        """
        self._start = start_of_captioner(self._on_meta(), source, allow=self._settings.init.allow, say=say)
        return self._start

    def build_model(self, samples: CaptionedClips | None = None) -> Captioner:
        """A captioner for the task's tokens."""
        model = self._captioner()
        copy_decoder(model, self.decoder)
        if self._start is not None:
            copy_into(model, self._start)
        freeze(model, self._settings.freeze)
        if self._settings.compile:
            compile_blocks(model)
        return model

    def build_objective(self, samples: CaptionedClips, world: World) -> Objective:
        """Cross-entropy of tokens."""
        inputs: Callable[[Batch, slice], torch.Tensor] = partial(self.inputs, is_training=True)
        end_id = self.decoder.tokenizer.end_id
        return CaptionLoss(inputs, end_id=end_id, label_smoothing=self._settings.label_smoothing)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks of tower and decoder."""
        return blocks_of(model)

    def layers(self, model: Captioner) -> list[LayerCost]:
        """What a pipeline is cut between."""
        return layers_of(model)

    def part(self, model: Captioner, layers: range) -> nn.Module:
        """Some layers of a captioner, for a stage of a pipeline."""
        return part_of(model, layers)

    def inputs(self, batch: Batch, rows: slice = slice(None), *, is_training: bool = False) -> torch.Tensor:
        """Clips [B, C, T, H, W] of some rows of a batch, as the model takes them."""
        settings, init = self._settings, self._settings.init
        kind = kind_of(settings.towers)
        if "video" not in batch:
            # On a later stage of a pipeline, where only the number of clips is asked for.
            return torch.empty(len(batch["position"][rows]), 0, device=self._device)
        drawn = None
        if is_training:
            drawn = draw(batch["position"][rows].numpy(), settings.augment, seed=settings.seed)
        return to_model_input(
            batch["video"][rows],
            batch["colour"][rows],
            size_px=settings.size_px,
            mean=init.pixel_mean or MEANS[kind],
            std=init.pixel_std or STDS[kind],
            draw=drawn,
        )

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Loss, metrics and exact matches on the split that the settings name, as `<split>/<name>`."""
        if self._held_out is None:
            return {}
        wanted, samples = self._settings.evaluate, self._held_out
        batches = samples.evaluation_batches(every=every_for(len(samples), at_most=wanted.max_samples))
        own = captions_of(
            whole_captioner(model, stages=world.stages, device=self._device),
            batches_on_all_stages(batches, world.stages),
            inputs=self.inputs,
            tokenizer=self.decoder.tokenizer,
            decoding=self.decoding(),
            device=self._device,
        )
        numbers = numbers_of(world.gather_objects(own), references=samples.references)
        return {f"{wanted.split}/{name}": value for name, value in numbers.items()}

    def decoding(self, wanted: DecodingSettings | None = None) -> DecodingSettings:
        """How captions are written: as wanted, or as the run says; they end where the decoder's context does.

        Raises:
            UserError: a limit that was asked for is beyond the context.
        """
        is_of_run = wanted is None and self._is_of_run
        return within(wanted or self._settings.decoding, self.decoder.size.context_length, is_of_run=is_of_run)

    def _tokenizer(self, texts: Iterable[str]) -> CaptionTokenizer:
        if self._decoder is None:
            of_start = decoder_of_start(self._settings)
            self._decoder = of_start or open_decoder(self._settings.decoder, texts, say=self._say)
        return self._decoder.tokenizer

    def _on_meta(self) -> Captioner:
        with torch.device("meta"):
            return self._captioner()

    def _captioner(self) -> Captioner:
        return build_captioner(self._settings, self.decoder.size, attend=self._attention.attend)
