"""Tars read sequentially, written by clipmill or video2dataset: order, ranks, resuming and faults."""

import json
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from clipmill.manifests.errors import UserError
from clipmill.prep.synthetic import FrameNumberVideo, read_frame_number
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.data.video_stream import VideoStream
from clipmill.train.models.text import load_tokenizer
from tests.prep.running import chunk, manifest
from tests.train.data.http_folder import HttpFolder
from tests.train.tiny_data import encode_chunk

SIZE_PX = 64
SHAPE = ClipShape(sampling=Sampling(num_frames=2), size_px=SIZE_PX, min_crop_area=1.0)
TOKENIZE = load_tokenizer()


def open_stream(pattern: object, *, cache: Path | None = None, shape: ClipShape = SHAPE, **loading: Any) -> VideoStream:
    settings = LoaderSettings(**{"batch": 4, "num_threads": 2, "num_ahead": 8, "seed": 1, **loading})
    return VideoStream(str(pattern), shape=shape, tokenize=TOKENIZE, loading=settings, cache=cache)


def first(stream: VideoStream, num_batches: int, *, max_failures: int = 0) -> list[LoadedBatch]:
    batches = stream.batches(max_failures=max_failures)
    taken = list(islice(batches, num_batches))
    taken = [
        LoadedBatch(
            {**loaded_batch.batch, "video": loaded_batch.batch["video"].clone()},
            loaded_batch.failed,
            loaded_batch.cursor,
        )
        for loaded_batch in taken
    ]
    batches.close()
    return taken


def numbers(loaded: LoadedBatch) -> list[list[int]]:
    """Return the frame numbers in the luma of each clip."""
    luma = loaded.batch["video"][:, :, : SIZE_PX**2].unflatten(-1, (SIZE_PX, SIZE_PX))
    return [[read_frame_number(picture) for picture in clip] for clip in luma.numpy()]


def keys_of(batches: list[LoadedBatch]) -> list[str]:
    return [key for loaded in batches for key in loaded.batch["key"]]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tars of four samples as video2dataset writes them; sample n starts with frame 100 n."""
    folder = tmp_path_factory.mktemp("foreign")
    for tar in range(3):
        with wds.TarWriter(str(folder / f"{tar:05d}.tar")) as writer:
            for number in range(4 * tar, 4 * tar + 4):
                caption = {"caption": f"video {number}"} if number % 2 else {"url": "x"}
                sample = {
                    "__key__": f"{number:08d}",
                    "mp4": encode_chunk(100 * number, 20, size_px=SIZE_PX),
                    "json": json.dumps({"key": number, "status": "success", **caption}).encode(),
                }
                writer.write(sample if number % 2 else {**sample, "txt": f"video {number}"})
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only tar of a video of 75 frames in chunks of 30, with three captions."""
    folder = tmp_path_factory.mktemp("ours")
    video = folder / "videos/v.mp4"
    FrameNumberVideo(num_frames=75, fps=Fraction(30), width=SIZE_PX, height=SIZE_PX).write(video)
    (folder / "captions.csv").write_text("video,text,begin_s,end_s\nv,one,0,0.5\nv,two,0.8,1.4\nv,rest,2,\n")
    manifest(folder / "data", folder / "videos", "--captions", folder / "captions.csv")
    chunk(folder / "data", "--len", "1s", "--short-side", SIZE_PX, "--crf", 15)
    [tar] = (folder / "data/video").glob("*/*.tar")
    return tar


def test_a_foreign_tar_gives_whole_videos_with_their_captions(foreign: Path) -> None:
    stream = open_stream(foreign / "{00000..00002}.tar")
    batches = list(stream.evaluation_batches())
    assert [len(loaded.batch["key"]) for loaded in batches] == [4, 4, 4]
    assert keys_of(batches) == [f"{number:08d}" for number in range(12)]
    assert numbers(batches[2]) == [[100 * number + 5, 100 * number + 15] for number in range(8, 12)]
    assert [stream.text(number) for number in range(12)] == [f"video {number}" for number in range(12)]
    assert batches[0].batch["caption_id"].tolist() == [-1] * 4
    assert "decoded through the container" in stream.describe()


def test_our_tar_gives_the_parts_of_captions_that_lie_in_each_chunk(ours: Path) -> None:
    """The second caption spans two chunks of one second: 0.8 to 1 s in one, 1 to 1.4 s in the next."""
    stream = open_stream(ours)
    [batch] = stream.evaluation_batches()
    assert [stream.text(number) for number in range(4)] == ["one", "two", "two", "rest"]
    assert numbers(batch) == [[3, 11], [25, 28], [33, 39], [63, 71]]
    assert [stream.span_s(number) for number in (1, 2)] == [(0.8, 1.0), (0.0, 0.4)]
    assert batch.batch["key"] == ["v_000000000", "v_000000000", "v_000001000", "v_000002000"]
    assert stream.reader.num_shortened == 2


def test_an_epoch_holds_every_clip_once_in_an_order_of_its_own(foreign: Path) -> None:
    keys = keys_of(first(open_stream(foreign / "{00000..00002}.tar"), 6))
    assert len(keys) == 24 and len(set(keys[:12])) == len(set(keys[12:])) == 12
    assert keys[:12] != sorted(keys[:12]) and keys[:12] != keys[12:]
    assert keys == keys_of(first(open_stream(foreign / "{00000..00002}.tar", num_threads=1), 6))
    assert keys != keys_of(first(open_stream(foreign / "{00000..00002}.tar", seed=2), 6))


