"""Comparison of encoder settings: seconds to encode, bytes, quality, and decoded clips per second.

    python -m benchmarks.recipes [VIDEOS] [--rounds 3] [--json FILE]

One chunk of 15 s from the middle of each video in a folder (all of a shorter video) is encoded under each recipe by
prep's own pass, verified like any chunk, and compared frame by frame with the encoder's input: the frames after the
recipe's own resize and rate filter, taken from the same filter graph. A recipe is thus never judged against another
recipe's frames. The rows that compare scalers are the exception: their reference is always the output of `lanczos`,
since each scaler agrees best with itself.

    balanced, small, fast are `prep chunk --recipe` of these names; the other rows are described in the table.

    encode CPU s        CPU seconds of the pass (reading, scaling, encoding) for a minute of video
    Mb/s, / base        bits of the chunk's file for a second of video, mean of the videos; and over those of the base,
                        mean and highest of the videos' ratios
    PSNR-Y, SSIM, VMAF  ffmpeg's filters, mean of the videos; VMAF where this ffmpeg has it
    4 frames            clips a CPU second, four frames spread evenly over windows of 1 to 4 s
    16 frames           clips a CPU second, 16 frames with a stride of 4
    / base              the same over the base's, median of the ratios within each round

Base: x264 with ffmpeg's defaults (preset medium, CRF 23, a keyframe every 250 frames), from the same frames, on one
thread. Clips are decoded by train's PacketDecoder from only the packets that they need, in memory (for the base too);
the time is that of decoding, without crops. All recipes take turns in each round of decoding; figures are medians.
Encoder passes run in parallel, one per core.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from benchmarks.chunk import make_manifest
from benchmarks.recipe_trial import (
    Chunk,
    Piece,
    Quality,
    decode_s,
    encode_piece,
    long_clips,
    middle_piece,
    quality,
    short_clips,
    write_reference,
)
from benchmarks.report import parser_for, print_report
from manifests.store import read_videos
from prep.video.encode import output_size
from prep.video.ffmpeg import Ffmpeg, find_ffmpeg
from prep.video.recipe import NAMED_RECIPES, Recipe
from prep.video.settings import Gop, Scaler
from train.data.decoding.decoders import PacketDecoder

BASE = "x264 defaults"
SHORT_CLIPS, LONG_CLIPS = 12, 6  # per chunk and round


@dataclass(frozen=True)
class Candidate:
    """A recipe to evaluate. `recipe` is None for the base; `reference` names the scaler of the reference frames."""

    name: str
    recipe: Recipe | None
    reference: Scaler


@dataclass
class Trial:
    """The measurements of one candidate on one video."""

    chunk: Chunk
    quality: Quality
    short_s: list[float]
    long_s: list[float]


# Codec, GOP, keyframe interval in frames, CRF, preset.
TRIED: list[tuple[str, Gop, int, int, str | None]] = [
    *(("h264", "comb", 90, crf, "faster") for crf in (20, 21, 22, 23)),
    *(("h264", "comb", keyint, 24, "faster") for keyint in (30, 60, 150)),
    *(("h264", "comb", 90, 24, preset) for preset in ("superfast", "veryfast", "fast", "medium")),
    ("h264", "comb", 90, 23, "veryfast"),
    *(("h264", "star", keyint, crf, "veryfast") for keyint in (8, 12, 18) for crf in (21, 23)),
    *(("h264", "star", 16, crf, "veryfast") for crf in (20, 21, 22, 23)),
    *(("h264", "star", 16, 21, preset) for preset in ("superfast", "medium")),
    *(("h264", "closed", keyint, 22, "veryfast") for keyint in (16, 30)),
    *(("h264", "intra", 1, crf, "veryfast") for crf in (17, 20, 23)),
    *(("mjpeg", "intra", 1, quantiser, None) for quantiser in (5, 10)),
    ("hevc", "star", 16, 24, "veryfast"),
    ("hevc", "comb", 90, 24, "veryfast"),
    *(("vp9", "closed", keyint, 33, "5") for keyint in (16, 30)),
    *(("av1", "closed", keyint, 45, "9") for keyint in (16, 30)),
    *(("av1", "closed", 64, 45, preset) for preset in ("9", "10", "12")),
    *(("av1", "closed", 90, crf, "9") for crf in (40, 50)),
]


def candidates() -> Iterator[Candidate]:
    """Yield all candidates: the base, the named recipes, others, and scalers."""
    yield Candidate(BASE, None, Recipe().scaler)
    yield from (Candidate(name, Recipe(recipe=name), Recipe().scaler) for name in NAMED_RECIPES)
    yield from (_candidate(*settings) for settings in TRIED)
    yield from (Candidate(f"scaler {scaler}", Recipe(scaler=scaler), "lanczos") for scaler in get_args(Scaler))


def _candidate(codec: str, gop: Gop, keyint: int, crf: int, preset: str | None) -> Candidate:
    length = "" if gop == "intra" else str(keyint)
    rate = "q" if codec == "mjpeg" else "crf "
    name = f"{codec} {gop}{length} {rate}{crf}" + (f" {preset}" if preset else "")
    return Candidate(name, Recipe(codec=codec, gop=gop, keyint=keyint, crf=crf, preset=preset), Recipe().scaler)


def try_video(piece: Piece, tried: list[Candidate], *, program: Ffmpeg, num_workers: int) -> dict[str, Trial]:
    """Encode one chunk with every candidate, and compare each with its reference."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(num_workers) as pool:
        references = {scaler: Path(name) / f"{scaler}.yuv" for scaler in {one.reference for one in tried}}
        for scaler, path in references.items():
            write_reference(piece, Recipe(scaler=scaler).settings(), path, program=program)

        def attempt(candidate: Candidate) -> Trial:
            chunk = encode_piece(piece, candidate.recipe, program=program)
            near = quality(
                chunk.content,
                references[candidate.reference],
                size=output_size(piece.source, short_side=Recipe().short_side),
                num_frames=piece.num_frames,
                program=program,
            )
            print(f"{piece.path.name}, {candidate.name}: {chunk.encode_s:.1f} CPU s", file=sys.stderr, flush=True)
            return Trial(chunk, near, [], [])

        return dict(zip([one.name for one in tried], pool.map(attempt, tried), strict=True))


