"""Cost of checkpoints during training, for a run in a bucket and for a run on a disk.

    python -m benchmarks.bucket_run [--steps N] [--every N] [--rounds N] [--latency S] [--batch N] [--json FILE]

A tiny dual encoder is trained on synthetic clips. A local S3 server (moto) stores the run, and a proxy in front of the
server delays every response. Both run on the last core, and training runs on the other cores, as if the server were
another machine. The two kinds of run take turns. All figures are medians over the rounds:

- `step ms`: median time of the steps during which no checkpoint is written
- `waits ms`: time that the loop waits for a checkpoint: to copy the state, and to finish the previous checkpoint
- `upload s`: time from the copy of the state until the checkpoint is complete
- `cost ms`: time that a checkpoint adds to the steps until it is complete, including `waits ms`
- `CPU ms`: CPU time of the process per step, including checkpoints; an upload may use cores that the steps leave idle
- `% every 5 min`: `cost ms` as a percentage of `INTERVAL_S`; the target is at most 2

The time of `--every` steps must exceed the time of an upload, as in real training, because a checkpoint waits until the
previous one is complete.
"""

import os
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.report import parser_for, print_report
from benchmarks.timing import turns
from clipmill.train.commands.launch import launch
from clipmill.train.config.files import Provenance
from clipmill.train.config.shards import local_folder
from clipmill.train.registry import find_task
from clipmill.train.run.checkpoint import CheckpointMetadata
from clipmill.train.run.checkpoint_writer import CheckpointWriter
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from tests.object_storage.faults import faulty
from tests.object_storage.server import s3_server
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

LOCAL, BUCKET = "local", "S3"
NUM_FRAMES, SIZE_PX = 4, 64
INTERVAL_S = 300.0
_VIDEOS = tuple("abcdef")


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--steps", type=int, default=150, help="number of steps per run (default 150)")
    parser.add_argument("--every", type=int, default=60, help="number of steps between checkpoints (default 60)")
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each kind (default 3)")
    parser.add_argument("--latency", type=float, default=0.05, help="delay of every response in seconds (default 0.05)")
    parser.add_argument("--batch", type=int, default=8, help="number of clips per step (default 8)")
    chosen = parser.parse_args()
    measured: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in (LOCAL, BUCKET)}
    folder, cores = Path(tempfile.mkdtemp(prefix="bucket-run-")), sorted(os.sched_getaffinity(0))
    try:
        _write_data(folder / "data")
        os.sched_setaffinity(0, cores[-1:])  # the servers inherit this core
        with (
            s3_server() as server,
            faulty(server.port) as proxy,
            patch.dict("os.environ", server.environment(endpoint=proxy.endpoint)),
        ):
            os.sched_setaffinity(0, cores[:-1] or cores)
            torch.set_num_threads(len(cores[:-1] or cores))
            proxy.set(latency_s=chosen.latency)
            bucket = server.make_bucket("benchmark")
            for number, name in turns([LOCAL, BUCKET], chosen.rounds + 1):
                out = folder / f"run-{number}" if name == LOCAL else local_folder(f"{bucket}/run-{number}")
                figures = _measure(chosen, folder / "data", out)
                for column, value in figures.items() if number else ():  # the first round is a warm-up
                    measured[name][column].append(value)
    finally:
        os.sched_setaffinity(0, cores)
        shutil.rmtree(folder)
    print_report(
        f"A run in a bucket, {1000 * chosen.latency:g} ms, a checkpoint every {chosen.every} steps",
        [_row(name, measured) for name in measured],
        notes=["Target: at most 2 % every 5 min"],
        json_path=chosen.json,
    )


def _write_data(data: Path) -> None:
    write_shard(data, 0, [sample for name in _VIDEOS for sample in chunks_of(name, 55)], split="train")
    spans = [(name, begin) for name in _VIDEOS for begin in (0.0, 1.0, 2.0)]
    captions = [Caption(name, begin, begin + 1.5, f"{begin} of {name}") for name, begin in spans]
    write_captions(data, dict.fromkeys(_VIDEOS, "train"), captions)


