"""`open_clips`: the clips of the training commands in a user's program, with one epoch per iteration."""

import shutil
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

from clipmill import Batches, open_clips
from clipmill.manifests.errors import UserError
from clipmill.train.distributed.world import World
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask
from tests.train.tiny_data import Caption, encode_chunk, write_captions

SMALL: dict[str, Any] = {"batch": 2, "num_frames": 2, "size_px": 32, "workers": 2}
TRAIN_CLIPS = 9


def open_batches(data_dir: Path | list[Path], **changes: Any) -> Batches:
    return open_clips(data_dir, **{**SMALL, **changes})


def ids(batches: Iterable[dict[str, Any]]) -> list[list[int]]:
    return [batch["clip_id"].tolist() for batch in batches]


def endless(batches: Batches) -> Iterator[dict[str, Any]]:
    while True:
        yield from batches


def same(first: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(value, other[name]) for name, value in first.items())


def copy_of(data_dir: Path, tmp_path: Path) -> Path:
    data_copy = tmp_path / "data"
    shutil.copytree(data_dir, data_copy)
    return data_copy


def test_batches_are_those_of_the_training_command(data_dir: Path) -> None:
    settings = DualEncoderSettings(shards=str(data_dir), batch=4, num_frames=2, size_px=32, seed=7, model="tiny")
    for rank in range(2):
        task = DualEncoderTask(settings, attention=None, device=torch.device("cpu"))  # type: ignore[arg-type]
        command = task.training_set(World(rank=rank, size=2)).batches(max_failures=0)
        with open_batches(data_dir, rgb=False, seed=7, rank=rank, world=2) as clips:
            for loaded, batch in zip(islice(command, 6), endless(clips), strict=False):
                for name in ("position", "clip_id", "caption_id", "video", "colour"):
                    assert torch.equal(loaded.batch[name], batch[name]), name  # type: ignore[literal-required]
                assert loaded.batch["key"] == batch["key"]
        command.close()


