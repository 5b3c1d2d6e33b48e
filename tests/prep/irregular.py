"""Sources with irregular timelines, made with the bundled ffmpeg; their frames carry numbers."""

import math
import struct
import subprocess
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from clipmill.prep.synthetic import draw_frame_number
from clipmill.prep.video.ffmpeg import find_ffmpeg

# Frames per second, and frames in one part and in both parts, which are longer than the first span (10 s).
FPS, HALF, WHOLE = 10, 70, 140
BOTH = list(range(WHOLE))
WITHOUT_DTS = ("-bsf:v", "setts=dts=PTS")  # an MPEG-TS stores decoding times that differ from presentation times


def ffmpeg(*arguments: object, content: bytes = b"") -> None:
    command = [find_ffmpeg().path, "-v", "fatal", "-y", *map(str, arguments)]
    subprocess.run(command, input=content, check=True)


def write_numbered(
    path: Path,
    first: int = 0,
    count: int = WHOLE,
    *,
    size: tuple[int, int] = (120, 120),
    encoder: str = "libx264",
    num_b: int = 2,
) -> Path:
    """Write a video whose frames carry their number, with `num_b` consecutive B-frames where supported."""
    width, height = size
    pictures = b"".join(
        draw_frame_number(first + number, width=width, height=height).tobytes() for number in range(count)
    )
    shape = ("-f", "rawvideo", "-pix_fmt", "gray", "-s", f"{width}x{height}", "-r", FPS)
    quality = {
        "libx264": ("-preset", "veryfast", "-bf", num_b, "-crf", 20),
        "mpeg2video": ("-strict", -1, "-bf", num_b, "-q:v", 3),
    }.get(encoder, ("-b:v", "1M"))
    encode = ("-c:v", encoder, *quality, "-pix_fmt", "yuv420p", "-g", 10, "-threads", 1, path)
    ffmpeg(*shape, "-i", "-", *encode, content=pictures)
    return path


def with_sound(
    video: Path, target: Path, *, delay_s: float = 0, codec: str = "mp2", options: tuple[object, ...] = ()
) -> Path:
    """Copy a video and add a tone that starts `delay_s` seconds earlier."""
    seconds = 1 + delay_s + WHOLE / FPS
    sound = ("-f", "lavfi", "-i", f"sine=duration={seconds}", "-itsoffset", delay_s, "-i", video)
    ffmpeg(*sound, "-map", "1:v", "-map", "0:a", "-c:v", "copy", "-c:a", codec, "-ar", 48000, *options, target)
    return target


def parts(folder: Path, suffix: str, *options: object, sound: str = "mp2", **how: Any) -> bytes:
    """Return the bytes of two concatenated files, each with audio and with timestamps that start at the same time."""
    content = b""
    for first in (0, HALF):
        video = write_numbered(folder / f"pictures{first}.mkv", first, HALF, **how)
        part = folder / f"part{first}{suffix}"
        length = ("-t", HALF / FPS)
        ffmpeg(
            *("-f", "lavfi", *length, "-i", "sine", "-i", video, "-map", "1:v", "-map", "0:a", "-c:v", "copy"),
            *("-c:a", sound, "-ar", 48000, *options, part),
        )
        content += part.read_bytes()
    return content


def transport_streams(folder: Path, *seconds: float, options: tuple[object, ...] = (), **how: Any) -> list[Path]:
    """Write two transport streams without audio whose timestamps start at these seconds."""
    streams = []
    for first, begin_s in zip((0, HALF), seconds, strict=True):
        video = write_numbered(folder / f"ts{first}.mkv", first, HALF, **how)
        streams.append(folder / f"ts{first}.ts")
        ffmpeg("-i", video, "-c", "copy", *options, "-muxdelay", 0, "-output_ts_offset", begin_s, streams[-1])
    return streams


def join_streams(*streams: Path) -> bytes:
    """Concatenate transport streams with continuous continuity counters, as in one recording."""
    counters: dict[int, int] = {}
    content = bytearray()
    for stream in streams:
        part = bytearray(stream.read_bytes())
        for begin in range(0, len(part), 188):
            pid = (part[begin + 1] & 31) << 8 | part[begin + 2]
            if part[begin + 3] & 0x10:
                counters[pid] = (counters.get(pid, -1) + 1) & 15
            part[begin + 3] = part[begin + 3] & 0xF0 | counters.get(pid, 0)
        content += part
    return bytes(content)


def late_picture(folder: Path, name: str) -> list[int]:
    encoder = "libx264" if name.endswith("ts") else "mpeg2video"
    with_sound(write_numbered(folder / "v.mkv", encoder=encoder), folder / name, delay_s=1, options=("-muxdelay", 0))
    return [0] * FPS + BOTH


def without_second_header(folder: Path, name: str) -> list[int]:
    """Write an FLV to which a recorder has appended: after a header of 13 bytes, tags follow tags."""
    content = parts(folder, ".flv", "-ar", 44100, sound="mp3")
    second = content.index(b"FLV\1", 4)
    (folder / name).write_bytes(content[:second] + content[second + 13 :])
    return BOTH


