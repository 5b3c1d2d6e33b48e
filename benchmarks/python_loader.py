"""The Python interface (`open_clips`, `open_latents`) compared with the loaders of the training commands.

    python -m benchmarks.python_loader VIDEOS [--pieces N] [--batches N] [--rounds N] [--json FILE]

Pieces of VIDEOS are encoded with `prep chunk`; latents are random numbers. The loaders take turns. In each turn, a
loader loads the next batches in the same order, and discards the batches that it has loaded in advance. `/ command` is
the rate of the loader divided by the rate of the command's loader with the same output, in CPU time of the complete
process: the median over the rounds. The target is at least 0.97.

Clips: 4 frames of 224 px, 2 threads. `YUV` has the tensors of `train dual-encoder`, with captions as strings instead of
tokens. `RGB` is computed on the CPU: for the command by the conversion in its training step, for `open_clips` in its
loader.

Latents: segments of 5 s with captions. `kept` is the command's loader with batches that later batches do not overwrite,
as in `open_latents`: while a program uses a batch, the next batch is ready and the one after it is being filled, so
there are three buffers instead of two. `open_latents, all read` also reads the keys, captions and times of each batch,
which are computed on access.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_peers.chunk_sets import OWN, make_set, write_captions
from benchmarks.decode_peers.clip_set import data_folder
from benchmarks.decode_peers.pieces import pieces_of
from benchmarks.latent_peers.latent_data import write_columns
from benchmarks.latent_peers.segment_set import make_segment_set, open_segment_set
from benchmarks.report import parser_for, print_report
from benchmarks.timing import turns
from clipmill import Batches, open_clips, open_latents
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.train.augment.model_input import to_rgb_uint8
from clipmill.train.data.latents.segments import SegmentQuery
from clipmill.train.data.loader import LoaderSettings, TrainingSet
from clipmill.train.data.prefetch import prefetch
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.distributed.world import World
from clipmill.train.models.attention import open_attention
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask

CPU = torch.device("cpu")
NUM_FRAMES, SIZE_PX, WORKERS = 4, 224, 2
CLIP_S, CLIPS_PER_PIECE = 4.0, 3
NUM_COPIES, SEGMENTS_PER_VIDEO = 4, 50

Read = Callable[[int, int], None]  # reads batches, given the position of the first sample and the number of batches
Use = Callable[[Any], object]  # uses a batch as a training step does
Ways = dict[str, tuple[Read, str | None]]  # reader, and name of the reader to compare it with, by name


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, help="folder of videos (default: generated videos)")
    parser.add_argument("--pieces", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--batches", type=int, default=6, help="number of batches of clips per turn (default 6)")
    parser.add_argument("--segments", type=int, default=5000, help="number of segments of latents (default 5000)")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        data = _make_data(Path(scratch), videos=arguments.videos, num_pieces=arguments.pieces)
        ways, num_rounds = _clip_ways(data, arguments.batch), arguments.rounds
        rows = _measure(ways, batch=arguments.batch, num_batches=arguments.batches, num_rounds=num_rounds)
        latents = _make_latents(Path(scratch) / "latents", num_segments=arguments.segments)
        for batch in (arguments.batch, 4 * arguments.batch):
            ways, num_batches = _latent_ways(latents, batch), _num_latent_batches(batch)
            rows += _measure(ways, batch=batch, num_batches=num_batches, num_rounds=num_rounds)
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
    return data_folder(folder, OWN)


def _make_latents(folder: Path, *, num_segments: int) -> Path:
    num_own = num_segments // NUM_COPIES
    num_videos = max(1, num_own // SEGMENTS_PER_VIDEO)
    make_segment_set(folder / "segments", num_segments=num_own, num_videos=num_videos, values="normal")
    data = folder / "data"
    data.mkdir()
    write_columns(data, open_segment_set(folder / "segments"), num_copies=NUM_COPIES)
    return data


def _num_latent_batches(batch: int) -> int:
    """Return the number of batches in four complete blocks of requests, so that no request is wasted."""
    return sum(min(8**number, 2**14 // batch) for number in range(4))


def _clip_ways(data: Path, batch: int) -> Ways:
    settings = DualEncoderSettings(
        shards=str(data), batch=batch, num_frames=NUM_FRAMES, size_px=SIZE_PX, workers=WORKERS, model="tiny"
    )
    attention = open_attention("auto", device_type="cpu")
    samples = DualEncoderTask(settings, attention=attention, device=CPU).samples("train", World())
    shape: dict[str, Any] = {"batch": batch, "num_frames": NUM_FRAMES, "size_px": SIZE_PX, "workers": WORKERS}
    return {
        "clips, YUV, command": (_command(samples), None),
        "clips, YUV, open_clips": (_public(open_clips(data, rgb=False, **shape)), "clips, YUV, command"),
        "clips, RGB, command": (_command(samples, use=_to_rgb), None),
        "clips, RGB, open_clips": (_public(open_clips(data, **shape)), "clips, RGB, command"),
    }


def _latent_ways(data: Path, batch: int) -> Ways:
    query = SegmentQuery(data, split="train", captions="words", loading=LoaderSettings(batch=batch))
    kept = open_latent_segments(replace(query, loading=LoaderSettings(batch=batch, can_keep=True)))
    name = f"latents, batches of {batch}"
    command = f"{name}, kept, command"
    return {
        command: (_command(kept), None),
        f"{name}, command": (_command(open_latent_segments(query)), command),
        f"{name}, kept, open_latents": (_public(open_latents(data, batch=batch)), command),
        f"{name}, kept, open_latents, all read": (_public(open_latents(data, batch=batch), use=dict), command),
    }


def _command(samples: TrainingSet, *, use: Use | None = None) -> Read:
    def read(position: int, count: int) -> None:
        loaded = prefetch(samples.batches(position=position, max_failures=0), CPU)
        with closing(loaded):
            _take((one.batch for one in loaded), count, use)

    return read


def _public(batches: Batches, *, use: Use | None = None) -> Read:
    def read(position: int, count: int) -> None:
        batches.load_state_dict({**batches.state_dict(), "position": position})
        with batches:
            _take(_endless(batches), count, use)

    return read


def _to_rgb(batch: Any) -> None:
    to_rgb_uint8(batch["video"], batch["colour"], size_px=SIZE_PX)


def _endless(batches: Batches) -> Generator[dict[str, Any], None, None]:
    while True:
        yield from batches


def _take(batches: Iterator[Any], count: int, use: Use | None) -> None:
    for batch in islice(batches, count):
        if use is not None:
            use(batch)


def _measure(ways: Ways, *, batch: int, num_batches: int, num_rounds: int) -> list[dict[str, object]]:
    for read, _ in ways.values():
        read(0, num_batches)  # fills the page cache, verifies checksums and allocates memory
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number, way in turns(list(ways), num_rounds):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        ways[way][0](number * num_batches * batch, num_batches)
        taken[way].append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
    num = num_batches * batch
    return [
        {
            "way": way,
            "samples/CPU s": num / statistics.median(cpu_s for cpu_s, _ in its),
            "samples/s": num / statistics.median(wall_s for _, wall_s in its),
            "/ command": statistics.median(
                one[0] / other[0] for one, other in zip(taken[ways[way][1] or way], its, strict=True)
            ),
        }
        for way, its in taken.items()
    ]


if __name__ == "__main__":
    main()
