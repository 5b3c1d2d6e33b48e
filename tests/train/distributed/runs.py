"""Runs of the training loop in float64, which are equal on one process and on two ranks."""

import io
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from clipmill.manifests.errors import FailedWork
from clipmill.train.cli import main
from clipmill.train.config.evaluation import EvaluationSettings, ProbeEvaluation
from clipmill.train.config.model import DualEncoderInit, Lora
from clipmill.train.config.training import OptimizerSettings, ParallelSettings, Strategy, TrainingSettings
from clipmill.train.data.batch import Batch
from clipmill.train.distributed import heartbeat, launch
from clipmill.train.distributed.launch import open_world
from clipmill.train.distributed.world import World
from clipmill.train.engine.loop import train
from clipmill.train.losses.objective import Objective
from clipmill.train.losses.settings import Loss
from clipmill.train.models.attention import open_attention
from clipmill.train.models.dual_encoder import DualEncoder
from clipmill.train.models.videomae import MaskedAutoencoder
from clipmill.train.run import shared_folder
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder, create_run
from clipmill.train.run.tracking import Progress
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings, DualEncoderTowers
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask
from clipmill.train.tasks.mae.spec import MaeSettings, MaeTowers
from clipmill.train.tasks.mae.task import MaeTask
from clipmill.train.weights.sources import open_weights
from tests.train.plane import LoadedPoints, PlaneTask, Points, settings

CPU = torch.device("cpu")
STRATEGIES: tuple[Strategy, ...] = ("ddp", "zero1", "fsdp")
# Runs that train a part of a model, or a masked autoencoder: first those for `run_ranks`, then those for
# `run_further_parts`.
PARTS = ("adapted-zero1", "locked-ddp", "masked-fsdp")
FURTHER_PARTS = (
    *("adapted-ddp", "adapted-fsdp", "locked-zero1"),
    *("locked-fsdp", "masked-ddp", "masked-zero1"),
)
FAILING = (3, 11)


