"""Truncated files in tars: each fails with its name in every container format, and none is read as a shorter video."""

import io
import random
import subprocess
from fractions import Fraction
from pathlib import Path

import av
import pytest
import webdataset as wds

from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.shards.opening import CONTAINERS
from clipmill.train.data.decoders import PlainVideo
from tests.train.data.test_streams import open_stream

NUM_FRAMES = 40
COPY = ("-c", "copy")
MPEG2 = ("-c:v", "mpeg2video", "-r", "25")
VP9 = ("-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8")
LIVE_AVI = "live.avi"  # written to a pipe, where ffmpeg cannot seek back to write sizes
# Each value is the muxer, followed by ffmpeg options.
COMPLETE = {
    "last.mp4": ("mp4", *COPY),
    "first.mov": ("mov", *COPY, "-movflags", "+faststart"),
    "fragments.mp4": ("mp4", *COPY, "-movflags", "frag_keyframe+empty_moov"),
    "dash.mp4": ("mp4", *COPY, "-movflags", "dash+global_sidx+skip_trailer", "-frag_duration", "300000"),
    "matroska.mkv": ("matroska", *COPY),
    "vp9.webm": ("webm", *VP9),
    "mpeg4.avi": ("avi", "-c:v", "mpeg4"),
    "wmv2.wmv": ("asf", "-c:v", "wmv2"),
    "animated.gif": ("gif",),
}
UNKNOWN = {
    "live.mp4": ("mp4", *COPY, "-movflags", "frag_keyframe+empty_moov+skip_trailer"),
    "live.mkv": ("matroska", *COPY, "-live", "1"),
    "live.webm": ("webm", *VP9, "-live", "1"),
    "theora.ogv": ("ogg", "-c:v", "libtheora"),
    "stream.ts": ("mpegts", *COPY),
    "stream.mpg": ("vob", *MPEG2),
    "raw.m2v": ("mpeg2video", *MPEG2),
    "flash.flv": ("flv", *COPY),
    "tape.dv": ("dv", "-target", "pal-dv"),
    "vp9.ivf": ("ivf", *VP9),
    "mpeg2.mxf": ("mxf", *MPEG2),
    "mpeg2.wtv": ("wtv", *MPEG2),
    "real.rm": ("rm", "-c:v", "rv20", "-s", "176x144"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A video in each container of `COMPLETE` and `UNKNOWN`, and a live recording in AVI."""
    folder = tmp_path_factory.mktemp("containers")
    FrameNumberVideo(num_frames=NUM_FRAMES, fps=Fraction(30), width=64, height=64, gop=10).write(folder / "in.mp4")
    outputs: list[str | Path] = []
    for name, (muxer, *options) in (COMPLETE | UNKNOWN).items():
        outputs += [*options, "-f", muxer, folder / name]
    outputs += ["-c:v", "mpeg4", "-f", "avi", "pipe:1"]
    command = [find_ffmpeg().path, "-v", "error", "-i", folder / "in.mp4", *outputs]
    live = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return {LIVE_AVI: live} | {name: (folder / name).read_bytes() for name in COMPLETE | UNKNOWN}


def test_each_allowed_container_is_among_them(files: dict[str, bytes]) -> None:
    names = set()
    for content in files.values():
        with av.open(io.BytesIO(content)) as container:
            names |= set(container.format.name.split(","))
    assert set(CONTAINERS.split(",")) <= names


@pytest.mark.parametrize("name", COMPLETE)
def test_wherever_a_file_is_cut_it_has_all_frames_or_is_refused(name: str, files: dict[str, bytes]) -> None:
    content, generator = files[name], random.Random(name)
    num_frames = len(PlainVideo(content).pts)
    assert abs(num_frames - NUM_FRAMES) <= 1
    late = range(len(content) - 1, len(content) - 30, -3)
    num_refused = 0
    for end in (*late, *(generator.randrange(1, len(content)) for _ in range(25))):
        try:
            video = PlainVideo(content[:end])
        except (av.FFmpegError, ValueError):
            num_refused += 1
        else:
            assert len(video.decode(range(num_frames))) == num_frames, f"cut at {end} of {len(content)}"
    assert num_refused >= 15


@pytest.mark.parametrize("name", [*UNKNOWN, LIVE_AVI])
def test_a_container_that_does_not_state_its_end_is_refused(name: str, files: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="does not contain its size"):
        PlainVideo(files[name])


def test_trailing_bytes_are_not_a_truncation(files: dict[str, bytes]) -> None:
    for name in COMPLETE:
        for padding in (b"\0", bytes(600), b"TAG" + bytes(125)):
            assert len(PlainVideo(files[name] + padding).pts) == len(PlainVideo(files[name]).pts), name


def test_truncated_members_of_a_tar_are_failures_with_their_keys(files: dict[str, bytes], tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "0.tar")) as writer:
        for name, content in files.items():
            for kind, member in (("cut", content[: len(content) * 4 // 5]), ("complete", content)):
                writer.write({"__key__": f"{kind}-{name.replace('.', '-')}", "mp4": member, "txt": "a caption"})
    batches = list(open_stream(tmp_path / "0.tar").evaluation_batches())
    shown = {key for loaded in batches if loaded.batch for key in loaded.batch["key"]}
    failed = {failure.key: failure.reason for loaded in batches for failure in loaded.failed}
    assert shown == {f"complete-{name.replace('.', '-')}" for name in COMPLETE}
    assert set(failed.values()) == {"undecodable"} and len(failed) == 2 * len(files) - len(shown)
