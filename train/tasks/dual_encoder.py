"""Contrastive training of clips and captions (CLIP's recipe on video, as AVION's).

Clips are pixels, or latents that a VAE made once; captions go through a text tower, or come as embeddings that
another one made once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from manifests.errors import UserError
from train.augment.draws import draw
from train.augment.pictures import to_model_input
from train.data.batch import Batch
from train.data.clips import Sampling
from train.data.decoding.clip import ClipShape
from train.data.latents.captioned import CaptionedLatents
from train.data.loader import LoaderSettings
from train.data.remote.address import is_remote
from train.data.remote.folder import open_data_folder
from train.data.streams.stream import VideoStream
from train.data.streams.tars import names_tars
from train.data.video_captions import VideoCaptions
from train.distributed.world import World
from train.losses.infonce import info_nce
from train.models.attention import AttentionDoor
from train.models.dual_encoder import DualEncoder, size_of
from train.models.text import load_tokenizer
from train.models.transformer import blocks_of, compile_blocks
from train.objective import Objective
from train.settings import DualEncoderSettings
from train.step import Step

# Means and deviations of CLIP's training images, by colour.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
# A VAE scales a side down by 8: a patch of 2 is then as much of the picture as one of 16 pixels.
_LATENT_PATCH = 2
_INITIAL_TEMPERATURE = 0.07  # CLIP, section 2.5
_MAX_LOG_SCALE = math.log(100)  # CLIP: logits are never scaled by more than 100


Samples = VideoCaptions | VideoStream | CaptionedLatents


class DualEncoderTask:
    """The task of `train dual-encoder`."""

    name = "dual-encoder"

    def __init__(self, settings: DualEncoderSettings, *, door: AttentionDoor, device: torch.device) -> None:
        self._settings = settings
        self._door = door
        self._device = device
        self.columns: tuple[str, ...] = ("latents", "text") if settings.input == "latents" else ("video",)

    def training_set(self, world: World) -> Samples:
        """This rank's part of the clips and captions of the split that the settings name."""
        return self.samples(self._settings.split, world)

    def samples(self, split: str, world: World) -> Samples:
        """This rank's part of the clips and captions of any split; tars that are streamed know no splits.

        Raises:
            UserError: there are none, or they do not fit the settings.
        """
        settings = self._settings
        batch = settings.batch // world.size
        if settings.input == "latents":
            if is_remote(settings.shards) or names_tars(settings.shards):
                raise UserError(
                    f"--input latents cannot be read from {settings.shards}: latents are mapped into memory",
                    hint="copy the data folder to this machine",
                )
            latents = CaptionedLatents(
                Path(settings.shards),
                split=split,
                segment=settings.segment,
                batch=batch,
                seed=settings.seed,
                rank=world.rank,
                num_ranks=world.size,
            )
            _check_latents(latents, settings)
            return latents
        shape = ClipShape(
            sampling=Sampling(num_frames=settings.num_frames, rule=settings.sampling, stride=settings.stride),
            size_px=settings.size_px,
            crop=settings.crop,
            min_crop_area=settings.min_crop_area,
        )
        loading = LoaderSettings(
            batch=batch,
            num_threads=settings.workers,
            num_ahead=batch * settings.batches_ahead,
            seed=settings.seed,
            group=settings.samples_per_chunk,
            rank=world.rank,
            num_ranks=world.size,
            pin=self._device.type == "cuda",
        )
        tokenize = load_tokenizer()
        if names_tars(settings.shards):
            return VideoStream(settings.shards, shape=shape, tokenize=tokenize, loading=loading, cache=settings.cache)
        folder = open_data_folder(settings.shards, cache=settings.cache)
        return VideoCaptions(
            folder.path,
            split=split,
            shape=shape,
            tokenize=tokenize,
            loading=loading,
            decode=settings.decode,
            tars=folder.tars,
        )

    def build_model(self, samples: Samples) -> DualEncoder:
        """The two towers in the size that the settings name, for clips as `samples` has them."""
        settings = self._settings
        size = size_of(settings.model, settings.towers)
        image_px = settings.size_px
        if isinstance(samples, CaptionedLatents):
            shape = samples.frame_shape
            image_px = shape.height
            video = replace(size.video, patch_px=_LATENT_PATCH, num_channels=shape.channels)
            size = replace(size, video=video, embedding_width=samples.text_width)
        model = DualEncoder(
            size,
            image_px=image_px,
            num_frames=settings.num_frames,
            attend=self._door.attend,
            towers=settings.towers,
            has_text_tower=settings.text_tower == "trained",
        )
        if settings.compile:
            compile_blocks(model)
        return model

    def inputs(self, batch: Batch, *, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips [B, C, T, H, W] and captions (tokens or stored embeddings) of a batch, as the model takes them."""
        if batch["input"] == "latents":
            latents_BTCHW = spread(batch["latents"], num_frames=self._settings.num_frames, is_training=is_training)
            return latents_BTCHW.float().transpose(1, 2), batch["text"]
        settings = self._settings
        drawn = draw(batch["position"].numpy(), settings.augment, seed=settings.seed) if is_training else None
        clips_BCTHW = to_model_input(
            batch["video"], batch["colour"], size_px=settings.size_px, mean=_MEAN, std=_STD, draw=drawn
        )
        return clips_BCTHW, batch["tokens"]

    def build_objective(self, samples: Samples, world: World) -> Objective:
        """InfoNCE with a trained temperature."""
        return InBatchContrast(self.inputs)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks of both towers."""
        return blocks_of(model)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Nothing yet."""
        return {}


class InBatchContrast(Objective):
    """InfoNCE over the batch of all ranks, with a trained temperature."""

    def __init__(self, inputs: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(_INITIAL_TEMPERATURE)))
        self._inputs = inputs

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, float]:
        """Adds the gradients of InfoNCE; says the temperature and the share of clips that find their own caption."""
        world = step.world
        with step.random(0), step.synced(True):
            with step.autocast():
                clips, captions = self._inputs(batch, is_training=True)
                own_BE = model(clips, captions)
            video_NE, text_NE = (world.gather(one).requires_grad_() for one in own_BE)
            loss = info_nce(video_NE, text_NE, log_scale=self.logit_scale)
            step.scale(loss).backward()
            # The ranks' gradients are averaged; each has those of its own rows only, which shall be added.
            own = slice(world.rank * len(captions), (world.rank + 1) * len(captions))
            pairs = [pair for pair in zip(own_BE, (video_NE, text_NE), strict=True) if pair[0].requires_grad]
            gradients = [world.size * one_NE.grad[own] for _, one_NE in pairs if one_NE.grad is not None]
            torch.autograd.backward([own_one_BE for own_one_BE, _ in pairs], gradients)
        found_N = (video_NE @ text_NE.T).argmax(dim=1)
        captions_N = world.gather(captions)
        # Equal captions have equal embeddings, and any of them is right.
        right = (captions_N[found_N] == captions_N).all(dim=1).float().mean()
        return {
            "loss": loss.item(),
            "batch_accuracy": right.item(),
            "temperature": (-self.logit_scale).exp().item(),
        }

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Holds the scale at or below 100, as CLIP does after every step."""
        self.logit_scale.clamp_(0, _MAX_LOG_SCALE)


def _check_latents(latents: CaptionedLatents, settings: DualEncoderSettings) -> None:
    shape = latents.frame_shape
    if settings.num_frames > latents.segment_frames:
        raise UserError(
            f"--num-frames {settings.num_frames}: a segment of {settings.segment} has {latents.segment_frames} frames",
            hint="use fewer frames, or a longer --segment",
        )
    if shape.height != shape.width or shape.height % _LATENT_PATCH:
        raise UserError(
            f"latents of {shape.height} x {shape.width} cannot be cut into squares of {_LATENT_PATCH}",
            hint=f"make them with a --size that gives an even side: {latents.variant_name}",
        )


def spread(latents_BTCHW: torch.Tensor, *, num_frames: int, is_training: bool) -> torch.Tensor:
    """One frame from each of `num_frames` equal parts of a segment: a random one in training, else the middle one."""
    length = latents_BTCHW.shape[1]
    within_K = torch.rand(num_frames) if is_training else torch.full((num_frames,), 0.5)
    chosen_K = ((torch.arange(num_frames) + within_K) * length / num_frames).long().clamp(max=length - 1)
    return latents_BTCHW[:, chosen_K.to(latents_BTCHW.device)]
