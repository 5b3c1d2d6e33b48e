"""Tests of `prep index`: chunks whose packets stay in the source files, against a plain decode with PyAV."""

import json
import os
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.core.chunk_content import read_chunk
from clipmill.shards.format import SOURCE_FIELDS, VIDEO_FIELDS
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.train.data.chunk_reader import read_chunks
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.interface import open_clips
from clipmill.train.data.outcomes import SampleFailed
from tests.prep.captions.server import MODEL, run_server
from tests.prep.irregular import edit, ffmpeg, with_sound, write_numbered
from tests.prep.running import manifest, prep_here

SECONDS, FPS = 6, 30
QUIET = ("-threads", 1, "-t", SECONDS)
PICTURES = ("-f", "lavfi", "-i", f"testsrc2=s=160x120:r={FPS}:d={SECONDS}")
X264 = ("-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p", *QUIET)
X265 = ("-c:v", "libx265", "-preset", "ultrafast", "-pix_fmt", "yuv420p", *QUIET)
QUIET_GRAY = ("-f", "lavfi", "-i", "color=gray:s=64x64:r=10:d=3", "-c:v", "libx264", "-pix_fmt", "yuv420p")
Make = Callable[[Path], object]


def make_with(*options: object, rate: str = str(FPS)) -> Make:
    pictures = (*PICTURES[:3], str(PICTURES[3]).replace(f"r={FPS}", f"r={rate}"))
    return lambda path: ffmpeg(*pictures, *options, path)


def with_edit(path: Path) -> None:
    make_with(*X264, "-bf", 3, "-g", 30)(path)
    edit(path, begin_s=1, end_s=5)


def with_early_sound(path: Path) -> None:
    with_sound(write_numbered(path.with_suffix(".mkv")), path, delay_s=0.35, codec="aac")
    path.with_suffix(".mkv").unlink()


def with_tracks(path: Path) -> None:
    second = ("-f", "lavfi", "-i", f"testsrc=s=96x96:r=10:d={SECONDS}")
    sounds = [word for hz in (440, 880) for word in ("-f", "lavfi", "-i", f"sine={hz}:d={SECONDS}")]
    maps = [word for number in range(4) for word in ("-map", number)]
    ffmpeg(*PICTURES, *second, *sounds, *maps, *X264, "-bf", 2, "-g", 30, path)


def with_timecode(path: Path) -> None:
    plain = path.with_suffix(".edited.mov")
    make_with(*X264, "-bf", 3, "-g", 30, "-timecode", "01:00:00:00")(plain)
    edit(plain, begin_s=1, end_s=5)
    plain.rename(path)


def turned_hevc(path: Path) -> None:
    upright = path.with_suffix(".upright.mp4")
    make_with(*X265, "-x265-params", "log-level=error:keyint=24", "-tag:v", "hvc1")(upright)
    ffmpeg("-display_rotation", 90, "-i", upright, "-c", "copy", path)
    upright.unlink()


def with_uneven_frames(path: Path) -> None:
    select = "select='not(mod(n,3))+lt(n,40)+eq(mod(n,7),1)'"
    ffmpeg(*PICTURES, "-vf", select, "-fps_mode", "vfr", *X264, "-bf", 2, path)


