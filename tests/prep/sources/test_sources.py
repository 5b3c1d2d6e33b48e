"""Tests of sources that are unreadable for a while, which fail by name and are read again, and of truncated files."""

import io
import json
import os
import random
import subprocess
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import pyarrow as pa
import pytest

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.tables import write_table_file
from clipmill.prep.sources import table as source_files
from clipmill.prep.sources import table as sources
from clipmill.prep.sources.probe import probe
from clipmill.prep.sources.table import NO_FILE, probe_sources, read_probes, stat_files
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.shards.reader import Variant
from clipmill.shards.timeline.truncation import find_truncation
from tests.conftest import ROOT
from tests.forks import Forks
from tests.prep.numbered import Source
from tests.prep.running import manifest

COPY = ["-c", "copy"]
VP9 = ["-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8"]
# Containers whose structure contains their length, or the length of each part.
SIZED = {
    "matroska.mkv": COPY,
    "live.mkv": [*COPY, "-live", "1"],
    "webm.webm": VP9,
    "live.webm": [*VP9, "-live", "1"],
    "wmv.wmv": ["-c:v", "wmv2"],
    "avi.avi": ["-c:v", "mpeg4"],
    "theora.ogv": ["-c:v", "libtheora"],
    "fragments.mp4": [*COPY, "-movflags", "frag_keyframe+empty_moov"],
    "last.mov": COPY,
    "first.mp4": [*COPY, "-movflags", "+faststart"],
    "dash.mp4": [*COPY, "-movflags", "dash+global_sidx+skip_trailer"],
    "flash.flv": COPY,
    "ivf.ivf": VP9,
    "gif.gif": [],
}
# Containers that do not contain the number of their parts: a file that ends between two parts may be complete.
OPEN_ENDED = {"live.mkv", "live.webm", "theora.ogv", "fragments.mp4", "flash.flv", "gif.gif"}


def failures(data: Path) -> dict[str, str]:
    """Return the failure code of each source that failed, by name."""
    listed = (Variant.open(data).directory / "failures.jsonl").read_text().splitlines()
    return {row["video_id"]: row["code"] for row in map(json.loads, listed)}