def test_a_batch_has_frames_captions_keys_and_times(data_dir: Path) -> None:
    with open_batches(data_dir, split="val", shuffle=False, batch=3) as clips:
        [batch] = clips
    assert batch["video"].shape == (3, 2, 32, 32, 3) and batch["video"].dtype == torch.uint8
    assert batch["caption"] == ["it begins", "the middle of d", "the end of d"]
    assert batch["key"] == ["d_000000000", "d_000000000", "d_000002000"]
    assert batch["begin_s"].tolist() == [0, 1.2, 3] and batch["end_s"].tolist() == [1, 2.8, 5.5]
    assert batch["clip_id"].tolist() == [0, 1, 2] and batch["caption_id"].tolist() == [9, 10, 11]
    with open_batches(data_dir, split="val", shuffle=False, batch=3, rgb=False) as clips:
        [planes] = clips
    assert planes["video"].shape == (3, 2, 32 * 32 * 3 // 2) and planes["colour"].shape == (3,)


def test_arrays_are_what_tensors_are(data_dir: Path) -> None:
    with open_batches(data_dir, device=None) as arrays, open_batches(data_dir) as tensors:
        for array_batch, other in zip(arrays, tensors, strict=True):
            assert isinstance(array_batch["video"], np.ndarray) and isinstance(other["video"], torch.Tensor)
            assert same(array_batch, other)


def test_a_batch_is_never_overwritten(data_dir: Path) -> None:
    with open_batches(data_dir) as clips:
        kept = [(batch, batch["video"].clone()) for batch in islice(endless(clips), 9)]
    assert all(torch.equal(batch["video"], video) for batch, video in kept)


@pytest.mark.parametrize("device", ["cpu", None])
def test_memory_is_used_again_once_a_batch_is_dropped(data_dir: Path, device: str | None) -> None:
    with open_batches(data_dir, device=device) as clips:
        batches = endless(clips)
        pictures = next(batches)["video"][1, 0]  # a part of a batch keeps the memory of the batch alive
        content = pictures.copy() if device is None else pictures.clone()
        addresses = set()
        for batch in islice(batches, 20):
            video = torch.as_tensor(batch["video"])
            addresses.add(video.data_ptr())
    assert len(addresses) <= 5
    assert torch.equal(torch.as_tensor(pictures), torch.as_tensor(content))
    assert not any(first <= torch.as_tensor(pictures).data_ptr() < first + video.nbytes for first in addresses)


def test_what_an_iteration_leaves_over_begins_the_next(data_dir: Path) -> None:
    with open_batches(data_dir) as clips:
        assert len(clips) == 4
        epochs = [ids(clips) for _ in range(9)]
    assert {len(epoch) for epoch in epochs} == {4}
    shown = [clip for epoch in epochs for batch in epoch for clip in batch]
    for first in range(0, len(shown), TRAIN_CLIPS):
        assert sorted(shown[first : first + TRAIN_CLIPS]) == list(range(TRAIN_CLIPS))


def test_without_shuffle_every_clip_is_shown_once_in_order(data_dir: Path) -> None:
    with open_batches(data_dir, shuffle=False) as clips:
        assert len(clips) == 5
        first, second = list(clips), list(clips)
    assert [clip for batch in ids(first) for clip in batch] == list(range(TRAIN_CLIPS))
    assert all(same(*pair) for pair in zip(first, second, strict=True))
    shares = [ids(open_batches(data_dir, shuffle=False, rank=rank, world=2)) for rank in range(2)]
    assert sorted(clip for share in shares for batch in share for clip in batch) == list(range(TRAIN_CLIPS))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("taken", [1, 4])
def test_a_state_in_the_middle_of_an_iteration_goes_on_exactly(data_dir: Path, shuffle: bool, taken: int) -> None:
    with open_batches(data_dir, shuffle=shuffle) as clips:
        whole = list(islice(endless(clips), 12))
    with open_batches(data_dir, shuffle=shuffle) as clips:
        list(islice(endless(clips), taken))
        state = clips.state_dict()
    with open_batches(data_dir, shuffle=shuffle) as again:
        again.load_state_dict(state)
        iter(again)  # creating an iterator without using it changes nothing
        rest = list(again)
        assert len(rest) == len(again) - taken % len(again)
        rest += islice(endless(again), 12 - taken - len(rest))
    assert all(same(*pair) for pair in zip(rest, whole[taken:], strict=True))


def test_an_older_iteration_says_that_another_has_begun(data_dir: Path) -> None:
    with open_batches(data_dir) as clips:
        older = iter(clips)
        next(older)
        next(iter(clips))
        with pytest.raises(UserError, match="another iteration"):
            next(older)


def test_the_same_data_are_opened_twice_in_one_process(data_dir: Path) -> None:
    with open_batches(data_dir) as batches, open_batches(data_dir) as other:
        assert all(same(*pair) for pair in zip(batches, other, strict=True))


def test_closing_ends_the_threads(data_dir: Path) -> None:
    before = threading.active_count()
    clips = open_batches(data_dir)
    next(iter(clips))
    assert threading.active_count() > before
    clips.close()
    assert threading.active_count() == before


def test_labels_are_numbered_alike_in_every_split(data_dir: Path, tmp_path: Path) -> None:
    copy = copy_of(data_dir, tmp_path)
    videos = {"a": "train", "b": "train", "c": "train", "d": "val"}
    captions = [Caption(name, 0.0, 1.0, "", labels={"label_name": name}) for name in videos]
    write_captions(copy, videos, captions)
    with open_batches(copy, split="val", label="name", shuffle=False) as clips:
        [batch] = clips
        assert clips.classes == ("a", "b", "c", "d") and batch["label"].tolist() == [3]
        assert "caption" not in batch


def test_tars_are_read_without_an_index_and_have_no_length(tmp_path: Path) -> None:
    for tar in range(2):
        with wds.TarWriter(str(tmp_path / f"{tar}.tar")) as writer:
            for number in range(3 * tar, 3 * tar + 3):
                writer.write({"__key__": f"{number:03d}", "mp4": encode_chunk(number, 8), "txt": f"video {number}"})
    pattern = str(tmp_path / "{0..1}.tar")
    with open_batches(Path(pattern), shuffle=False) as clips:
        with pytest.raises(TypeError, match="a stream of 2 tars has no length"):
            len(clips)
        batches = [next(iter(clips))]
        state = clips.state_dict()
    with open_batches(Path(pattern), shuffle=False) as clips:
        clips.load_state_dict(state)
        batches += clips
    assert [text for batch in batches for text in batch["caption"]] == [f"video {number}" for number in range(6)]
    assert "begin_s" not in batches[0]
    with pytest.raises(UserError, match="names video tars, but labels are in the manifest"):
        open_batches(Path(pattern), label="class")
    with open_batches(Path(pattern)) as clips:
        shown = [text for batch in islice(clips, 6) for text in batch["caption"]]
        assert sorted(shown[:6]) == sorted(shown[6:]) == [f"video {number}" for number in range(6)]
