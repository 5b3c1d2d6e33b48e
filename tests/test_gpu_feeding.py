"""What the benchmarks of the input pipeline load from, and what their figures say."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.feeding_data import num_copies_for, repeat_chunks
from benchmarks.gpu.feeding_steps import batch_for, wait_row
from benchmarks.gpu.feeding_threads import thread_counts
from clipmill.manifests.store import read_captions
from clipmill.shards.reader import Variant
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.samples import Samples
from tests.train.tiny_data import Caption, encode_chunk, video_sample, write_captions, write_shard

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


def open_set(folder: Path, *, num_threads: int = 2) -> Samples[Any]:
    loading = LoaderSettings(batch=BATCH, num_threads=num_threads, num_ahead=2 * BATCH, seed=0)
    return open_captioned_clips(ClipQuery(folder, split="train", shape=SHAPE, loading=loading))


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


def test_a_machine_is_asked_for_as_many_threads_as_it_has_cores() -> None:
    assert thread_counts(16, is_dry_run=False) == [1, 2, 4, 8, 16]
    assert thread_counts(6, is_dry_run=False) == [1, 2, 4]
    assert thread_counts(1, is_dry_run=False) == [1, 2]


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