def concatenate(suffix: str, *options: object, **how: Any) -> Callable[[Path, str], list[int]]:
    def write(folder: Path, name: str) -> list[int]:
        (folder / name).write_bytes(parts(folder, suffix, *options, **how))
        return BOTH

    return write


def hours_later(folder: Path, name: str) -> list[int]:
    """Write timestamps that restart at a later time."""
    streams = transport_streams(folder, 1, 30_000, options=WITHOUT_DTS, encoder="mpeg2video", num_b=0)
    (folder / name).write_bytes(join_streams(*streams))
    return BOTH


def gap(folder: Path, name: str) -> list[int]:
    streams = transport_streams(folder, 1, 1 + HALF / FPS + 12)
    (folder / name).write_bytes(join_streams(*streams))
    return [*range(HALF), *[HALF - 1] * 12 * FPS, *range(HALF, WHOLE)]


def colours_change(folder: Path, name: str) -> list[int]:
    streams = []
    for first, begin_s, matrix in ((0, 1, "smpte170m"), (HALF, 1 + HALF / FPS, "bt709")):
        streams.append(folder / f"tags{first}.ts")
        tags = ("-color_primaries", matrix, "-color_trc", matrix, "-colorspace", matrix)
        video = write_numbered(folder / f"tags{first}.mkv", first, HALF)
        ffmpeg("-i", video, "-c:v", "libx264", *tags, "-muxdelay", 0, "-output_ts_offset", begin_s, streams[-1])
    (folder / name).write_bytes(join_streams(*streams))
    return BOTH


def size_changes(folder: Path, name: str) -> list[int]:
    small = transport_streams(folder, 1, 1 + HALF / FPS)[0].rename(folder / "small.ts")
    large = transport_streams(folder, 1, 1 + HALF / FPS, size=(240, 240))[1]
    (folder / name).write_bytes(join_streams(small, large))
    return BOTH


def edit(video: Path, *, begin_s: int = 0, end_s: int) -> None:
    """Write the shown range into the edit list of an MP4."""
    content = bytearray(video.read_bytes())
    box = content.index(b"elst")
    movie, media = (struct.unpack_from(">I", content, content.index(name) + 16)[0] for name in (b"mvhd", b"mdhd"))
    begin = struct.unpack_from(">i", content, box + 16)[0] + begin_s * media
    struct.pack_into(">Ii", content, box + 12, (end_s - begin_s) * movie, begin)
    video.write_bytes(content)


