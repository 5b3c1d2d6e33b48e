"""Tests of `prep chunk --cut shots`, from videos with known cuts to chunks whose frames carry their number."""

import json
import shutil
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest

from clipmill.prep.core.tables import write_table_file
from clipmill.prep.sources.shot_table import SHOTS, read_shots
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.prep.video import column
from clipmill.prep.video.plan_inputs import left_out_lines
from clipmill.shards.reader import Variant
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.data_folder import ChunkSearch
from tests.prep.running import chunk, contents, identities, manifest, prep_here
from tests.prep.scenes import QUICK, SETTINGS, run_here, scene_number, write_scenes

# Scenes by their numbers of frames: too short at the start, in the middle and at the end; too long; omitted.
VIDEOS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "plain": ([20, 45, 60, 18, 60, 44, 150, 25], {}),
    "ntsc": ([45, 60, 36], {"fps": Fraction(30000, 1001), "start_offset_s": 1.5, "rotation_degrees": 90}),
    "variable": ([50, 40, 41], {"variable_rate": True}),
    "still": ([130], {}),
    "one": ([1], {}),
}
MAX_FRAMES, MIN_FRAMES = 60, 30
# By source: the content of the json member, and the numbers of the frames.
Chunks = dict[str, list[tuple[dict[str, Any], list[int]]]]


@dataclass(frozen=True)
class Made:
    """Data folder, and the summary of the run that made it."""

    videos: Path
    data: Path
    summary: dict[str, Any]

    def copy(self, folder: Path) -> "Made":
        shutil.copytree(self.data, folder / "data")
        return Made(self.videos, folder / "data", self.summary)


@pytest.fixture(scope="module")
def finished_shots(tmp_path_factory: pytest.TempPathFactory) -> Made:
    videos, data = tmp_path_factory.mktemp("videos"), tmp_path_factory.mktemp("made") / "data"
    for name, (scenes, options) in VIDEOS.items():
        write_scenes(videos / f"{name}.mp4", scenes, **options)
    FrameNumberVideo(num_frames=100, fps=Fraction(30), width=160, height=120).write(videos / "noise.mp4")
    manifest(data, videos)
    return Made(videos, data, chunk(data, *SETTINGS, *QUICK))


@pytest.fixture(scope="module")
def chunks(finished_shots: Made) -> Chunks:
    chunks_by_video = defaultdict(list)
    for sample in Variant.open(finished_shots.data).iterate():
        description = json.loads(sample["json"])
        numbers = []
        if description["source_id"] != "noise":
            with av.open(BytesIO(sample["mp4"]), "r") as container:
                numbers = [scene_number(frame.to_ndarray(format="gray")) for frame in container.decode(video=0)]
            assert len(numbers) == description["num_frames"]
        chunks_by_video[description["source_id"]].append((description, numbers))
    return {name: sorted(mine, key=lambda chunk: chunk[0]["key"]) for name, mine in chunks_by_video.items()}


def places(chunks: Chunks, name: str) -> list[tuple[int, int]]:
    """Return (first frame, number of frames) of each chunk of a source."""
    return [(int(Fraction(*record["begin_s"]) * 30), record["num_frames"]) for record, _ in chunks[name]]


def test_chunks_end_where_scenes_end(chunks: Chunks) -> None:
    assert places(chunks, "plain") == [
        # 0: 20 frames, which do not fit with the 45 frames after them.
        (20, 45),
        (65, 60),
        # 125: 18 frames, which fit neither with the 60 frames before nor with the 60 frames after them.
        (143, 60),
        (203, 44),
        (247, 50),
        (297, 50),
        (347, 50),
        # 397: 25 frames, which do not fit with the 50 frames before them.
    ]
    assert [numbers for _, numbers in chunks["plain"]] == [
        list(range(first, first + frames)) for first, frames in places(chunks, "plain")
    ]
    assert places(chunks, "still") == [(0, 43), (43, 43), (86, 44)]
    assert "one" not in chunks


