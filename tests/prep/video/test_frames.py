"""Tests that every output frame shows the source frame of its time, for all kinds of sources."""

import json
import subprocess
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.sources.probe import probe
from clipmill.prep.video.column import Recipe, resolve
from clipmill.prep.video.encode import Span, span_arguments
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.span_task import read_chunk
from clipmill.shards.reader import Variant
from tests.prep.irregular import write_numbered
from tests.prep.numbered import Source, due_frames, frame_numbers
from tests.prep.running import chunk, manifest

FPS = Fraction(30)
Chunks = dict[str, list[tuple[dict[str, Any], bytes]]]  # by source, in order: content of the json member, and the mp4
CHUNK_FRAMES = 15  # 500 ms: a complete GOP and the start of one
SPAN_S = 10.0  # each source is longer, so that its second span starts with a seek

SOURCES = [
    Source("ntsc.mp4", Fraction(30000, 1001), 321),
    Source("pal.mp4", Fraction(25), 269),
    Source("fast.mp4", Fraction(60), 641),
    Source("variable-slow.mp4", Fraction(12), 130, options={"variable_rate": True}),
    Source("turned-90.mp4", Fraction(30), 321, 120, 160, options={"rotation_degrees": 90}),
    Source("odd.mp4", Fraction(30), 321, 161, 121, options={"pixel_format": "yuv444p"}),
    Source("offset-mkv.mkv", Fraction(30), 321, tick_s=0.001, options={"start_offset_s": 7.3}),
    Source("offset-wmv.wmv", Fraction(30), 321, tick_s=0.001, options={"codec": "wmv2", "start_offset_s": 7.3}),
    Source("ts-intra.ts", Fraction(30), 321, tick_s=2e-5, options={"gop": 1}),  # reading starts 31 or 32 frames earlier
    # Slides: the last one is shown from 8 to 16 s.
    Source("slides.mp4", Fraction(1, 8), 2),
    Source("ts-hevc.ts", Fraction(30), 321, tick_s=2e-5, options={"codec": "libx265", "open_gop": True, "gop": 100}),
]
# Each of these sources differs from one above only in a rate, container or encoder that another source covers, here or
# in test_timelines.py. One frame of the screen recordings is shown from 6 to 10.5 s.
FURTHER_SOURCES = [
    Source("slow.mp4", Fraction(10), 108),
    Source("offset-pal.mp4", Fraction(25), 269, options={"start_offset_s": 0.73}),
    Source("ten-bit.mp4", Fraction(30), 321, options={"codec": "libx265", "pixel_format": "yuv420p10le"}),
    Source("one-key.mp4", Fraction(30), 321, options={"gop": 10_000}),
    Source("offset-webm.webm", Fraction(25), 269, tick_s=0.001, options={"codec": "libvpx-vp9", "start_offset_s": 7.3}),
    Source("avi.avi", Fraction(25), 269, options={"codec": "mpeg4"}),
    Source("open-hevc.mp4", Fraction(30), 321, options={"codec": "libx265", "open_gop": True, "gop": 50}),
    Source("screen.mp4", Fraction(1, 3), 4, options={"variable_rate": True}),
    Source("30.mp4", Fraction(30), 321),
    Source("film.mp4", Fraction(24), 257),
    Source("variable.mp4", Fraction(30), 321, options={"variable_rate": True}),
    Source("offset.mp4", Fraction(30), 321, options={"start_offset_s": 1.5}),
    Source("turned-180.mp4", Fraction(25), 269, options={"rotation_degrees": 180}),
    Source("open-h264.mp4", Fraction(30), 321, options={"open_gop": True, "gop": 50}),
    Source("mkv.mkv", Fraction(30000, 1001), 321, tick_s=0.001),
    Source("ts.ts", Fraction(30), 321, tick_s=2e-5),
    Source("screen-mkv.mkv", Fraction(1, 3), 4, tick_s=0.001, options={"variable_rate": True}),
    Source("screen-webm.webm", Fraction(1, 3), 4, tick_s=0.001, options={"codec": "libvpx-vp9", "variable_rate": True}),
]


