"""One chunk with one recipe: encoded as in prep, compared with the encoder's input frames, and decoded."""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ffmpeg
import numpy as np

from prep.sources.probe import SourceFacts, probe
from prep.video.encode import encode_span, output_size, scaled_frames
from prep.video.ffmpeg import Ffmpeg, run
from prep.video.packets import read_chunk
from prep.video.recipe import Recipe, resolve
from prep.video.settings import ChunkSettings
from prep.video.spans import Span, num_output_frames
from shards.packets import PacketTable
from train.data.decoding.decoders import PacketDecoder

LIMIT_S = 600.0


@dataclass(frozen=True)
class Piece:
    """The part of a video that is encoded as one chunk."""

    path: Path
    source: SourceFacts
    span: Span

    @property
    def num_frames(self) -> int:
        return self.span.num_frames


@dataclass(frozen=True)
class Quality:
    """Similarity of the chunk and the reference over all frames: PSNR of luma in dB, SSIM of luma, VMAF 0 to 100."""

    psnr_y: float
    ssim_y: float
    vmaf: float | None


@dataclass(frozen=True)
class Chunk:
    """An encoded chunk in memory.

    Attributes:
        encode_s: CPU seconds of the pass: reading, scaling and encoding.
    """

    content: bytes
    encode_s: float
    codec: str
    extradata: bytes
    table: PacketTable


