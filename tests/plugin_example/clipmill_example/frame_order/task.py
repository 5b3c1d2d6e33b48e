"""The task itself: data, model, objective and evaluation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from clipmill.train.augment.model_input import to_model_input
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import Views
from clipmill.train.data.producers.chunk_clips import open_chunk_clips
from clipmill.train.data.query import clip_shape, loader_settings, open_folder
from clipmill.train.data.samples import Samples
from clipmill.train.device.random import draw_uniform
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.world import Step, World
from clipmill.train.evaluation.runner import OpenedRun, Score, sample_stride
from clipmill.train.losses.objective import Objective
from clipmill.train.models.attention import AttentionBackend
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.transformer import blocks_of
from clipmill.train.models.video_vit import VideoViT
from clipmill.train.weights.conversion import CLIP_MEAN, CLIP_STD
from clipmill.train.weights.loading import LoadedWeights, copy_into, fit_to
from clipmill.train.weights.source import Say, Source
from clipmill_example.frame_order.spec import FrameOrderFlags, FrameOrderSettings


class OrderClassifier(nn.Module):
    """Video tower and a linear layer that returns the logits [B] of clips [B, C, T, H, W] being reversed."""

    def __init__(self, settings: FrameOrderSettings, attention: AttentionBackend) -> None:
        super().__init__()
        size = size_of(settings.model, settings.towers).video
        self.video = VideoViT(
            size,
            image_px=settings.size_px,
            num_frames=settings.num_frames,
            embedding_width=None,
            attend=attention.attend,
            temporal_std=0.02,
        )
        self.head = nn.Linear(size.trunk.width, 1)

    def forward(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        logits_B: torch.Tensor = self.head(self.video(video_BCTHW))[:, 0]
        return logits_B


class FrameOrderTask:
    """Task of `train frame-order`."""

    name = "frame-order"
    columns: tuple[str, ...] = ("video",)

    def __init__(self, settings: FrameOrderSettings, *, attention: AttentionBackend, device: torch.device) -> None:
        self._settings, self._attention, self._device = settings, attention, device
        self._start: LoadedWeights | None = None

    def facts(self) -> dict[str, Any]:
        return {}

    def files(self) -> dict[str, bytes]:
        return {}

    def training_set(self, world: World) -> Samples:
        return self.samples(self._settings.split, world)

    def samples(self, split: str, world: World, *, shards: str | None = None) -> Samples:
        settings = replace(self._settings, shards=shards or self._settings.shards)
        folder = open_folder(settings, reason="train frame-order reads data folders")
        return open_chunk_clips(
            ClipQuery(
                folder.path,
                where=settings.where,
                split=split,
                shape=clip_shape(settings, views=Views()),
                loading=loader_settings(settings, world, device=self._device),
                tars=folder.tars,
            )
        )

    def start_from(self, source: Source, samples: Any, *, say: Say) -> LoadedWeights:
        with torch.device("meta"):
            model = OrderClassifier(self._settings, self._attention)
        self._start = fit_to(model, source, allow=self._settings.init.allow, say=say)
        return self._start

    def build_model(self, samples: Any) -> OrderClassifier:
        model = OrderClassifier(self._settings, self._attention)
        if self._start is not None:
            copy_into(model, self._start)
        return model

    def build_objective(self, samples: Any, world: World) -> Objective:
        return FrameOrderLoss(self)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        return blocks_of(model)

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return clips [B, C, T, H, W], half of them reversed, and a float32 [B] that is 1 for reversed clips."""
        clips = to_model_input(
            batch["video"],
            batch["colour"],
            size_px=self._settings.size_px,
            mean=CLIP_MEAN,
            std=CLIP_STD,
            draw=None,
        )
        drawn = draw_uniform(batch["position"].cpu().numpy(), 1, seed=self._settings.seed, purpose="order")[:, 0]
        reversed_B = torch.from_numpy((drawn < 0.5).astype(np.float32)).to(clips.device)
        return torch.where(reversed_B[:, None, None, None, None] > 0, clips.flip(2), clips), reversed_B

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        flags = self._settings.evaluate
        if not flags.every:
            return {}
        metrics: dict[str, float] = {}
        for data in flags.evaluated_data():
            samples = self.samples(data.split, world, shards=data.shards)
            right, count, _ = self.score(model, samples, every=sample_stride(len(samples), at_most=flags.max_samples))
            counts = world.sum(torch.tensor([right, count]))
            metrics[f"{data.name}/accuracy"] = float(counts[0] / counts[1])
        return metrics

    @torch.no_grad()
    def score(self, model: nn.Module, samples: Samples, *, every: int) -> tuple[int, int, list[Any]]:
        """Return the number of correct clips, the number of clips, and the samples that could not be decoded."""
        right = count = 0
        failed: list[Any] = []
        for loaded in samples.evaluation_batches(stride=every):
            failed += loaded.failed
            clips, reversed_B = self.inputs(to_device(loaded.batch, self._device))
            right += int(((model(clips) > 0) == (reversed_B > 0)).sum())
            count += len(reversed_B)
        return right, count, failed


class FrameOrderLoss(Objective):
    """Binary cross-entropy loss."""

    def __init__(self, task: FrameOrderTask) -> None:
        super().__init__()
        self._task = task

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        clips, reversed_B = self._task.inputs(batch)
        with step.sync_context(True), step.seed_generators(0):
            with step.autocast():
                logits_B = model(clips)
            loss = nn.functional.binary_cross_entropy_with_logits(logits_B.float(), reversed_B)
            step.scale(loss).backward()
        return {"loss": step.world.sum(loss.detach()).double() / step.world.size}


def score_run(opened: OpenedRun, flags: FrameOrderFlags) -> Score:
    """Return the accuracy of a run's latest checkpoint on a split."""
    samples = opened.task.samples(flags.split, World())
    model = opened.trained.fill(opened.task.build_model(samples))
    every = sample_stride(len(samples), at_most=flags.max_samples)
    right, count, failed = opened.task.score(model, samples, every=every)
    return Score(
        name=f"frame-order-{flags.split}",
        samples=samples,
        clip="in order or reversed",
        values={"accuracy": right / count, "num_samples": count, "protocol": "half of the clips are reversed"},
        failed=failed,
    )