# File names, and the functions that write the files.
SOURCES: dict[str, Make] = {
    "plain.mp4": make_with(*X264, "-g", 250),
    "b_pyramid.mp4": make_with("-c:v", "libx264", "-preset", "medium", "-g", 25, *QUIET),
    "open_gops.mp4": make_with(*X264, "-bf", 3, "-g", 24, "-x264-params", "open-gop=1"),
    "open_hevc.mkv": make_with(*X265, "-x265-params", "log-level=error:keyint=20:bframes=3"),
    "vp9.webm": make_with(
        "-c:v", "libvpx-vp9", "-b:v", "200k", "-g", 40, "-deadline", "realtime", "-cpu-used", 8, *QUIET
    ),
    "edited.mp4": with_edit,
    "early_sound.mp4": with_early_sound,
    "uneven.mp4": with_uneven_frames,
    "fragments.mp4": make_with(*X264, "-bf", 2, "-g", 30, "-movflags", "frag_keyframe+empty_moov"),
    "tracks.mp4": with_tracks,
    "ends.mkv": make_with(*X264, "-g", 17, "-bf", 2, "-t", 4.4),
}
# Only in `make nightly`.
VP9 = ("-c:v", "libvpx-vp9", "-b:v", "200k", "-deadline", "good", "-cpu-used", 5)
MORE: dict[str, Make] = {
    "slow.mkv": make_with(*X264, "-bf", 2, rate="7"),
    "fast.mp4": make_with(*X264, rate="90"),
    "hevc.mp4": make_with(*X265, "-x265-params", "log-level=error:keyint=30:open-gop=0", "-tag:v", "hvc1"),
    "ten_bits.mp4": make_with("-c:v", "libx265", "-preset", "ultrafast", "-pix_fmt", "yuv420p10le", *QUIET),
    "av1_in_mp4.mp4": make_with("-c:v", "libsvtav1", "-preset", 12, "-g", 30, *QUIET),
    "full_colour.mp4": make_with(*X264, "-pix_fmt", "yuv444p", "-bf", 2, "-g", 40),
    "timecode.mov": with_timecode,
    "intra.mp4": make_with(*X264, "-g", 1),
    "ntsc.mov": make_with(*X264, "-bf", 2, rate="30000/1001"),
    "more_bits.mkv": make_with(*X265, "-pix_fmt", "yuv420p10le", "-x265-params", "log-level=error:keyint=40:bframes=4"),
    "av1.webm": make_with("-c:v", "libsvtav1", "-preset", 10, "-g", 40, *QUIET),
    "superframes.webm": make_with(*VP9, "-auto-alt-ref", 1, "-lag-in-frames", 16, "-arnr-maxframes", 5, *QUIET),
    "more_superframes.mp4": make_with(*VP9, "-auto-alt-ref", 1, "-lag-in-frames", 16, "-g", 50, *QUIET),
    "turned_hevc.mp4": turned_hevc,
    "fields.mp4": make_with(*X264, "-flags", "+ilme+ildct", "-x264-params", "interlaced=1:keyint=30"),
    "lossless.mkv": make_with(*X264, "-qp", 0, "-g", 60),
    "pyramid.mkv": make_with(*X264, "-bf", 5, "-x264-params", "b-pyramid=normal:ref=4:keyint=45:scenecut=0"),
    "slices.mp4": make_with(*X264, "-slices", 4, "-bf", 2, "-g", 30),
}
REFUSED: dict[str, tuple[Make, str]] = {
    "mpeg4.mp4": (make_with("-c:v", "mpeg4", *QUIET), "mpeg4"),
    "stream.ts": (make_with(*X264), "mpegts"),
    "theirs.avi": (make_with(*X264), "avi"),
    "refresh.mp4": (make_with(*X264, "-x264-params", "intra-refresh=1:keyint=20"), ""),
}


@pytest.fixture(scope="module")
def index_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a data folder of all sources; `prep index` rejects some of them."""
    folder = tmp_path_factory.mktemp("index")
    (folder / "videos").mkdir()
    for name, make in [*SOURCES.items(), *((name, make) for name, (make, _) in REFUSED.items())]:
        make(folder / "videos" / name)
    lines = ["video,begin_s,end_s,text", *(f"{name},0.5,3.5,{Path(name).stem}" for name in SOURCES)]
    (folder / "captions.csv").write_text("\n".join(lines))
    manifest(folder / "data", folder / "videos", "--captions", folder / "captions.csv")
    ran = prep_here(
        *("index", "--data", folder / "data", "--len", "2s", "--json"),
        *("--workers", 2, "--max-failures", len(REFUSED)),
    )
    assert ran.summary["num_encoded"] > 2 * len(SOURCES)
    return folder


def plain_frames(path: Path) -> list[tuple[Fraction, NDArray[Any]]]:
    """Return the luma of all frames of a file, upright, with their times, in the order in which PyAV decodes them."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        start = Fraction(container.start_time or 0, 1_000_000)
        frames = [
            (frame.pts * stream.time_base - start, upright_luma(frame))
            for frame in container.decode(stream)
            if frame.pts is not None and stream.time_base is not None
        ]
    return sorted(frames, key=lambda entry: entry[0])