def middle_piece(path: Path, settings: ChunkSettings) -> Piece:
    """Return the full chunk in the middle of a video; all of a video shorter than a chunk."""
    source = probe(path)
    num_frames = int(num_output_frames(np.array([source.end_s]), fps=settings.fps_exact)[0])
    length = min(settings.chunk_frames, num_frames)
    number = (num_frames // length - 1) // 2
    is_last = (number + 1) * length >= num_frames
    return Piece(path, source, Span(number, number * length, (length,), is_last))


def encode_piece(piece: Piece, recipe: Recipe | None, *, program: Ffmpeg) -> Chunk:
    """Encode one chunk with `prep`'s encoder pass; None stands for x264 with ffmpeg's defaults, on one thread."""
    fps = (recipe or Recipe()).settings().fps_exact
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if recipe is None:
            path = folder / "chunk.mp4"
            encode_s = _write_frames(
                piece, Recipe().settings(), path, program=program, options={"c:v": "libx264", "threads:v": 1}
            )
        else:
            made = encode_span(
                piece.path,
                source=piece.source,
                span=piece.span,
                recipe=resolve(recipe, ffmpeg_version=program.version),
                program=program.path,
                folder=folder,
            )
            [path], encode_s = made.segments, made.cpu_s
        content = path.read_bytes()
    facts = read_chunk(content, fps=fps)
    if sorted(facts.packet_frame) != list(range(piece.num_frames)):
        raise RuntimeError(f"{piece.path} became {facts.num_frames} frames, expected {piece.num_frames}")
    table = PacketTable(
        np.array(facts.packet_offset, np.uint32),
        np.array(facts.packet_size, np.uint32),
        np.array(facts.packet_frame, np.int32),
        np.array(facts.packet_flags, np.uint8),
        np.array(facts.packet_crc32, np.uint32),
    )
    return Chunk(content, encode_s, facts.codec, facts.extradata, table)


def write_reference(piece: Piece, settings: ChunkSettings, path: Path, *, program: Ffmpeg) -> None:
    """Write the encoder's input frames under `settings` as raw 4:2:0 samples, 8 bit."""
    _write_frames(piece, settings, path, program=program, options={"c:v": "rawvideo", "f": "rawvideo"})
    width, height = output_size(piece.source, short_side=settings.short_side)
    expected = piece.num_frames * (width * height + 2 * (width // 2) * (height // 2))
    if path.stat().st_size != expected:
        raise RuntimeError(f"the reference of {piece.path} has {path.stat().st_size} bytes, expected {expected}")


def _write_frames(
    piece: Piece, settings: ChunkSettings, path: Path, *, program: Ffmpeg, options: Mapping[str, str | int]
) -> float:
    """Write the scaled frames with the given output options; return CPU seconds."""
    _, video = scaled_frames(piece.path, source=piece.source, span=piece.span, settings=settings)
    output = ffmpeg.output(
        video, str(path), **{"an": None, "frames:v": piece.num_frames, "fps_mode": "passthrough", **options}
    )
    general = ["-hide_banner", "-nostdin", "-loglevel", "error", "-xerror", "-nostats"]
    outcome = run(output.global_args(*general).compile(cmd=program.path), folder=path.parent, limit_s=LIMIT_S)
    if outcome.return_code:
        raise RuntimeError(f"ffmpeg ended with {outcome.return_code}: {outcome.stderr_tail}")
    return outcome.cpu_s


def quality(content: bytes, reference: Path, *, size: tuple[int, int], num_frames: int, program: Ffmpeg) -> Quality:
    """Compare a chunk with the reference frame by frame, with ffmpeg's filters."""
    has_vmaf = _has_vmaf(program.path)
    measures = ["psnr=stats_file=psnr.txt", "ssim", *(["libvmaf=log_fmt=json:log_path=vmaf.json"] if has_vmaf else [])]
    count = len(measures)
    # Same time base, since the filters pair frames by timestamp; same colour tags, since ffmpeg would convert from the
    # chunk's to the untagged reference's.
    common = "setparams=range=limited:colorspace=bt709,format=yuv420p,settb=1/30,setpts=N"
    graph = [
        f"[0:v]{common},split={count}{_labels('a', count)}",
        f"[1:v]{common},split={count}{_labels('b', count)}",
        *(f"[a{n}][b{n}]{measure}[o{n}]" for n, measure in enumerate(measures)),
    ]
    arguments = [program.path, "-hide_banner", "-nostdin", "-nostats", "-loglevel", "info", "-i", "chunk.mp4"]
    arguments += ["-f", "rawvideo", "-pix_fmt", "yuv420p", "-color_range", "tv", "-video_size", f"{size[0]}x{size[1]}"]
    arguments += ["-framerate", "30", "-i", str(reference.resolve()), "-filter_complex", ";".join(graph)]
    for number in range(count):
        arguments += ["-map", f"[o{number}]", "-f", "null", "-"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "chunk.mp4").write_bytes(content)
        outcome = run(arguments, folder=folder, limit_s=LIMIT_S)
        if outcome.return_code:
            raise RuntimeError(f"ffmpeg ended with {outcome.return_code}: {outcome.stderr_tail}")
        num_compared = len((folder / "psnr.txt").read_text().splitlines())
        vmaf = json.loads((folder / "vmaf.json").read_bytes())["pooled_metrics"]["vmaf"]["mean"] if has_vmaf else None
    if num_compared != num_frames:
        raise RuntimeError(f"{num_compared} frames were compared, expected {num_frames}")
    log = outcome.stderr_tail
    return Quality(_number(r"PSNR y:(\S+)", log), _number(r"SSIM Y:(\S+)", log), vmaf)


@cache
def _has_vmaf(program: str) -> bool:
    listed = subprocess.run([program, "-hide_banner", "-filters"], capture_output=True, text=True, check=True).stdout
    return any(line.split()[1:2] == ["libvmaf"] for line in listed.splitlines())


def _labels(name: str, count: int) -> str:
    return "".join(f"[{name}{number}]" for number in range(count))


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"ffmpeg did not report {pattern}: {text}")
    return float(found[1])


def short_clips(num_frames: int, *, fps: int, count: int, seed: int) -> list[list[int]]:
    """Draw clips of four frames, evenly spaced in random windows of 1 to 4 s of the chunk."""
    rng = np.random.default_rng(seed)
    clips = []
    for _ in range(count):
        length = min(int(rng.uniform(1, 4) * fps), num_frames)
        begin = int(rng.integers(num_frames - length + 1))
        clips.append([begin + int((part + 0.5) * length / 4) for part in range(4)])
    return clips


def long_clips(num_frames: int, *, count: int, seed: int) -> list[list[int]]:
    """Draw clips of sixteen frames with a stride of four, anywhere in the chunk."""
    rng = np.random.default_rng(seed)
    begins = rng.integers(max(1, num_frames - 60), size=count)
    return [[min(begin + 4 * number, num_frames - 1) for number in range(16)] for begin in begins.tolist()]


def decode_s(chunk: Chunk, clips: list[list[int]], *, decoder: PacketDecoder) -> float:
    """Return the CPU seconds to select packets and decode the clips' frames from a chunk in memory, without crops."""
    content, table = chunk.content, chunk.table
    begin_s = time.thread_time()
    for clip in clips:
        packets = []
        for position in table.needed_for(clip):
            offset = int(table.offset[position])
            packets.append((int(table.frame[position]), content[offset : offset + int(table.size[position])]))
        found: dict[int, object] = {}
        decoder.decode_each(codec=chunk.codec, extradata=chunk.extradata, packets=packets, use=found.__setitem__)
        if not found.keys() >= set(clip):
            raise RuntimeError(f"the decoder did not return frames {sorted(set(clip) - found.keys())}")
    return time.thread_time() - begin_s