@pytest.mark.parametrize("name", ["ntsc", "variable"])
def test_a_chunk_of_a_crooked_source_shows_one_scene_and_every_frame_once(name: str, chunks: Chunks) -> None:
    scenes = VIDEOS[name][0]
    borders = [sum(scenes[:number]) for number in range(len(scenes) + 1)]
    shown: list[int] = []
    for _, numbers in chunks[name]:
        assert sum(borders[scene] <= numbers[0] and numbers[-1] < borders[scene + 1] for scene in range(3)) == 1
        shown += numbers
    assert shown == sorted(shown) and shown[-1] == sum(scenes) - 1
    assert [numbers[0] for _, numbers in chunks[name]] == borders[:-1]
    starts = [record["key"].rpartition("_")[2] for record, _ in chunks[name]]
    begins = [Fraction(*record["begin_s"]) for record, _ in chunks[name]]
    assert starts == [f"{round(begin_s * 1000):09d}" for begin_s in begins] and len(set(starts)) == len(starts)


def test_a_detector_that_sees_cuts_everywhere_gives_chunks_of_lawful_length(chunks: Chunks) -> None:
    places_found = places(chunks, "noise")
    assert sum(frames for _, frames in places_found) == 100
    assert all(MIN_FRAMES <= frames <= MAX_FRAMES for _, frames in places_found)
    assert [first for first, _ in places_found] == [
        sum(frames for _, frames in places_found[:n]) for n in range(len(places_found))
    ]


def test_training_reads_each_chunk_by_its_packets(finished_shots: Made, chunks: Chunks) -> None:
    """Training also knows where shots were omitted: no clip spans such a gap."""
    read = ChunkSet(finished_shots.data, split="train", rule="packets")
    starts = [read.key(row) for row in range(len(read.table))]
    counts: dict[int, int] = {}

    def add(frame: int, picture: av.VideoFrame) -> None:
        counts[frame] = scene_number(picture.to_ndarray(format="gray"))

    for name in ("plain", "ntsc", "still"):
        for record, numbers in chunks[name]:
            counts.clear()
            expected = range(0, len(numbers), 7)
            read.decoder.decode_each(read.read(starts.index(record["key"]), expected), add)
            assert counts == {frame: numbers[frame] for frame in expected}
    of_plain = np.array([start.startswith("plain") for start in starts])
    has_gap = np.diff(ChunkSearch(read.table).num_gaps, prepend=0) > 0
    assert has_gap[of_plain].tolist() == [True, False, True, False, False, False, False]


def test_what_is_left_out_is_said_by_run_and_plan_and_the_shards_are_whole(finished_shots: Made) -> None:
    left_out = [20, 18, 25, 1]
    plan = prep_here("plan", "--data", finished_shots.data, *SETTINGS, *QUICK, "--json").summary
    for report in (finished_shots.summary, plan):
        assert report["num_left_out"] == len(left_out) and report["left_out_s"] == pytest.approx(sum(left_out) / 30)
    text = prep_here("plan", "--data", finished_shots.data, *SETTINGS, *QUICK).stdout
    assert "left out 4 shots, 2.1 s: shorter than --min-len" in text and "nothing to do" in text
    assert "         in one, plain\n" in text
    assert left_out_lines({**finished_shots.summary, "left_out_s": 1 / 30}, cut="shots")[0].startswith(
        "4 shots, 33 ms: "
    )
    told = prep_here("plan", "--data", finished_shots.data, *SETTINGS, *QUICK, "--explain", "plain").stdout.splitlines()
    assert told[-3:] == [
        f"left out {begin / 30:.3f} to {end / 30:.3f} s: shorter than --min-len"
        for begin, end in ((0, 20), (125, 143), (397, 422))
    ]
    assert finished_shots.summary["num_searched"] == len(VIDEOS) + 1
    assert prep_here("verify", "--deep", "--data", finished_shots.data).stdout.rstrip().endswith("OK")
    status = prep_here("status", "--data", finished_shots.data, "--json").summary
    (variant,) = status["columns"]["video"]["variants"]
    assert variant["num_wanted"] == variant["num_samples"] == finished_shots.summary["num_chunks"]


def test_again_with_nothing_changed_nothing_is_done(finished_shots: Made) -> None:
    before = identities(finished_shots.data)
    summary = chunk(finished_shots.data, *SETTINGS, *QUICK)
    assert (summary["num_searched"], summary["num_encoded"], summary["num_shards_made"]) == (0, 0, 0)
    assert identities(finished_shots.data) == before


