from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from manifests.errors import UserError
from prep.synthetic.frame_code import read_frame_number
from shards.reader import Variant
from tests.train.tiny_data import (
    CHUNK_FRAMES,
    FPS,
    VARIANT,
    Caption,
    chunks_of,
    encode_chunk,
    video_sample,
    write_captions,
    write_shard,
)
from train.data.clips import segment_times_us, to_us
from train.data.failures import SampleFailed
from train.data.loader import LoaderSettings
from train.data.video_captions import ClipShape, VideoCaptions
from train.models.text import load_tokenizer

# The whole picture, at its own size: the numbers in it stay readable.
LOADING = LoaderSettings(batch=2, num_threads=1, num_ahead=2, seed=0)
SHAPE = ClipShape(num_frames=4, size_px=64, min_crop_area=1.0)


def open_set(data_dir: Path, split: str = "train") -> VideoCaptions:
    return VideoCaptions(data_dir, split=split, shape=SHAPE, tokenize=load_tokenizer(), loading=LOADING)


def numbers(samples: VideoCaptions, sample: int, rng: np.random.Generator | None = None) -> list[int]:
    video = samples.load(sample, position=0, rng=rng)["video"]
    return [read_frame_number(frame.numpy()) for frame in video]


def test_clips_show_the_frames_of_their_span_across_borders_too(data_dir: Path) -> None:
    samples = open_set(data_dir)
    assert [samples.text(sample) for sample in range(3)] == ["it begins", "the middle of a", "the end of a"]
    assert numbers(samples, 0) == [1, 3, 6, 8]
    assert numbers(samples, 1) == [14, 18, 22, 26]  # 20 frames a chunk: two from each
    assert numbers(samples, 2) == [33, 39, 45, 51]  # to the end of the video at 5.5 s


def test_training_clips_show_the_frames_that_the_arithmetic_names(data_dir: Path) -> None:
    samples = open_set(data_dir)
    spans = [(0.0, 1.0), (1.2, 2.8), (3.0, 5.5)]
    for seed in range(60):
        sample = seed % len(samples)
        begin_s, end_s = spans[sample % 3]
        rng = np.random.default_rng(seed)
        times = segment_times_us(to_us(begin_s), to_us(end_s), num_frames=4, rng=np.random.default_rng(seed))
        assert numbers(samples, sample, rng) == [int(time_us * FPS // 1_000_000) for time_us in times]


def test_a_sample_carries_its_names(data_dir: Path) -> None:
    samples = open_set(data_dir, "val")
    sample = samples.load(1, position=77, rng=None)
    assert sample["key"] == "d_000000000" == samples.key(1)
    assert (sample["position"], sample["caption_id"]) == (77, 10)
    assert sample["video"].shape == (4, 64, 64, 3)
    assert sample["tokens"].tolist() == load_tokenizer()("the middle of d").tolist()


def test_splits_keep_to_their_own_videos(data_dir: Path) -> None:
    assert len(open_set(data_dir)) == 9 and len(open_set(data_dir, "val")) == 3
    with pytest.raises(UserError, match="no videos of split 'test'") as caught:
        open_set(data_dir, "test")
    assert "train, val" in (caught.value.hint or "")


def test_captions_without_their_chunks_are_counted_by_reason(tmp_path: Path) -> None:
    chunks = chunks_of("a", 3 * CHUNK_FRAMES)
    write_shard(tmp_path, 0, [chunks[0], chunks[2]], split="train")
    captions = [
        Caption("a", 0.0, 1.0, "there"),
        Caption("a", 1.0, 3.0, "half of it is missing"),
        Caption("a", 1.0, 5.0, "its middle is missing"),
        Caption("a", 2.5, 3.5, "missing"),
        Caption("a", 4.0, 5.0, "there too"),
        Caption("a", 5.0, 9.0, "longer than the video"),
        Caption("a", 7.0, 9.0, "after the video"),
        Caption("b", 0.0, 1.0, "of a video that failed"),
    ]
    write_captions(tmp_path, {"a": "train", "b": "train"}, captions)
    samples = open_set(tmp_path)
    assert [samples.text(sample) for sample in range(len(samples))] == ["there", "there too", "longer than the video"]
    assert samples.usable.num_unusable == {
        "video_without_chunks": 1,
        "begins_after_the_last_chunk": 1,
        "chunk_missing": 3,
    }
    assert samples.usable.num_shortened == 1
    said = samples.describe()
    assert said.startswith("3 of 8 captions of split 'train'") and "3 chunk missing" in said and "1 shortened" in said
    assert numbers(samples, 2) == [51, 53, 56, 58]


def test_a_set_without_captions_says_so(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", CHUNK_FRAMES), split="train")
    write_captions(tmp_path, {"a": "train"}, [])
    with pytest.raises(UserError, match="no caption of split 'train' can be shown: 0 of 0"):
        open_set(tmp_path)


def test_missing_folders_and_shards_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no data folder"):
        open_set(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no video shards"):
        open_set(tmp_path)


def test_a_flipped_byte_is_a_failed_sample_and_not_another_picture(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", CHUNK_FRAMES), split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 0.0, 2.0, "all of it")])
    shard = Variant.open(tmp_path).shards()[0]
    offset, size = shard.member_range(0, "mp4")
    with shard.tar_path.open("r+b") as file:
        file.seek(offset + size // 2)
        byte = file.read(1)[0]
        file.seek(offset + size // 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(SampleFailed) as caught:
        numbers(open_set(tmp_path), 0)
    assert (caught.value.key, caught.value.reason) == ("a_000000000", "checksum")


def test_a_shard_that_went_away_is_a_failed_sample(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", CHUNK_FRAMES), split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 0.0, 2.0, "all of it")])
    samples = open_set(tmp_path)
    next((tmp_path / "video" / VARIANT).glob("*.tar")).unlink()
    with pytest.raises(SampleFailed) as caught:
        numbers(samples, 0)
    assert caught.value.reason == "shard_unreadable"


def test_neighbours_of_different_size_are_a_failed_sample(tmp_path: Path) -> None:
    first = video_sample("a", 0, encode_chunk(0, CHUNK_FRAMES))
    second = video_sample("a", 2000, encode_chunk(CHUNK_FRAMES, CHUNK_FRAMES, size_px=96))
    write_shard(tmp_path, 0, [first, second], split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 1.0, 3.0, "both")])
    with pytest.raises(SampleFailed) as caught:
        numbers(open_set(tmp_path), 0)
    assert caught.value.reason == "sizes_differ"


def test_the_fingerprint_follows_the_captions(data_dir: Path, tmp_path: Path) -> None:
    assert open_set(data_dir).fingerprint == open_set(data_dir).fingerprint
    found = set()
    write_shard(tmp_path, 0, chunks_of("a", CHUNK_FRAMES), split="train")
    for end_s in (1.0, 1.5):
        write_captions(tmp_path, {"a": "train"}, [Caption("a", 0.0, end_s, "it begins")])
        found.add(open_set(tmp_path).fingerprint)
    assert len(found) == 2


def test_spans_are_rounded_once(data_dir: Path) -> None:
    assert Fraction(to_us(1.2)) == 1_200_000
    assert open_set(data_dir).span_s(1) == (1.2, 2.8)
