"""Training with its run in a bucket against a run on a disk: seconds of a step, and what a checkpoint costs it.

    python -m benchmarks.bucket_run [--steps N] [--every N] [--rounds N] [--latency S] [--batch N] [--json FILE]

A tiny dual encoder is trained on synthetic clips. A local S3 server (moto's) has the run; a proxy in front of it delays
every answer. Both are programs of their own, which take CPU time from training where there are few cores. The runs take
turns. `step ms` is the mean over the steps after the first, with everything that the loop waits for, and `waits ms` the
part of it that the loop waits for checkpoints: copying the state, and the end of the checkpoint before. `upload s` is
the time from the copy of the state until the checkpoint is complete. `/ local` is the ratio of `step ms`, medians over
the rounds; the target is at most 1.02.
"""

import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.report import parser_for, print_report
from benchmarks.timing import turns
from clipmill.train.commands.launch import launch
from clipmill.train.config.files import Provenance
from clipmill.train.config.shards import local_folder
from clipmill.train.registry import find_task
from clipmill.train.run.checkpoint_writer import CheckpointWriter
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from tests.object_storage.faults import faulty
from tests.object_storage.server import s3_server
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

LOCAL, BUCKET = "local", "S3"
NUM_FRAMES, SIZE_PX = 4, 64
_VIDEOS = tuple("abcdef")


def main() -> None:
    """Measure, and print the table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--latency", type=float, default=0.05, help="delay of every answer, in seconds")
    parser.add_argument("--batch", type=int, default=8, help="clips of a step")
    chosen = parser.parse_args()
    measured: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in (LOCAL, BUCKET)}
    folder = Path(tempfile.mkdtemp(prefix="bucket-run-"))
    try:
        _write_data(folder / "data")
        with (
            s3_server() as server,
            faulty(server.port) as proxy,
            patch.dict("os.environ", server.environment(endpoint=proxy.endpoint)),
        ):
            proxy.set(latency_s=chosen.latency)
            bucket = server.make_bucket("benchmark")
            for number, name in turns([LOCAL, BUCKET], chosen.rounds + 1):
                out = folder / f"run-{number}" if name == LOCAL else local_folder(f"{bucket}/run-{number}")
                figures = _measure(chosen, folder / "data", out)
                for column, value in figures.items() if number else ():  # the first round warms up
                    measured[name][column].append(value)
    finally:
        shutil.rmtree(folder)
    print_report(
        f"A run in a bucket, {1000 * chosen.latency:g} ms, a checkpoint every {chosen.every} steps",
        [_row(name, measured) for name in measured],
        notes=["Target: / local at most 1.02"],
        json_path=chosen.json,
    )


def _write_data(data: Path) -> None:
    write_shard(data, 0, [sample for name in _VIDEOS for sample in chunks_of(name, 55)], split="train")
    spans = [(name, begin) for name in _VIDEOS for begin in (0.0, 1.0, 2.0)]
    captions = [Caption(name, begin, begin + 1.5, f"{begin} of {name}") for name, begin in spans]
    write_captions(data, dict.fromkeys(_VIDEOS, "train"), captions)


def _measure(chosen: Namespace, data: Path, out: Path) -> dict[str, float]:
    """Train once, and return the figures by column."""
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
    with _timed_checkpoints() as times:
        launch(find_task("dual-encoder"), settings, resume=False, provenance=Provenance())
    steps_s = [line["step_s"] for line in read_lines(RunFolder(out).metrics)[1:]]
    return {
        "step ms": 1000 * statistics.fmean(steps_s),
        "waits ms": 1000 * sum(times["waits"]) / chosen.steps,
        "upload s": statistics.fmean(times["written"]),
        "MB": sum(path.stat().st_size for path in out.rglob("*.bin")) / 1e6,
    }


@contextmanager
def _timed_checkpoints() -> Iterator[dict[str, list[float]]]:
    """Yield the seconds that the loop waits for checkpoints (`waits`), and that they take (`written`)."""
    times: dict[str, list[float]] = {"waits": [], "written": []}
    save, write = CheckpointWriter.save, CheckpointWriter._write

    def timed_save(writer: CheckpointWriter, *arguments: Any, **named: Any) -> None:
        began_s = time.perf_counter()
        save(writer, *arguments, **named)
        times["waits"].append(time.perf_counter() - began_s)

    def timed_write(writer: CheckpointWriter, *arguments: Any) -> None:
        began_s = time.perf_counter()
        write(writer, *arguments)
        times["written"].append(time.perf_counter() - began_s)

    with patch.object(CheckpointWriter, "save", timed_save), patch.object(CheckpointWriter, "_write", timed_write):
        yield times


def _row(name: str, measured: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    medians = {column: statistics.median(values) for column, values in measured[name].items()}
    of_local = statistics.median(measured[LOCAL]["step ms"])
    return {
        "run": name,
        "step ms": round(medians["step ms"], 1),
        "/ local": round(medians["step ms"] / of_local, 3),
        "waits ms": round(medians["waits ms"], 2),
        "upload s": round(medians["upload s"], 2),
        "MB": round(medians["MB"], 1),
    }


if __name__ == "__main__":
    main()
