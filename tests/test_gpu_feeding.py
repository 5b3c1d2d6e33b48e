"""Part C on small data: what it loads from, what its figures say, and that all variants do the same work."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.feeding_data import num_copies_for, repeat_chunks
from benchmarks.gpu.feeding_lock import InterpreterLock, find_interpreter_lock
from benchmarks.gpu.feeding_mjpeg import make_mjpeg, mjpeg_variant
from benchmarks.gpu.feeding_ring import ProcessRing
from benchmarks.gpu.feeding_steps import batch_for, wait_row
from benchmarks.gpu.feeding_threads import decision, lock_row, worker_counts
from manifests.store import read_captions
from prep.synthetic.frame_code import read_frame_number
from shards.reader import Variant
from tests.train.tiny_data import Caption, encode_chunk, video_sample, write_captions, write_shard
from train.data.chunk_clips import ChunkClips
from train.data.decoding.clip import ClipShape
from train.data.frame_sampling import Sampling
from train.data.loader import LoaderSettings
from train.data.video_captions import VideoCaptions

GIB = 1024**3
SIZE_PX, NUM_FRAMES, BATCH = 32, 2, 5
SHAPE = ClipShape(sampling=Sampling(num_frames=NUM_FRAMES), size_px=SIZE_PX)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two chunks of one video and one of another, each with a caption."""
    folder = tmp_path / "data"
    chunks = [("a", 0, 0), ("a", 2000, 20), ("b", 0, 40)]
    samples = [video_sample(name, start_ms, encode_chunk(first, 20)) for name, start_ms, first in chunks]
    write_shard(folder, 0, samples, split="val")
    captions = [Caption("a", 0, 1, "one"), Caption("a", 2, 3, "two"), Caption("b", 0, 1, "three")]
    write_captions(folder, {"a": "val", "b": "val"}, captions)
    return folder


def open_set(folder: Path, *, num_threads: int = 2) -> VideoCaptions:
    loading = LoaderSettings(batch=BATCH, num_threads=num_threads, num_ahead=2 * BATCH, seed=0)
    return VideoCaptions(folder, split="train", shape=SHAPE, tokenize=None, loading=loading)


def test_repeated_chunks_are_the_same_pictures_under_other_keys(data: Path, tmp_path: Path) -> None:
    assert num_copies_for(data, num_clips=7) == 3
    folder = repeat_chunks(data, tmp_path / "repeated", num_copies=3)
    samples = open_set(folder)
    assert len(samples) == 9
    keys = [key for shard in Variant.open(folder).shards() for key in shard.index["key"].to_pylist()]
    assert len(set(keys)) == 9
    texts = [samples.text(sample) for sample in range(9)]
    assert sorted(texts) == sorted(read_captions(data)["text"].to_pylist() * 3)
    tars = [shard.tar_path for shard in Variant.open(folder).shards()]
    assert len({tar.stat().st_ino for tar in tars}) == 3 and len({tar.read_bytes() for tar in tars}) == 1
    for batch in samples.evaluation_batches():
        assert not batch.failed