def decode_all(pieces: list[Piece], trials: list[dict[str, Trial]], *, num_rounds: int) -> None:
    """Decode the same clips from every candidate's chunks, in turns."""
    decoder = PacketDecoder()
    for number in range(num_rounds):
        for video, (piece, of_video) in enumerate(zip(pieces, trials, strict=True)):
            short = short_clips(piece.num_frames, fps=30, count=SHORT_CLIPS, seed=video)
            long = long_clips(piece.num_frames, count=LONG_CLIPS, seed=video)
            names = sorted(of_video, reverse=bool(number % 2))
            for name in names:
                trial = of_video[name]
                trial.short_s.append(decode_s(trial.chunk, short, decoder=decoder))
                trial.long_s.append(decode_s(trial.chunk, long, decoder=decoder))
        print(f"decoding, round {number + 1}", file=sys.stderr, flush=True)


def rows_of(pieces: list[Piece], trials: list[dict[str, Trial]]) -> list[dict[str, object]]:
    """Return one row for each candidate."""
    seconds = [piece.num_frames / 30 for piece in pieces]

    def totals(name: str, which: str) -> list[float]:
        """Return the seconds over all videos, one value per round."""
        return [sum(round_) for round_ in zip(*(getattr(of_video[name], which) for of_video in trials), strict=True)]

    rows = []
    for name in trials[0]:
        own = [of_video[name] for of_video in trials]
        sizes = [len(trial.chunk.content) for trial in own]
        ratios = [size / len(of_video[BASE].chunk.content) for size, of_video in zip(sizes, trials, strict=True)]
        row: dict[str, object] = {
            "recipe": name,
            "encode CPU s": 60 * sum(trial.chunk.encode_s for trial in own) / sum(seconds),
            "Mb/s": statistics.mean(8e-6 * size / length for size, length in zip(sizes, seconds, strict=True)),
            "/ base": statistics.mean(ratios),
            "highest": max(ratios),
            "PSNR-Y": statistics.mean(trial.quality.psnr_y for trial in own),
            "SSIM": f"{statistics.mean(trial.quality.ssim_y for trial in own):.4f}",
            "VMAF": _mean_vmaf(own),
        }
        for which, title, count in (("short_s", "4 frames", SHORT_CLIPS), ("long_s", "16 frames", LONG_CLIPS)):
            taken, base = totals(name, which), totals(BASE, which)
            row[title] = round(count * len(own) / statistics.median(taken))
            row[f"{title} / base"] = statistics.median(b / t for b, t in zip(base, taken, strict=True))
        rows.append(row)
    return rows


