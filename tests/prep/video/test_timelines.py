"""Sources with irregular timelines: every frame is shown once, at its time, with and without sound.

Ordinary sources are in test_frames.py. The output has the frame rate of the sources, so that every number is exact.
"""

import struct
import subprocess
from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.probe import probe
from clipmill.prep.synthetic.frame_code import draw_frame_number, read_frame_number
from clipmill.prep.video.encode import check_frames
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.spans import Span
from clipmill.train.data.frame_sampling import US_PER_S, Sampling
from clipmill.train.tasks.caption.videos.clips import window_clips
from tests.prep.numbered import frame_numbers
from tests.prep.running import chunk, manifest, prep_here
from tests.prep.video.test_frames import chunks_by_source

FPS, HALF, WHOLE = 10, 70, 140  # frames per second, frames of a part, and of both: longer than the first span (10 s)
BOTH = list(range(WHOLE))


def ffmpeg(*arguments: object, content: bytes = b"") -> None:
    command = [find_ffmpeg().path, "-v", "fatal", "-y", *map(str, arguments)]
    subprocess.run(command, input=content, check=True)


def numbered(
    path: Path, first: int = 0, count: int = WHOLE, *, size: tuple[int, int] = (120, 120), encoder: str = "libx264"
) -> Path:
    """Write a video whose frames carry their number, with B frames if the encoder has any."""
    width, height = size
    pictures = b"".join(
        draw_frame_number(first + number, width=width, height=height).tobytes() for number in range(count)
    )
    shape = ("-f", "rawvideo", "-pix_fmt", "gray", "-s", f"{width}x{height}", "-r", FPS)
    quality = {
        "libx264": ("-preset", "veryfast", "-bf", 2, "-crf", 20),
        "mpeg2video": ("-strict", -1, "-bf", 2, "-q:v", 3),
    }.get(encoder, ("-b:v", "1M"))
    encode = ("-c:v", encoder, *quality, "-pix_fmt", "yuv420p", "-g", 10, "-threads", 1, path)
    ffmpeg(*shape, "-i", "-", *encode, content=pictures)
    return path


def with_sound(
    video: Path, target: Path, *, delay_s: float = 0, codec: str = "mp2", options: tuple[object, ...] = ()
) -> Path:
    """Copy a video beside a tone that begins `delay_s` seconds earlier."""
    seconds = 1 + delay_s + WHOLE / FPS
    sound = ("-f", "lavfi", "-i", f"sine=duration={seconds}", "-itsoffset", delay_s, "-i", video)
    ffmpeg(*sound, "-map", "1:v", "-map", "0:a", "-c:v", "copy", "-c:a", codec, "-ar", 48000, *options, target)
    return target


def parts(folder: Path, suffix: str, *options: object, sound: str = "mp2", **how: Any) -> bytes:
    """The bytes of two files, one after another, each with sound and with timestamps that start at the same time."""
    content = b""
    for first in (0, HALF):
        video = numbered(folder / f"pictures{first}.mkv", first, HALF, **how)
        part = folder / f"part{first}{suffix}"
        length = ("-t", HALF / FPS)
        ffmpeg(
            *("-f", "lavfi", *length, "-i", "sine", "-i", video, "-map", "1:v", "-map", "0:a", "-c:v", "copy"),
            *("-c:a", sound, "-ar", 48000, *options, part),
        )
        content += part.read_bytes()
    return content


def transport_streams(folder: Path, *seconds: float, **how: Any) -> list[Path]:
    """Two transport streams without sound whose timestamps begin at these seconds."""
    streams = []
    for first, begin_s in zip((0, HALF), seconds, strict=True):
        video = numbered(folder / f"ts{first}.mkv", first, HALF, **how)
        streams.append(folder / f"ts{first}.ts")
        ffmpeg("-i", video, "-c", "copy", "-muxdelay", 0, "-output_ts_offset", begin_s, streams[-1])
    return streams


def joined(*streams: Path) -> bytes:
    """Transport streams, one after another, with continuity counters that run on, as in one recording."""
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
    with_sound(numbered(folder / "v.mkv", encoder=encoder), folder / name, delay_s=1, options=("-muxdelay", 0))
    return [0] * FPS + BOTH


