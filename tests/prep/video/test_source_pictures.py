"""Tests of crops, aspect ratios, orientations and colours of sources: chunks show them as players do."""

import struct
from io import BytesIO
from pathlib import Path

import av
import numpy as np

from clipmill.prep.sources.probe import probe
from clipmill.train.data.frame_sampling import US_PER_S, Sampling
from clipmill.train.tasks.caption.video_windows import window_clips
from tests.prep.irregular import ffmpeg, join_streams
from tests.prep.running import chunk, manifest, prep_here
from tests.prep.video.test_frames import chunks_by_source


def chunk_pictures(data: Path) -> list[np.ndarray]:
    """Return the first frame of every chunk in a data folder, in gray."""
    pictures = []
    for of_source in chunks_by_source(data).values():
        for _, content in of_source:
            with av.open(BytesIO(content), "r") as container:
                pictures.append(next(container.decode(video=0)).to_ndarray(format="gray"))
    return pictures


def test_a_part_of_another_shape_keeps_its_shape(tmp_path: Path) -> None:
    """Change from 4:3 to 16:9 with the same number of pixels, as broadcasts do: a circle stays a circle."""
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
    (tmp_path / "videos/shape.ts").write_bytes(join_streams(*streams))
    manifest(tmp_path / "data", tmp_path / "videos")
    chunk(tmp_path / "data", "--len", "2s", "--fps", 10)
    first, second = chunk_pictures(tmp_path / "data")
    assert first.shape == second.shape == (240, 320) and first.min() > 200
    assert second[40:200].min() > 200 and second[:28].max() < 30 and second[212:].max() < 30  # 320x180 in the middle


def test_pixels_of_an_mp4_become_square(tmp_path: Path) -> None:
    """Use an MP4 that is read by its index, and a MOV whose frames do not state the pixel aspect."""
    (tmp_path / "videos").mkdir()
    for name, encoder in (("a.mp4", "libx264"), ("b.mov", "mjpeg")):
        source = ("-f", "lavfi", "-i", "color=white:s=192x240:r=10:d=2,setsar=4/3")
        ffmpeg(*source, "-c:v", encoder, "-pix_fmt", "yuvj420p", tmp_path / "videos" / name)
    manifest(tmp_path / "data", tmp_path / "videos")
    chunk(tmp_path / "data", "--len", "2s", "--fps", 10)
    for picture in chunk_pictures(tmp_path / "data"):
        assert picture.shape == (240, 256) and picture.min() > 200


def test_a_shape_changes_with_its_frame(tmp_path: Path) -> None:
    """Reduce the frame rate, with a change of aspect between two output frames."""
    streams = []
    for begin_s, aspect in ((1, "1"), (3.04, "4/3")):
        streams.append(tmp_path / f"{begin_s}.ts")
        source = ("-f", "lavfi", "-i", f"color=white:s=320x240:r=25:d=2,setsar={aspect}")
        encode = ("-c:v", "mpeg2video", "-g", 5, "-muxdelay", 0, "-output_ts_offset", begin_s)
        ffmpeg(*source, *encode, streams[-1])
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/shape.ts").write_bytes(join_streams(*streams))
    manifest(tmp_path / "data", tmp_path / "videos")
    chunk(tmp_path / "data", "--len", "2s", "--fps", 10)
    _, second = chunk_pictures(tmp_path / "data")
    assert second[40:200].min() > 200 and second[:28].max() < 30  # on show from 2.04 s, and not before


def test_a_crop_of_the_container_is_applied(tmp_path: Path) -> None:
    video = tmp_path / "videos/crop.mkv"
    video.parent.mkdir()
    bars = "color=white:s=320x192:r=10:d=2,pad=320:288:0:48"
    ffmpeg("-f", "lavfi", "-i", bars, "-c:v", "libx264", "-live", 1, "-write_crc32", 0, video)
    content = video.read_bytes()
    # Insert into the Video element (E0), whose size and whose parents' sizes have fixed numbers of bytes here.
    video.write_bytes(with_crop(content, {0x54BB: 48, 0x54AA: 48}))
    manifest(tmp_path / "data", video.parent)
    chunk(tmp_path / "data", "--len", "2s", "--fps", 10)
    [picture] = chunk_pictures(tmp_path / "data")
    assert picture.shape == (192, 320) and picture.min() > 200
    [clip] = window_clips(video, Sampling(num_frames=1), size_px=64, length_us=2 * US_PER_S)
    assert clip.video[0][: 64 * 64].min() > 200
    assert "the container crops 320x288 to 320x192" in prep_here("status", "--data", tmp_path / "data").stdout


def with_crop(content: bytes, crop: dict[int, int]) -> bytes:
    """Return a Matroska file of unknown length with crop elements in its only track."""

    def element(name: bytes, body: bytes) -> bytes:
        return name + (len(body) | 1 << 28).to_bytes(4, "big") + body

    def body_of(content: bytes, name: bytes) -> tuple[int, int, int]:
        """Return the start of an element, the start of its body, and its end."""
        begin = (
            content.rindex(name) if len(name) > 1 else content.index(name)
        )  # the first occurrence may be in a list of positions
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
    with av.open(BytesIO(content), "r") as container:
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
