"""Runs of a captioner on one process and on a pipeline's stages, in float64."""

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from clipmill.manifests.errors import FailedWork, Stopped
from clipmill.train.config.model import FrozenPart
from clipmill.train.config.training import ParallelSettings, Schedule, TrainingSettings
from clipmill.train.data.batch import Batch, Sample
from clipmill.train.data.loader import SampleRequest, TrainingSet
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.launch import open_world
from clipmill.train.distributed.pipeline import LayerCost, Pipeline
from clipmill.train.distributed.world import Step, World
from clipmill.train.engine.loop import train
from clipmill.train.losses.objective import Objective
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.captioner import Captioner, Gpt2, Gpt2Size
from clipmill.train.models.timesformer import TimeSformer
from clipmill.train.models.transformer import TransformerSize, add_adapters, blocks_of
from clipmill.train.models.video_vit import VideoViTSize
from clipmill.train.optim.parameters import freeze
from clipmill.train.run.folder import RunFolder, create_run
from clipmill.train.run.tracking import Progress
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.spec import DecodingSettings
from clipmill.train.tasks.caption.stages import TIED, CaptionerPart, complete_captioner, layers_of, part_of
from clipmill.train.tasks.caption.task import CaptionLoss
from tests.train.plane import LoadedPoints, Points, settings

ONE_STAGE = ParallelSettings()
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
# The first partition puts both ends of the tied matrix on one stage, the second on two.
THREE = {"gpipe": "parameters", "1f1b": "2,4,3"}
FAILING = (3, 11)
DECODINGS = {
    "greedy": DecodingSettings(max_tokens=6),
    "sample": DecodingSettings(method="sample", temperature=2.0, top_k=20, seed=5, max_tokens=6),
    "beam": DecodingSettings(method="beam", num_beams=3, max_tokens=6),
}
CPU = torch.device("cpu")
NUM_FRAMES, IMAGE_PX, VOCABULARY, END = 2, 16, 37, 36
MAX_TOKENS, NUM_TEXTS = 7, 2


def captioner(*, dropout: float = 0.0) -> Captioner:
    """Make a TimeSformer of 3 blocks and a GPT-2 of 2 blocks, with different widths: 9 layers in total."""
    size = VideoViTSize(trunk=TransformerSize(width=16, depth=3, num_heads=2), patch_px=8)
    text = Gpt2Size(
        trunk=TransformerSize(width=12, depth=2, num_heads=2), vocabulary_size=VOCABULARY, context_length=MAX_TOKENS + 2
    )
    return Captioner(
        TimeSformer(size, image_px=IMAGE_PX, num_frames=NUM_FRAMES, attend=attend_with_sdpa),
        Gpt2(text, attend=attend_with_sdpa, dropout=dropout),
    )


class Captions(Points):
    """Clips of noise and captions of any length, as a function of the visit's seed."""

    def _load(self, request: SampleRequest) -> Sample | FailedSample:
        if request.sample in self._failing:
            return FailedSample(request.position, self.key(request.sample), "undecodable", "as told")
        rng = request.generator("crop")
        assert rng is not None
        values = rng.normal(size=(3, NUM_FRAMES, IMAGE_PX, IMAGE_PX))
        if request.sample == self._poisoned:
            values[:] = np.nan
        targets = np.full((NUM_TEXTS, MAX_TOKENS), -100)
        for text in targets:
            length = rng.integers(0, MAX_TOKENS - 2)
            text[:length] = rng.integers(0, END, length)
            text[length] = END
        return Sample(
            position=request.position,
            key=self.key(request.sample),
            targets=targets.astype(np.int64),
            video=values.view(np.uint8),
        )


class RecordingLoss(CaptionLoss):
    """Caption loss that saves the gradients of the first step."""

    folder: Path
    rank: int

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        numbers = super().backward(model, batch, step)
        if step.number == 1:
            named = model.part.named_parameters() if isinstance(model, Pipeline) else plain_parameters(model)
            torch.save({name: parameter.grad for name, parameter in named}, self.folder / f"step-1-rank-{self.rank}.pt")
        return numbers


def plain_parameters(model: nn.Module) -> Any:
    return [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]


