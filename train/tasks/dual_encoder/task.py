"""Contrastive training of clips and captions (CLIP's recipe on video, as AVION's).

Clips are pixels, or latents that a VAE made once; captions go through a text tower, or come as embeddings that
another one made once.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from manifests.errors import UserError
from train.augment.draws import draw
from train.augment.pictures import to_model_input
from train.config.data import CaptionSettings
from train.config.model import Towers
from train.data.batch import Batch
from train.data.decoding.clip import Views
from train.data.frame_sampling import spread_frames
from train.data.inputs import clip_shape, loader_settings, open_latents, size_on_latents
from train.data.latents.loader import CaptionedLatents
from train.data.remote.files import is_remote
from train.data.remote.folder import open_data_folder
from train.data.streams.stream import VideoStream
from train.data.streams.tars import names_tars
from train.data.video_captions import VideoCaptions
from train.device.random import uniform
from train.distributed.world import World
from train.engine.attention_choice import video_workloads
from train.losses.contrastive import DatasetSize
from train.losses.objective import Objective
from train.losses.registry import build_contrast
from train.models.attention import AttentionBackend
from train.models.attention_kernels import Workload
from train.models.dual_encoder import DualEncoder, size_of
from train.models.text import Tokenize, load_tokenizer
from train.models.transformer import NORM_EPS, blocks_of, compile_blocks
from train.tasks.dual_encoder.evaluation import LoopEvaluation
from train.tasks.dual_encoder.settings import DualEncoderSettings
from train.weights.conversion import CLIP_MEAN, CLIP_STD, LOGIT_SCALE, require_finite
from train.weights.effective import KINDS, effective_clip_settings
from train.weights.loading import Loaded, copy_into, fit_to
from train.weights.sources import Say, Source

Samples = VideoCaptions | VideoStream | CaptionedLatents
# Losses in which a temperature means what it means in CLIP's. The others have starting values of their own.
_CLIPS_TEMPERATURE = frozenset({"infonce", "mbcl"})
# Tokens of narrations and other short captions, in a measurement of attention.
_CAPTION_LENGTHS = (12, 9, 17, 11, 8, 14, 10, 22)


class DualEncoderTask:
    """The task of `train dual-encoder`."""

    name = "dual-encoder"

    def __init__(self, settings: DualEncoderSettings, *, attention: AttentionBackend, device: torch.device) -> None:
        self._settings = settings
        self._attention = attention
        self._device = device
        self._evaluation: LoopEvaluation | None = None
        self._start: Loaded | None = None
        pictures = "latents" if settings.input == "latents" else "video"
        self.columns: tuple[str, ...] = (pictures, "text") if settings.text_tower == "frozen" else (pictures,)

    def training_set(self, world: World) -> Samples:
        """This rank's part of the clips and captions of the split that the settings name."""
        samples = self.samples(self._settings.split, world)
        if not isinstance(samples, VideoStream):
            samples.require_different_texts()
        if self._settings.evaluate.every:
            # Made now, so that a mistake in its settings ends the run before it begins.
            self._evaluation = self._open_evaluation(world)
        return samples

    def samples(self, split: str, world: World, *, num_clips: int = 1, each_caption: bool = False) -> Samples:
        """This rank's part of the clips and captions of any split; tars that are streamed know no splits.

        Args:
            num_clips: looks at each clip in an evaluation.
            each_caption: see `VideoCaptions`.

        Raises:
            UserError: there are none, or they do not fit the settings.
        """
        settings = self._settings
        tokenize = load_tokenizer() if settings.text_tower == "trained" else None
        if settings.input == "latents":
            return self._latents(split, world, tokenize=tokenize)
        shape = clip_shape(settings, views=Views(num_clips=num_clips))
        loading = loader_settings(settings, world, device=self._device)
        if names_tars(settings.shards):
            if tokenize is None or settings.captions != CaptionSettings():
                raise UserError(
                    f"{settings.shards} is a stream of tars: each clip has the one caption that its tar gives it",
                    hint="leave out --text-tower and --captions, or name a data folder that prep made",
                )
            return VideoStream(settings.shards, shape=shape, tokenize=tokenize, loading=loading, cache=settings.cache)
        if tokenize is None and is_remote(settings.shards):
            raise UserError(
                f"--text-tower frozen cannot be read from {settings.shards}: embeddings are mapped into memory",
                hint="copy the data folder to this machine",
            )
        folder = open_data_folder(settings.shards, cache=settings.cache)
        return VideoCaptions(
            folder.path,
            split=split,
            shape=shape,
            tokenize=tokenize,
            loading=loading,
            decode=settings.decode,
            captions=settings.captions,
            has_stored_text=tokenize is None,
            each_caption=each_caption,
            tars=folder.tars,
        )

    def _latents(self, split: str, world: World, *, tokenize: Tokenize | None) -> CaptionedLatents:
        settings = self._settings
        make = partial(CaptionedLatents, tokenize=tokenize, sources=settings.captions.sources)
        return open_latents(make, settings, segment=settings.segment, split=split, world=world)

    def start_from(self, source: Source, samples: Samples, *, say: Say) -> Loaded:
        """Has `build_model` give models these weights, once they fit.

        Raises:
            UserError: they do not, and nothing explains why.
        """
        with torch.device("meta"):
            model = self._towers(samples)
        self._start = fit_to(model, source, allow=self._settings.init.allow, say=say)
        return self._start

    def facts(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def files(self) -> dict[str, bytes]:
        """None."""
        return {}

    def build_model(self, samples: Samples) -> DualEncoder:
        """The two towers in the size that the settings name, for clips as `samples` has them."""
        model = self._towers(samples)
        if self._start is not None:
            copy_into(model, self._start)
        if self._settings.compile:
            compile_blocks(model)
        return model

    def _towers(self, samples: Samples) -> DualEncoder:
        settings = self._settings
        size = size_of(settings.model, settings.towers)
        image_px = settings.size_px
        if isinstance(samples, CaptionedLatents):
            shape = samples.frame_shape
            image_px = shape.height
            size = replace(size, video=size_on_latents(size.video, shape))
        if not isinstance(samples, VideoStream) and samples.text_width is not None:
            size = replace(size, embedding_width=samples.text_width)
        return DualEncoder(
            size,
            image_px=image_px,
            num_frames=settings.num_frames,
            attend=self._attention.attend,
            towers=settings.towers,
            has_text_tower=settings.text_tower == "trained",
        )

    def inputs(self, batch: Batch, *, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips [B, C, T, H, W] and captions (tokens or stored embeddings) of a batch, as the model takes them."""
        return self.clips(batch, is_training=is_training), _captions(batch)

    def _training_inputs(self, batch: Batch) -> tuple[Any, ...]:
        """The same in training, with the lengths of captions, which the host knows."""
        clips, captions = self.inputs(batch, is_training=True)
        return clips, captions, batch["length"].numpy() if "length" in batch else None

    def clips(self, batch: Batch, *, is_training: bool = False) -> torch.Tensor:
        """Clips [B, C, T, H, W] of a batch, as the video tower takes them."""
        settings = self._settings
        if batch["input"] == "latents":
            within_BK = None
            if is_training:
                positions, count = batch["position"].numpy(), settings.num_frames
                within_BK = uniform(positions, count, seed=settings.seed, purpose="frames")
            latents_BTCHW = spread_frames(batch["latents"], num_frames=settings.num_frames, offset_BK=within_BK)
            return latents_BTCHW.float().transpose(1, 2)
        return to_model_input(
            batch["video"],
            batch["colour"],
            size_px=settings.size_px,
            mean=settings.init.pixel_mean or CLIP_MEAN,
            std=settings.init.pixel_std or CLIP_STD,
            draw=draw(batch["position"].numpy(), settings.augment, seed=settings.seed) if is_training else None,
        )

    def build_objective(self, samples: Samples, world: World) -> Objective:
        """The loss that `--loss.*` names."""
        inputs = self._training_inputs
        dataset = _dataset_size(samples, self._settings)
        return build_contrast(self._settings.loss, inputs=inputs, dataset=dataset, world=world)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks of both towers."""
        return blocks_of(model)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Numbers of the protocol that the settings name, as `<split>/<name>`."""
        return {} if self._evaluation is None else self._evaluation(model, world)

    def _open_evaluation(self, world: World) -> LoopEvaluation:
        # Two narrations of one span are two queries there.
        each_caption = self._settings.evaluate.protocol == "mir"
        samples = self.samples(self._settings.evaluate.split, world, each_caption=each_caption)
        return LoopEvaluation(self, samples, self._settings, device=self._device)


def _dataset_size(samples: Samples, settings: DualEncoderSettings) -> DatasetSize | None:
    """What a global loss keeps state for; None for other losses.

    Raises:
        UserError: the samples are a stream, without ids for a global loss.
    """
    if not settings.loss.spec.is_global:
        return None
    if isinstance(samples, VideoStream):
        raise UserError(
            f"--loss.kind {settings.loss.kind} keeps a number for each clip, and {settings.shards} is a stream of them",
            hint="name a data folder that prep made, or use --loss.kind infonce",
        )
    num_epochs = settings.steps * settings.batch / samples.num_samples
    return DatasetSize(num_clips=samples.num_clips, num_captions=samples.num_caption_ids, num_epochs=num_epochs)


def _captions(batch: Batch) -> torch.Tensor:
    return batch["text"] if "text" in batch else batch["tokens"]


def effective_settings(settings: DualEncoderSettings, source: Source | None, *, say: Say) -> DualEncoderSettings:
    """The settings with activation, eps, normalisation and temperature of the weights, where they say so.

    Raises:
        UserError: the weights need something that the towers do not have.
    """
    settings = replace(settings, towers=_of_clip(settings.towers))
    if source is None:
        return settings
    facts = source.facts
    if settings.text_tower == "trained" and facts.text_eps is not None and not math.isclose(facts.text_eps, NORM_EPS):
        raise UserError(
            f"{source.title}: the text tower's layer norms have eps {facts.text_eps:g}, here they have {NORM_EPS:g}",
            hint="use the weights of a plain CLIP",
        )
    settings = effective_clip_settings(settings, source, say=say)
    temperature = _temperature(settings, source)
    if temperature is not None:
        say(f"weights: the temperature starts at theirs, {temperature:.4g}")
        settings = replace(settings, loss=replace(settings.loss, temperature=temperature))
    return settings


def _of_clip(towers: Towers) -> Towers:
    if towers.kind not in (None, "clip"):
        raise UserError(
            f"--towers.kind is {towers.kind}, and train dual-encoder has {KINDS['clip']}", hint="leave it out"
        )
    return replace(towers, kind="clip")


def _temperature(settings: DualEncoderSettings, source: Source) -> float | None:
    """The temperature of the weights where the loss shall start with it."""
    loss, tensors = settings.loss, source.converted.tensors
    if loss.temperature is not None or loss.kind not in _CLIPS_TEMPERATURE or LOGIT_SCALE not in tensors:
        return None
    projection = tensors.get("video.proj")
    width = size_of(settings.model, settings.towers).embedding_width
    if settings.text_tower == "frozen" or projection is None or projection.shape[-1] != width:
        return None
    require_finite({LOGIT_SCALE: tensors[LOGIT_SCALE]}, source=source.title)
    return max(math.exp(-float(tensors[LOGIT_SCALE])), loss.min_temperature)


def workloads_of(settings: DualEncoderSettings, num_clips: int) -> tuple[Workload, ...]:
    """The attention of both towers; captions of packed text count as short ones."""
    found = video_workloads(settings, num_clips)
    if settings.text_tower != "trained" or not settings.towers.packed_text:
        return found
    size = size_of(settings.model, settings.towers).text.trunk
    lengths = tuple(_CAPTION_LENGTHS[at % len(_CAPTION_LENGTHS)] for at in range(min(num_clips, 512)))
    shape = {"num_heads": size.num_heads, "head_width": size.width // size.num_heads, "num_blocks": size.depth}
    return (*found, Workload(num_items=1, num_tokens=sum(lengths), lengths=lengths, **shape))