class ExactTask(DualEncoderTask):
    """The dual encoder in float64, so that the order of sums does not affect the result."""

    def build_model(self, samples: Any) -> DualEncoder:
        return super().build_model(samples).double()

    def build_objective(self, samples: Any, world: World) -> Objective:
        return super().build_objective(samples, world).double()

    def inputs(self, batch: Batch, *, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        clips, captions = super().inputs(batch, is_training=is_training)
        return clips.double(), captions.double() if captions.is_floating_point() else captions


def towers(out: Path, data_dir: Path, **changes: Any) -> DualEncoderSettings:
    """Return settings of a dual encoder on latents, with FastCLIP's loss, which keeps state for every sample."""
    base = DualEncoderSettings(
        shards=str(data_dir),
        out=out,
        input="latents",
        text_tower="frozen",
        segment="2s",
        steps=4,
        batch=8,
        lr=1e-3,
        warmup_steps=2,
        checkpoint_every=2,
        model="tiny",
        towers=DualEncoderTowers(depth=2),
        num_frames=2,
        loss=Loss(kind="fastclip-v3"),
    )
    return replace(base, **changes)


def adapter_settings(out: Path, data_dir: Path, *, source: Path, **changes: Any) -> DualEncoderSettings:
    """Return settings of that dual encoder with a frozen first block and adapters.

    The adapters are in the second block of a tower from `source`.
    """
    tuned = {"freeze": ("blocks:1",), "lora": Lora(rank=2, alpha=4), "lr": 1e-2, "microbatch": 3}
    init = DualEncoderInit(weights=str(source))
    return towers(out, data_dir, init=init, optimizer=OptimizerSettings(ema=0.9), **tuned, **changes)


def locked_settings(out: Path, data_dir: Path, **changes: Any) -> DualEncoderSettings:
    """Return settings of a dual encoder with a frozen video tower and a trained text tower, in microbatches."""
    tuned = {"text_tower": "trained", "freeze": ("video",), "loss": Loss(), "microbatch": 3}
    return towers(out, data_dir, **tuned, **changes)


def train_towers(chosen: DualEncoderSettings, world: World) -> nn.Module:
    """Run the dual encoder, from its latest checkpoint if it has one."""
    task = ExactTask(chosen, attention=open_attention("sdpa", device_type="cpu"), device=CPU)
    samples = task.training_set(world)
    if (source := open_weights(chosen.init)) is not None:
        task.start_from(source, samples, say=lambda _: None)
    return train(
        task, samples, chosen, run=_run(chosen, world), world=world, device=CPU, progress=Progress(is_quiet=True)
    )


class ExactMae(MaeTask):
    """The masked autoencoder in float64."""

    def build_model(self, samples: Any) -> MaskedAutoencoder:
        return super().build_model(samples).double()

    def inputs(self, batch: Batch, rows: slice = slice(None), *, is_training: bool = False) -> torch.Tensor:
        return super().inputs(batch, rows, is_training=is_training).double()


def masked_settings(out: Path, data_dir: Path, **changes: Any) -> MaeSettings:
    """Return settings of a masked autoencoder on latents, with both kinds of masks, random windows, and probes."""
    base = MaeSettings(
        shards=str(data_dir),
        out=out,
        input="latents",
        segment="2s",
        steps=4,
        batch=8,
        lr=1e-2,
        warmup_steps=2,
        checkpoint_every=2,
        model="tiny",
        towers=MaeTowers(depth=2),
        num_frames=4,
        mask_ratio=0.75,
        decoder_mask="random",
        decoder_depth=1,
        evaluate=ProbeEvaluation(every=2, labels=("pattern",), methods=("knn", "linear"), neighbours=6, max_bank=30),
        best="val/pattern_linear_top1",
    )
    return replace(base, **changes)


def train_masked(chosen: MaeSettings, world: World) -> nn.Module:
    """Run the masked autoencoder, from its latest checkpoint if it has one."""
    task = ExactMae(chosen, attention=open_attention("sdpa", device_type="cpu"), device=CPU)
    samples = task.training_set(world)
    return train(
        task, samples, chosen, run=_run(chosen, world), world=world, device=CPU, progress=Progress(is_quiet=True)
    )


def exact_plane(out: Path, **changes: Any) -> TrainingSettings:
    """Return settings of the small task, with averaged weights and an evaluation that selects the best checkpoint."""
    base = settings(out, evaluate=EvaluationSettings(every=3), best="closeness")
    return replace(base, **{"optimizer": replace(base.optimizer, ema=0.9), **changes})


class LateNanTask(PlaneTask):
    """Small task in which only the second of two ranks has NaN in an averaged weight after the last step."""

    def __init__(self, world: World) -> None:
        super().__init__(dropout=0.0, dtype=torch.float64)
        self._world = world

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        self._num_evaluations = getattr(self, "_num_evaluations", 0) + 1
        if self._num_evaluations == 4 and not self._world.is_first:
            next(model.parameters()).data[0, 0] = float("nan")
        return super().evaluate(model, world)


def train_plane(
    chosen: TrainingSettings,
    world: World,
    points: Points | None = None,
    *,
    task: PlaneTask | None = None,
    group: int = 1,
) -> nn.Module:
    """Run the small task, from its latest checkpoint if it has one."""
    samples = LoadedPoints(points or Points(), chosen, world, group=group)
    task = task or PlaneTask(dropout=0.0, dtype=torch.float64)
    return train(
        task, samples, chosen, run=_run(chosen, world), world=world, device=CPU, progress=Progress(is_quiet=True)
    )


def _run(chosen: TrainingSettings, world: World) -> RunFolder:
    run = RunFolder(chosen.out)
    # Only rank 0 checks, because a different rank would see the folder that rank 0 has just made.
    return world.first(lambda: run if run.settings.exists() else create_run(chosen))


def spread_over(strategy: Strategy) -> dict[str, Any]:
    """Return settings for a strategy."""
    return {"parallel": ParallelSettings(strategy=strategy)}


def train_parts(folder: Path, data_dir: Path, source: Path, world: World, *, names: Sequence[str]) -> None:
    """Run each name of `names`, such as `adapted-zero1`: part of a model or a masked autoencoder, and a strategy."""
    for name in names:
        kind, _, strategy = name.partition("-")
        out, parallel = folder / name, spread_over(cast(Strategy, strategy))
        if kind == "adapted":
            train_towers(adapter_settings(out, data_dir, source=source, **parallel), world)
        elif kind == "locked":
            train_towers(locked_settings(out, data_dir, **parallel), world)
        else:
            train_masked(masked_settings(out, data_dir, microbatch=3, **parallel), world)


def run_further_parts(folder: Path, data_dir: Path, source: Path) -> None:
    """Run one rank of several, with the strategies that `run_ranks` omits."""
    torch.set_num_threads(1)
    with open_world(device_type="cpu") as world:
        train_parts(folder, data_dir, source, world, names=FURTHER_PARTS)


def _all_runs(folder: Path, data_dir: Path, source: Path, world: World) -> None:
    train_parts(folder, data_dir, source, world, names=PARTS)
    for strategy in STRATEGIES:
        train_plane(exact_plane(folder / f"plane-{strategy}", **spread_over(strategy)), world)
        train_towers(towers(folder / f"towers-{strategy}", data_dir, **spread_over(strategy)), world)
        # One process started this run and left a checkpoint.
        train_plane(exact_plane(folder / f"resumed-{strategy}", **spread_over(strategy)), world)
    train_plane(exact_plane(folder / "microbatches", microbatch=1), world)
    train_plane(exact_plane(folder / "failing", max_failures=50), world, Points(failing=FAILING))
    shown = {}
    for name, points, most in (("poisoned", Points(poisoned=7), 9), ("budget", Points(failing=FAILING), 2)):
        try:
            train_plane(exact_plane(folder / name, max_failures=most), world, points)
        except FailedWork as error:
            shown[name] = str(error)
    try:
        train_plane(exact_plane(folder / "not-finite"), world, task=LateNanTask(world))
    except FailedWork as error:
        shown["not-finite"] = str(error)
    (folder / f"shown-{world.rank}.json").write_text(json.dumps(shown))


def run_and_resume(folder: Path) -> None:
    """Run one rank of several: for each strategy, a run in float32 and a run that resumes from step 2.

    The group size does not divide a rank's part of the batch, and failures make the ranks read ahead differently.
    """
    torch.set_num_threads(1)
    with open_world(device_type="cpu") as world:
        for strategy in STRATEGIES:
            changes = {"batch": 12, "steps": 4, "checkpoint_every": 2, "keep_checkpoints": 9, **spread_over(strategy)}
            whole, resumed = folder / "whole" / strategy, folder / "resumed" / strategy
            for out in (whole, resumed):
                if out == resumed:
                    world.first(partial(_copy_begun, whole, resumed))
                train_plane(settings(out, **changes), world, Points(failing=FAILING), task=PlaneTask(), group=5)


def _copy_begun(whole: Path, begun: Path) -> None:
    """Copy a run in the state that it had when it was killed after its second step."""
    shutil.copytree(whole, begun)
    shutil.rmtree(all_checkpoints(RunFolder(begun).checkpoints)[4])


def run_command(*arguments: str) -> None:
    """Run one rank of the complete program."""
    sys.argv = ["train", *arguments]
    main()


def run_impatient_command(*arguments: str) -> None:
    """Run one rank of the complete program, with a heartbeat limit of a few seconds."""
    heartbeat.BEAT_S, heartbeat.SILENT_S = 0.2, 2.0
    run_command(*arguments)


def run_command_of_two(*arguments: str) -> None:
    """Run one rank of the complete program with a short heartbeat limit.

    The second rank is killed as soon as both ranks have joined.
    """
    if os.environ["RANK"] == "1":
        launch.require_same_start = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    run_impatient_command(*arguments)


def run_own_commands(folder: Path, cases: list[tuple[Sequence[str], ...]], ports: list[int]) -> None:
    """Run one rank of several, which runs its own command for each case, and write its exit statuses and stderr.

    The ranks join again for each case, each as the first rank of its machine.
    """
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = "0"
    ends = []
    for commands, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with redirect_stderr(io.StringIO()) as stderr:
            try:
                run_command(*commands[rank])
            except SystemExit as end:
                ends.append((end.code, stderr.getvalue()))
        if dist.is_initialized():
            dist.destroy_process_group()  # a failed command relies on the end of its process
    (folder / f"ends-{rank}.json").write_text(json.dumps(ends))


def run_apart(folder: Path, command: Sequence[str], ports: list[int]) -> None:
    """Run one rank of two in its own working directory: a command with a relative --out, and checks of folders."""
    torch.set_num_threads(1)
    shared_folder.VISIBLE_S = 0.6
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = "0"
    (folder / str(rank)).mkdir()
    os.chdir(folder / str(rank))
    os.environ["MASTER_PORT"] = str(ports[0])
    with redirect_stderr(io.StringIO()) as stderr, suppress(SystemExit):
        run_command(*command)
    outcome: dict[str, Any] = {"command": stderr.getvalue()}
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(ports[1])
    with open_world(device_type="cpu") as world:
        shared_folder.require_shared(folder / "shared", world=world)
        outcome["shared"] = [path.name for path in (folder / "shared").iterdir()]
        late = folder / f"late-{rank}"
        late.mkdir()
        (late / "first").write_text("whole" if rank == 0 else "wh")
        world.gather_objects(None)
        if rank == 1:
            threading.Timer(0.2, (late / "first").write_text, ("whole",)).start()
        shared_folder.wait_for_files(late, world=world)
        outcome["late"] = (late / "first").read_text()
        if rank == 1:
            (late / "first").unlink()
        shared_folder.wait_for_files(late, world=world)  # the file never appears
        outcome["missing"] = (late / "first").exists()
    (folder / f"found-{rank}.json").write_text(json.dumps(outcome))


def run_ranks(folder: Path, data_dir: Path, source: Path) -> None:
    """Run one rank of two; `source` is a run of the dual encoder."""
    torch.set_num_threads(1)
    with suppress(BrokenPipeError), open_world(device_type="cpu") as launched:
        _all_runs(folder, data_dir, source, launched)


def run_on_nodes(environments: list[dict[str, str]], ports: list[int], commands: list[Sequence[str]]) -> None:
    """Run one rank of several commands in turn, where each rank is on its own node and no folder is shared."""
    torch.set_num_threads(1)
    heartbeat.BEAT_S, heartbeat.SILENT_S = 0.2, 5.0
    os.environ |= {**environments[int(os.environ["RANK"])], "LOCAL_RANK": "0"}
    for port, command in zip(ports, commands, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with suppress(SystemExit):
            run_command(*command)
