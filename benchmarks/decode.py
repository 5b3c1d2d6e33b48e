"""Decoding clips from chunks: clipmill compared with decord, torchcodec, PyAV, OpenCV, and bare libavcodec.

    python benchmarks/decode.py [VIDEOS] [--quick] [--json FILE]

Pieces of 15 s at 30 fps with a short side of 288 pixels are cut losslessly from a folder of VIDEOS. Without VIDEOS, the
pieces are generated, with texture, panning, rotation and noise. They are encoded as several sets of chunks:

    x264 default   `ffmpeg -i PIECE -c:v libx264`: CRF 23, preset medium, a keyframe every 250 frames; clipmill reads
                   these files without re-encoding (`prep index`)
    x264, GOP 30   the same with a keyframe every 30 frames
    own            `prep chunk` with its default recipe
    closed GOP     `prep chunk --gop closed`
    fast           `prep chunk --recipe fast`: every frame is a keyframe

Every variant reads the same clips from each set: the same frames, with one RandomResizedCrop(0.5-1.0) to 224 pixels per
clip and the same rectangles. A clip has 4 frames from a span of 1 to 4 s, or 16 frames with a stride of 4 as in
VideoMAE. The variants:

    clipmill       the code path of training: packets read from the shard, checksums verified; YUV planes
    clipmill, rgb  the same, converted to RGB on the CPU
    clipmill, uncropped
                   the same, with the frames as the decoder returns them
    decord, torchcodec (seek mode exact, and approximate), PyAV, OpenCV
                   open the file of the chunk, decode the frames to RGB, crop and resize them with OpenCV; `torchcodec,
                   kept open` opens each file once, in approximate mode
    libavcodec     clipmill's packets, preloaded into memory, are sent to the same decoder; nothing is read,
                   verified, cropped or resized: the lower bound

Each variant is a persistent process with one thread and its files in the page cache. Before the timing, its clips are
compared with sequential decoding of the chunk. `wrong frames` counts the frames that differ from the requested frames
(YUV planes must be identical). A turn repeats complete passes over the clips for at least half a second. All variants
take turns in every round, in rotating order. The figures are clips per CPU second of the variant's process: medians
over the rounds. Ratios are medians of the ratios within each round. `/ decord` is relative to decord on the x264
default chunks, `/ libavcodec` relative to libavcodec on the same chunks.

Targets: 12 times decord on x264 default chunks, with at most 1.6 times their bytes, and 8 times with 16 frames; on own
chunks 3.5 times decord and 2.5 times the best variant of torchcodec; on x264's files 1.5 times torchcodec; uncropped
0.9 times libavcodec; less than 10 % of the CPU time outside libavcodec and the resize; two loader threads 0.98 times
two concurrent processes with one thread each and the same work, which is the limit of two cores.
"""

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode_peers.chunk_sets import (
    CLOSED,
    FAST,
    OWN,
    SETS,
    X264_DEFAULT,
    X264_SHORT,
    make_set,
    write_captions,
)
from benchmarks.decode_peers.clip_set import (
    MAE,
    MIN_AREA,
    SHORT,
    Clip,
    chunk_path,
    draw_span,
    frames_of_mae,
    frames_of_short,
    write_clips,
)
from benchmarks.decode_peers.figures import (
    COSTS,
    DECORD,
    FLOOR,
    LOADERS,
    OPENCV,
    OTHERS,
    OURS,
    OURS_RGB,
    PYAV,
    TORCHCODEC,
    UNCROPPED,
    Case,
    Measured,
    cost_rows,
    loader_rows,
    ratios_of,
    rows_of,
    size_rows,
)
from benchmarks.decode_peers.pieces import pieces_of
from benchmarks.decode_peers.torchcodec_reader import links_to_libraries
from benchmarks.peer_process import PEERS_PYTHON, NotInstalled, PeerProcess
from benchmarks.report import Rows, parser_for, print_report
from clipmill.prep.video.ffmpeg import find_ffmpeg

AT_LEAST_S, LOADER_AT_LEAST_S = 0.5, 1.0
NUM_LOADER_TURNS = 3  # number per round; several, because the load of the machine changes from second to second
NUM_CAPTIONS, NUM_CHECKED_CHUNKS = 512, 2


@dataclass(frozen=True)
class Entry:
    """Program of a variant in benchmarks.decode_peers, and the Python interpreter that has its packages."""

    module: str
    words: tuple[str, ...] = ()
    python: Path = Path(sys.executable)


