"""A small task that needs every kind of state: random numbers in a step, and an objective with state."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from clipmill.train.config.training import TrainingSettings
from clipmill.train.data.batch import Batch, Sample
from clipmill.train.data.loader import Loader, LoaderSettings, SampleRequest, TrainingSet
from clipmill.train.data.order import LoaderState
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.data.workers import ThreadedReader
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.world import Step, World
from clipmill.train.engine.loop import train
from clipmill.train.losses.objective import Objective
from clipmill.train.run.folder import RunFolder, create_run, read_lines
from clipmill.train.run.tracking import Progress
from tests.train.running import weights_of

ONE = World()
CPU = torch.device("cpu")


class Points(ThreadedReader):
    """Points of a plane with noise from a generator per visit; some points fail."""

    fingerprint = "points"

    def __init__(self, *, failing: tuple[int, ...] = (), poisoned: int | None = None) -> None:
        self._failing = failing
        self._poisoned = poisoned

    num_samples = 20

    def describe(self) -> str:
        return "points"

    def key(self, sample: int) -> str:
        return f"point_{sample}"

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        return [self._load(request) for request in requests]

    def _load(self, request: SampleRequest) -> Sample | FailedSample:
        sample, rng = request.sample, request.generator("crop")
        if sample in self._failing:
            return FailedSample(request.position, self.key(sample), "undecodable", "as told")
        assert rng is not None
        values = np.array([np.nan if sample == self._poisoned else sample / 20, rng.normal()], np.float32)
        return Sample(position=request.position, key=self.key(sample), caption_id=sample, video=values.view(np.uint8))


class LoadedPoints:
    """Points in batches, as the settings specify; `group` points are loaded together."""

    def __init__(self, points: Points, chosen: TrainingSettings, world: World = ONE, *, group: int = 1) -> None:
        self._points, self.fingerprint = points, points.fingerprint
        self.num_samples: int | None = points.num_samples
        batch = chosen.batch // world.size
        self._loader = Loader(
            points,
            points,
            LoaderSettings(
                batch=batch,
                num_threads=chosen.workers,
                num_ahead=2 * batch,
                seed=chosen.seed,
                group=group,
                rank=world.rank,
                num_ranks=world.size,
            ),
        )

    @property
    def visits_per_epoch(self) -> float | None:
        return self.num_samples

    def describe(self) -> str:
        return self._points.describe()

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        return self._loader.batches(position=position, max_failures=max_failures)

    def evaluation_batches(self, *, stride: int = 1) -> Iterator[LoadedBatch]:
        return self._loader.evaluation_batches(stride=stride)

    def load_state_dict(self, *states: LoaderState) -> None:
        self._loader.load_state_dict(*states)


class Distance(Objective):
    """Squared distance to a line whose slope is also trained."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(3.0))
        self.num_seen = nn.Buffer(torch.zeros(()))

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        parts = batch["video"].view(torch.float32).to(self.slope.dtype).split(step.microbatch or len(batch["video"]))
        loss, worst = torch.zeros_like(self.slope), torch.zeros_like(self.slope)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            with step.seed_generators(number), step.sync_context(is_last), step.autocast():
                error = model(part).squeeze(1) - self.slope * part[:, 0]
                part_loss = (error**2).sum() / len(batch["video"])
                step.scale(part_loss).backward()
            loss, worst = loss + part_loss.detach(), torch.maximum(worst, error.detach().abs().max())
        self.num_seen.add_(step.world.size * len(batch["video"]))
        return {
            "loss": step.world.sum(loss).double() / step.world.size,
            "worst": step.world.gather(worst[None]).max(),
        }

    def after_step(self, step: Step) -> None:
        self.slope.data.clamp_(2.9, 3.1)


class PlaneTask:
    """A task that needs every kind of state: random numbers in the step, parameters and state of the objective."""

    name = "plane"
    columns: tuple[str, ...] = ()

    def __init__(self, *, dropout: float = 0.5, dtype: torch.dtype = torch.float32) -> None:
        self._dropout, self._dtype = dropout, dtype

    def training_set(self, world: World) -> LoadedPoints:
        return LoadedPoints(Points(), TrainingSettings(), world)

    def build_model(self, samples: TrainingSet) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(self._dropout)) for _ in range(2)]
        return nn.Sequential(nn.Linear(2, 8), *blocks, nn.Linear(8, 1)).to(self._dtype)

    def build_objective(self, samples: TrainingSet, world: World) -> Objective:
        return Distance().to(self._dtype)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        return (
            [module for module in model if isinstance(module, nn.Sequential)]
            if isinstance(model, nn.Sequential)
            else []
        )

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        # The number of forward passes differs between ranks.
        points = torch.tensor([[0.5, 0.5]], dtype=self._dtype)
        error = torch.stack([model(points).squeeze() - 1.5 for _ in range(world.rank + 1)]).mean()
        return {"error": error.abs().item(), "closeness": -error.abs().item()}


def settings(out: Path, **changes: Any) -> TrainingSettings:
    base = TrainingSettings(out=out, steps=12, batch=6, lr=0.05, warmup_steps=3, checkpoint_every=4, workers=2)
    return replace(base, **changes)


def train_plane(
    chosen: TrainingSettings,
    task: PlaneTask | None = None,
    points: Points | None = None,
    *,
    kind: type[LoadedPoints] = LoadedPoints,
    device: torch.device = CPU,
) -> RunFolder:
    """Start or resume a run of the task in the folder."""
    run = RunFolder(chosen.out)
    if not run.settings.exists():
        create_run(chosen)
    samples = kind(points or Points(), chosen)
    train(task or PlaneTask(), samples, chosen, run=run, world=ONE, device=device, progress=Progress())
    return run


def assert_same(run: RunFolder, other: RunFolder) -> None:
    """Assert that two runs have the same weights, metrics in each step, and failures."""
    weights, expected = weights_of(run.path), weights_of(other.path)
    assert weights.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in weights.items()
    )
    for key in ("step", "loss", "lr", "grad_norm", "worst", "epoch", "num_failed", "loss_scale", "num_skipped"):
        lines, again = ([line.get(key) for line in read_lines(folder.metrics)] for folder in (run, other))
        assert lines == again, key
    assert read_lines(run.failures) == read_lines(other.failures)
