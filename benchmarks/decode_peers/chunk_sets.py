"""Sets of chunks with the same pieces: encoded by plain ffmpeg calls and indexed, or encoded by `prep chunk`."""

import csv
import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.decode_peers.clip_set import CHUNK_FRAMES, chunk_path, data_folder
from benchmarks.decode_peers.pieces import PIECE_S
from benchmarks.measure import prep_command, run_measured

X264_DEFAULT, X264_SHORT, OWN, CLOSED, FAST = "x264 default", "x264, GOP 30", "own", "closed GOP", "fast"
SETS = (X264_DEFAULT, X264_SHORT, OWN, CLOSED, FAST)
# Arguments of ffmpeg for the sets that are not re-encoded.
AS_THEY_ARE: dict[str, tuple[str, ...]] = {X264_DEFAULT: (), X264_SHORT: ("-g", "30")}
# Arguments of `prep chunk` for the sets that it encodes.
RECIPES: dict[str, tuple[str, ...]] = {OWN: (), CLOSED: ("--gop", "closed"), FAST: ("--recipe", "fast")}


def write_captions(path: Path, spans: Iterable[tuple[int, float, float]]) -> None:
    """Write captions for `prep manifest folder` from (piece, start in seconds, length in seconds)."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["video", "text", "begin_s", "end_s"])
        for number, (piece, begin_s, length_s) in enumerate(spans):
            writer.writerow([f"{piece:03d}.mp4", f"caption {number}", f"{begin_s:.3f}", f"{begin_s + length_s:.3f}"])


def make_set(name: str, *, pieces: Path, captions: Path, folder: Path, program: str) -> int:
    """Encode each piece to one chunk, and return the total size of the chunks in bytes.

    Raises:
        RuntimeError: `prep chunk` did not make one chunk of 15 s from each piece.
    """
    chunk_path(folder, name, 0).parent.mkdir()
    sources = sorted(pieces.iterdir())
    chunks = [chunk_path(folder, name, number) for number in range(len(sources))]
    if name in AS_THEY_ARE:
        for piece, chunk in zip(sources, chunks, strict=True):
            command = [program, "-v", "error", "-nostdin", "-i", str(piece), "-c:v", "libx264", *AS_THEY_ARE[name]]
            subprocess.run([*command, str(chunk)], check=True)
        words: list[str | Path] = ["--data", data_folder(folder, name), "--len", f"{PIECE_S}s", "--engine", "processes"]
        run_measured(prep_command("index", chunks[0].parent, *words))
    else:
        _prep_chunks(name, pieces=pieces, captions=captions, folder=folder)
    return sum(chunk.stat().st_size for chunk in chunks)


def _prep_chunks(name: str, *, pieces: Path, captions: Path, folder: Path) -> None:
    from clipmill.shards.reader import Variant

    data = data_folder(folder, name)
    run_measured(prep_command("manifest", "folder", pieces, "--captions", captions, "--data", data))
    words: list[str | Path] = ["--len", f"{PIECE_S}s", "--data", data, "--engine", "processes", *RECIPES[name]]
    run_measured(prep_command("chunk", *words))
    for shard in Variant.open(data).shards():
        for row in range(shard.num_samples):
            num_frames = shard.index["num_frames"][row].as_py()
            if num_frames != CHUNK_FRAMES:
                raise RuntimeError(f"{shard.index['key'][row]} has {num_frames} frames, not {CHUNK_FRAMES}")
            number = int(shard.index["video_id"][row].as_py())
            chunk_path(folder, name, number).write_bytes(shard.read(row, "mp4"))