def upright_luma(frame: av.VideoFrame) -> NDArray[Any]:
    return np.rot90(frame.reformat(format="gray").to_ndarray(), frame.rotation // 90)


def chunks_of(chunks: ChunkSet, video_id: str) -> list[int]:
    row = chunks.video_ids.to_pylist().index(video_id)
    return [int(chunk) for chunk in np.flatnonzero(chunks.table.video_row == row)]


def compare_frames(chunks: ChunkSet, path: Path, *, prefix: str = "") -> None:
    """Compare frames at random times in each chunk of a video with a plain decode of its file."""
    frames, draw = plain_frames(path), random.Random(path.name)
    numbers = chunks_of(chunks, f"{prefix}{path.stem}")
    assert len(numbers) >= 2
    for chunk in numbers:
        times = chunks.times(chunk)
        moments = [draw.randrange(times.start_ms * 1000, int(times.end_us)) for _ in range(6)]
        on_show = {times.frame_at(moment, 1): moment for moment in moments}
        decoded = chunks.decoder.decode(chunks.read(chunk, on_show))
        for frame, moment in on_show.items():
            begun = [entry for entry in frames if entry[0] * 1_000_000 <= moment] or frames[:1]
            luma = np.asarray(decoded[frame].reformat(format="gray").to_ndarray())
            assert np.array_equal(luma, begun[-1][1]), (chunk, frame, moment)
            assert abs(times.frame_begin_us(frame) - begun[-1][0] * 1_000_000) <= 1


@pytest.mark.parametrize("name", SOURCES)
def test_frames_on_show_are_those_of_a_plain_decode(index_folder: Path, name: str) -> None:
    compare_frames(ChunkSet(index_folder / "data", split="train", rule="packets"), index_folder / "videos" / name)


@pytest.mark.nightly
def test_frames_of_further_sources_here_and_in_a_bucket(index_folder: Path, tmp_path: Path, bucket: str) -> None:
    (tmp_path / "here").mkdir()
    paths = [*((tmp_path / "here" / name) for name in MORE), *((index_folder / "videos" / name) for name in SOURCES)]
    for name, make in MORE.items():
        make(tmp_path / "here" / name)
    for path in paths:
        open_objects(bucket).write(f"videos/{path.parent.name}_{path.name}", path)
    for videos, name in ((tmp_path / "here", "local"), (f"{bucket}/videos", "remote")):
        prep_here("index", videos, "--data", tmp_path / name, "--len", "2s", "--workers", 2)
        chunks = ChunkSet(tmp_path / name, split="train", rule="packets")
        for path in paths if name == "remote" else paths[: len(MORE)]:
            compare_frames(chunks, path, prefix="" if name == "local" else f"{path.parent.name}_")


def test_columns_see_the_frames_of_the_nominal_rate(index_folder: Path) -> None:
    shard, row = Variant.open(index_folder / "data").find("open_hevc_000002000")
    content = read_chunk(shard, row)
    frames = plain_frames(index_folder / "videos" / "open_hevc.mkv")
    shown = [np.asarray(frame.reformat(format="gray").to_ndarray()) for frame in content.frames(range(60))]
    middles = [2 + Fraction(2 * number + 1, 2 * FPS) for number in range(60)]
    expected = [[luma for time, luma in frames if time <= middle][-1] for middle in middles]
    assert len(shown) == 60 and all(map(np.array_equal, shown, expected))


@pytest.mark.parametrize("name", REFUSED)
def test_a_source_that_cannot_be_read_in_place_is_refused_by_name(index_folder: Path, name: str) -> None:
    lines = (next((index_folder / "data" / "video").iterdir()) / "failures.jsonl").read_text().splitlines()
    failed = {failure["video_id"]: failure for failure in map(json.loads, lines)}
    assert failed[Path(name).stem]["code"] == "not_indexable"
    assert REFUSED[name][1] in failed[Path(name).stem]["message"]


def test_clips_show_the_moments_of_their_captions(index_folder: Path) -> None:
    with open_clips(
        index_folder / "data", num_frames=3, size_px=32, batch=len(SOURCES), crop="centre", rgb=False
    ) as clips:
        batch = next(iter(clips))
    assert sorted(batch["caption"]) == sorted(Path(name).stem for name in SOURCES)
    assert len({bytes(clip.numpy().tobytes()) for clip in batch["video"]}) > len(SOURCES) - 3


def test_a_source_that_has_changed_moved_or_been_cut_is_named(index_folder: Path, tmp_path: Path) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    videos.mkdir()
    for name in ("changed", "cut", "moved", "kept"):
        (videos / f"{name}.mp4").write_bytes((index_folder / "videos" / "open_gops.mp4").read_bytes())
    prep_here("index", videos, "--data", data, "--len", "2s", "--workers", 1)
    content = bytearray((videos / "changed.mp4").read_bytes())
    content[len(content) // 3 : len(content) // 3 * 2] = bytes(len(content) // 3 * 2 - len(content) // 3)
    (videos / "changed.mp4").write_bytes(content)
    os.truncate(videos / "cut.mp4", 5000)
    (videos / "moved.mp4").rename(tmp_path / "elsewhere.mp4")
    chunks = ChunkSet(data, split="train", rule="packets")
    reasons = {}
    for video_id in ("changed", "cut", "moved"):
        with pytest.raises(SampleFailed, match=f"{video_id}.mp4") as failed:
            chunks.decoder.decode(chunks.read(chunks_of(chunks, video_id)[1], {0, 40}))
        reasons[video_id] = failed.value.reason
    assert reasons == {"changed": "checksum", "cut": "shard_unreadable", "moved": "shard_unreadable"}
    # A new manifest finds the moved file, and nothing is read again.
    (tmp_path / "elsewhere.mp4").rename(videos / "moved.mp4")
    manifest(data, videos)
    chunks = ChunkSet(data, split="train", rule="packets")
    assert chunks.decoder.decode(chunks.read(chunks_of(chunks, "moved")[1], {40}))


def test_a_second_run_reads_nothing(index_folder: Path) -> None:
    ran = prep_here("index", "--data", index_folder / "data", "--len", "2s", "--json", "--max-failures", len(REFUSED))
    assert ran.summary["num_encoded"] == 0 and ran.summary["num_shards_made"] == 0


def test_pictures_are_upright_and_have_square_pixels(index_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    plain, turned, wide = index_folder / "videos" / "plain.mp4", *(tmp_path / "videos" / f"{name}.mp4" for name in "tw")
    ffmpeg("-display_rotation", 90, "-i", plain, "-c", "copy", turned)
    ffmpeg("-i", plain, "-vf", "setsar=4/3", *X264, wide)
    prep_here("index", tmp_path / "videos", "--data", tmp_path / "data", "--workers", 1)
    chunks = {chunk.key[0]: chunk.frames for chunk in read_chunks(tmp_path / "data", every=60)}
    with av.open(str(plain)) as container:
        first = next(container.decode(video=0)).to_ndarray(format="rgb24")
    assert np.array_equal(chunks["t"][0], np.rot90(first))
    assert chunks["w"].shape[1:3] == (120, 214)


def test_sources_in_a_bucket_are_read_by_range(index_folder: Path, tmp_path: Path, bucket: str) -> None:
    names = ("open_gops.mp4", "vp9.webm")
    objects = open_objects(bucket)
    for name in names:
        objects.write(f"videos/{name}", index_folder / "videos" / name)
    prep_here("index", f"{bucket}/videos", "--data", tmp_path / "data", "--len", "2s", "--workers", 1)
    here, other_set = (
        ChunkSet(data, split="train", rule="packets") for data in (index_folder / "data", tmp_path / "data")
    )
    for name in names:
        chunk, same = chunks_of(other_set, Path(name).stem)[1], chunks_of(here, Path(name).stem)[1]
        frames = {5, 33}
        read, expected = other_set.read(chunk, frames), here.read(same, frames)
        assert read.packets == expected.packets and read.size_bytes < (index_folder / "videos" / name).stat().st_size
    objects.delete("videos/vp9.webm")
    with pytest.raises(SampleFailed, match=r"vp9\.webm"):
        other_set.read(chunk, frames)


def test_a_source_without_key_frames_is_refused_where_a_chunk_would_need_minutes(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    pictures = ("-f", "lavfi", "-i", "testsrc2=s=64x64:r=5:d=300")
    ffmpeg(*pictures, "-c:v", "libx264", "-preset", "ultrafast", "-g", 9999, tmp_path / "videos" / "v.mp4")
    data = tmp_path / "data"
    ran = prep_here("index", tmp_path / "videos", "--data", data, "--workers", 1, "--json", status=1)
    assert ran.summary["failures"] == {"not_indexable": 1}
    assert "no key frame" in (next((data / "video").iterdir()) / "failures.jsonl").read_text()


def test_calm_videos_are_scored_and_sources_are_verified(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    for name in ("calm", "lost"):
        ffmpeg(*QUIET_GRAY, tmp_path / "videos" / f"{name}.mp4")
    data = tmp_path / "data"
    prep_here("index", tmp_path / "videos", "--data", data, "--workers", 1)
    assert prep_here("scores", "--data", data, "--workers", 1, "--json").summary["num_encoded"] == 2
    deep = ("verify", "--column", "video", "--deep", "--data", data)
    prep_here(*deep)
    (tmp_path / "videos" / "lost.mp4").unlink()
    assert "lost.mp4" in prep_here(*deep, status=1).stdout


def test_a_server_captions_an_index(index_folder: Path) -> None:
    data = index_folder / "data"
    with run_server() as server:
        flags = (
            *("--endpoint", server.address, "--model", MODEL, "--frames", 2, "--size", 160),
            *("--where", "video = 'open_gops'", "--data", data, "--engine", "processes", "--workers", 1, "--json"),
        )
        ran = prep_here("captions", *flags).summary
        # The server saw the source frame in the middle of each half, as JPEG.
        frames = plain_frames(index_folder / "videos" / "open_gops.mp4")
        assert ran["num_encoded"] == len(server.log) == 3 and ran["failures"] == {}
        assert prep_here("captions", *flags).summary["num_encoded"] == 0 and len(server.log) == 3
    for number, request in enumerate(sorted(server.log, key=lambda request: nearest(frames, request.pictures[0]))):
        for half, picture in enumerate(request.pictures):
            assert abs(nearest(frames, picture) - (60 * number + 15 + 30 * half)) <= 1
    assert "3 captions (3 new)" in prep_here(*ran["next"].split()[1:]).stdout


def nearest(frames: list[tuple[Fraction, NDArray[Any]]], picture: NDArray[Any]) -> int:
    """Return the index of the frame that is most similar to a BGR image."""
    luma = cv2.cvtColor(picture, cv2.COLOR_BGR2GRAY).astype(int)
    return int(np.argmin([np.abs(luma - frame).mean() for _, frame in frames]))


def test_a_folder_is_not_read_again_over_captions_or_by_another_adapter(index_folder: Path, tmp_path: Path) -> None:
    again = prep_here("index", index_folder / "videos", "--data", index_folder / "data", status=2)
    assert "already contains videos of" in again.error
    (tmp_path / "robot" / "meta").mkdir(parents=True)
    (tmp_path / "robot" / "meta" / "info.json").write_text("{}")
    ran = prep_here("index", tmp_path / "robot", "--data", tmp_path / "data", status=2)
    assert "LeRobot" in ran.error and "prep manifest lerobot" in ran.stderr


def test_an_index_without_any_chunk_is_named(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    make_with(*X264)(tmp_path / "videos" / "v.ts")
    prep_here("index", tmp_path / "videos", "--data", tmp_path / "data", "--workers", 1, status=1)
    with pytest.raises(UserError, match="all of its videos have failed"):
        read_chunks(tmp_path / "data")


def test_missing_and_changed_sources_are_named_by_status_and_by_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    for name in ("gone", "grown", "kept"):
        ffmpeg(*QUIET_GRAY, tmp_path / "videos" / f"{name}.mp4")
    data, videos = tmp_path / "data", tmp_path / "videos"
    run = ("index", "--data", data, "--workers", 1)
    prep_here(*run[:1], videos, *run[1:])
    assert "lost" not in prep_here("status", "--data", data).stdout
    (videos / "gone.mp4").rename(tmp_path / "gone.mp4")
    with (videos / "grown.mp4").open("ab") as file:
        file.write(bytes(8))
    status = prep_here("status", "--data", data, status=1)
    for name, code in (("gone", "source_missing"), ("grown", "source_changed")):
        assert f"({code}); their chunks cannot be read" in status.stdout and f"{name}: {code}" in status.stdout
    assert "2 sources" in status.stderr and f"next      prep index --len 15s --data {data}" not in status.stdout
    # A run reads changed files again, and fails for missing files, which no command can create.
    ran = prep_here(*run, "--json", status=1).summary
    assert ran["failures"] == {"source_missing": 1} and (ran["num_encoded"], ran["num_reused"]) == (1, 2)
    assert prep_here("plan", "index", "--data", data, "--json").summary["lost_sources"] == {"source_missing": 1}
    recorded = prep_here("status", "--data", data, "--json", status=1).summary["videos"]
    assert recorded["lost"] == {"source_missing": 1} and recorded["is_indexed"]
    (tmp_path / "gone.mp4").rename(videos / "gone.mp4")
    prep_here(*run)
    assert "next      train" in prep_here("status", "--data", data).stdout


def test_chunks_of_other_videos_are_copied_when_one_is_removed_or_renamed(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    for name in ("first", "second", "third"):
        ffmpeg(*PICTURES, *X264, "-g", 30, "-crf", 20 + len(name), tmp_path / "videos" / f"{name}.mp4")
    data, videos = tmp_path / "data", tmp_path / "videos"
    prep_here("index", videos, "--data", data, "--len", "2s", "--workers", 1)
    before = {shard.index["key"][row].as_py(): shard.index.slice(row, 1) for shard, row in rows_of(data)}
    (videos / "first.mp4").unlink()
    (videos / "second.mp4").rename(videos / "renamed.mp4")
    manifest(data, videos)
    ran = prep_here("index", "--data", data, "--len", "2s", "--workers", 1, "--json").summary
    assert (ran["num_encoded"], ran["num_reused"], ran["failures"]) == (0, 6, {})
    copied = {shard.index["key"][row].as_py(): shard.index.slice(row, 1) for shard, row in rows_of(data)}
    assert sorted(copied) == [f"{name}_{ms:09d}" for name in ("renamed", "third") for ms in (0, 2000, 4000)]
    for key, row in copied.items():
        old = before[key.replace("renamed", "second")]
        names = [field.name for field in (*VIDEO_FIELDS[2:], *SOURCE_FIELDS)]
        assert row.select(names).to_pylist() == old.select(names).to_pylist()
    chunks = ChunkSet(data, split="train", rule="packets")
    assert chunks.decoder.decode(chunks.read(chunks_of(chunks, "renamed")[1], {0, 40}))
    # The result equals a new index of the same manifest.
    prep_here("index", videos, "--data", tmp_path / "again", "--len", "2s", "--workers", 1)
    fresh = {shard.index["key"][row].as_py(): shard.index.slice(row, 1) for shard, row in rows_of(tmp_path / "again")}
    assert {key: row.drop_columns(OFFSETS).to_pylist() for key, row in copied.items()} == {
        key: row.drop_columns(OFFSETS).to_pylist() for key, row in fresh.items()
    }


OFFSETS = ["source.json_offset", "json_offset"]


def rows_of(data: Path) -> list[tuple[CommittedShard, int]]:
    return [(shard, row) for shard in Variant.open(data).shards() for row in range(shard.num_samples)]