def test_a_mount_that_does_not_answer_costs_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [tmp_path / f"{number}.mp4" for number in range(4)]
    for number, path in enumerate(good):
        path.write_bytes(b"x" * number)
    paths = [str(good[0]), "/dead/a.mp4", str(good[1]), "/dead/b.mp4", str(tmp_path / "gone.mp4"), *map(str, good[2:])]
    really, released = os.stat, threading.Event()

    def stat(path: str, **options: object) -> os.stat_result:
        if str(path).startswith("/dead/"):
            released.wait(60)
        return really(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(source_files, "STAT_LIMIT_S", 0.3)
    monkeypatch.setattr(os, "stat", stat)
    looks = stat_files(pa.chunked_array([paths]), num_threads=2)
    released.set()
    assert {row: failure.code for row, failure in looks.failures.items()} == {
        1: FailureCode.TIMEOUT,
        3: FailureCode.TIMEOUT,
        4: FailureCode.SOURCE_MISSING,
    }
    assert looks.size_bytes.tolist() == [0, NO_FILE, 1, NO_FILE, NO_FILE, 2, 3]


def test_a_source_that_may_be_read_again_is_read_without_being_asked_for(
    tmp_path: Path, write_video: Callable[..., Path], forks: Forks
) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    write_video(videos / "good.mp4", seconds=1)
    secret = write_video(videos / "secret.mp4", seconds=1)
    manifest(data, videos)
    secret.chmod(0)
    _chunk_without_privileges(forks, data, status=1)
    assert failures(data) == {"secret": "source_unreadable"}
    before = (data / "probes.parquet").stat().st_ino
    _chunk_without_privileges(forks, data, status=1)
    assert (data / "probes.parquet").stat().st_ino == before, "the table must not be written again without new probes"
    secret.chmod(0o600)
    _chunk_without_privileges(forks, data, status=0)
    assert len(list(Variant.open(data).iterate())) == 2


def _chunk_without_privileges(forks: Forks, data: Path, *, status: int) -> None:
    """Run `prep chunk` as a user who may not read every file, unlike root."""
    words = ["clipmill.prep.cli", "chunk", "--data", data, "--len", "1s", "--engine", "processes", "--workers", "1"]
    environment = {**os.environ, "CLIPMILL_READS_AS_OTHERS": "1"}
    program = [str(forks.python()), "-m", *map(str, words)]
    ran = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == status, ran.stderr


def test_failures_of_older_rules_are_looked_into_again_and_good_sources_are_not(
    tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    paths = pa.chunked_array([[str(write_video(tmp_path / f"{number}.mp4", seconds=1)) for number in range(2)]])
    told: list[int] = []
    probe_sources(tmp_path, paths, num_workers=2)
    rows = read_probes(tmp_path).to_pylist()
    rows[1] |= {"code": "source_truncated", "message": "its header promises 18.60 s, the packets end at 11.30 s"}
    older = pa.Table.from_pylist(rows, schema=sources.PROBES.remove_metadata())
    write_table_file(tmp_path / sources.PROBES_FILE, older)
    probes = probe_sources(tmp_path, paths, num_workers=2, on_progress=lambda done, total: told.append(total))
    assert probes["code"].to_pylist() == [None, None] and told == [1]
    probe_sources(tmp_path, paths, num_workers=2, on_progress=lambda done, total: told.append(total))
    assert told == [1]


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write four seconds of video in each container of SIZED."""
    folder = tmp_path_factory.mktemp("whole")
    base = Source("base.mp4", Fraction(30), 120, options={"gop": 15}).write(folder)
    for name, options in SIZED.items():
        subprocess.run([find_ffmpeg().path, "-v", "error", "-i", base, *options, folder / name], check=True)
    return {name: folder / name for name in SIZED}


@pytest.mark.parametrize("name", SIZED)
def test_wherever_a_file_is_cut_its_frames_are_all_there_or_it_is_named(
    name: str, whole_files: dict[str, Path], tmp_path: Path
) -> None:
    facts = probe(whole_files[name])
    assert abs(facts.end_s - 4) < 0.05
    content, generator = whole_files[name].read_bytes(), random.Random(name)
    at_random = [generator.randrange(1, len(content)) for _ in range(14)]
    with av.open(whole_files[name]) as container:
        format_name = container.format.name
        starts = [pos for packet in container.demux(video=0) if (pos := packet.pos or 0) > 0]
    at_parts = [start + offset for start in (starts[-1], *starts[1::17]) for offset in (0, 4, 8, 12)]
    for cut in (len(content) - 1, len(content) * 9 // 10, *at_random, *at_parts):
        path = tmp_path / f"{cut}{whole_files[name].suffix}"
        path.write_bytes(content[:cut])
        try:
            probed = probe(path)
        except SourceFailure as failure:
            assert failure.message
            continue
        if probed.end_s != facts.end_s:
            assert name in OPEN_ENDED, f"cut at {cut} of {len(content)}"
            with path.open("rb") as file:
                assert find_truncation(file, size_bytes=cut, format_name=format_name) is None


@pytest.mark.parametrize(
    ("name", "format_name", "part", "num_bytes"),
    [
        ("theora.ogv", "ogg", b"OggS\0", range(1, 6)),
        ("fragments.mp4", "mov,mp4", b"mdat", range(-4, -3)),  # a fragment ends before its data
        ("gif.gif", "gif", b"!\xf9", range(1, 9)),
    ],
)
def test_file_that_ends_inside_the_header_of_a_part_is_truncated(
    name: str, format_name: str, part: bytes, num_bytes: range, whole_files: dict[str, Path]
) -> None:
    content = whole_files[name].read_bytes()
    start = content.rindex(part)

    for end in (start + count for count in num_bytes):
        problem = find_truncation(io.BytesIO(content[:end]), size_bytes=end, format_name=format_name)
        assert "truncated" in (problem or ""), f"{end - start} bytes after {part!r}"


def test_ivf_that_was_written_to_a_pipe_or_has_gaps_is_complete(tmp_path: Path) -> None:
    source = ["-f", "lavfi", "-i", "testsrc=size=64x64:rate=25:duration=2"]
    command = [find_ffmpeg().path, "-v", "error", *source, *VP9, "-f", "ivf"]
    piped, sparse = tmp_path / "piped.ivf", tmp_path / "sparse.ivf"
    piped.write_bytes(subprocess.run([*command, "-"], check=True, capture_output=True).stdout)
    subprocess.run([*command, "-vf", "select='eq(n,0)+gte(n,30)'", "-fps_mode", "vfr", sparse], check=True)
    assert piped.read_bytes()[24:28] == bytes([255] * 4)
    assert probe(piped).end_s == probe(sparse).end_s == 2


def test_raw_frames_can_be_given_times_as_the_message_says(tmp_path: Path) -> None:
    raw, program = tmp_path / "in.h264", find_ffmpeg().path
    base = Source("base.mp4", Fraction(30), 90).write(tmp_path)
    subprocess.run([program, "-v", "error", "-i", base, "-c:v", "libx264", "-bf", "2", "-f", "h264", raw], check=True)
    with pytest.raises(SourceFailure, match="as in a raw h264 stream") as caught:
        probe(raw)
    command = caught.value.message.partition("ffmpeg ")[2].split()
    given = {"RATE": "30", "IN": str(raw), "OUT.mkv": str(tmp_path / "out.mkv")}
    subprocess.run([program, "-v", "error", *(given.get(word, word) for word in command)], check=True)
    assert abs(probe(tmp_path / "out.mkv").end_s - 3) < 0.01


def test_times_that_no_video_has_are_refused(tmp_path: Path) -> None:
    base = Source("base.mp4", Fraction(30), 30).write(tmp_path)
    path = tmp_path / "centuries.ogv"
    shift = ["-output_ts_offset", "-1.5", "-avoid_negative_ts", "disabled"]  # counted from the end of 64 bits
    subprocess.run([find_ffmpeg().path, "-v", "error", "-i", base, "-c:v", "libtheora", *shift, path], check=True)
    with pytest.raises(SourceFailure, match=r"implausible duration of .* for 30 frames") as caught:
        probe(path)
    assert caught.value.code == FailureCode.BAD_TIMESTAMPS


def test_timestamps_that_jump_by_hours_are_refused(whole_files: dict[str, Path], tmp_path: Path) -> None:
    content = bytearray(whole_files["flash.flv"].read_bytes())
    position, num_tags = 13, 0
    while num_tags < 60:
        position, num_tags = position + 15 + int.from_bytes(content[position + 1 : position + 4], "big"), num_tags + 1
    content[position + 7] = 1  # the highest byte of a tag's time in ms: 4.7 hours
    (tmp_path / "jump.flv").write_bytes(content)
    with pytest.raises(SourceFailure, match=r"the timestamps jump by 4\.7 hours") as caught:
        probe(tmp_path / "jump.flv")
    assert caught.value.code == FailureCode.BAD_TIMESTAMPS
