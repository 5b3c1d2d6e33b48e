"""Shared code of the learning benchmarks: synthetic videos, and resumable runs."""

import contextlib
import json
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for
from manifests.publish import publish_json
from train.cli import app


def learning_parser(description: str, *, preset: str) -> ArgumentParser:
    """Create a parser with the shared options; unknown options are passed to the training command."""
    parser = parser_for(description)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--videos", type=int, default=60, help="number of videos (default 60)")
    parser.add_argument("--minutes", type=float, default=1.0, help="length of a video in minutes (default 1)")
    parser.add_argument("--preset", default=preset)
    parser.add_argument(
        "--folder", type=Path, help="folder for data and runs, kept at the end (default: a temporary one)"
    )
    return parser


def found_of_seeds(
    command: str,
    arguments: Namespace,
    flags: Sequence[str],
    *,
    score: Callable[[Path], dict[str, Any]],
    in_words: Callable[[dict[str, Any]], object],
) -> list[dict[str, Any]]:
    """Train each seed with `train COMMAND`, and score it.

    Args:
        arguments: parsed by `learning_parser`.
        score: computes the scores of a finished run.
        in_words: formats the scores as a line.

    Returns:
        For each seed the scores, the CPU seconds of training, and whether an interrupted run was resumed.
    """
    with kept_folder(arguments.folder) as folder:
        data = _made_data(folder, num_videos=arguments.videos, minutes=arguments.minutes)
        seeds = []
        for seed in range(arguments.seeds):
            words = ["--preset", arguments.preset, "--seed", str(seed), *flags]
            seeds.append(found_of(folder / f"seed-{seed}", [command, "--shards", str(data)], words, score=score))
            print(f"seed {seed}: {in_words(seeds[-1])}", file=sys.stderr, flush=True)
    return seeds


@contextlib.contextmanager
def kept_folder(kept: Path | None) -> Iterator[Path]:
    """Yield the folder that a benchmark works in: the given one, or a temporary one."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _made_data(folder: Path, *, num_videos: int, minutes: float) -> Path:
    """Generate videos, their manifest and chunks; both commands skip finished work."""
    data = folder / "data"
    if not (data / "manifest").exists():
        run_measured(
            prep_command(
                "manifest", "synthetic", "--videos", str(num_videos), "--minutes", str(minutes), "--data", data
            )
        )
    run_measured(prep_command("chunk", "--len", "15s", "--data", data, "--engine", "processes"))
    return data


def found_of(
    out: Path, command: Sequence[str], words: Sequence[str], *, score: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Train and score one seed, and save the scores with the run."""
    found = out.with_suffix(".json")
    if found.exists():
        kept: dict[str, Any] = json.loads(found.read_bytes())
        return kept
    begun = (out / "settings.yaml").exists()
    began_s = time.process_time()
    with contextlib.redirect_stdout(sys.stderr):
        app([*command, "--out", str(out), *(["--resume"] if begun else words)])
    cpu_s = time.process_time() - began_s
    result = {**score(out), "cpu_s": cpu_s, "was_resumed": begun}
    publish_json(found, result)
    return result