def rows_of_videos(pieces: list[Piece], trials: list[dict[str, Trial]]) -> list[dict[str, object]]:
    """Return one row for each video: the results of the base and of the named recipes."""
    rows = []
    for piece, of_video in zip(pieces, trials, strict=True):
        base = len(of_video[BASE].chunk.content)
        row: dict[str, object] = {
            "video": piece.path.name,
            "from s": piece.span.first_frame / 30,
            "frames": piece.num_frames,
            "base Mb/s": 8e-6 * base / (piece.num_frames / 30),
            "base PSNR-Y": of_video[BASE].quality.psnr_y,
        }
        for name in NAMED_RECIPES:
            trial = of_video.get(name)
            row[f"{name} / base"] = None if trial is None else len(trial.chunk.content) / base
            row[f"{name} PSNR-Y"] = None if trial is None else trial.quality.psnr_y
        rows.append(row)
    return rows


def _mean_vmaf(trials: list[Trial]) -> float | None:
    values = [trial.quality.vmaf for trial in trials if trial.quality.vmaf is not None]
    return statistics.mean(values) if values else None


def source_paths(videos: Path | None, folder: Path) -> list[Path]:
    """Return the usable videos of a folder, or a short synthetic one."""
    data = folder / "data"
    make_manifest(videos, data, num_synthetic=1, minutes=0.05)
    return [Path(path) for path in read_videos(data)["path"].to_pylist()]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, help="folder of videos (default: a short synthetic one)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of decoding (default 3)")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel encoder passes (default 2)")
    parser.add_argument(
        "--only", nargs="+", metavar="RECIPE", help="prefixes of the recipes to run, in addition to the base"
    )
    arguments = parser.parse_args()
    program = find_ffmpeg()
    tried = [
        candidate
        for candidate in candidates()
        if candidate.name == BASE or not arguments.only or candidate.name.startswith(tuple(arguments.only))
    ]
    with tempfile.TemporaryDirectory() as name:
        paths = source_paths(arguments.videos, Path(name))
        pieces = [middle_piece(path, Recipe().settings()) for path in paths]
        trials = [try_video(piece, tried, program=program, num_workers=arguments.workers) for piece in pieces]
    decode_all(pieces, trials, num_rounds=arguments.rounds)
    notes = [
        f"{len(pieces)} chunks, {sum(piece.num_frames for piece in pieces)} frames; "
        f"{arguments.rounds} rounds of decoding. The reference for scalers is the output of lanczos.",
    ]
    print_report(
        "Recipes of prep chunk",
        rows_of(pieces, trials),
        notes=notes,
        json_path=arguments.json,
        further={"By video": rows_of_videos(pieces, trials)},
    )


if __name__ == "__main__":
    main()