def make_chunks(sources: list[Source], folder: Path) -> Chunks:
    """Write sources, and make their chunks."""
    for source in sources:
        source.write(folder / "videos")
    manifest(folder / "data", folder / "videos")
    chunk(folder / "data", "--len", "500ms", "--keyint", 10, "--preset", "ultrafast")
    return chunks_by_source(folder / "data")


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return make_chunks(SOURCES, tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def further_chunks(tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return make_chunks(FURTHER_SOURCES, tmp_path_factory.mktemp("further"))


def chunks_by_source(data: Path) -> Chunks:
    frames_by_name = defaultdict(list)
    for sample in Variant.open(data).iterate():
        description = json.loads(sample["json"])
        frames_by_name[description["source_id"]].append((description, sample["mp4"]))
    return {name: sorted(mine, key=lambda chunk: chunk[0]["key"]) for name, mine in frames_by_name.items()}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_each_output_frame_shows_what_was_on_show_at_its_time(source: Source, chunks: Chunks) -> None:
    check_frames_of(source, chunks)


@pytest.mark.nightly
@pytest.mark.parametrize("source", FURTHER_SOURCES, ids=lambda source: source.name)
def test_each_frame_of_further_sources_shows_what_was_on_show(source: Source, further_chunks: Chunks) -> None:
    check_frames_of(source, further_chunks)


def check_frames_of(source: Source, chunks: Chunks) -> None:
    times_s = source.times_s()
    mine = chunks[source.name.partition(".")[0]]
    shown: list[int] = []
    first_frames = []
    for description, content in mine:
        numbers = frame_numbers(content)
        assert description["num_frames"] == len(numbers)
        first_frames.append(Fraction(*description["begin_s"]) * FPS)
        assert Fraction(*description["end_s"]) * FPS == len(shown) + len(numbers)
        shown += numbers
        assert len(numbers) == CHUNK_FRAMES or description is mine[-1][0]
    assert first_frames == [CHUNK_FRAMES * n for n in range(len(mine))]
    last_frame_s = times_s[-1] - times_s[-2]
    assert abs(len(shown) / float(FPS) - (times_s[-1] + last_frame_s)) <= max(last_frame_s, 2 / float(FPS))
    assert len(shown) / float(FPS) > SPAN_S
    wrong = [
        (frame, number)
        for frame, number in enumerate(shown)
        if number not in due_frames(times_s, output_frame=frame, fps=FPS, tick_s=source.tick_s)
    ]
    assert wrong == []


def test_other_output_rates_and_a_video_that_begins_after_its_sound(tmp_path: Path) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    source = Source("ntsc.mp4", Fraction(30000, 1001), 180)
    late = Source("late.mp4", Fraction(30), 90)
    source.write(videos)
    sound = ("-f", "lavfi", "-i", "sine=duration=4", "-itsoffset", "1", "-i", late.write(tmp_path))
    program = find_ffmpeg().path
    subprocess.run([program, "-v", "error", *sound, "-c:v", "copy", "-c:a", "aac", videos / "late.mp4"], check=True)
    manifest(data, videos)

    chunk(data, "--len", "1001ms", "--fps", "30000/1001")
    same_rate = [number for _, content in chunks_by_source(data)["ntsc"] for number in frame_numbers(content)]
    assert same_rate == list(range(180))

    chunk(data, "--len", "1s", "--fps", "25")
    times_s = np.concatenate([[0.0], 1.0 + late.times_s()])
    shown = [number for _, content in chunks_by_source(data)["late"] for number in frame_numbers(content)]
    assert len(shown) == 4 * 25
    for frame, number in enumerate(shown):
        # Before the first frame starts, it is the only frame that can be shown.
        due = due_frames(times_s, output_frame=frame, fps=Fraction(25), tick_s=1e-3)
        assert number in {max(row - 1, 0) for row in due}


def test_frames_without_a_frame_rate_are_shown_to_the_last_one(tmp_path: Path) -> None:
    """In ffmpeg before 8, the filter setpts removes the frame rate; later versions have an option that does."""
    path = write_numbered(tmp_path / "a.mkv", count=40)
    recipe = resolve(Recipe(len="2s", fps="10", preset="veryfast"), ffmpeg_version="9.0")
    span, program = Span(0, 0, (20, 20), False), find_ffmpeg().path
    plain = span_arguments(path, source=probe(path), span=span, recipe=recipe, program=program)
    words = [word.replace("setpts=expr=N", "setpts=expr=N:strip_fps=1") for word in plain]
    assert words != plain

    def first_chunk(words: list[str]) -> bytes:
        subprocess.run([*words, "-y"], cwd=tmp_path, check=True)
        return (tmp_path / "000000.mp4").read_bytes()

    assert read_chunk(first_chunk(words), fps=Fraction(10)).num_frames == 20
    option = words.index("-bsf:v")
    with pytest.raises(SourceFailure, match="the edit list hides the frame at pts"):
        read_chunk(first_chunk([*words[:option], *words[option + 2 :]]), fps=Fraction(10))
