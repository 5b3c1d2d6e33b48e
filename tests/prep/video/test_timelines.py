"""Tests of sources with irregular timelines: every frame is shown once, at its time, with and without audio.

test_frames.py covers ordinary sources. The output has the frame rate of the sources, so that every number is exact.
"""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.probe import probe
from clipmill.prep.synthetic import read_frame_number
from clipmill.prep.video.encode import Span, check_frames
from clipmill.shards.timeline.copying import write_continuous
from clipmill.shards.timeline.model import frame_times
from clipmill.shards.timeline.reading import times_in_display_order
from clipmill.train.data.frame_sampling import US_PER_S, Sampling
from clipmill.train.tasks.caption.video_windows import window_clips
from tests.prep.irregular import FPS, KINDS, WITH_SOUND, ffmpeg, join_streams, parts
from tests.prep.numbered import frame_numbers
from tests.prep.running import chunk, manifest, prep_here
from tests.prep.video.test_frames import chunks_by_source


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """Write all kinds of sources into one folder; return it with the frames that each must show."""
    folder, due = tmp_path_factory.mktemp("videos"), {}
    for name, (write, _) in KINDS.items():
        made = tmp_path_factory.mktemp(name.replace(".", "-"))
        due[name] = write(made, name)
        (made / name).rename(folder / name)
    return folder, due


def make_chunks(videos: Path, data: Path, *, audio: str) -> dict[str, list[int]]:
    """Make chunks of videos; return the frame numbers that the chunks of each video show."""
    manifest(data, videos)
    settings = ("--len", "1s", "--fps", FPS, "--keyint", 10, "--preset", "ultrafast", "--audio", audio)
    chunk(data, *settings, status=None)
    return {
        name: [number for _, content in of_source for number in frame_numbers(content)]
        for name, of_source in chunks_by_source(data).items()
    }


@pytest.fixture(scope="module")
def chunks(
    sources: tuple[Path, dict[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, list[int]], Path]:
    """Make chunks with the audio of the sources that have audio."""
    data = tmp_path_factory.mktemp("data")
    return make_chunks(sources[0], data, audio="keep"), data


@pytest.fixture(scope="module")
def silent_chunks(
    sources: tuple[Path, dict[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[int]]:
    """Make chunks without audio from the sources that have audio."""
    videos = tmp_path_factory.mktemp("with-sound")
    for name in WITH_SOUND:
        (videos / name).hardlink_to(sources[0] / name)
    return make_chunks(videos, tmp_path_factory.mktemp("silent"), audio="drop")


@pytest.mark.parametrize("name", KINDS)
def test_every_frame_of_an_irregular_source_is_shown_at_its_time(
    name: str, sources: tuple[Path, dict[str, list[int]]], chunks: tuple[dict[str, list[int]], Path]
) -> None:
    due = sources[1][name]
    assert chunks[0].get(name.partition(".")[0]) == due


@pytest.mark.parametrize("name", WITH_SOUND)
def test_frames_of_a_source_with_sound_are_the_same_without_it(
    name: str, sources: tuple[Path, dict[str, list[int]]], silent_chunks: dict[str, list[int]]
) -> None:
    assert silent_chunks.get(name.partition(".")[0]) == sources[1][name]


def test_what_may_surprise_is_noted_in_plan_and_status(
    sources: tuple[Path, dict[str, list[int]]], chunks: tuple[dict[str, list[int]], Path]
) -> None:
    data = chunks[1]
    for name, (_, note) in KINDS.items():
        explained = prep_here("plan", "--data", data, "--explain", name.partition(".")[0]).stdout
        assert note in explained and ("\nnote " in explained) == bool(note), name
    num_noted = sum(bool(note) for _, note in KINDS.values())
    for report in (prep_here("plan", "--data", data).stdout, prep_here("status", "--data", data).stdout):
        assert f"... and {num_noted - 5} more" in report and "timestamps restart at packet" in report


@pytest.mark.parametrize("name", KINDS)
def test_captions_of_a_file_are_made_of_the_same_frames(name: str, sources: tuple[Path, dict[str, list[int]]]) -> None:
    due, shown = sources[1][name], []
    for clip in window_clips(sources[0] / name, Sampling(num_frames=FPS), size_px=96, length_us=US_PER_S):
        shown += [read_frame_number(planes[: 96 * 96].reshape(96, 96)) for planes in clip.video]
    assert shown == due  # ten times per second, in the middle of the chunks' frames


@pytest.mark.parametrize(
    ("shown_s", "code"),
    [
        ([0.0, 0.1, 0.2, 0.3, 0.4], None),
        ([0.0, 0.0, 0.1, 0.2, 0.4], None),  # a frame is missing, like the second of two fields
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


def test_pictures_of_an_mpeg_ps_follow_one_another_until_time_starts_again() -> None:
    """The time of the third frame is a wrong guess, and durations are rounded down."""
    times, is_b = np.array([0, 3754, 3800, 11261, 0, 3754]), np.zeros(6, bool)
    shown, ordered = times_in_display_order(times, np.full(6, 3753), is_b)
    assert shown.tolist() == ordered.tolist() == [0, 3754, 7507, 11261, 0, 3754]


def test_a_copy_is_made_where_key_frames_go_back(tmp_path: Path) -> None:
    """The times go back by too little to start a new part, between the first two of three streams.

    The streams are large enough for an index.
    """
    pictures = ("-f", "lavfi", "-i", f"testsrc2=s=960x720:r={FPS}:d=0.5", "-c:v", "libx264", "-g", 1, "-qp", 2)
    streams = [tmp_path / f"{number}.ts" for number in range(3)]
    for stream, begin_s in zip(streams, (1, 1.35, 1), strict=True):
        ffmpeg(*pictures, "-preset", "ultrafast", "-muxdelay", 0, "-output_ts_offset", begin_s, stream)
    source, copy = tmp_path / "joined.ts", tmp_path / "copy.nut"
    source.write_bytes(join_streams(*streams))
    timeline = write_continuous(source, copy, keeps_audio=False)
    times_s = frame_times(copy, timeline, begin=Fraction(0), end=timeline.end)
    begins_s = np.array([0, 0.35, 0.85])[:, None] + np.arange(5) / FPS
    np.testing.assert_allclose(times_s, np.sort(begins_s, axis=None), atol=1e-4)


def test_what_cannot_be_shown_completely_is_refused_with_its_place(tmp_path: Path) -> None:
    twice = tmp_path / "twice.flv"
    twice.write_bytes(parts(tmp_path, ".flv", "-ar", 44100, sound="mp3"))
    with pytest.raises(SourceFailure, match=r"a second FLV file begins after byte \d+, at 7.0\d s") as refused:
        probe(twice)
    assert refused.value.code == FailureCode.BAD_TIMESTAMPS