class StageTask:
    """Task that trains a captioner on noise."""

    name = "stages"
    columns: tuple[str, ...] = ()

    def __init__(
        self, folder: Path, rank: int, *, dropout: float = 0.0, frozen: str | None = None, is_tuned: bool = False
    ) -> None:
        self._folder, self._rank, self._dropout, self._frozen = folder, rank, dropout, frozen
        self._is_tuned = is_tuned

    def training_set(self, world: World) -> LoadedPoints:
        return LoadedPoints(Captions(), settings(self._folder), world)

    def build_model(self, samples: TrainingSet) -> Captioner:
        model = captioner(dropout=self._dropout)
        if self._is_tuned:
            freeze(model, [FrozenPart("video", 1), FrozenPart("decoder", 1)])
            frozen_ids = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
            add_adapters(model.video, rank=2, scale=1.5, targets=("attention", "mlp"), frozen_ids=frozen_ids)
        model.double()
        # Weights that start at zero would hide their effect.
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, std=0.3)
            if self._frozen is not None:
                parameter.requires_grad_(not name.startswith(self._frozen))
        return model

    def build_objective(self, samples: TrainingSet, world: World) -> Objective:
        loss = RecordingLoss(clips_of, end_id=END, label_smoothing=0.1)
        loss.folder, loss.rank = self._folder, self._rank
        return loss

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        return blocks_of(model)

    def layers(self, model: Captioner) -> list[LayerCost]:
        return layers_of(model)

    def extract_layers(self, model: Captioner, layers: range) -> CaptionerPart:
        return part_of(model, layers)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        raise Stopped("as told")


def clips_of(batch: Batch, rows: slice) -> torch.Tensor:
    return batch["video"][rows].view(torch.float64)


def chosen_of(out: Path, *, parallel: ParallelSettings = ONE_STAGE, **changes: Any) -> TrainingSettings:
    base = settings(out, batch=8, steps=3, checkpoint_every=2, microbatch=2, parallel=parallel)
    # This limit is below the gradient norm, so clipping affects the result.
    return replace(base, **{"optimizer": replace(base.optimizer, ema=0.9), "max_grad_norm": 0.5, **changes})


def train_stages(
    chosen: TrainingSettings,
    world: World,
    points: Captions | None = None,
    *,
    dropout: float = 0.0,
    frozen: str | None = None,
    is_tuned: bool = False,
) -> nn.Module:
    """Run the captioner, from its latest checkpoint if it has one."""
    samples = LoadedPoints(points or Captions(), chosen, world.replicas)
    run = RunFolder(chosen.out)
    run = world.first(lambda: run if run.settings.exists() else create_run(chosen))
    task = StageTask(chosen.out, world.rank, dropout=dropout, frozen=frozen, is_tuned=is_tuned)
    return train(task, samples, chosen, run=run, world=world, device=CPU, progress=Progress(is_quiet=True))


def train_tuned(out: Path, world: World, *, parallel: ParallelSettings = ONE_STAGE) -> nn.Module:
    """Run the captioner with frozen blocks, adapters, and a learning rate for each layer."""
    chosen = chosen_of(out, parallel=parallel)
    optimizer = replace(chosen.optimizer, layer_decay=0.5)
    return train_stages(replace(chosen, optimizer=optimizer), world, is_tuned=True)


def captions_by(model: nn.Module, *, sees: bool = True) -> dict[str, Any]:
    """Return captions of three clips for every decoding method, and the logits of fixed captions."""
    generator = torch.Generator().manual_seed(3)
    clips = torch.randn(3, 3, NUM_FRAMES, IMAGE_PX, IMAGE_PX, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, END, (3, 2, 4), generator=generator)
    seen = clips if sees else torch.empty(3, 0)
    with torch.no_grad():
        tensors: dict[str, Any] = {"logits": model(seen, tokens).sum(dim=-1).tolist()}
    for name, decoding in DECODINGS.items():
        written = generate_captions(model, seen, decoding, end_id=END, samples=[4, 7, 9])  # type: ignore[arg-type]
        tensors[name] = written.tokens_VL.tolist()
    return tensors


def begin_from(folder: Path, source: Path, world: World) -> Path:
    """Copy a run with only its first checkpoint, so that a new run resumes from there."""

    def copy() -> None:
        shutil.copytree(source, folder)
        for path in sorted((folder / "checkpoints").iterdir())[1:]:
            shutil.rmtree(path)

    world.first(copy)
    return folder