def _measure(chosen: Namespace, data: Path, out: Path) -> dict[str, float]:
    """Train once, and return the figures of the run by column."""
    settings = DualEncoderSettings(
        shards=str(data),
        out=out,
        steps=chosen.steps,
        batch=chosen.batch,
        warmup_steps=1,
        workers=1,
        checkpoint_every=chosen.every,
        keep_checkpoints=1,
        model="tiny",
        num_frames=NUM_FRAMES,
        size_px=SIZE_PX,
        device="cpu",
    )
    with _timed_checkpoints() as checkpoints:
        launch(find_task("dual-encoder"), settings, resume=False, provenance=Provenance())
    steps_s = [line["step_s"] for line in read_lines(RunFolder(out).metrics)]
    # Step n has index n - 1. The step after a checkpoint begins with the copy of the state.
    spans = {
        step: range(step, next((end for end in range(step, len(steps_s)) if sum(steps_s[step:end]) > s), len(steps_s)))
        for step, s in checkpoints.written.items()
        if step < len(steps_s)
    }
    busy = {0, *(number for span in spans.values() for number in span)}  # the first step imports modules
    step_s = statistics.median(time_s for number, time_s in enumerate(steps_s) if number not in busy)
    (first, began_s), *_, (last, ended_s) = checkpoints.cpu.items()
    return {
        "step ms": 1000 * step_s,
        "CPU ms": 1000 * (ended_s - began_s) / (last - first),
        "waits ms": 1000 * statistics.fmean(checkpoints.waits[step] for step in spans),
        "upload s": statistics.fmean(checkpoints.written.values()),
        "cost ms": 1000 * statistics.fmean(sum(steps_s[number] - step_s for number in span) for span in spans.values()),
        "MB": sum(path.stat().st_size for path in out.rglob("*.bin")) / 1e6,
    }


@dataclass(frozen=True)
class _Checkpoints:
    """Times of the checkpoints in seconds, by step.

    Attributes:
        waits: Time that the loop waits for the checkpoint.
        written: Time until the checkpoint is complete.
        cpu: CPU time of the process at the start of the checkpoint.
    """

    waits: dict[int, float] = field(default_factory=dict)
    written: dict[int, float] = field(default_factory=dict)
    cpu: dict[int, float] = field(default_factory=dict)


@contextmanager
def _timed_checkpoints() -> Iterator[_Checkpoints]:
    """Yield the times of the checkpoints that are written within the block."""
    times, began_s = _Checkpoints(), dict[int, float]()
    save, write = CheckpointWriter.save, CheckpointWriter._write

    def timed_save(writer: CheckpointWriter, tensors: Any, metadata: CheckpointMetadata, **named: Any) -> None:
        began_s[metadata.step], times.cpu[metadata.step] = time.perf_counter(), time.process_time()
        save(writer, tensors, metadata, **named)
        times.waits[metadata.step] = time.perf_counter() - began_s[metadata.step]

    def timed_write(writer: CheckpointWriter, staged: Any, metadata: CheckpointMetadata, beside: Any) -> None:
        write(writer, staged, metadata, beside)
        times.written[metadata.step] = time.perf_counter() - began_s[metadata.step]

    with patch.object(CheckpointWriter, "save", timed_save), patch.object(CheckpointWriter, "_write", timed_write):
        yield times


def _row(name: str, measured: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    medians = {column: statistics.median(values) for column, values in measured[name].items()}
    return {
        "run": name,
        "step ms": round(medians["step ms"], 1),
        "CPU ms": round(medians["CPU ms"], 1),
        "waits ms": round(medians["waits ms"], 1),
        "upload s": round(medians["upload s"], 2),
        "MB": round(medians["MB"], 1),
        "cost ms": round(medians["cost ms"]),
        "% every 5 min": round(100 * medians["cost ms"] / 1000 / INTERVAL_S, 2),
    }


if __name__ == "__main__":
    main()
