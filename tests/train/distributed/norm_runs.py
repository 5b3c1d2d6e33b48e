"""Runs of a small model with batch norms, whose evaluations record the weights that every rank evaluates."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipmill.train.config.evaluation import EvaluationSettings
from clipmill.train.config.training import TrainingSettings
from clipmill.train.data.loader import TrainingSet
from clipmill.train.distributed.launch import open_world
from clipmill.train.distributed.world import World
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder
from tests.train.distributed.runs import STRATEGIES, spread_over, train_plane
from tests.train.plane import PlaneTask, settings


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of tensors by name. The tensors are copied, because FSDP resizes the memory of gathered weights."""
    summary = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        summary.update(name.encode() + tensor.detach().clone().numpy().tobytes())
    return summary.hexdigest()


class NormTask(PlaneTask):
    """The small task with batch norms, and with spectral norms whose vectors affect the next forward pass."""

    def __init__(self, out: Path, *, rank: int) -> None:
        super().__init__()
        self._file, self._digests = out / f"evaluated-by-{rank}.json", list[str]()

    def build_model(self, samples: TrainingSet) -> nn.Module:
        def block() -> nn.Module:
            linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
            return nn.Sequential(linear, nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2))

        return nn.Sequential(nn.Linear(2, 8), block(), block(), nn.Linear(8, 1))

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Return the metrics of rank 0; the index of a digest in the file is the number of its evaluation."""
        self._digests.append(digest([*model.named_parameters(), *model.named_buffers()]))
        self._file.write_text(json.dumps(self._digests))
        error = (model(torch.linspace(-1, 1, 16).reshape(8, 2)) - 1.5).abs().mean().item()
        return {"error": world.first(lambda: error)}


def run_norms(folder: Path) -> None:
    """Run one rank of several: for each strategy, a run and a run that resumes from step 2."""
    torch.set_num_threads(1)
    with open_world(device_type="cpu") as world:
        for strategy in STRATEGIES:
            for out in (folder / "whole" / strategy, folder / "resumed" / strategy):
                if out.parent.name == "resumed":
                    world.first(partial(_copy_begun, folder / "whole" / strategy, out))
                chosen = _settings(out, **spread_over(strategy))
                train_plane(chosen, world, task=NormTask(out, rank=world.rank))


def _settings(out: Path, **changes: Any) -> TrainingSettings:
    base = settings(out, steps=4, batch=12, checkpoint_every=2, keep_checkpoints=9, **changes)
    return replace(base, evaluate=EvaluationSettings(every=2), optimizer=replace(base.optimizer, ema=0.5))


def _copy_begun(whole: Path, begun: Path) -> None:
    shutil.copytree(whole, begun)
    shutil.rmtree(all_checkpoints(RunFolder(begun).checkpoints)[4])