def without_second_header(folder: Path, name: str) -> list[int]:
    """An FLV to which a recorder has appended: tags follow tags, after a header of 13 bytes."""
    content = parts(folder, ".flv", "-ar", 44100, sound="mp3")
    second = content.index(b"FLV\1", 4)
    (folder / name).write_bytes(content[:second] + content[second + 13 :])
    return BOTH


def concatenated(suffix: str, *options: object, **how: Any) -> Callable[[Path, str], list[int]]:
    def write(folder: Path, name: str) -> list[int]:
        (folder / name).write_bytes(parts(folder, suffix, *options, **how))
        return BOTH

    return write


def gap(folder: Path, name: str) -> list[int]:
    streams = transport_streams(folder, 1, 1 + HALF / FPS + 12)
    (folder / name).write_bytes(joined(*streams))
    return [*range(HALF), *[HALF - 1] * 12 * FPS, *range(HALF, WHOLE)]


def colours_change(folder: Path, name: str) -> list[int]:
    streams = []
    for first, begin_s, matrix in ((0, 1, "smpte170m"), (HALF, 1 + HALF / FPS, "bt709")):
        streams.append(folder / f"tags{first}.ts")
        tags = ("-color_primaries", matrix, "-color_trc", matrix, "-colorspace", matrix)
        video = numbered(folder / f"tags{first}.mkv", first, HALF)
        ffmpeg("-i", video, "-c:v", "libx264", *tags, "-muxdelay", 0, "-output_ts_offset", begin_s, streams[-1])
    (folder / name).write_bytes(joined(*streams))
    return BOTH


def size_changes(folder: Path, name: str) -> list[int]:
    small = transport_streams(folder, 1, 1 + HALF / FPS)[0].rename(folder / "small.ts")
    large = transport_streams(folder, 1, 1 + HALF / FPS, size=(240, 240))[1]
    (folder / name).write_bytes(joined(small, large))
    return BOTH