def test_worker_processes_give_the_batches_of_the_threads(data: Path, tmp_path: Path) -> None:
    samples = open_set(repeat_chunks(data, tmp_path / "repeated", num_copies=4))
    threads = samples.batches(max_failures=0)
    clip_shape = (NUM_FRAMES, SIZE_PX * SIZE_PX * 3 // 2)
    with ProcessRing(samples, num_processes=2, batch=BATCH, seed=0, clip_shape=clip_shape) as ring:
        batches = ring.batches()
        # More blocks than the ring has places, and more than an epoch.
        for _ in range(20):
            wanted, found = next(threads).batch, next(batches)
            assert found["position"].tolist() == wanted["position"].tolist()
            assert (found["video"] == wanted["video"]).all() and found["key"] == wanted["key"]
    threads.close()


def test_mjpeg_chunks_have_the_frames_of_the_chunks_they_are_made_of(data: Path, tmp_path: Path) -> None:
    folder = make_mjpeg(data, tmp_path / "mjpeg", num_chunks=2, max_frames=12)
    assert mjpeg_variant(data) is None and mjpeg_variant(folder) is not None
    loading = LoaderSettings(batch=1, num_threads=1, num_ahead=1, seed=0)
    shape = ClipShape(sampling=Sampling(num_frames=12), size_px=64, rgb=True)
    samples = ChunkClips(folder, split="train", shape=shape, loading=loading)
    clips = [batch.batch["video"][0].numpy() for batch in samples.evaluation_batches()]
    numbers = [[read_frame_number(picture) for picture in clip] for clip in clips]
    assert sorted(numbers) == [list(range(12)), list(range(20, 32))]


def test_the_interpreter_lock_is_held_by_threads_that_compute_and_not_by_those_that_sleep() -> None:
    lock = find_interpreter_lock()
    computing, sleeping = (share_beside(lock, work) for work in (lambda: None, lambda: time.sleep(0.05)))
    assert computing > 0.5 > sleeping


def share_beside(lock: InterpreterLock, work: Any) -> float:
    stops = threading.Event()

    def run() -> None:
        while not stops.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return lock.held_share(100_000_000)
    finally:
        stops.set()
        thread.join()


def test_the_limit_of_threads_is_arithmetic_on_the_share_of_one() -> None:
    one = lock_row("4 frames", 1, held_share=0.08, clips_per_s=400.0)
    assert (one["held us a clip"], one["threads at most"]) == (200, 12.5)
    assert lock_row("4 frames", 8, held_share=0.7, clips_per_s=2800.0)["threads at most"] is None


def test_what_follows_from_threads_that_fall_behind_depends_on_the_ring() -> None:
    assert "threads suffice" in decision("4 frames", 16, threads=0.93, ring=0.5)
    assert "worth building" in decision("4 frames", 16, threads=0.6, ring=0.95)
    assert "would not help" in decision("4 frames", 16, threads=0.6, ring=0.5)


def test_a_machine_is_asked_for_as_many_threads_as_it_has_cores() -> None:
    assert worker_counts(16, is_dry_run=False) == [1, 2, 4, 8, 16]
    assert worker_counts(6, is_dry_run=False) == [1, 2, 4]
    assert worker_counts(1, is_dry_run=False) == [1, 2]


def test_a_batch_is_in_proportion_to_the_memory() -> None:
    assert batch_for(80 * GIB, of_80_gib=128) == 128
    assert batch_for(141 * GIB, of_80_gib=128) == 224
    assert batch_for(2 * GIB, of_80_gib=32) == 8


def test_the_share_of_waiting_leaves_the_first_steps_out() -> None:
    slow = [{"step_s": 10.0, "data_wait_s": 9.0}] * 8
    lines = slow + [{"step_s": 0.2, "data_wait_s": wait_s} for wait_s in (0.0, 0.002, 0.004)] * 10
    row = wait_row("MAE", lines, batch=64, workers=16)
    assert row["steps"] == 30 and row["step ms"] == 200.0
    assert row["wait share"] == pytest.approx(0.01)
    assert row["longest wait ms"] == 4.0 and row["clips/s"] == 320


def test_the_size_of_a_jpeg_is_in_its_frame_header(data: Path, tmp_path: Path) -> None:
    import torch

    from benchmarks.gpu.feeding_nvjpeg import jpeg_size

    folder = make_mjpeg(data, tmp_path / "mjpeg", num_chunks=1, max_frames=1)
    (shard,) = Variant.open(folder).shards()
    packet = torch.from_numpy(np.frombuffer(shard.read(0, "mp4"), np.uint8).copy())
    assert jpeg_size(packet) == (shard.index["width"][0].as_py(), shard.index["height"][0].as_py())
    with pytest.raises(ValueError, match="not a baseline JPEG"):
        jpeg_size(torch.zeros(100, dtype=torch.uint8))
