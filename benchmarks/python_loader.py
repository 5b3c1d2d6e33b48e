"""The Python interface (`open_clips`, `open_latents`) against the loaders of the training commands behind it.

    python -m benchmarks.python_loader VIDEOS [--pieces N] [--batches N] [--rounds N] [--json FILE]

Pieces of VIDEOS are encoded with `prep chunk`, and their latents with a tiny VAE. The loaders take turns; in each turn
a loader gives the next batches of the same order, and drops what it has loaded ahead. `/ command` is the ratio of its
rate to that of the command's loader, in CPU time of the whole process: the median over the rounds. The target for
`open_clips, YUV` is at least 0.97.

Clips: 4 frames of 224 px, 2 threads. `YUV` has the tensors of `train dual-encoder`, and captions as texts in place of
tokens; `RGB` is converted on the CPU. Latents: segments of 5 s with captions; `copy` is the command's loader with
batches that are allocated anew, as `open_latents` needs them.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_peers.chunk_sets import OWN, make_set, write_captions
from benchmarks.decode_peers.clip_set import data_folder
from benchmarks.decode_peers.pieces import pieces_of
from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report
from benchmarks.timing import turns
from prep.video.ffmpeg import find_ffmpeg
from train.data import Batches, open_clips, open_latents
from train.data.latents.loader import LatentLoader
from train.data.loader import TrainingSet
from train.data.prefetch import prefetch
from train.distributed.world import World
from train.models.attention import open_attention
from train.tasks.dual_encoder.settings import DualEncoderSettings
from train.tasks.dual_encoder.task import DualEncoderTask

CPU = torch.device("cpu")
NUM_FRAMES, SIZE_PX, WORKERS = 4, 224, 2
CLIP_S, CLIPS_PER_PIECE, LATENTS_PER_CLIP_BATCH = 4.0, 3, 20

Read = Callable[[int, int], None]  # position of the first sample, number of batches


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, help="folder of videos; made up when left out")
    parser.add_argument("--pieces", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--batches", type=int, default=6, help="batches of clips in a turn; 20 times as many of latents"
    )
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        data = _make_data(Path(scratch), videos=arguments.videos, num_pieces=arguments.pieces)
        num_latents = LATENTS_PER_CLIP_BATCH * arguments.batches
        rows = _measure(
            _clip_ways(data, arguments.batch),
            arguments.batch,
            num_batches=arguments.batches,
            num_rounds=arguments.rounds,
        )
        rows += _measure(
            _latent_ways(data, arguments.batch), arguments.batch, num_batches=num_latents, num_rounds=arguments.rounds
        )
    sizes = f"{arguments.pieces} chunks, {arguments.batches} batches of {arguments.batch} clips a turn"
    print_report(f"{sizes}, median of {arguments.rounds} rounds", rows, notes=[], json_path=arguments.json)


def _make_data(folder: Path, *, videos: Path | None, num_pieces: int) -> Path:
    program = find_ffmpeg().path
    pieces, captions = folder / "pieces", folder / "captions.csv"
    pieces.mkdir()
    names = pieces_of(videos, pieces, num_pieces=num_pieces, program=program)
    begins_s = [CLIP_S * number for number in range(CLIPS_PER_PIECE)]
    write_captions(captions, [(piece, begin, CLIP_S) for piece in range(len(names)) for begin in begins_s])
    make_set(OWN, pieces=pieces, captions=captions, folder=folder, program=program)
    data = data_folder(folder, OWN)
    run_measured(prep_command("latents", "--vae", "tiny", "--size", "224", "--data", data, "--engine", "processes"))
    return data


def _clip_ways(data: Path, batch: int) -> dict[str, Read]:
    settings = DualEncoderSettings(
        shards=str(data), batch=batch, num_frames=NUM_FRAMES, size_px=SIZE_PX, workers=WORKERS, model="tiny"
    )
    attention = open_attention("auto", device_type="cpu")
    samples = DualEncoderTask(settings, attention=attention, device=CPU).samples("train", World())
    shape: dict[str, Any] = {"batch": batch, "num_frames": NUM_FRAMES, "size_px": SIZE_PX, "workers": WORKERS}
    return {
        "clips, command": _command(samples),
        "clips, open_clips, YUV": _public(open_clips(data, rgb=False, **shape)),
        "clips, open_clips, RGB": _public(open_clips(data, **shape)),
    }


def _latent_ways(data: Path, batch: int) -> dict[str, Read]:
    kept = LatentLoader(data, split="train", batch=batch, words=True, copy=True)
    return {
        "latents, command": _command(LatentLoader(data, split="train", batch=batch, words=True)),
        "latents, command, copy": _command(kept),
        "latents, open_latents": _public(open_latents(data, batch=batch)),
    }


def _command(samples: TrainingSet) -> Read:
    def read(position: int, count: int) -> None:
        batches = prefetch(samples.batches(position=position, max_failures=0), CPU)
        with closing(batches):
            _take(batches, count)

    return read


def _public(batches: Batches) -> Read:
    def read(position: int, count: int) -> None:
        batches.load_state_dict({**batches.state_dict(), "position": position})
        with batches:
            _take(_endless(batches), count)

    return read


def _endless(batches: Batches) -> Generator[dict[str, Any], None, None]:
    while True:
        yield from batches


def _take(batches: Iterator[Any], count: int) -> None:
    for _ in islice(batches, count):
        pass


def _measure(ways: dict[str, Read], batch: int, *, num_batches: int, num_rounds: int) -> list[dict[str, object]]:
    for read in ways.values():
        read(0, num_batches)  # the page cache, checksums, and memory
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number, way in turns(list(ways), num_rounds):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        ways[way](number * num_batches * batch, num_batches)
        taken[way].append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
    first = taken[next(iter(ways))]
    num = num_batches * batch
    return [
        {
            "way": way,
            "samples/CPU s": num / statistics.median(cpu_s for cpu_s, _ in its),
            "samples/s": num / statistics.median(wall_s for _, wall_s in its),
            "/ command": statistics.median(one[0] / other[0] for one, other in zip(first, its, strict=True)),
        }
        for way, its in taken.items()
    ]


if __name__ == "__main__":
    main()