VARIANTS = {
    OURS: Entry("packet_clips"),
    OURS_RGB: Entry("packet_clips", ("--as", "rgb")),
    UNCROPPED: Entry("packet_clips", ("--as", "frames")),
    FLOOR: Entry("libavcodec_floor"),
    DECORD: Entry("decord_reader", (), PEERS_PYTHON),
    TORCHCODEC[0]: Entry("torchcodec_reader", ("--seek-mode", "exact"), PEERS_PYTHON),
    TORCHCODEC[1]: Entry("torchcodec_reader", ("--seek-mode", "approximate"), PEERS_PYTHON),
    TORCHCODEC[2]: Entry("torchcodec_reader", ("--seek-mode", "approximate", "--keep-open"), PEERS_PYTHON),
    PYAV: Entry("pyav_seek", (), PEERS_PYTHON),
    OPENCV: Entry("opencv_seek", (), PEERS_PYTHON),
}
# Threads of each loader process, by variant.
LOADER_PROCESSES = {
    LOADERS[0]: {"loader of 1 thread": 1},
    LOADERS[1]: {"loader of 2 threads": 2},
    LOADERS[2]: {"loader of process 1": 1, "loader of process 2": 1},
}
# OpenCV is omitted where it is slowest: it takes half a second per clip with 16 seeks among 250 frames.
CASES: list[Case] = [
    *((X264_DEFAULT, SHORT, variant) for variant in (OURS, UNCROPPED, FLOOR, *OTHERS)),
    *((X264_SHORT, SHORT, variant) for variant in (OURS, UNCROPPED, FLOOR, DECORD, *TORCHCODEC)),
    *((OWN, SHORT, variant) for variant in VARIANTS),
    *((CLOSED, SHORT, variant) for variant in (OURS, UNCROPPED, FLOOR, DECORD, *TORCHCODEC)),
    *((FAST, SHORT, variant) for variant in VARIANTS),
    *((X264_DEFAULT, MAE, variant) for variant in (OURS, FLOOR, *OTHERS) if variant != OPENCV),
    *((OWN, MAE, variant) for variant in VARIANTS if variant != OPENCV),
    *((FAST, MAE, variant) for variant in (OURS, UNCROPPED, FLOOR)),
]


