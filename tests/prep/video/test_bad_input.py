"""Tests of a folder with bad sources: each is listed with its failure, and all other sources are chunked."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from clipmill.manifests.keys import safe_video_id
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.shards.reader import Variant
from tests.prep.numbered import Source, frame_numbers
from tests.prep.running import Ran, chunk, contents, manifest

STRANGE_NAMES = [
    "dots.in.it",
    "spaces in it",
    "emoji 🎬",
    "sub/folder",
    "sub.folder",
    "n" * 200,
    "-dash",
    "quote'\"$(x)",
    "%d",
]
EXPECTED = {
    "cut-fast": "source_truncated",
    "cut-mkv": "source_truncated",
    "cut-avi": "source_truncated",
    "cut-late": "source_truncated",
    "cut-slow": "source_truncated",
    "raw-h264": "bad_timestamps",
    "raw-hevc": "bad_timestamps",
    "raw-mpeg": "bad_timestamps",
    "negative": "bad_timestamps",
    "cut-gif": "source_truncated",
    "half-frame": "decode_errors",
    "nothing": "source_unreadable",
    "text": "source_unreadable",
    "playlist": "source_unreadable",
    "concat": "source_unreadable",
    "pipe": "source_unreadable",
    "sound": "no_video",
    "gone": "source_missing",
    "damaged": "decode_errors",
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]) -> Path:
    """Write the sources and their manifest.

    After the manifest was made, `gone.mp4` is removed and `pipe.mp4` is replaced by a pipe.
    """
    root = tmp_path_factory.mktemp("bad")
    videos = root / "videos"
    whole = write_video(videos / "whole.mp4", seconds=3)
    for number, name in enumerate(STRANGE_NAMES):
        write_video(videos / f"{name}.mp4", seconds=1, first_number=100 * number)
    write_video(videos / "one.mp4", seconds=1 / 30, first_number=77)
    for name in ("cut.mkv", "cut.avi", "gone.mp4", "pipe.mp4"):
        Source(name, num_frames=120, options={"codec": "mpeg4", "gop": 10}).write(root / "made")
    program = find_ffmpeg().path
    sound = ["-f", "lavfi", "-i", "sine=duration=2", "-c:a", "aac", str(videos / "sound.mp4")]
    subprocess.run([program, "-v", "error", *sound], check=True)
    fast = ["-i", str(whole), "-c", "copy", "-movflags", "+faststart", str(root / "made/fast.mp4")]
    subprocess.run([program, "-v", "error", *fast], check=True)
    _write_streams_without_times(program, root / "made/gone.mp4", videos)
    subprocess.run(
        [program, "-v", "error", "-i", str(root / "made/gone.mp4"), str(root / "made/whole.gif")], check=True
    )
    gif = (root / "made/whole.gif").read_bytes()
    (videos / "cut-gif.mp4").write_bytes(gif[:-50])
    picture = gif.rindex(b"\x08\xff")  # the codes of a frame, in blocks of at most 255 bytes
    half = gif[: picture + 1] + b"\x10" + gif[picture + 2 : picture + 18] + b"\0;"
    (videos / "half-frame.mp4").write_bytes(half)
    late = (root / "made/cut.mkv").read_bytes()
    (videos / "cut-late.mkv").write_bytes(late[: len(late) * 9 // 10])  # less than a second is missing
    for made, name in (("fast.mp4", "cut-fast.mp4"), ("cut.mkv", "cut-mkv.mkv"), ("cut.avi", "cut-avi.avi")):
        content = (root / "made" / made).read_bytes()
        (videos / name).write_bytes(content[: len(content) * 6 // 10])
    (videos / "cut-slow.mp4").write_bytes(whole.read_bytes()[: whole.stat().st_size * 6 // 10])
    damaged = bytearray((root / "made/fast.mp4").read_bytes())
    middle = damaged.index(b"mdat") + (len(damaged) - damaged.index(b"mdat")) // 2
    damaged[middle : middle + 1500] = bytes(byte ^ 0x5A for byte in damaged[middle : middle + 1500])
    (videos / "damaged.mp4").write_bytes(damaged)
    (videos / "nothing.mp4").write_text("not for long")
    (videos / "text.mp4").write_text("This is no video at all.\n" * 100)
    list_of_parts = f"#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{whole.name}\n#EXT-X-ENDLIST\n"
    (videos / "playlist.mp4").write_text(list_of_parts)
    (videos / "concat.mp4").write_text(f"ffconcat version 1.0\nfile {whole.name}\n")
    (videos / "directory.mp4").mkdir()
    for name in ("gone.mp4", "pipe.mp4"):
        shutil.copy(root / "made" / name, videos / name)
    manifest(root / "manifest-only", videos)
    for name in ("gone.mp4", "pipe.mp4"):
        (videos / name).unlink()
    (videos / "nothing.mp4").write_bytes(b"")
    os.mkfifo(videos / "pipe.mp4")
    return videos


def _write_streams_without_times(program: str, whole: Path, videos: Path) -> None:
    """Write raw streams with a video's file name, and a Matroska file whose times start before 0.

    The blocks of a Matroska file cannot store such times.
    """
    x264, mpeg2 = ["-c:v", "libx264", "-bf", "2"], ["-c:v", "mpeg2video"]
    for name, options in (
        ("raw-h264.mp4", [*x264, "-f", "h264"]),
        ("raw-hevc.mp4", ["-c:v", "libx265", "-x265-params", "log-level=none", "-f", "hevc"]),
        ("raw-mpeg.mpg", [*mpeg2, "-f", "mpeg2video"]),
        ("negative.mkv", [*x264, "-output_ts_offset", "-1.5", "-avoid_negative_ts", "disabled"]),
    ):
        subprocess.run([program, "-v", "error", "-i", str(whole), *options, str(videos / name)], check=True)


def test_each_bad_source_is_named_and_all_others_are_made(
    prep: Callable[..., Ran], videos: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(videos.parent / "manifest-only", data)
    summary = chunk(data, "--len", "1s", status=1)
    variant = Variant.open(data)
    listed = [json.loads(line) for line in (variant.directory / "failures.jsonl").read_text().splitlines()]
    assert {row["video_id"]: row["code"] for row in listed} == EXPECTED
    (cut,) = (row["message"] for row in listed if row["video_id"] == "cut-slow")
    assert cut.endswith("truncated: its index (box moov) is missing")
    assert all(row["message"] for row in listed) and summary["num_failed_videos"] == len(EXPECTED)
    probes = pq.read_table(data / "probes.parquet").to_pylist()
    in_probes = {Path(row["path"]).stem: row["code"] for row in probes if row["code"]}
    in_commits = {failure.video_id: failure.code for commit in variant.commits.values() for failure in commit.failures}
    assert in_probes | in_commits == EXPECTED and set(in_commits) == {"damaged", "half-frame"}
    assert not [row for row in listed if "0x" in row["message"]], "a memory address differs between runs"

    chunks = {sample["__key__"]: sample for sample in variant.iterate()}
    expected = {f"whole_{second * 1000:09d}": second * 30 for second in (0, 1, 2)} | {"one_000000000": 77}
    expected |= {f"{safe_video_id(name)}_000000000": 100 * number for number, name in enumerate(STRANGE_NAMES)}
    assert {key: frame_numbers(sample["mp4"])[0] for key, sample in chunks.items()} == expected
    assert frame_numbers(chunks["one_000000000"]["mp4"]) == [77]
    ids = {json.loads(sample["json"])["source_id"] for sample in chunks.values()}
    assert ids == {*STRANGE_NAMES, "whole", "one"}

    # A second run has the same list and tries no source again. A budget limits the failures of a requested retry.
    before = contents(data)
    share = 100 * len(EXPECTED) // (len(EXPECTED) + len(ids)) + 1
    for command, budget, status in (
        (("chunk", "--len", "1s"), 0, 0),
        (("retry",), len(EXPECTED) - 1, 1),
        (("retry",), len(EXPECTED), 0),
        (("retry",), f"{share}%", 0),
    ):
        flags = ("--max-failures", budget, "--engine", "processes", "--workers", 2, "--json")
        again = prep(*command, "--data", data, *flags, status=status).summary
        assert again["num_encoded"] == 0 and again["failures"] == summary["failures"]
    assert contents(data) == before
