"""Train a masked autoencoder (VideoMAE) on videos without captions, on pixels or on latents.

Shape suffixes: B batch, C channels, T frames, H and W pixels, F frames of a segment of latents.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from clipmill.shards.columns import LATENTS, VIDEO
from clipmill.train.config.evaluation import EvaluatedData, ProbeEvaluation
from clipmill.train.config.shards import kind_of
from clipmill.train.data.batch import Batch
from clipmill.train.data.chunks import videos_of_split
from clipmill.train.data.folders import open_data_folder
from clipmill.train.data.frame_sampling import window_frames
from clipmill.train.data.inputs import picture_size
from clipmill.train.data.query import LATENT_PATCH, DataQuery, loader_settings, open_samples
from clipmill.train.device.random import draw_uniform
from clipmill.train.distributed.world import World
from clipmill.train.engine.task import ClipTask
from clipmill.train.evaluation.probe.evaluation import LoopProbe
from clipmill.train.losses.objective import Objective
from clipmill.train.models.video_vit import CubeGrid, VideoViTSize
from clipmill.train.models.videomae import MaskedAutoencoder
from clipmill.train.tasks.mae.masks import Masking
from clipmill.train.tasks.mae.objective import MaskedClips, MaskedReconstruction
from clipmill.train.tasks.mae.settings import MaeSettings, check_mask, without_effect
from clipmill.train.weights.conversion import IMAGENET_MEAN, IMAGENET_STD
from clipmill.train.weights.loading import Loaded, fit_to
from clipmill.train.weights.source import Say, Source, effective_clip_settings

if TYPE_CHECKING:
    from clipmill.train.data.mixed_samples import MixedSamples
    from clipmill.train.data.samples import Samples

    AnySamples = Samples[Any] | MixedSamples


class MaeTask(ClipTask[MaeSettings, "AnySamples", MaskedAutoencoder]):
    """The task of `train mae`."""

    name = "mae"

    def __init__(self, settings: MaeSettings, **opened: Any) -> None:
        super().__init__(settings, **opened)
        self._probes: list[LoopProbe] = []
        self.columns: tuple[str, ...] = (LATENTS,) if settings.reads_latents else (VIDEO,)

    def training_set(self, world: World) -> "AnySamples":
        """This rank's part of the chunks, or of the segments of latents, of the split that the settings name.

        Raises:
            UserError: there are none, they cannot be cut and masked as the settings say, or the data has no such split
                to evaluate on.
        """
        settings = self._settings
        per_chunk = settings.samples_per_chunk
        samples = self.open_mixture(lambda task: task.samples(settings.split, world, per_chunk=per_chunk))
        if settings.evaluate.split != ProbeEvaluation.split:
            # The run reconstructs clips of it at the end; only the default split may be missing.
            for folder in settings.folders:
                if not kind_of(folder).has_manifest:
                    continue
                with EvaluatedData(name="", shards=None, split=settings.evaluate.split).opening():
                    path = open_data_folder(folder, cache=settings.cache, column=None).path
                    videos_of_split(path, settings.evaluate.split)
        if settings.evaluate.every:
            # Opened now, so that a mistake in its settings is reported before training starts.
            self._probes = [self._open_probe(one, world) for one in settings.evaluated()]
        return samples

    def _open_probe(self, one: EvaluatedData, world: World) -> LoopProbe:
        task = self.on(one.shards)
        wanted = replace(self._settings.evaluate, shards=(), split=one.split)
        with one.opening():
            probe = LoopProbe(
                task._settings, wanted, name=one.name, inputs=self.inputs, world=world, device=self._device
            )
        self.note_evaluation(one, probe.queries)
        return probe

    def samples(self, split: str, world: World, *, per_chunk: int = 1) -> "Samples[Any]":
        """This rank's part of the samples of any split.

        Args:
            per_chunk: samples of each chunk.

        Raises:
            UserError: there are none, or they do not fit the settings.
        """
        settings = self._settings
        query = DataQuery(
            settings=settings,
            content="frames",
            split=split,
            loading=replace(loader_settings(settings, world, device=self._device), group=per_chunk),
            repeats=per_chunk,
            same_frames=settings.repeat == "masks",
        )
        samples: Samples[Any] = open_samples(query)
        if (shape := samples.frame_shape) is not None:
            check_mask(settings.mask_ratio, num_places=(shape.height // LATENT_PATCH) ** 2)
        return samples

    def build_objective(self, samples: "AnySamples", world: World) -> Objective:
        """Reconstruction error of masked cubes."""
        return MaskedReconstruction(self.masked_clips(samples, is_training=True))

    def masked_clips(self, samples: "AnySamples", *, is_training: bool = False) -> MaskedClips:
        """Clips as `samples` has them, with masks."""
        settings = self._settings
        return MaskedClips(
            inputs=partial(self.inputs, is_training=is_training),
            masking=self.masking(samples),
            size=self.size(samples),
            # Latents are not divided.
            std=None if settings.reads_latents else settings.init.pixel_std or IMAGENET_STD,
        )

    def size(self, samples: "AnySamples") -> VideoViTSize:
        """The size of the encoder, for clips as `samples` has them."""
        return self._shape.size.video if self._shape is not None else picture_size(samples, self._settings)[0]

    def masking(self, samples: "AnySamples") -> Masking:
        """The masks of clips as `samples` has them."""
        settings, size = self._settings, self.size(samples)
        side = self._side(samples) // size.patch_px
        return Masking(settings, CubeGrid(settings.num_frames // size.cube_frames, side, side))

    def inputs(self, batch: Batch, rows: slice = slice(None), *, is_training: bool = False) -> torch.Tensor:
        """Clips [B, C, T, H, W] of some rows of a batch, as the model takes them."""
        settings = self._settings
        if batch["input"] == "latents":
            within_B = None
            if is_training:
                within_B = draw_uniform(batch["position"][rows].numpy(), 1, seed=settings.seed, purpose="window")[:, 0]
            latents_BTCHW = window_frames(batch["latents"][rows], num_frames=settings.num_frames, offset_B=within_B)
            return latents_BTCHW.float().transpose(1, 2)
        return self.pixels(batch, rows, mean=IMAGENET_MEAN, std=IMAGENET_STD, is_training=is_training)

    def fit_whole(self, model: MaskedAutoencoder, source: Source, *, say: Say) -> Loaded:
        """Fit encoder and decoder, or the encoder alone to weights without a decoder.

        Without a last norm in the weights, as transformers' use_mean_pooling has it, the encoder has none either.
        """
        names = source.converted.tensors
        if "video.ln_post.weight" not in names:
            model.video.ln_post = None
        wanted: nn.Module = model
        if not any(name.startswith("decoder.") for name in names):
            wanted = nn.Module()
            wanted.video = model.video
        return fit_to(wanted, source, say=say)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Metrics of the probes that the settings name, as `<name>/<metric>`."""
        return {name: value for probe in self._probes for name, value in probe(model, world).items()}

    def new_model(self, samples: "AnySamples") -> MaskedAutoencoder:
        """Encoder and decoder, for clips as `samples` has them."""
        settings = self._settings
        return MaskedAutoencoder(
            self.size(samples),
            decoder_depth=settings.decoder_depth,
            image_px=self._side(samples),
            num_frames=settings.num_frames,
            attend=self._attention.attend,
            towers=settings.towers,
        )

    def _side(self, samples: "AnySamples") -> int:
        return self._shape.image_px if self._shape is not None else picture_size(samples, self._settings)[1]


def effective_settings(settings: MaeSettings, source: Source | None, *, say: Say) -> MaeSettings:
    """The settings that take effect with the weights of `source` (`effective_clip_settings`)."""
    if unused := without_effect(settings):
        say(f"without effect with --input {settings.input}, given or from a preset: {', '.join(unused)}")
    return effective_clip_settings(settings, source, say=say)
