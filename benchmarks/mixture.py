"""Clips and latents per CPU second from a mixture of ten data folders, and from one folder with the same chunks.

    python -m benchmarks.mixture VIDEOS [--pieces N] [--folders N] [--rounds N] [--json FILE]

Pieces of VIDEOS are encoded with `prep chunk`, and their latents with a tiny VAE. One folder contains all pieces, and
the folders of the mixture contain the same pieces, divided among them. The loaders of `train dual-encoder` take turns.
A turn consists of complete epochs, so that both loaders load the same clips. `/ one folder` is the ratio of the CPU
times of the complete process: the median over the rounds, with the quartiles. The target is at least 0.97.

Clips: 4 frames of 224 px, 2 threads. Latents: segments of 5 s with captions.
"""

import shutil
import statistics
import tempfile
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch

from benchmarks.decode_peers.chunk_sets import OWN, make_set, write_captions
from benchmarks.decode_peers.clip_set import data_folder
from benchmarks.decode_peers.pieces import pieces_of
from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report
from benchmarks.timing import turns
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.train.data.loader import TrainingSet
from clipmill.train.data.prefetch import prefetch
from clipmill.train.distributed.world import World
from clipmill.train.models.attention import open_attention
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask

CPU = torch.device("cpu")
NUM_FRAMES, SIZE_PX, WORKERS = 4, 224, 2
CLIP_S, CLIPS_PER_PIECE, STEP_S = 4.0, 60, 0.18  # spans that overlap, so that a folder has many samples
BATCH = 15
LATENT_EPOCHS = 160  # number of epochs of latents for each epoch of clips


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, help="folder of videos (default: generated videos)")
    parser.add_argument("--pieces", type=int, default=20, help="number of pieces, a multiple of --folders (default 20)")
    parser.add_argument("--folders", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=1, help="number of epochs of clips per turn (default 1)")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    per_folder = arguments.pieces // arguments.folders
    with tempfile.TemporaryDirectory() as scratch:
        folder, program = Path(scratch), find_ffmpeg().path
        (folder / "pieces").mkdir()
        pieces_of(arguments.videos, folder / "pieces", num_pieces=arguments.pieces, program=program)
        pieces = sorted((folder / "pieces").iterdir())[: per_folder * arguments.folders]
        one = (_make_data(folder / "one", pieces),)
        several = tuple(
            _make_data(folder / f"folder-{number}", pieces[number * per_folder : (number + 1) * per_folder])
            for number in range(arguments.folders)
        )
        rows = []
        for kind, epochs in (("pixels", arguments.epochs), ("latents", arguments.epochs * LATENT_EPOCHS)):
            ways = {"one folder": _samples(one, kind), f"{arguments.folders} folders": _samples(several, kind)}
            rows += _measure(ways, kind, num_epochs=epochs, num_rounds=arguments.rounds)
    sizes = (
        f"{len(pieces)} chunks, {arguments.epochs} epochs of clips and {arguments.epochs * LATENT_EPOCHS} of latents"
    )
    print_report(f"{sizes} a turn, median of {arguments.rounds} rounds", rows, notes=[], json_path=arguments.json)


def _make_data(folder: Path, pieces: list[Path]) -> Path:
    own, captions = folder / "pieces", folder / "captions.csv"
    own.mkdir(parents=True)
    for number, piece in enumerate(pieces):
        shutil.copyfile(piece, own / f"{number:03d}.mp4")
    begins_s = [STEP_S * number for number in range(CLIPS_PER_PIECE)]
    write_captions(captions, [(piece, begin, CLIP_S) for piece in range(len(pieces)) for begin in begins_s])
    make_set(OWN, pieces=own, captions=captions, folder=folder, program=find_ffmpeg().path)
    data = data_folder(folder, OWN)
    run_measured(prep_command("latents", "--vae", "tiny", "--size", "224", "--data", data, "--engine", "processes"))
    return data


def _samples(folders: tuple[Path, ...], kind: str) -> TrainingSet:
    """Open the samples of a training run, on pixels or latents."""
    shards = tuple(map(str, folders))
    settings = DualEncoderSettings(
        shards=shards if len(shards) > 1 else shards[0],
        input="latents" if kind == "latents" else "pixels",
        batch=BATCH,
        num_frames=NUM_FRAMES,
        size_px=SIZE_PX,
        workers=WORKERS,
        model="tiny",
    )
    task = DualEncoderTask(settings, attention=open_attention("auto", device_type="cpu"), device=CPU)
    return task.training_set(World())


def _measure(ways: dict[str, TrainingSet], kind: str, *, num_epochs: int, num_rounds: int) -> list[dict[str, object]]:
    (num_samples,) = {samples.num_samples for samples in ways.values()}
    assert num_samples is not None
    num_batches = max(num_samples * num_epochs // BATCH, 1)

    def read(samples: TrainingSet, position: int) -> None:
        batches = prefetch(samples.batches(position=position, max_failures=0), CPU)
        with closing(batches):
            for _ in islice(batches, num_batches):
                pass

    for samples in ways.values():
        read(samples, 0)  # fills the page cache, verifies checksums and allocates memory
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number, way in turns(list(ways), num_rounds):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        read(ways[way], number * num_epochs * num_samples)
        taken[way].append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
    first, num = taken["one folder"], num_batches * BATCH
    rows: list[dict[str, object]] = []
    for way, its in taken.items():
        ratios = [one[0] / other[0] for one, other in zip(first, its, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows.append(
            {
                "way": f"{kind}, {way}",
                "samples/CPU s": num / statistics.median(cpu_s for cpu_s, _ in its),
                "samples/s": num / statistics.median(wall_s for _, wall_s in its),
                "/ one folder": statistics.median(ratios),
                "quartiles": f"{low:.3f} to {high:.3f}",
            }
        )
    return rows


if __name__ == "__main__":
    main()
