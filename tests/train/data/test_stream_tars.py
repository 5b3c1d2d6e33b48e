"""Tars that end too early or hold less than they should, and runs that resume many epochs later."""

import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import TEMPORARY_PREFIX
from clipmill.train.data import tar_samples, video_stream
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import Views
from clipmill.train.data.frame_sampling import Sampling, SamplingRule
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.remote import local_copy
from tests.train.data.http_folder import HttpFolder
from tests.train.data.test_streams import SHAPE, SIZE_PX, TOKENIZE, first, keys_of, numbers, open_stream
from tests.train.tiny_data import Caption, chunks_of, encode_chunk, write_captions, write_shard


@pytest.fixture(scope="module")
def payload() -> bytes:
    return encode_chunk(0, 10, size_px=SIZE_PX)


def write_tar(path: Path, payload: bytes, keys: list[str]) -> Path:
    """Write a tar with one short video per key, captioned with its key."""
    with wds.TarWriter(str(path)) as writer:
        for key in keys:
            writer.write({"__key__": key, "mp4": payload, "txt": key})
    return path


def evaluate_stream(pattern: object) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the keys of the clips, and (key, detail) of the failures."""
    batches = list(open_stream(pattern).evaluation_batches())
    failed = [(failure.key, failure.detail) for loaded in batches for failure in loaded.failed]
    return keys_of([loaded for loaded in batches if loaded.batch]), failed


@pytest.mark.parametrize("where", ["between two samples", "in a header", "in a payload", "a header is damaged"])
def test_a_tar_that_breaks_off_is_named_wherever_it_does(tmp_path: Path, payload: bytes, where: str) -> None:
    """Tar readers take the first two cases and the last one for the end of the tar."""
    path = write_tar(tmp_path / "0.tar", payload, ["a", "b", "c"])
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        third = tar.getmember("c.mp4")
    if where == "a header is damaged":
        content[third.offset + 150] ^= 0x55
    else:
        end = {"between two samples": third.offset, "in a header": third.offset + 100}
        del content[end.get(where, third.offset_data + 100) :]
    path.write_bytes(content)
    keys, failed = evaluate_stream(path)
    assert keys in (["a", "b"], ["a"])  # webdataset keeps the sample before a truncated one
    [(key, detail)] = failed
    assert key == str(path) and "cannot be read after" in detail


def test_names_that_webdataset_would_give_to_a_shell_are_files(
    tmp_path: Path, payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("http:x.tar", "s3:x.tar", "a:b.tar"):
        write_tar(tmp_path / name, payload, ["k"])
        assert evaluate_stream(name) == (["k"], [])


def test_videos_that_were_never_downloaded_are_left_out_and_counted(tmp_path: Path, payload: bytes) -> None:
    with wds.TarWriter(str(tmp_path / "0.tar")) as writer:
        for key, status in (("a", "success"), ("b", "failed_to_download"), ("c", "failed_to_subsample")):
            sample = {"__key__": key, "txt": key, "json": json.dumps({"key": key, "status": status}).encode()}
            writer.write({**sample, "mp4": payload} if status == "success" else sample)
    opened = open_stream(tmp_path / "0.tar")
    [loaded] = opened.evaluation_batches()
    assert loaded.batch["key"] == ["a"] and not loaded.failed
    assert "2 samples left out" in opened.describe()


def test_an_empty_caption_is_none(tmp_path: Path, payload: bytes) -> None:
    with wds.TarWriter(str(tmp_path / "0.tar")) as writer:
        writer.write({"__key__": "a", "mp4": payload, "txt": "", "json": b'{"caption": "from the json"}'})
        writer.write({"__key__": "b", "mp4": payload, "txt": "", "json": b"{}"})
    opened = open_stream(tmp_path / "0.tar")
    [loaded] = opened.evaluation_batches()
    assert opened.text(0) == "from the json" and loaded.batch["key"] == ["a"]
    assert [failure.key for failure in loaded.failed] == ["b"] and "no caption" in loaded.failed[0].detail


@pytest.mark.parametrize("rule", ["uniform", "stride", "lavila"])
@pytest.mark.parametrize("num_clips", [1, 2])
def test_a_stream_shows_the_frames_that_the_data_folder_shows(
    tmp_path: Path, rule: SamplingRule, num_clips: int
) -> None:
    """Reading a data folder and reading only its tar give the same frames, in one view or several.

    Each caption lies in one chunk.
    """
    captions = [Caption("v", 0.3, 1.9, "one"), Caption("v", 2.0, 3.95, "two"), Caption("v", 3.1, 3.15, "three")]
    chunks = chunks_of("v", 40)
    write_captions(tmp_path, {"v": "train"}, captions)
    write_shard(tmp_path, 0, chunks, split="train")
    with wds.TarWriter(str(tmp_path / "0.tar")) as writer:
        for begin_s, sample in zip((0, 2), chunks, strict=True):
            mine = [
                {"caption_id": place, "begin_s": caption.begin_s, "end_s": caption.end_s, "text": caption.text}
                for place, caption in enumerate(captions)
                if begin_s <= caption.begin_s < begin_s + 2
            ]
            place = {"begin_s": [begin_s, 1], "end_s": [begin_s + 2, 1], "span_fingerprint": "00"}
            described = json.dumps({**place, "captions": mine}).encode()
            writer.write({"__key__": sample.key, "mp4": sample.members["mp4"], "json": described})
    sampling = Sampling(num_frames=3, rule=rule, stride=2)
    shape = replace(SHAPE, sampling=sampling, views=Views(num_clips=num_clips))
    loading = LoaderSettings(batch=3, num_threads=1, num_ahead=2, seed=0)
    folder = open_captioned_clips(ClipQuery(tmp_path, split="train", shape=shape, loading=loading), tokenize=TOKENIZE)
    [from_tar] = open_stream(tmp_path / "0.tar", shape=shape).evaluation_batches()
    [from_folder] = folder.evaluation_batches()
    assert from_tar.batch["key"] == from_folder.batch["key"] == ["v_000000000", "v_000002000", "v_000002000"]
    assert from_tar.batch["caption_id"].tolist() == from_folder.batch["caption_id"].tolist() == [0, 1, 2]
    assert numbers(from_tar) == numbers(from_folder)
    assert from_tar.batch["video"].equal(from_folder.batch["video"])
    assert from_tar.batch["video"].shape[1] == 3 * num_clips


def test_strides_are_whole_frames_in_a_video_of_odd_length(tmp_path: Path) -> None:
    """The video has 31 frames at 30 per second. The middle window of 25 frames starts exactly on a frame boundary."""
    with wds.TarWriter(str(tmp_path / "0.tar")) as writer:
        writer.write({"__key__": "v", "mp4": encode_chunk(0, 31, fps=30, size_px=SIZE_PX), "txt": "x"})
    shape = replace(SHAPE, sampling=Sampling(num_frames=5, rule="stride", stride=5))
    [batch] = open_stream(tmp_path / "0.tar", shape=shape).evaluation_batches()
    assert numbers(batch) == [[3, 8, 13, 18, 23]]


def test_a_late_epoch_is_reached_by_way_of_the_first_alone(
    tmp_path: Path, payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tar in range(2):
        write_tar(tmp_path / f"{tar}.tar", payload, [f"{tar}{number}" for number in range(3)])
    pattern = tmp_path / "{0..1}.tar"
    whole = keys_of(first(open_stream(pattern, batch=3), 22))
    epochs: list[int] = []
    shuffled = tar_samples.shuffle_items

    def note_epoch(*arguments: Any, epoch: int, **options: Any) -> Any:
        epochs.append(epoch)
        return shuffled(*arguments, epoch=epoch, **options)

    monkeypatch.setattr(video_stream, "shuffle_items", note_epoch)
    resumed = open_stream(pattern, batch=3, num_ahead=1)
    batches = resumed.batches(position=57, max_failures=0)
    assert list(next(batches).batch["key"]) == whole[57:60]
    batches.close()
    assert epochs == [0, 9]


def test_a_stream_is_the_same_by_any_path_and_another_one_when_its_tars_change(
    tmp_path: Path, payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = write_tar(tmp_path / "0.tar", payload, ["a", "b"])
    expected = open_stream(tar).fingerprint
    monkeypatch.chdir(tmp_path)
    assert open_stream(Path("0.tar")).fingerprint == expected
    opened = open_stream(tar)
    write_tar(tar, payload, [*"abcdefghijklmnop"])
    assert open_stream(tar).fingerprint != expected
    tar.unlink()
    assert opened.state_dict()["samples"] == expected, "a run that loses a tar can save its state"


def test_a_window_of_large_videos_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_samples, "_WINDOW_BYTES", 1000)
    held: list[int] = []
    waiting = 0

    def videos() -> Iterator[int]:
        nonlocal waiting
        for number in range(50):
            waiting += 1
            yield number

    got = []
    for number in tar_samples.shuffle_items(videos(), size_of=lambda _: 300, seed=0, epoch=0):
        held.append(waiting)
        waiting -= 1
        got.append(number)
    assert sorted(got) == list(range(50)) and got != list(range(50)) and max(held) <= 4


def test_a_stream_of_fewer_clips_than_a_batch_is_the_users_mistake(tmp_path: Path, payload: bytes) -> None:
    with pytest.raises(UserError, match="fewer than the required 4 clips"):
        first(open_stream(write_tar(tmp_path / "0.tar", payload, ["a", "b"])), 1)


def test_tars_without_samples_are_the_users_mistake(tmp_path: Path, payload: bytes) -> None:
    write_tar(tmp_path / "0.tar", payload, [])
    with pytest.raises(UserError, match="fewer than the required 1 clip"):
        list(open_stream(tmp_path / "0.tar").evaluation_batches())
    with pytest.raises(UserError, match="fewer than the required 4 clips"):
        first(open_stream(tmp_path / "0.tar"), 1)


def test_what_is_no_tar_is_named_where_clips_are_too_few(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(UserError, match=r"fewer than the required 4 clips.*unreadable: .*0\.tar"):
        first(open_stream(tmp_path / "0.tar"), 1)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("NOWHERE/{00..07}.tar", "http://.*/00.tar does not exist"),
        ("nosuchthing://bucket/{00..07}.tar", "are not supported"),
        ("x/{pipe:echo,b}.tar", "is a command"),
        ("x/{00000..", "is not a pattern"),
        ("x/{00000..99999999999}.tar", "names 100,000,000,000 tars"),
    ],
)
def test_remote_patterns_that_name_nothing_are_the_users_mistake(pattern: str, message: str, tmp_path: Path) -> None:
    server = HttpFolder(tmp_path)
    with pytest.raises(UserError, match=message):
        open_stream(pattern.replace("NOWHERE", server.address))
    server.close()


def test_a_killed_download_leaves_no_tar(tmp_path: Path, payload: bytes) -> None:
    served = tmp_path / "served"
    served.mkdir()
    write_tar(served / "0.tar", payload, ["a", "b", "c"])
    server = HttpFolder(served)
    server.hanging.add("/0.tar")  # the response stops after half of the bytes
    script = (
        "import sys; from pathlib import Path; from clipmill.train.data.remote import local_copy\n"
        "local_copy(sys.argv[1], cache=Path(sys.argv[2]))"
    )
    address, cache = f"{server.address}/0.tar", tmp_path / "cache"
    with subprocess.Popen([sys.executable, "-c", script, address, str(cache)]) as process:
        assert server.has_hung.wait(60)
        while process.poll() is None and not list(cache.glob("objects/*")):
            time.sleep(0.01)  # the process has received half of the tar and is creating its file
        process.send_signal(signal.SIGKILL)
    server.hanging.clear()
    left = [path.name for path in cache.glob("objects/*")]
    assert len(left) == 1 and left[0].startswith(TEMPORARY_PREFIX)
    assert local_copy(address, cache=cache).read_bytes() == (served / "0.tar").read_bytes()
    server.close()