def test_ranks_take_equal_parts(foreign: Path) -> None:
    parts = [
        keys_of(first(open_stream(foreign / "{00000..00002}.tar", rank=rank, num_ranks=3), 1)) for rank in range(3)
    ]
    assert len(set(parts[0] + parts[1] + parts[2])) == 12


def test_a_state_of_two_ranks_goes_on_in_one(foreign: Path) -> None:
    pattern = foreign / "{00000..00002}.tar"
    stopped, resumed = open_stream(pattern, rank=1, num_ranks=2, batch=2), open_stream(pattern)
    first(stopped, 2)
    resumed.load_state_dict(stopped.state_dict())
    assert keys_of(first(resumed, 4)) == keys_of(first(open_stream(pattern), 6))[8:]


def test_what_is_wrong_is_named_and_the_rest_goes_on(foreign: Path, tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "0.tar")) as writer:
        good = encode_chunk(0, 20, size_px=SIZE_PX)
        writer.write({"__key__": "novideo", "txt": "x", "json": b"{}"})
        writer.write({"__key__": "nocaption", "mp4": good, "json": b'{"caption": null}'})
        writer.write({"__key__": "badjson", "mp4": good, "json": b"{", "txt": "x"})
        writer.write({"__key__": "listjson", "mp4": good, "json": b"[]", "txt": "x"})
        writer.write({"__key__": "textvideo", "mp4": b"no video at all" * 50, "txt": "x"})
        writer.write({"__key__": "oddjson", "mp4": good, "json": b'{"span_fingerprint": "x", "begin_s": 5}'})
        writer.write({"__key__": "good", "mp4": good, "txt": "<b>x</b>"})
    whole = (foreign / "00000.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "2.tar").write_bytes(b"<html>not found</html>" * 100)
    batches = list(open_stream(tmp_path / "{0..2}.tar").evaluation_batches())
    failed = {failure.key: failure for loaded in batches for failure in loaded.failed}
    seen = [key for loaded in batches if loaded.batch for key in loaded.batch["key"]]
    assert seen[0] == "good" and seen[1:3] == ["00000000", "00000001"]
    assert failed.keys() == {
        *("novideo", "nocaption", "badjson", "listjson", "textvideo", "oddjson"),
        *(str(tmp_path / name) for name in ("1.tar", "2.tar")),
    }
    assert failed["textvideo"].reason == "undecodable"
    assert "no video among its members: json, txt" in failed["novideo"].detail
    assert "cannot be read after byte" in failed[str(tmp_path / "1.tar")].detail


@pytest.mark.parametrize(
    "pattern", ["{folder}/{{7..9}}.tar", "{folder}/nothing.tar", "pipe:echo x > {folder}/made.tar"]
)
def test_patterns_that_name_nothing_are_the_users_mistake(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UserError, match=r"cannot be found|is a command"):
        open_stream(pattern.format(folder=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def foreign_server(foreign: Path, few_retries: None) -> Iterator[HttpFolder]:
    server = HttpFolder(foreign)
    yield server
    server.close()


def test_remote_tars_are_fetched_once_and_are_the_local_ones(
    foreign_server: HttpFolder, foreign: Path, tmp_path: Path
) -> None:
    local = keys_of(first(open_stream(foreign / "{00000..00002}.tar"), 6))
    foreign_server.num_failures["/00001.tar"] = 2
    stream = open_stream(f"{foreign_server.address}/{{00000..00002}}.tar", cache=tmp_path)
    assert sorted(keys_of(first(stream, 6))) == sorted(local)
    assert foreign_server.num_bytes["/00001.tar"] == (foreign / "00001.tar").stat().st_size


def test_a_tar_that_comes_short_is_no_copy_and_a_named_failure(foreign_server: HttpFolder, tmp_path: Path) -> None:
    foreign_server.cut.add("/00001.tar")
    stream = open_stream(f"{foreign_server.address}/{{00000..00002}}.tar", cache=tmp_path)
    batches = list(stream.evaluation_batches())
    [failed] = [failure for loaded in batches for failure in loaded.failed]
    assert failed.key.endswith("/00001.tar") and failed.reason == "shard_unreadable"
    assert len(keys_of([loaded for loaded in batches if loaded.batch])) == 8
    assert not [path for path in tmp_path.rglob("*") if "00001" in path.name]


def test_videos_of_variable_rate_show_the_frame_of_their_time(tmp_path: Path) -> None:
    """Frame durations cycle through 4, 4, 6, 2, 8, 3, 1 and 4 quarters of 1/30 s, so 31 frames last 127 quarters."""
    video = tmp_path / "v.mp4"
    FrameNumberVideo(
        num_frames=31, fps=Fraction(30), width=SIZE_PX, height=SIZE_PX, variable_rate=True, start_offset_s=1.0
    ).write(video)
    with wds.TarWriter(str(tmp_path / "0.tar")) as writer:
        writer.write({"__key__": "v", "mp4": video.read_bytes(), "txt": "x"})
    shape = replace(SHAPE, sampling=Sampling(num_frames=3))
    [batch] = open_stream(tmp_path / "0.tar", shape=shape).evaluation_batches()
    # The moments are at 21.2, 63.5 and 105.8 quarters. At a constant rate, the first one would show frame 5.
    assert numbers(batch) == [[4, 15, 26]]