def _on_two(folder: Path, world: World) -> None:
    shown = {}
    parallel = ParallelSettings(stages=2, schedule="1f1b", partition="6,3")
    train_stages(chosen_of(folder / "2-1f1b", parallel=parallel), world)
    for name, points, most in (("poisoned", Captions(poisoned=7), 9), ("budget", Captions(failing=FAILING), 1)):
        try:
            train_stages(chosen_of(folder / name, max_failures=most, parallel=parallel), world, points)
        except FailedWork as error:
            shown[name] = str(error)
    failing = chosen_of(folder / "2-failing", max_failures=50, parallel=parallel)
    train_stages(failing, world, Captions(failing=FAILING))
    (folder / f"shown-{world.rank}.json").write_text(json.dumps(shown))
    # This run lasts until one of the two ranks is killed.
    endless = chosen_of(folder / "endless", parallel=parallel, steps=10**6, checkpoint_every=5)
    train_stages(endless, world)


def _on_three(folder: Path, world: World) -> None:
    for schedule in SCHEDULES:
        parallel = ParallelSettings(stages=3, schedule=schedule, partition=THREE[schedule])
        train_stages(chosen_of(folder / f"3-{schedule}", parallel=parallel), world)
    # The middle stage ends with the decoder's embedding and blocks, and the last stage has only the final norm, so the
    # ends of the tied matrix are on neighboring stages.
    parallel = ParallelSettings(stages=3, partition="1,7,1")
    train_stages(chosen_of(folder / "3-frozen", parallel=parallel), world, frozen="video.")
    # The tower is split between its blocks, so no stage sees how many blocks it has.
    train_tuned(folder / "3-tuned", world, parallel=ParallelSettings(stages=3, partition="3,3,3"))


def _on_four(folder: Path, world: World, two_by_two: World) -> None:
    for strategy in ("ddp", "zero1"):
        pairs = ParallelSettings(stages=2, strategy=strategy, partition="6,3")
        train_stages(chosen_of(folder / f"2x2-{strategy}", parallel=pairs), two_by_two)
    resumed = begin_from(folder / "resumed-2x2-zero1", folder / "one", world)
    train_stages(chosen_of(resumed, parallel=pairs), two_by_two)
    four = ParallelSettings(stages=4, partition="uniform")
    part = train_stages(chosen_of(folder / "4", parallel=four), world)
    tied = {name: parameter for name, parameter in part.named_parameters() if name == TIED}
    torch.save(tied, folder / f"tied-{world.rank}.pt")
    model = complete_captioner(part.eval(), stages=world.stages, device=CPU)
    captions = captions_by(model, sees=world.stages.is_first)
    (folder / f"said-{world.rank}.json").write_text(json.dumps(captions))
    train_stages(chosen_of(begin_from(folder / "four-of-2x2", folder / "2x2-zero1", world), parallel=four), world)
    for name in ("dropout", "dropout-resumed"):
        if name != "dropout":
            begin_from(folder / name, folder / "dropout", world)
        train_stages(chosen_of(folder / name, parallel=four), world, dropout=0.5)


def run_further_stages(folder: Path) -> None:
    """Run one rank of two, three or four, with schedules, a strategy and models that `run_stages` omits."""
    torch.set_num_threads(1)
    with open_world(device_type="cpu") as launched:
        if launched.size == 2:
            parallel = ParallelSettings(stages=2, schedule="gpipe", partition="6,3")
            train_stages(chosen_of(folder / "2-gpipe", parallel=parallel), launched.cut(2))
        elif launched.size == 3:
            _on_three(folder, launched.cut(3))
        else:
            pairs = ParallelSettings(stages=2, strategy="ddp", partition="6,3")
            resumed = begin_from(folder / "resumed-2x2-ddp", folder / "one", launched)
            train_stages(chosen_of(resumed, parallel=pairs), launched.cut(2))
            four, world = ParallelSettings(stages=4, partition="uniform"), launched.cut(4)
            train_stages(chosen_of(begin_from(folder / "resumed-4", folder / "one", world), parallel=four), world)


def run_stages(folder: Path) -> None:
    """Run one rank of two or four."""
    torch.set_num_threads(1)
    with suppress(BrokenPipeError), open_world(device_type="cpu") as launched:
        if launched.size == 2:
            _on_two(folder, launched.cut(2))
        else:
            _on_four(folder, launched.cut(4), launched.cut(2))
