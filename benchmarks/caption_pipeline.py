"""Pipeline parallelism of a captioner on CPUs with gloo: the measured and the theoretical bubble.

    python -m benchmarks.caption_pipeline [--stages 2] [--microbatches 2 4 8 16] [--schedules gpipe 1f1b] [--json FILE]

The model is a TimeSformer of 8 blocks (width 192, 4 frames of 112 px) with a GPT-2 of 2 blocks, partitioned so that all
stages compute for about the same time. A microbatch has 2 clips, so more microbatches mean a larger batch. Each stage
is a process with one thread.

- `bubble`: fraction of a step in which a stage is idle, averaged over the stages
- `theory`: (p - 1) / (m + p - 1), the bubble of p equally fast stages with m microbatches and free communication
- `slowest / mean`: compute time of the slowest stage divided by the mean over the stages; a value above 1 adds to the
  bubble
- `speed / one`: samples per second relative to one process with one thread
- `theory x p`: p (1 - theory)

Each round covers all numbers of microbatches. Figures are medians over the rounds.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.environment import REPOSITORY
from benchmarks.report import parser_for, print_report
from clipmill.train.config.training import ParallelSettings, Schedule
from clipmill.train.data.batch import Batch
from clipmill.train.distributed.launch import open_world
from clipmill.train.distributed.pipeline import Pipeline, partition
from clipmill.train.distributed.world import Step, World
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.captioner import Captioner, Gpt2, Gpt2Size
from clipmill.train.models.timesformer import TimeSformer
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.video_vit import VideoViTSize
from clipmill.train.tasks.caption.stages import layers_of, part_of
from clipmill.train.tasks.caption.task import CaptionLoss

NUM_FRAMES, IMAGE_PX, VOCABULARY, NUM_TOKENS, MICROBATCH = 4, 112, 1000, 16, 2
DEPTH = 8
# Layers per stage for about equal compute. The layers of the decoder are cheap, because they have few tokens.
CUTS = {2: "5,9", 3: "4,3,7", 4: "3,2,2,7"}
CPU = torch.device("cpu")


def new_captioner() -> Captioner:
    """Create the captioner. Its weights are the same each time."""
    torch.manual_seed(0)
    trunk = TransformerSize(width=192, depth=DEPTH, num_heads=3)
    tower = TimeSformer(
        VideoViTSize(trunk=trunk, patch_px=16), image_px=IMAGE_PX, num_frames=NUM_FRAMES, attend=attend_with_sdpa
    )
    text = TransformerSize(width=192, depth=2, num_heads=3)
    size = Gpt2Size(trunk=text, vocabulary_size=VOCABULARY, context_length=NUM_TOKENS)
    return Captioner(tower, Gpt2(size, attend=attend_with_sdpa))


class Clock:
    """Timer that adds up the time spent in calls."""

    def __init__(self) -> None:
        self.s = 0.0

    def timing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that the time of its calls is added."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.s += time.perf_counter() - began_s

        return timed


def steps_of(
    model: nn.Module, world: World, *, microbatches: list[int], num_rounds: int, clock: Clock
) -> dict[int, list[tuple[float, float]]]:
    """Return the time of each step and of this process's computations in it, in seconds, by number of microbatches."""
    clips = torch.randn(max(microbatches) * MICROBATCH, 3, NUM_FRAMES, IMAGE_PX, IMAGE_PX)
    targets = torch.randint(0, VOCABULARY, (len(clips), 1, NUM_TOKENS))
    objective = CaptionLoss(lambda batch, rows: clips[rows], end_id=0, label_smoothing=0.0)
    durations: dict[int, list[tuple[float, float]]] = {count: [] for count in microbatches}
    for number in range(num_rounds + 1):
        for count in microbatches:
            batch = Batch(targets=targets[: count * MICROBATCH])
            world.gather(torch.zeros(1))  # synchronizes the start
            clock.s, began_s = 0.0, time.perf_counter()
            objective.backward(model, batch, Step(number=1, world=world.replicas, microbatch=MICROBATCH))
            if number:  # the first round is a warm-up
                durations[count].append((time.perf_counter() - began_s, clock.s))
    return durations


