"""Loading clips for a captioner from shards, compared with clips stored as float32 arrays (.npz).

    python -m benchmarks.caption_data VIDEOS [--pieces 40] [--rounds N] [--json FILE]

Pieces of VIDEOS are encoded with `prep chunk`. `shards`: 8 frames, evenly spaced in a chunk, decoded from packets,
cropped and resized to 224 px, as normalised float32 RGB; each visit draws a new crop. `npz`: the same tensors written
once by numpy.savez, [8, 3, 224, 224], 4.8 MB a clip, and read back: from the page cache, and from disk, as far as the
kernel drops its pages on request. One thread. In each round, every variant in turn loads the same clips one by one;
figures are medians over the rounds.

Reading 4.8 MB per clip requires a fast disk or network: `MB/s for 1,000 clips/s` is the bandwidth that training at that
rate would need.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.decode_peers.chunk_sets import OWN, make_set, write_captions
from benchmarks.decode_peers.clip_set import data_folder
from benchmarks.decode_peers.pieces import pieces_of
from benchmarks.report import parser_for, print_report
from prep.video.ffmpeg import find_ffmpeg
from train.augment.pictures import to_model_input
from train.data.chunk_clips import ChunkClips
from train.data.decoding.clip import ClipShape
from train.data.frame_sampling import Sampling
from train.data.loader import LoaderSettings, SampleRequest
from train.weights.conversion import IMAGENET_MEAN, IMAGENET_STD

NUM_FRAMES, SIZE_PX = 8, 224
_MB = 1e6


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, help="folder of videos (default: synthetic videos)")
    parser.add_argument("--pieces", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        samples = _open_samples(folder, videos=arguments.videos, num_pieces=arguments.pieces)
        arrays = _write_arrays(folder, samples)
        variants: dict[str, Callable[[int], torch.Tensor]] = {
            "shards": lambda number: _from_shards(samples, number, seed=0),
            "npz, from memory": lambda number: _from_array(arrays[number]),
            "npz, from disk": lambda number: _from_array(arrays[number], is_cold=True),
        }
        shard_bytes = sum(path.stat().st_size for path in data_folder(folder, OWN).glob("video/*/*.tar"))
        sizes = {variant: sum(path.stat().st_size for path in arrays) for variant in variants} | {"shards": shard_bytes}
        seconds: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
        for _ in range(arguments.rounds):
            for variant, load in variants.items():
                seconds[variant].append(_timed(load, len(arrays)))
    rows: list[dict[str, object]] = []
    for variant, taken in seconds.items():
        mb = sizes[variant] / len(arrays) / _MB
        rows.append(
            {
                "way": variant,
                "clips/CPU s": statistics.median(len(arrays) / cpu_s for _, cpu_s in taken),
                "clips/s": statistics.median(len(arrays) / wall_s for wall_s, _ in taken),
                "MB a clip": mb,
                "MB/s for 1,000 clips/s": 1000 * mb,
            }
        )
    print_report(
        f"{len(arrays)} clips of {NUM_FRAMES} frames of {SIZE_PX} px", rows, notes=[], json_path=arguments.json
    )


def _open_samples(folder: Path, *, videos: Path | None, num_pieces: int) -> ChunkClips:
    program = find_ffmpeg().path
    pieces, captions = folder / "pieces", folder / "captions.csv"
    pieces.mkdir()
    names = pieces_of(videos, pieces, num_pieces=num_pieces, program=program)
    write_captions(captions, [(number, 0.0, 1.0) for number in range(len(names))])
    make_set(OWN, pieces=pieces, captions=captions, folder=folder, program=program)
    return ChunkClips(
        data_folder(folder, OWN),
        split="train",
        shape=ClipShape(sampling=Sampling(num_frames=NUM_FRAMES), size_px=SIZE_PX),
        loading=LoaderSettings(batch=1, num_threads=1, num_ahead=1, seed=0),
    )


def _write_arrays(folder: Path, samples: ChunkClips) -> list[Path]:
    """Write the clips of an evaluation to files, one per clip."""
    paths = []
    for number in range(len(samples)):
        paths.append(folder / f"{number}.npz")
        np.savez(paths[-1], _from_shards(samples, number, seed=None).numpy())
    os.sync()
    return paths


def _from_shards(samples: ChunkClips, number: int, *, seed: int | None) -> torch.Tensor:
    (sample,) = samples.load([SampleRequest(number, number, seed)])
    assert isinstance(sample, dict), sample
    clip = to_model_input(
        torch.from_numpy(sample["video"])[None],
        torch.tensor([sample["colour"]], dtype=torch.uint8),
        size_px=SIZE_PX,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
    return clip[0].transpose(0, 1).contiguous()


def _from_array(path: Path, *, is_cold: bool = False) -> torch.Tensor:
    if is_cold:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with np.load(path) as arrays:
        return torch.from_numpy(arrays["arr_0"])


def _timed(load: Callable[[int], torch.Tensor], count: int) -> tuple[float, float]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for number in range(count):
        load(number)
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


if __name__ == "__main__":
    main()