def test_a_plan_before_the_detection_says_what_it_does_not_know_and_searches_nothing(
    finished_shots: Made, tmp_path: Path
) -> None:
    data = finished_shots.copy(tmp_path).data
    before = identities(data)
    ran = prep_here("plan", "--data", data, *SETTINGS, *QUICK, "--threshold", "50")
    assert "unknown  6 videos" in ran.stdout and "nothing to do" not in ran.stdout
    assert "         noise, ntsc, one, plain, still, and 1 more\n" in ran.stdout
    assert "setting  threshold: 27.0 → 50.0" in ran.stdout.splitlines()
    told = prep_here("plan", "--data", data, *SETTINGS, *QUICK, "--threshold", "50", "--explain", "still").stdout
    assert told.rstrip().endswith("unknown  shots not detected yet")
    assert identities(data) == before
    summary = run_here(data, "--threshold", "50")
    assert summary["variant"] != finished_shots.summary["variant"] and summary["num_searched"] == 6
    assert len(read_shots(data)) == 12, "the first variant still needs its shots"
    # The flags that status and verify print make the same variants.
    for name in (finished_shots.summary["variant"], summary["variant"]):
        flags = column.COLUMN.flags(Variant(data / "video" / name).recipe)
        assert prep_here("plan", "--data", data, *flags, "--json").summary["variant"] == name


@pytest.mark.parametrize("lost", ["layout", "shots.parquet", "half of shots.parquet"])
def test_a_lost_record_is_made_again_and_nothing_is_encoded(lost: str, finished_shots: Made, tmp_path: Path) -> None:
    data = finished_shots.copy(tmp_path).data
    before = contents(data)
    path = data / lost.removeprefix("half of ")
    if path.is_dir():
        shutil.rmtree(path)
    elif path.name == lost:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        verified = prep_here("verify", "--data", data, status=1)
        assert str(path) in verified.stdout
        assert (
            "prep chunk --len 2s" in verified.stderr
            and f"--cut shots --detector content --data {data}" in verified.stderr
        )
    if lost == "shots.parquet":
        plan = prep_here("plan", "--data", data, *SETTINGS, *QUICK).stdout
        assert "unknown  6 videos" in plan and "orphaned" not in plan and "changed" not in plan
        status = prep_here("status", "--data", data, "--json").summary["columns"]["video"]
        assert status["variants"][0]["num_wanted"] is None and status["to_make"] == {}
    summary = run_here(data)
    assert (summary["num_searched"], summary["num_encoded"]) == (0 if lost == "layout" else 6, 0)
    assert contents(data) == before


def test_a_replaced_source_is_searched_and_encoded_again_and_no_other(finished_shots: Made, tmp_path: Path) -> None:
    data, videos = finished_shots.copy(tmp_path).data, tmp_path / "videos"
    shutil.copytree(finished_shots.videos, videos)
    manifest(data, videos)
    assert run_here(data)["num_searched"] == 0, "shots are stored by content, not by path"
    write_scenes(videos / "still.mp4", [60, 50])
    assert "unknown  1 video" in prep_here("plan", "--data", data, *SETTINGS, *QUICK).stdout
    summary = run_here(data)
    assert (summary["num_searched"], summary["num_encoded"]) == (1, 2)
    assert len(read_shots(data)) == 7, "the shots of the old content stay, because it may return"


def test_other_cuts_of_the_same_source_change_its_shard_and_no_other_span(finished_shots: Made, tmp_path: Path) -> None:
    """A different version of a decoder may find different cuts after the stored ones are lost."""
    data = finished_shots.copy(tmp_path).data
    rows = read_shots(data).to_pylist()
    (still,) = [row for row in rows if row["num_frames"] == 130]
    still["cuts"] = [71]
    write_table_file(data / "shots.parquet", pa.Table.from_pylist(rows, schema=SHOTS))
    plan = prep_here("plan", "--data", data, *SETTINGS, *QUICK, "--json").summary
    assert [shard["state"] for shard in plan["work"]] == ["changed"]
    summary = run_here(data)
    assert (summary["num_searched"], summary["num_encoded"]) == (0, 3)
