"""Make the source videos: lossless pieces of 15 s at 30 fps, with a short side of at most 288 pixels.

All sets of chunks are encoded from the same pieces, so that they differ only in their encoding.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.decode_peers.clip_set import CHUNK_FRAMES, FPS

PIECE_S = CHUNK_FRAMES // FPS
_SHORT_SIDE = 288
_MADE_WIDTH, _MADE_HEIGHT, _TEXTURE_PX = 512, 288, 1024
_LOSSLESS = ["-c:v", "libx264", "-qp", "0", "-preset", "ultrafast"]


def pieces_of(videos: Path | None, folder: Path, *, num_pieces: int, program: str) -> list[str]:
    """Cut pieces from a folder of videos, or generate pieces if `videos` is None; return the names of the pieces."""
    if videos is None:
        return make_pieces(folder, num_pieces=num_pieces, program=program)
    return cut_pieces(videos, folder, num_pieces=num_pieces, program=program)


def cut_pieces(videos: Path, folder: Path, *, num_pieces: int, program: str) -> list[str]:
    """Cut evenly spaced pieces from the videos in a folder, about the same number from each; return their names.

    Raises:
        SystemExit: No video in the folder is at least 15 s long.
    """
    room = {path: int(length_s(path) // PIECE_S) for path in sorted(videos.iterdir()) if path.is_file()}
    parts = distribute_pieces(room, num_pieces)
    if not parts:
        raise SystemExit(f"no video in {videos} is at least {PIECE_S} s long")
    names: list[str] = []
    for path, count in parts.items():
        for number in range(count):
            begin_s = room[path] * number // count * PIECE_S
            _cut(path, begin_s, folder / f"{len(names):03d}.mp4", program=program)
            names.append(f"{path.stem} from {begin_s} s")
    return names


def distribute_pieces(room: dict[Path, int], num_pieces: int) -> dict[Path, int]:
    """Distribute the pieces over the videos in turn, until there are enough or no video has room for another piece."""
    parts = dict.fromkeys(room, 0)
    while sum(parts.values()) < min(num_pieces, sum(room.values())):
        for path in parts:
            if parts[path] < room[path] and sum(parts.values()) < num_pieces:
                parts[path] += 1
    return {path: count for path, count in parts.items() if count}


def length_s(path: Path) -> float:
    """Return the duration in the header of the container, in seconds; 0 if the file is not a video."""
    import av

    try:
        with av.open(str(path)) as container:
            return (container.duration or 0) / av.time_base if container.streams.video else 0.0
    except av.FFmpegError:
        return 0.0


def make_pieces(folder: Path, *, num_pieces: int, program: str) -> list[str]:
    """Generate pieces with a textured background that pans, rotates and zooms, sharp objects, and sensor noise."""
    for number in range(num_pieces):
        size = f"{_MADE_WIDTH}x{_MADE_HEIGHT}"
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(FPS), "-i", "pipe:"]
        command = [program, "-v", "error", *raw, "-pix_fmt", "yuv420p", *_LOSSLESS, str(folder / f"{number:03d}.mp4")]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            for picture in generate_frames(np.random.default_rng(number)):
                process.stdin.write(picture.tobytes())
            process.stdin.close()
        if process.returncode:
            raise RuntimeError(f"{program} exited with {process.returncode}")
    return [f"made {number}" for number in range(num_pieces)]


def generate_frames(random: np.random.Generator) -> Iterator[np.ndarray]:
    """Generate the frames of a piece, RGB uint8 [288, 512, 3]. The generator determines them completely."""
    import cv2

    ground = _texture(random)
    things = [(_texture(random)[:96, :96], random.uniform(0, 1, 2), random.uniform(0.1, 0.5, 2)) for _ in range(4)]
    speed, turn, swell = random.uniform(-60, 60, 2), random.uniform(-0.1, 0.1), random.uniform(0.1, 0.5)
    for number in range(CHUNK_FRAMES):
        now_s = number / FPS
        matrix = cv2.getRotationMatrix2D((0, 0), np.degrees(turn * now_s), 1 + 0.2 * np.sin(swell * now_s))
        matrix[:, 2] = speed * now_s
        size = (_MADE_WIDTH, _MADE_HEIGHT)
        picture = cv2.warpAffine(ground, matrix, size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)
        for thing, phase, rate in things:
            left, top = ((0.5 + 0.5 * np.sin(2 * np.pi * (rate * now_s + phase))) * (416, 192)).astype(int)
            picture[top : top + 96, left : left + 96] = thing
        noise = random.normal(0, 2.5, picture.shape[:2]).astype(np.float32)
        yield np.clip(picture + noise[..., None], 0, 255).astype(np.uint8)


def _texture(random: np.random.Generator) -> np.ndarray:
    """Return a tileable float32 RGB texture [1024, 1024, 3] with the spectrum of natural images."""
    frequency = np.fft.rfftfreq(_TEXTURE_PX)[None, :]
    radius = np.hypot(np.fft.fftfreq(_TEXTURE_PX)[:, None], frequency)
    radius[0, 0] = 1
    shade = random.normal(size=(3, _TEXTURE_PX, _TEXTURE_PX))
    # The three channels have most of their texture in common.
    shade = 0.8 * shade[:1] + 0.2 * shade
    waves = np.fft.irfft2(np.fft.rfft2(shade) / radius**1.2, s=(_TEXTURE_PX, _TEXTURE_PX))
    levels = 127 + 45 * waves / waves.std()
    return np.ascontiguousarray(np.clip(levels, 0, 255).transpose(1, 2, 0), np.float32)


def _cut(path: Path, begin_s: int, piece: Path, *, program: str) -> None:
    wide = f"if(gt(iw,ih),-2,min({_SHORT_SIDE},iw))"
    high = f"if(gt(iw,ih),min({_SHORT_SIDE},ih),-2)"
    resize = f"fps={FPS},scale='{wide}':'{high}':flags=bicubic,format=yuv420p"
    source = ["-ss", str(begin_s), "-i", str(path), "-an", "-vf", resize, "-frames:v", str(CHUNK_FRAMES)]
    subprocess.run([program, "-v", "error", "-nostdin", *source, *_LOSSLESS, str(piece)], check=True)
