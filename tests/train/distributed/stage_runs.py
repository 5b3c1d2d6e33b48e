"""Runs of a captioner on one process and on a pipeline's stages, in float64; `python -m` this is one of the ranks."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.train.plane import LoadedPoints, Points, settings
from train.caption.layers import layers_of, part_of
from train.caption.objective import CaptionLoss
from train.data.batch import Batch, Sample
from train.data.failures import FailedSample
from train.data.loader import TrainingSet, Visit
from train.distributed.launch import open_world
from train.distributed.partition import LayerCost
from train.distributed.pipeline import Pipeline
from train.distributed.settings import ParallelSettings
from train.distributed.world import World
from train.loop import train
from train.models.attention import attend_with_sdpa
from train.models.captioner import Captioner
from train.models.captioner_stages import CaptionerPart
from train.models.gpt2 import Gpt2, Gpt2Size
from train.models.timesformer import TimeSformer
from train.models.transformer import TransformerSize, blocks_of
from train.models.video_vit import VideoViTSize
from train.objective import Objective
from train.progress import Progress
from train.run_folder import RunFolder, create_run
from train.settings import TrainingSettings
from train.step import Step

ONE_STAGE = ParallelSettings()
CPU = torch.device("cpu")
NUM_FRAMES, IMAGE_PX, VOCABULARY, END = 2, 16, 37, 36
MAX_TOKENS, NUM_TEXTS = 7, 2


def captioner(*, dropout: float = 0.0) -> Captioner:
    """A TimeSformer of 3 blocks and a GPT-2 of 2, of different widths: 9 stages."""
    size = VideoViTSize(trunk=TransformerSize(width=16, depth=3, num_heads=2), patch_px=8)
    text = Gpt2Size(
        trunk=TransformerSize(width=12, depth=2, num_heads=2), vocabulary_size=VOCABULARY, context_length=MAX_TOKENS + 2
    )
    return Captioner(
        TimeSformer(size, image_px=IMAGE_PX, num_frames=NUM_FRAMES, attend=attend_with_sdpa),
        Gpt2(text, attend=attend_with_sdpa, dropout=dropout),
    )


class Captions(Points):
    """Clips of noise and captions of any length, a function of the visit's seed."""

    def _load(self, visit: Visit) -> Sample | FailedSample:
        if visit.sample in self._failing:
            return FailedSample(visit.position, self.key(visit.sample), "undecodable", "as told")
        rng = visit.rng()
        assert rng is not None
        values = rng.normal(size=(3, NUM_FRAMES, IMAGE_PX, IMAGE_PX))
        if visit.sample == self._poisoned:
            values[:] = np.nan
        targets = np.full((NUM_TEXTS, MAX_TOKENS), -100)
        for text in targets:
            length = rng.integers(0, MAX_TOKENS - 2)
            text[:length] = rng.integers(0, END, length)
            text[length] = END
        return Sample(
            position=visit.position,
            key=self.key(visit.sample),
            targets=targets.astype(np.int64),
            video=values.view(np.uint8),
        )


class RecordingLoss(CaptionLoss):
    """Writes down the gradients of the first step."""

    folder: Path
    rank: int

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, float]:
        numbers = super().backward(model, batch, step)
        if step.number == 1:
            named = model.part.named_parameters() if isinstance(model, Pipeline) else plain(model)
            torch.save(dict(named), self.folder / f"step-1-rank-{self.rank}.pt")
        return numbers


def plain(model: nn.Module) -> Any:
    return [(name.removeprefix("module."), one) for name, one in model.named_parameters()]


class StageTask:
    """Captions of noise."""

    name = "stages"
    columns: tuple[str, ...] = ()

    def __init__(self, folder: Path, rank: int, *, dropout: float = 0.0, frozen: str | None = None) -> None:
        self._folder, self._rank, self._dropout, self._frozen = folder, rank, dropout, frozen

    def build_model(self, samples: TrainingSet) -> Captioner:
        model = captioner(dropout=self._dropout).double()
        # Where weights begin with zeros, there is nothing to see of what they do.
        for name, one in model.named_parameters():
            nn.init.normal_(one, std=0.3)
            one.requires_grad_(self._frozen is None or not name.startswith(self._frozen))
        return model

    def build_objective(self, samples: TrainingSet, world: World) -> Objective:
        loss = RecordingLoss(clips_of, end_id=END, label_smoothing=0.1)
        loss.folder, loss.rank = self._folder, self._rank
        return loss

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        return blocks_of(model)

    def layers(self, model: Captioner) -> list[LayerCost]:
        return layers_of(model)

    def part(self, model: Captioner, layers: range) -> CaptionerPart:
        return part_of(model, layers)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        return {}


def clips_of(batch: Batch, rows: slice) -> torch.Tensor:
    return batch["video"][rows].view(torch.float64)


def chosen_of(out: Path, *, parallel: ParallelSettings = ONE_STAGE, **changes: Any) -> TrainingSettings:
    base = settings(out, batch=8, steps=6, checkpoint_every=3, microbatch=2, parallel=parallel)
    # Gradients are longer than this: what clipping does shows.
    return replace(base, **{"optimizer": replace(base.optimizer, ema=0.9), "max_grad_norm": 0.5, **changes})


def train_stages(
    chosen: TrainingSettings,
    world: World,
    points: Captions | None = None,
    *,
    dropout: float = 0.0,
    frozen: str | None = None,
) -> nn.Module:
    """A run, from its latest checkpoint if it has one."""
    samples = LoadedPoints(points or Captions(), chosen, world.replicas)
    run = RunFolder(chosen.out)
    run = world.first(lambda: run if run.settings.exists() else create_run(chosen))
    task = StageTask(chosen.out, world.rank, dropout=dropout, frozen=frozen)
    return train(task, samples, chosen, run=run, world=world, device=CPU, progress=Progress(is_quiet=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_world(device_type="cpu") as launched:
        folder = Path(sys.argv[1])
        for schedule in ("gpipe", "1f1b"):
            parallel = ParallelSettings(stages=launched.size, schedule=schedule)
            train_stages(chosen_of(folder / schedule, parallel=parallel), launched.cut(parallel.stages))