def hidden_end(folder: Path, name: str) -> list[int]:
    edit(write_numbered(folder / name, count=WHOLE + 40), end_s=WHOLE // FPS)
    return BOTH


def hidden_head(folder: Path, name: str) -> list[int]:
    """Write a MOV in which every frame is a key frame."""
    edit(write_numbered(folder / name, encoder="mjpeg"), begin_s=2, end_s=WHOLE // FPS)
    return BOTH[2 * FPS :]


def cut_frame(folder: Path, name: str) -> list[int]:
    """Write an MP4 whose edit list ends within a frame that lasts three seconds."""
    late = f"setts=ts=if(gte(N\\,{HALF})\\,TS+3/TB\\,TS)"
    ffmpeg("-i", write_numbered(folder / "v.mp4", num_b=0), "-c", "copy", "-bsf:v", late, folder / name)
    edit(folder / name, end_s=HALF // FPS + 1)
    return [*range(HALF), *[HALF - 1] * FPS]


def cut_key_frame(folder: Path, name: str) -> list[int]:
    """Write a MOV whose edit list ends within a long frame; no later packet is needed for decoding."""
    late = f"setts=ts=if(gte(N\\,{HALF})\\,TS+3/TB\\,TS)"
    ffmpeg("-i", write_numbered(folder / "v.mov", encoder="mjpeg"), "-c", "copy", "-bsf:v", late, folder / name)
    edit(folder / name, end_s=HALF // FPS + 1)
    return [*range(HALF), *[HALF - 1] * FPS]


def short_header(folder: Path, name: str) -> list[int]:
    content = bytearray(write_numbered(folder / name).read_bytes())
    box = content.index(b"mdhd")
    unit = struct.unpack(">I", content[box + 16 : box + 20])[0]
    content[box + 20 : box + 24] = struct.pack(">I", 3 * unit)
    (folder / name).write_bytes(content)
    return BOTH


def decoding_order(folder: Path, name: str) -> list[int]:
    ffmpeg("-i", write_numbered(folder / "b.mp4"), "-c", "copy", "-bsf:v", "h264_mp4toannexb", folder / name)
    return BOTH


def slow_clock(folder: Path, name: str) -> list[int]:
    """Write an AVI with a clock of 0.068 s per tick.

    Few output frames start at a tick, and the second span does not.
    """
    video = write_numbered(folder / name, count=250, encoder="mpeg4")
    content = bytearray(video.read_bytes())
    struct.pack_into("<II", content, content.index(b"strh") + 28, 17, 250)
    video.write_bytes(content)
    shown_by = [Fraction(2 * frame + 1, 2 * FPS) for frame in range(17 * FPS)]
    return [math.ceil(time * 250 / 17) - 1 for time in shown_by]


def dropped_frames(folder: Path, name: str, *, num: int = 30) -> list[int]:
    """Write an AVI whose last frames have no bytes."""
    content = write_numbered(folder / name, encoder="mpeg4").read_bytes()
    begin, end = content.index(b"movi") + 4, content.index(b"idx1")
    movie, index, position, number = b"", b"", begin, 0
    while position < end:
        size = struct.unpack("<I", content[position + 4 : position + 8])[0]
        data = content[position + 8 : position + 8 + size] if number < WHOLE - num else b""
        index += b"00dc" + struct.pack("<III", 16 if number == 0 else 0, 4 + len(movie), len(data))
        movie += b"00dc" + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
        position += 8 + size + size % 2
        number += 1
    head = content[: begin - 8] + struct.pack("<I", 4 + len(movie)) + b"movi"
    whole = head + movie + b"idx1" + struct.pack("<I", len(index)) + index
    (folder / name).write_bytes(whole[:4] + struct.pack("<I", len(whole) - 8) + whole[8:])
    return [*range(WHOLE - num), *[WHOLE - num - 1] * num]


def short_end(folder: Path, name: str) -> list[int]:
    """Write a last frame that starts early.

    It ends with the last output frame if time 0 is not on the grid of output frames.
    """
    early = f"setts=ts=if(gte(N\\,{WHOLE - 1})\\,TS-40\\,TS)"  # milliseconds
    video = write_numbered(folder / "v.mkv", num_b=0)
    ffmpeg("-i", video, "-c", "copy", "-bsf:v", early, "-output_ts_offset", 1.08, folder / name)
    return BOTH


def thumbnail_first(folder: Path, name: str) -> list[int]:
    still, video = write_numbered(folder / "still.mkv", 500, 1), write_numbered(folder / "v.mkv")
    ffmpeg("-i", still, "-i", video, "-map", "0:v", "-map", "1:v", "-c", "copy", "-disposition", 0, folder / name)
    return BOTH


def default_second(folder: Path, name: str) -> list[int]:
    other, video = write_numbered(folder / "other.mkv", 500), write_numbered(folder / "v.mkv")
    tracks = ("-map", "0:v", "-map", "1:v", "-c", "copy", "-disposition:v:0", 0, "-disposition:v:1", "default")
    ffmpeg("-i", other, "-i", video, *tracks, folder / name)
    return BOTH


KINDS: dict[str, tuple[Callable[[Path, str], list[int]], str]] = {
    "late-ts.ts": (late_picture, ""),
    "late-ps.mpg": (late_picture, ""),
    "cat.ts": (concatenate(".ts"), "restart at packet 70 (7.0"),
    "cat-without-dts.ts": (
        concatenate(".ts", *WITHOUT_DTS, encoder="mpeg2video", num_b=0),
        "restart at packet 70 (7.0",
    ),
    "hours-later.ts": (hours_later, "restart at packet 70 (7.00 s)"),
    "cells.mpg": (concatenate(".mpg", "-f", "vob", encoder="mpeg2video"), "timestamps restart"),
    "twice.flv": (without_second_header, "timestamps restart"),
    "blobs.webm": (concatenate(".webm", "-live", "1", sound="libopus", encoder="libvpx"), "timestamps restart"),
    "appended.mkv": (concatenate(".mkv", "-live", "1"), "timestamps restart"),
    "gap.ts": (gap, "no frames for 12.1 s from 6.90 s"),
    "tags.ts": (colours_change, ""),
    "size.ts": (size_changes, "changes from 120x120 to 240x240 at 7.00 s"),
    "hidden-end.mp4": (hidden_end, ""),
    "hidden-head.mov": (hidden_head, ""),
    "cut-frame.mp4": (cut_frame, ""),
    "cut-key-frame.mov": (cut_key_frame, ""),
    "short-header.mp4": (short_header, ""),
    "decoding-order.avi": (decoding_order, "no presentation times"),
    "slow-clock.avi": (slow_clock, ""),
    "dropped.avi": (dropped_frames, ""),
    "dropped-half.avi": (partial(dropped_frames, num=50), ""),
    "short-end.mkv": (short_end, ""),
    "thumbnail.mkv": (thumbnail_first, "2 video tracks"),
    "second.mkv": (default_second, "2 video tracks: only stream 1 is used"),
}
# The other sources have no audio, so --audio does not change their chunks.
WITH_SOUND = (
    *("late-ts.ts", "late-ps.mpg", "cat.ts", "cat-without-dts.ts"),
    *("cells.mpg", "twice.flv", "blobs.webm", "appended.mkv"),
)