def hidden_end(folder: Path, name: str) -> list[int]:
    content = bytearray(numbered(folder / name, count=WHOLE + 40).read_bytes())
    box = content.index(b"elst")
    content[box + 12 : box + 16] = struct.pack(">I", 1000 * WHOLE // FPS)  # of movie time, in milliseconds
    (folder / name).write_bytes(content)
    return BOTH


def short_header(folder: Path, name: str) -> list[int]:
    content = bytearray(numbered(folder / name).read_bytes())
    box = content.index(b"mdhd")
    unit = struct.unpack(">I", content[box + 16 : box + 20])[0]
    content[box + 20 : box + 24] = struct.pack(">I", 3 * unit)
    (folder / name).write_bytes(content)
    return BOTH


def decoding_order(folder: Path, name: str) -> list[int]:
    ffmpeg("-i", numbered(folder / "b.mp4"), "-c", "copy", "-bsf:v", "h264_mp4toannexb", folder / name)
    return BOTH


def dropped_frames(folder: Path, name: str) -> list[int]:
    """An AVI whose last frames have no bytes."""
    content = numbered(folder / name, encoder="mpeg4").read_bytes()
    begin, end = content.index(b"movi") + 4, content.index(b"idx1")
    movie, index, position, number = b"", b"", begin, 0
    while position < end:
        size = struct.unpack("<I", content[position + 4 : position + 8])[0]
        data = content[position + 8 : position + 8 + size] if number < WHOLE - 30 else b""
        index += b"00dc" + struct.pack("<III", 16 if number == 0 else 0, 4 + len(movie), len(data))
        movie += b"00dc" + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
        position += 8 + size + size % 2
        number += 1
    head = content[: begin - 8] + struct.pack("<I", 4 + len(movie)) + b"movi"
    whole = head + movie + b"idx1" + struct.pack("<I", len(index)) + index
    (folder / name).write_bytes(whole[:4] + struct.pack("<I", len(whole) - 8) + whole[8:])
    return [*range(WHOLE - 30), *[WHOLE - 31] * 30]


def thumbnail_first(folder: Path, name: str) -> list[int]:
    still, video = numbered(folder / "still.mkv", 500, 1), numbered(folder / "v.mkv")
    ffmpeg("-i", still, "-i", video, "-map", "0:v", "-map", "1:v", "-c", "copy", "-disposition", 0, folder / name)
    return BOTH


def default_second(folder: Path, name: str) -> list[int]:
    other, video = numbered(folder / "other.mkv", 500), numbered(folder / "v.mkv")
    tracks = ("-map", "0:v", "-map", "1:v", "-c", "copy", "-disposition:v:0", 0, "-disposition:v:1", "default")
    ffmpeg("-i", other, "-i", video, *tracks, folder / name)
    return BOTH


KINDS: dict[str, tuple[Callable[[Path, str], list[int]], str]] = {
    "late-ts.ts": (late_picture, ""),
    "late-ps.mpg": (late_picture, ""),
    "cat.ts": (concatenated(".ts"), "start again, first at packet 70 (7.00 s)"),
    "cells.mpg": (concatenated(".mpg", "-f", "vob", encoder="mpeg2video"), "start again"),
    "twice.flv": (without_second_header, "start again"),
    "blobs.webm": (concatenated(".webm", "-live", "1", sound="libopus", encoder="libvpx"), "start again"),
    "appended.mkv": (concatenated(".mkv", "-live", "1"), "start again"),
    "gap.ts": (gap, "no frames for 12.1 s from 6.90 s"),
    "tags.ts": (colours_change, ""),
    "size.ts": (size_changes, "changes from 120x120 to 240x240 at 7.00 s"),
    "hidden-end.mp4": (hidden_end, ""),
    "short-header.mp4": (short_header, ""),
    "decoding-order.avi": (decoding_order, "no presentation times"),
    "dropped.avi": (dropped_frames, ""),
    "thumbnail.mkv": (thumbnail_first, "2 video tracks"),
    "second.mkv": (default_second, "2 video tracks: stream 1 is taken"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """All kinds in one folder, and what each has to show."""
    folder, due = tmp_path_factory.mktemp("videos"), {}
    for name, (write, _) in KINDS.items():
        made = tmp_path_factory.mktemp(name.replace(".", "-"))
        due[name] = write(made, name)
        (made / name).rename(folder / name)
    return folder, due


@pytest.fixture(scope="module", params=["drop", "keep"])
def chunks(
    request: pytest.FixtureRequest, sources: tuple[Path, dict[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, list[int]], Path]:
    data = tmp_path_factory.mktemp("data")
    manifest(data, sources[0])
    settings = ("--len", "500ms", "--fps", FPS, "--keyint", 10, "--preset", "ultrafast", "--audio", request.param)
    chunk(data, *settings, status=None)
    shown = {
        name: [number for _, content in of_source for number in frame_numbers(content)]
        for name, of_source in chunks_by_source(data).items()
    }
    return shown, data


@pytest.mark.parametrize("name", KINDS)
def test_every_frame_of_an_irregular_source_is_shown_at_its_time(
    name: str, sources: tuple[Path, dict[str, list[int]]], chunks: tuple[dict[str, list[int]], Path]
) -> None:
    due = sources[1][name]
    assert chunks[0].get(name.partition(".")[0]) == due


def test_what_may_surprise_is_noted_in_plan_and_status(
    sources: tuple[Path, dict[str, list[int]]], chunks: tuple[dict[str, list[int]], Path]
) -> None:
    data = chunks[1]
    for name, (_, note) in KINDS.items():
        explained = prep_here("plan", "--data", data, "--explain", name.partition(".")[0]).stdout
        assert note in explained and ("\nnote " in explained) == bool(note), name
    num_noted = sum(bool(note) for _, note in KINDS.values())
    for report in (prep_here("plan", "--data", data).stdout, prep_here("status", "--data", data).stdout):
        assert f"... and {num_noted - 5} more" in report and "timestamps start again, first at packet" in report


@pytest.mark.parametrize("name", KINDS)
def test_captions_of_a_file_are_made_of_the_same_frames(name: str, sources: tuple[Path, dict[str, list[int]]]) -> None:
    due, shown = sources[1][name], []
    for clip in window_clips(sources[0] / name, Sampling(num_frames=FPS), size_px=96, length_us=US_PER_S):
        shown += [read_frame_number(planes[: 96 * 96].reshape(96, 96)) for planes in clip.video]
    assert shown == due  # ten moments of each second, in the middle of what frames of the chunks show


def chunk_pictures(data: Path) -> list[np.ndarray]:
    """The first picture of every chunk in a data folder, gray."""
    pictures = []
    for of_source in chunks_by_source(data).values():
        for _, content in of_source:
            with av.open(BytesIO(content)) as container:
                pictures.append(next(container.decode(video=0)).to_ndarray(format="gray"))
    return pictures


def test_a_part_of_another_shape_keeps_its_shape(tmp_path: Path) -> None:
    """From 4:3 to 16:9 with the same number of pixels, as broadcasts change: a circle stays a circle."""
    streams = []
    for begin_s, aspect in ((1, "1"), (3, "4/3")):
        streams.append(tmp_path / f"{begin_s}.ts")
        source = f"color=white:s=320x240:r=10:d=2,setsar={aspect}"
        ffmpeg(
            "-f",
            "lavfi",
            "-i",
            source,
            "-c:v",
            "mpeg2video",
            "-strict",
            -1,
            "-g",
            5,
            "-muxdelay",
            0,
            "-output_ts_offset",
            begin_s,
            streams[-1],
        )
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/shape.ts").write_bytes(joined(*streams))
    manifest(tmp_path / "data", tmp_path / "videos")
    chunk(tmp_path / "data", "--len", "2s", "--fps", 10)
    first, second = chunk_pictures(tmp_path / "data")
    assert first.shape == second.shape == (240, 320) and first.min() > 200
    assert second[40:200].min() > 200 and second[:28].max() < 30 and second[212:].max() < 30  # 320x180 in the middle


def test_a_crop_of_the_container_is_applied(tmp_path: Path) -> None:
    video = tmp_path / "videos/crop.mkv"
    video.parent.mkdir()
    bars = "color=white:s=320x192:r=10:d=2,pad=320:288:0:48"
    ffmpeg("-f", "lavfi", "-i", bars, "-c:v", "libx264", "-live", 1, "-write_crc32", 0, video)
    content = video.read_bytes()
    # Into the element Video (E0), whose size and those of its parents are fixed numbers of bytes here.
    video.write_bytes(with_crop(content, {0x54BB: 48, 0x54AA: 48}))
    manifest(tmp_path / "data", video.parent)
    chunk(tmp_path / "data", "--len", "2s", "--fps", 10)
    [picture] = chunk_pictures(tmp_path / "data")
    assert picture.shape == (192, 320) and picture.min() > 200
    [clip] = window_clips(video, Sampling(num_frames=1), size_px=64, length_us=2 * US_PER_S)
    assert clip.video[0][: 64 * 64].min() > 200
    assert "the container crops 320x288 to 320x192" in prep_here("status", "--data", tmp_path / "data").stdout


def with_crop(content: bytes, crop: dict[int, int]) -> bytes:
    """A Matroska file of unknown length with elements for a crop in its only track."""

    def element(name: bytes, body: bytes) -> bytes:
        return name + (len(body) | 1 << 28).to_bytes(4, "big") + body

    def body_of(content: bytes, name: bytes) -> tuple[int, int, int]:
        """Where an element begins, where its body begins, and where it ends."""
        begin = (
            content.rindex(name) if len(name) > 1 else content.index(name)
        )  # the first may be in a list of positions
        head = begin + len(name)
        length_bytes = 9 - content[head].bit_length()
        length = int.from_bytes(content[head : head + length_bytes], "big") & (1 << 7 * length_bytes) - 1
        return begin, head + length_bytes, head + length_bytes + length

    tracks, entry, picture = b"\x16\x54\xae\x6b", b"\xae", b"\xe0"
    begin, inside, end = body_of(content, tracks)
    of_tracks = content[inside:end]
    _, entry_inside, entry_end = body_of(of_tracks, entry)
    of_entry = of_tracks[entry_inside:entry_end]
    at = of_entry.index(picture, of_entry.index(b"V_MPEG4"))
    _, video_inside, video_end = body_of(of_entry[at:], picture)
    crops = b"".join(struct.pack(">H", name) + b"\x81" + bytes([value]) for name, value in crop.items())
    of_video = of_entry[at:][video_inside:video_end] + crops
    of_entry = of_entry[:at] + element(picture, of_video) + of_entry[at + video_end :]
    return content[:begin] + element(tracks, element(entry, of_entry)) + content[end:]


def test_hdr_is_noted_and_keeps_its_tags(tmp_path: Path) -> None:
    video = tmp_path / "videos/hdr.mp4"
    video.parent.mkdir()
    tags = ("-color_primaries", "bt2020", "-color_trc", "smpte2084", "-colorspace", "bt2020nc")
    source = ("-f", "lavfi", "-i", "testsrc2=s=160x120:r=10:d=2,setparams=color_trc=smpte2084:color_primaries=bt2020")
    ffmpeg(*source, "-c:v", "libx264", *tags, "-pix_fmt", "yuv420p10le", video)
    manifest(tmp_path / "data", video.parent)
    chunk(tmp_path / "data", "--len", "2s")
    [[(_, content)]] = chunks_by_source(tmp_path / "data").values()
    with av.open(BytesIO(content)) as container:
        context = container.streams.video[0].codec_context
        assert (context.color_trc, context.color_primaries, context.colorspace) == (16, 9, 9)
    assert "HDR (PQ)" in prep_here("status", "--data", tmp_path / "data").stdout


def test_pictures_are_turned_and_mirrored_as_players_do(tmp_path: Path) -> None:
    plain = tmp_path / "plain.mp4"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=160x120:r=10:d=1", "-c:v", "libx264", "-crf", 5, plain)
    for name, flags in (
        ("hflip", ("-display_hflip",)),
        ("vflip", ("-display_vflip",)),
        ("quarter", ("-display_rotation", 90)),
        ("both", ("-display_rotation", 90, "-display_hflip")),
        ("angle", ("-display_rotation", 330)),
    ):
        path = tmp_path / f"{name}.mp4"
        ffmpeg(*flags, "-i", plain, "-c", "copy", path)
        ffmpeg("-i", path, "-vf", "crop='min(iw,ih)':'min(iw,ih)',scale=96:96", "-c:v", "ffv1", tmp_path / "due.mkv")
        with av.open(str(tmp_path / "due.mkv")) as container:
            due = next(container.decode(video=0)).to_ndarray(format="gray").astype(int)
        clip = next(window_clips(path, Sampling(num_frames=1), size_px=96, length_us=100_000))
        shown = clip.video[0][: 96 * 96].reshape(96, 96).astype(int)
        others = [due[::-1], due[:, ::-1], due[::-1, ::-1], due.T]
        assert np.abs(shown - due).mean() < 12 < min(np.abs(shown - other).mean() for other in others), name
        facts = probe(path)
        assert (facts.width, facts.height) == ((120, 160) if name in ("quarter", "both") else (160, 120))
        assert ("rotated by 30 degrees" in facts.notes) == (name == "angle")


@pytest.mark.parametrize(
    ("shown_s", "code"),
    [
        ([0.0, 0.1, 0.2, 0.3, 0.4], None),
        ([0.0, 0.0, 0.1, 0.2, 0.4], None),  # a frame is missing, as the second of two fields would be
        ([1.0, 1.1, 1.2, 1.3, 1.4], FailureCode.FRAMES_DIFFER),  # a second too late
        ([-0.5, -0.4, -0.3, -0.2, -0.1], FailureCode.FRAMES_DIFFER),  # half a second too early
        ([0.0, 0.0, 0.0, 0.0, 0.0], FailureCode.SOURCE_TRUNCATED),
        ([0.0, 0.1, 0.2], FailureCode.SOURCE_TRUNCATED),
    ],
    ids=str,
)
def test_encoded_frames_are_compared_with_the_packets(shown_s: list[float], code: FailureCode | None) -> None:
    span = Span(index=1, first_frame=0, chunk_frames=(5,), is_last=False)
    try:
        check_frames(np.array(shown_s), np.arange(-10, 20) / 10, span=span, fps=Fraction(10))
    except SourceFailure as failure:
        assert failure.code == code
    else:
        assert code is None


def test_what_cannot_be_shown_completely_is_refused_with_its_place(tmp_path: Path) -> None:
    twice = tmp_path / "twice.flv"
    twice.write_bytes(parts(tmp_path, ".flv", "-ar", 44100, sound="mp3"))
    with pytest.raises(SourceFailure, match=r"another FLV file begins behind byte \d+, at 7.0\d s") as refused:
        probe(twice)
    assert refused.value.code == FailureCode.BAD_TIMESTAMPS