def run_as_rank(schedule: Schedule, microbatches: list[int], num_rounds: int, out: Path) -> None:
    """Run one stage, in a process that `launch_stages` launched."""
    from torch.distributed.pipelining import PipelineStage

    torch.set_num_threads(1)
    with open_world(device_type="cpu") as launched:
        world = launched.cut(launched.size)
        captioner, clock = new_captioner(), Clock()
        parallel = ParallelSettings(stages=world.size, schedule=schedule, partition=CUTS[world.size])
        cut = partition(layers_of(captioner), num_stages=world.size, rule=parallel.partition)
        model = Pipeline(part_of(captioner, cut[world.rank]), settings=parallel, world=world, device=CPU)
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(PipelineStage, name, clock.timing(getattr(PipelineStage, name)))
        durations = steps_of(model, world, microbatches=microbatches, num_rounds=num_rounds, clock=clock)
        every = world.gather_objects(durations)
        if world.is_first:
            out.write_text(json.dumps(every))


def launch_stages(size: int, schedule: str, microbatches: list[int], num_rounds: int) -> list[dict[str, Any]]:
    """Launch a process for each stage, and return their measurements."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = Path(folder) / "found.json"
        counts = " ".join(map(str, microbatches))
        command = [sys.executable, "-m", "benchmarks.caption_pipeline", "--rank", str(out), "--schedules", schedule]
        command += ["--rounds", str(num_rounds), "--microbatches", *counts.split()]
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(size)
        ]
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise RuntimeError(f"{' '.join(command)} failed")
        durations: list[dict[str, Any]] = json.loads(out.read_text())
        return durations


def row_of(
    schedule: str,
    num_microbatches: int,
    stage_durations: list[list[tuple[float, float]]],
    one: list[tuple[float, float]],
) -> dict[str, Any]:
    """Return a row of the table."""
    num_stages, num_samples = len(stage_durations), num_microbatches * MICROBATCH
    rounds = list(zip(*stage_durations, strict=True))
    step_s = [max(wall_s for wall_s, _ in of_round) for of_round in rounds]
    computed = [[busy_s for _, busy_s in of_round] for of_round in rounds]
    theory = (num_stages - 1) / (num_microbatches + num_stages - 1)
    one_s = statistics.median(wall_s for wall_s, _ in one)
    return {
        "schedule": schedule,
        "stages": num_stages,
        "microbatches": num_microbatches,
        "samples/s": num_samples / statistics.median(step_s),
        "bubble": statistics.median(
            1 - statistics.mean(busy) / wall_s for busy, wall_s in zip(computed, step_s, strict=True)
        ),
        "theory": theory,
        "slowest / mean": statistics.median(max(busy) / statistics.mean(busy) for busy in computed),
        "speed / one": one_s / statistics.median(step_s),
        "theory x p": num_stages * (1 - theory),
    }


def main() -> None:
    """Run the benchmark and print the results."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--stages", type=int, default=2, choices=sorted(CUTS))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--schedules", nargs="+", choices=("gpipe", "1f1b"), default=["gpipe", "1f1b"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=Path, help="run one stage; the benchmark uses this flag for its processes")
    arguments = parser.parse_args()
    shared = {"microbatches": arguments.microbatches, "num_rounds": arguments.rounds}
    if arguments.rank is not None:
        run_as_rank(arguments.schedules[0], out=arguments.rank, **shared)
        return
    torch.set_num_threads(1)
    one = steps_of(new_captioner(), World(), clock=Clock(), **shared)
    rows = []
    for schedule in arguments.schedules:
        durations = launch_stages(arguments.stages, schedule, **shared)
        for count in arguments.microbatches:
            stage_durations = [rank_durations[str(count)] for rank_durations in durations]
            rows.append(row_of(schedule, count, stage_durations, one[count]))
    print_report(
        f"Captioner on {arguments.stages} stages, gloo, microbatches of {MICROBATCH} clips",
        rows,
        notes=["`bubble` includes the imbalance of stages and communication; `theory` does not."],
        json_path=arguments.json,
    )


if __name__ == "__main__":
    main()