def draw_clips(folder: Path, name: str, *, num_chunks: int, num_clips: int) -> dict[str, list[Clip]]:
    """Draw about the same number of clips from each chunk: `num_clips` of 4 frames, and half as many of 16 frames."""
    import av

    from clipmill.train.data.clip_frames import rectangle_of

    sizes = []
    for chunk in range(num_chunks):
        with av.open(str(chunk_path(folder, name, chunk))) as container:
            stream = container.streams.video[0]
            sizes.append((stream.width, stream.height))
    random = np.random.default_rng(0)
    clips: dict[str, list[Clip]] = {}
    for kind, draw, count in ((SHORT, frames_of_short, num_clips), (MAE, frames_of_mae, -(-num_clips // 2))):
        clips[kind] = []
        for number in range(count):
            chunk, seed = number % num_chunks, int(random.integers(1 << 31))
            (width, height), own = sizes[chunk], np.random.default_rng(seed)
            part = rectangle_of("random", width=width, height=height, min_area=MIN_AREA, rng=own)
            clips[kind].append(
                Clip(chunk, draw(random), seed, part.left, part.top, part.width, part.height),
            )
    return clips


class Decoders:
    """Programs of the variants and additional programs by name, with the reasons why some are unavailable."""

    def __init__(self, names: list[str], folder: Path, *, stack: ExitStack) -> None:
        self._running: dict[str, PeerProcess] = {}
        self.missing: dict[str, str] = {}
        libraries = links_to_libraries(PEERS_PYTHON, folder / "libraries")
        searched = os.pathsep.join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH")]))
        entries = {name: VARIANTS[name] for name in names}
        entries |= {COSTS: Entry("clip_costs")}
        for processes in LOADER_PROCESSES.values():
            entries |= {name: Entry("loader_threads", ("--threads", str(num))) for name, num in processes.items()}
        for name, entry in entries.items():
            module = f"benchmarks.decode_peers.{entry.module}"
            environment = {"LD_LIBRARY_PATH": searched} if name in TORCHCODEC else None
            try:
                variant = PeerProcess(
                    entry.python, module, folder, *entry.words, folder=folder, environment=environment
                )
            except NotInstalled as error:
                self.missing[name] = str(error)
                continue
            self._running[name] = variant
            stack.callback(variant.end)

    def ask(self, name: str, do: str, **details: Any) -> dict[str, Any] | None:
        """Send a request to a variant; return None if the variant or one of its dependencies is not installed."""
        if name not in self._running:
            return None
        try:
            return self._running[name].ask(do, **details)
        except NotInstalled as error:
            self.missing[name] = str(error)
            del self._running[name]
            return None


def race(variants: Decoders, cases: list[Case], *, num_rounds: int) -> Measured:
    """Check the frames of every case, and then time the cases in turns.

    Raises:
        RuntimeError: clipmill returned a different frame than the requested frame.
    """
    measured = Measured({}, {}, {name: [] for name in LOADERS}, {}, variants.missing)
    for case in cases:
        name, kind, variant = case
        found = variants.ask(variant, "check", set=name, kind=kind, num_chunks=NUM_CHECKED_CHUNKS)
        if found is None:
            continue
        _progress(f"{name}, {kind}, {variant}: {found['num_wrong']} of {found['num_frames']} frames are wrong")
        if found["num_wrong"] and variant not in OTHERS:
            raise RuntimeError(f"{case}: {found}")
        measured.rates[case], measured.wrong[case] = [], (found["num_wrong"], found["num_frames"])
    for name in LOADERS:
        _load(variants, name, at_least_s=0)  # open the files first, so that the processes of a pair start together
    for number in range(num_rounds):
        running = list(measured.rates)
        begin = number * len(running) // num_rounds
        for name, kind, variant in running[begin:] + running[:begin]:
            turn = variants.ask(variant, "time", set=name, kind=kind, at_least_s=AT_LEAST_S)
            assert turn is not None, f"{variant} has exited"
            measured.rates[name, kind, variant].append(turn["num_clips"] / turn["cpu_s"])
        _measure_costs(variants, measured)
        _progress(f"round {number + 1} finished")
    return measured


def _measure_costs(variants: Decoders, measured: Measured) -> None:
    for name, kind in [(name, kind) for name, kind, variant in measured.rates if variant == FLOOR]:
        if costs := variants.ask(COSTS, "costs", set=name, kind=kind):
            measured.costs.setdefault((name, kind), []).append(costs)
    for turn in range(NUM_LOADER_TURNS):
        begin = turn % len(LOADERS)
        for name in LOADERS[begin:] + LOADERS[:begin]:
            if rates := _load(variants, name, at_least_s=LOADER_AT_LEAST_S):
                measured.loaders[name].append(rates)


def _load(variants: Decoders, name: str, *, at_least_s: float) -> tuple[float, float] | None:
    """Return clips per second of wall time and per CPU second, over all processes of a variant together."""
    processes = LOADER_PROCESSES[name]
    ask = partial(variants.ask, do="load", set=OWN, at_least_s=at_least_s)
    with ThreadPoolExecutor(len(processes)) as pool:
        turns = [turn for turn in pool.map(ask, processes) if turn is not None]
    if len(turns) < len(processes) or not at_least_s:
        return None
    num_clips, cpu_s = (sum(turn[name] for turn in turns) for name in ("num_clips", "cpu_s"))
    return sum(turn["num_clips"] / turn["wall_s"] for turn in turns), num_clips / cpu_s


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, metavar="VIDEOS", help="folder of videos to cut pieces from")
    parser.add_argument("--pieces", type=int, default=12, help="number of pieces of 15 s (default 12)")
    parser.add_argument(
        "--clips", type=int, default=36, help="number of clips of 4 frames; half as many have 16 (default 36)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each variant (default 5)")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT", help="only these"
    )
    parser.add_argument("--quick", action="store_true", help="4 pieces, 16 clips, one round: rough figures")
    return parser


def main() -> None:
    """Run the benchmark and print its tables."""
    arguments = _parser().parse_args()
    if arguments.quick:
        arguments.pieces, arguments.clips, arguments.rounds = 4, 16, 1
    program = find_ffmpeg().path
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        pieces, captions = folder / "pieces", folder / "captions.csv"
        pieces.mkdir()
        _progress("cutting the pieces")
        names = pieces_of(arguments.videos, pieces, num_pieces=arguments.pieces, program=program)
        random = np.random.default_rng(0)
        write_captions(captions, [(number % len(names), *draw_span(random)) for number in range(NUM_CAPTIONS)])
        _progress("encoding the sets")
        make = partial(make_set, pieces=pieces, captions=captions, folder=folder, program=program)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            sizes = dict(zip(SETS, pool.map(make, SETS), strict=True))
        write_clips(folder, draw_clips(folder, OWN, num_chunks=len(names), num_clips=arguments.clips))
        cases = [case for case in CASES if case[2] in arguments.variants]
        measured = race(Decoders(arguments.variants, folder, stack=stack), cases, num_rounds=arguments.rounds)
    ratios = ratios_of(measured, sizes)
    further: dict[str, Rows] = {
        "Figures with targets": [{"figure": figure, "value": value} for figure, value in ratios.items()],
        "Bytes": size_rows(sizes, num_chunks=len(names)),
        "CPU time per clip in clipmill, us": cost_rows(measured),
        "Loader, 4 frames per clip, own chunks": loader_rows(measured),
    }
    notes = [
        f"{len(names)} pieces of 15 s ({', '.join(names)}), {arguments.clips} clips, {arguments.rounds} rounds.",
        *(f"{variant} is not installed: {why}" for variant, why in measured.missing.items()),
    ]
    print_report(
        "Clips from chunks",
        rows_of(measured, cases),
        notes=notes,
        json_path=arguments.json,
        further={title: rows for title, rows in further.items() if rows},
        figures={"ratios": ratios},
    )


if __name__ == "__main__":
    main()
