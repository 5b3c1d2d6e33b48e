"""Bad input of `open_clips`: changed data, states of other data, forked processes, arguments that do not fit."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from clipmill import Batches, open_clips, open_latents, read_chunks
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.train.data.arguments import require_device
from tests.train.python.test_open_clips import TRAIN_CLIPS, copy_of, ids, open_batches
from tests.train.tiny_data import VARIANT, Caption, write_captions

NORMALISED: dict[str, Any] = {"pixel_mean": (0.48, 0.46, 0.41), "pixel_std": (0.27, 0.26, 0.28)}


def test_a_chunk_that_changed_after_opening_is_a_named_failure(data_dir: Path, tmp_path: Path) -> None:
    copy = copy_of(data_dir, tmp_path)
    with open_batches(copy, shuffle=False) as clips, open_batches(copy, max_failures=1) as strict:
        [tar] = (path for path in (copy / "video" / VARIANT).glob("000000*.tar"))
        content = bytearray(tar.read_bytes())
        begin = content.find(b"mdat", content.find(b"b_000000000.mp4"))
        content[begin + 4 : begin + 4096] = bytes(4092)
        tar.write_bytes(content)
        shown = [clip for batch in ids(clips) for clip in batch]
        assert shown == [0, 1, 2, 5, 6, 7, 8]
        assert {(failure.key, failure.reason) for failure in clips.failures} == {("b_000000000", "checksum")}
        with pytest.raises(FailedWork, match=r"max_failures=1: 1 file or chunk failed repeatedly \(b_000000000\)"):
            list(strict)
        assert len(strict.failures) == 2


def test_a_state_of_data_that_changed_is_refused(data_dir: Path, tmp_path: Path) -> None:
    copy = copy_of(data_dir, tmp_path)
    with open_batches(copy) as clips:
        next(iter(clips))
        state = clips.state_dict()
    videos = {"a": "train", "b": "train", "c": "train", "d": "val"}
    write_captions(copy, videos, [Caption(name, 0.0, 1.0, f"{name} begins") for name in videos for _ in range(3)])
    with (
        open_batches(copy) as clips,
        pytest.raises(UserError, match="the data, their selection or their mixture have changed"),
    ):
        clips.load_state_dict(state)


def test_states_of_another_split_seed_or_order_are_refused(data_dir: Path) -> None:
    with open_batches(data_dir) as clips:
        state = clips.state_dict()
    for changes, words in (
        ({"split": "val"}, "belongs to other samples"),
        ({"seed": 1}, "state has seed 0, but this loader has seed 1"),
        ({"shuffle": False}, "shuffle=True"),
    ):
        with open_batches(data_dir, **changes) as clips, pytest.raises(UserError, match=words) as caught:
            clips.load_state_dict(state)
        assert "--" not in f"{caught.value}{caught.value.hint}", "the message names a flag in place of an argument"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "test"}, "has no videos of split 'test'"),
        ({"batch": 10}, "batch=10 is larger than the data, which contain 9 samples"),
        ({"batch": 5, "rank": 0, "world": 2}, "batch=5 in each of 2 processes is larger"),
        ({"batch": "4"}, "batch is '4'"),
        ({"batch": 2.5}, "batch is 2.5"),
        ({"batch": True}, "batch is True"),
        ({"num_frames": None}, "num_frames is None"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"rank": "0", "world": 2}, "rank is '0'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"device": "cuda:99"}, "device is 'cuda:99'"),
        ({"batch": 0}, "batch is 0"),
        ({"size_px": 33}, "size_px is 33"),
        ({"size_px": -1}, "(?s)size_px is -1.*a positive even number"),
        ({"sampling": "every"}, "sampling is 'every'"),
        ({"crop": "left"}, "crop is 'left'"),
        ({"rank": 1}, "rank is 1 and world is None"),
        ({"rank": 2, "world": 2}, "rank is 2 of 2"),
        ({"label": "class"}, "no column label_class"),
        ({"split": 5}, "split is 5"),
        ({"cache_size": 5}, "cache_size is 5"),
        ({"mix": 2}, "mix is 2, not a list"),
        ({"pixel_mean": 0.5, "pixel_std": 0.5}, "pixel_mean is 0.5"),
        ({"pixel_mean": (0.5, 0.5), "pixel_std": (0.5, 0.5)}, r"pixel_mean is \(0.5, 0.5\)"),
        (NORMALISED | {"augment": {"flip": "x"}}, "augment.flip is 'x'"),
        (NORMALISED | {"augment": {"rand_ops": 2.5}}, "augment.rand_ops is 2.5"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(data_dir: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        open_batches(data_dir, **changes)
    assert caught.value.hint and f"hint: {caught.value.hint}" in caught.value.__notes__


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_mean_and_deviation_may_be_a_list_an_array_or_a_tensor(data_dir: Path, kind: Any) -> None:
    expected, given = (
        next(
            iter(open_batches(data_dir, pixel_mean=of(NORMALISED["pixel_mean"]), pixel_std=of(NORMALISED["pixel_std"])))
        )
        for of in (tuple, kind)
    )
    torch.testing.assert_close(given["video"], expected["video"])  # a tensor has dtype float32


def test_texts_are_asked_of_latents_and_chunks_too(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [(open_latents, "split"), (open_latents, "segment"), (read_chunks, "split")]
    for open_them, name in cases:
        with pytest.raises(UserError, match=f"{name} is 5"):
            open_them(tmp_path, **{name: 5})


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no data folder"):
        open_batches(tmp_path / "nothing")


@pytest.mark.parametrize("data", [None, 3, ["data", None]])
def test_what_names_no_data_folder_is_refused(data: Any) -> None:
    for open_them in (open_clips, open_latents):
        with pytest.raises(UserError, match=r"data is (None|3)"):
            open_them(data)


def test_devices_are_checked_before_anything_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    for device in ("cuda", torch.device("cuda")):
        for open_them in (open_batches, open_latents):
            with pytest.raises(UserError, match="device is 'cuda'") as caught:
                open_them(tmp_path / "nothing", device=device)
            assert caught.value.hint == "use a device of this machine: cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for known in ("cuda", "cuda:1", "cpu", "cpu:0", None):
        require_device(known)
    with pytest.raises(UserError) as caught:
        require_device("cuda:2")
    assert caught.value.hint == "use a device of this machine: cpu, cuda:0, cuda:1"


@pytest.mark.parametrize(
    "changes", [{"position": "1"}, {"position": -5}, {"samples": 1}, {"ahead": 3}, {"ahead": ["a"]}, {"taken": None}]
)
def test_a_state_with_damaged_entries_is_refused(data_dir: Path, changes: dict[str, Any]) -> None:
    with open_batches(data_dir) as clips, pytest.raises(UserError, match="not a state of these batches"):
        clips.load_state_dict({**clips.state_dict(), **changes})


@pytest.mark.parametrize("state", [{"a": 1}, {}, [], None, 3])
def test_what_is_no_state_is_refused(data_dir: Path, state: Any) -> None:
    with open_batches(data_dir) as clips:
        iterator = iter(clips)
        next(iterator)
        with pytest.raises(UserError, match="not a state of these batches"):
            clips.load_state_dict(state)
        with pytest.raises(UserError, match="no state is given"):
            clips.load_state_dict()
        next(iterator)  # the iterator is unaffected


def test_batches_are_not_indexed(data_dir: Path) -> None:
    with open_batches(data_dir) as clips, pytest.raises(TypeError, match="do not wrap them in a DataLoader"):
        next(iter(DataLoader(clips, batch_size=None)))  # type: ignore[arg-type]


def in_fork(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a forked process, or the exception that it raises."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        try:
            theirs.send(work())
        except Exception as error:  # noqa: BLE001
            theirs.send(error)

    process = context.Process(target=run, daemon=True)
    process.start()
    assert ours.poll(60), "the forked process hangs"
    received = ours.recv()
    process.join(10)
    return received


def test_a_forked_process_may_open_clips_and_not_use_those_of_its_parent(data_dir: Path) -> None:
    with open_batches(data_dir) as clips:
        expected = ids([next(iter(clips))])
        error = in_fork(lambda: next(iter(clips)))
        assert isinstance(error, UserError) and "in its fork" in str(error)
        assert in_fork(lambda: ids([next(iter(open_batches(data_dir)))])) == expected


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("taken", [0, 1])
def test_a_forked_process_may_not_go_on_with_an_iteration_of_its_parent(
    data_dir: Path, shuffle: bool, taken: int
) -> None:
    with open_batches(data_dir, shuffle=shuffle) as clips, open_batches(data_dir, shuffle=shuffle) as others:
        iterator = iter(clips)
        assert len(list(islice(iterator, taken))) == taken
        error = in_fork(lambda: next(iterator))
        assert isinstance(error, UserError) and "in its fork" in str(error)
        assert len(list(iterator)) == len(clips) - taken, "the parent can continue"
        assert len(list(others)) == len(clips)


def test_a_forked_process_that_is_refused_ends(data_dir: Path) -> None:
    for iterator in (iter(open_batches(data_dir)), iter(read_chunks(data_dir, workers=1))):
        next(iterator)  # type: ignore[call-overload]
        child = os.fork()
        if not child:
            try:
                for _ in iterator:  # type: ignore[attr-defined]
                    os._exit(1)
                os._exit(2)
            except UserError as error:
                del iterator
                os._exit(0 if "in its fork" in str(error) else 3)
            os._exit(4)
        ended_at = time.monotonic() + 60
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ended_at:
            time.sleep(0.05)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0)


class InWorker(IterableDataset[dict[str, Any]]):
    """Dataset that opens clips in each worker of a DataLoader."""

    def __init__(self, open_them: Callable[[int], Batches]) -> None:
        self._open = open_them

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        yield from self._open(info.id)


def test_workers_of_a_dataloader_are_told_that_they_would_repeat_each_other(data_dir: Path) -> None:
    def shares(worker: int) -> Batches:
        return open_batches(data_dir, shuffle=False, rank=worker, world=2)

    with pytest.raises(UserError, match="DataLoader worker"):
        next(iter(DataLoader(InWorker(lambda _: open_batches(data_dir)), batch_size=None, num_workers=2)))
    batches = DataLoader(InWorker(shares), batch_size=None, num_workers=2)
    assert sorted(clip for batch in ids(list(batches)) for clip in batch) == list(range(TRAIN_CLIPS))


def test_clips_that_were_opened_before_the_launcher_are_refused(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = open_batches(data_dir)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="opened as rank 0 of 1, but are used as rank 1 of 2"):
        next(iter(clips))
    assert "rank 1 of 2" in repr(open_batches(data_dir))
