from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.prep.synthetic import read_frame_number
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.train.data.batch import Sample
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.decoders import DecodeRule
from clipmill.train.data.frame_sampling import Sampling, moments_of, to_us
from clipmill.train.data.loader import LoaderSettings, SampleRequest
from clipmill.train.data.outcomes import FailedSample, Unusable, remarks_of
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.samples import Samples
from clipmill.train.models.text import load_tokenizer
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

# The complete frame at its own resolution keeps the numbers in it readable.
LOADING = LoaderSettings(batch=2, num_threads=1, num_ahead=2, seed=0)
SHAPE = ClipShape(sampling=Sampling(num_frames=4), size_px=64, min_crop_area=1.0)


def open_set(
    data_dir: Path,
    split: str = "train",
    *,
    shape: ClipShape = SHAPE,
    group: int = 1,
    decode: DecodeRule = "packets",
) -> Samples[Any]:
    loading = replace(LOADING, group=group)
    return open_captioned_clips(
        ClipQuery(data_dir, split=split, shape=shape, loading=loading, decode=decode), tokenize=load_tokenizer()
    )


def load(samples: Samples[Any], sample: int, *, seed: int | None = None) -> Sample:
    [loaded] = samples.reader.load([SampleRequest(sample, 0, seed)])
    assert not isinstance(loaded, FailedSample), loaded
    return loaded


def failure(samples: Samples[Any], sample: int) -> FailedSample:
    [loaded] = samples.reader.load([SampleRequest(sample, 77, None)])
    assert isinstance(loaded, FailedSample) and loaded.position == 77
    return loaded


def numbers(samples: Samples[Any], sample: int, *, seed: int | None = None) -> list[int]:
    return numbers_in(load(samples, sample, seed=seed))


def numbers_in(sample: Sample) -> list[int]:
    """Return the numbers read from the luma of each image."""
    return [read_frame_number(picture[: 64 * 64].reshape(64, 64)) for picture in sample["video"]]


def test_clips_show_the_frames_of_their_span_across_borders_too(data_dir: Path) -> None:
    samples = open_set(data_dir)
    assert [samples.text(sample) for sample in range(3)] == ["it begins", "the middle of a", "the end of a"]
    assert numbers(samples, 0) == [1, 3, 6, 8]
    assert numbers(samples, 1) == [14, 18, 22, 26]  # with 20 frames per chunk, two frames are from each chunk
    assert numbers(samples, 2) == [33, 39, 45, 51]  # until the end of the video at 5.5 s


def test_training_clips_show_the_frames_that_the_arithmetic_names(data_dir: Path) -> None:
    samples = open_set(data_dir)
    spans = [(0.0, 1.0), (1.2, 2.8), (3.0, 5.5)]
    for seed in range(60):
        sample = seed % len(samples)
        begin_s, end_s = spans[sample % 3]
        rng = SampleRequest(sample, 0, seed).generator("frames")
        moments_found = moments_of(
            to_us(begin_s), to_us(end_s), Sampling(num_frames=4), fps_num=FPS, fps_den=1, rng=rng
        )
        expected = [time * FPS // (moments_found.denominator * 1_000_000) for time in moments_found.numerators]
        assert numbers(samples, sample, seed=seed) == expected


def test_a_sample_carries_its_names(data_dir: Path) -> None:
    samples = open_set(data_dir, "val")
    [sample] = samples.reader.load([SampleRequest(1, 77, None)])
    assert not isinstance(sample, FailedSample)
    assert sample["key"] == "d_000000000" == samples.key(1)
    assert (sample["position"], sample["caption_id"], sample["colour"]) == (77, 10, 0)
    assert sample["video"].shape == (4, 64 * 64 * 3 // 2) and sample["video"].dtype == np.uint8
    assert sample["tokens"].tolist() == load_tokenizer()("the middle of d").tolist()


def test_splits_keep_to_their_own_videos(data_dir: Path) -> None:
    assert len(open_set(data_dir)) == 9 and len(open_set(data_dir, "val")) == 3
    with pytest.raises(UserError, match="no videos of split 'test'") as caught:
        open_set(data_dir, "test")
    assert "train, val" in (caught.value.hint or "")


def test_reasons_agree_with_their_number() -> None:
    counts: dict[Unusable, int] = {"video_without_chunks": 15, "begins_after_the_last_chunk": 12, "chunk_missing": 1}
    assert remarks_of(counts, 0) == [
        "15 of videos without chunks",
        "12 begin after the last chunk",
        "1 with a missing chunk",
    ]


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
    line = samples.describe()
    assert line.startswith("3 of 8 captions of split 'train'; ")
    for remark in (
        "1 of a video without chunks",
        "1 begins after the last chunk",
        "3 with missing chunks",
        "1 shortened to the end of the video",
    ):
        assert f"; {remark}" in line
    assert numbers(samples, 2) == [51, 53, 56, 58]


def test_a_set_without_captions_says_so(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", CHUNK_FRAMES), split="train")
    write_captions(tmp_path, {"a": "train"}, [])
    with pytest.raises(UserError, match="has no captions of split 'train'"):
        open_set(tmp_path)


def test_missing_folders_and_shards_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no data folder"):
        open_set(tmp_path / "nothing")
    with pytest.raises(UserError, match="has no video shards"):
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
    failed = failure(open_set(tmp_path), 0)
    assert (failed.key, failed.reason) == ("a_000000000", "checksum")


def test_a_shard_that_went_away_is_a_failed_sample(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", CHUNK_FRAMES), split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 0.0, 2.0, "all of it")])
    samples = open_set(tmp_path)
    next((tmp_path / "video" / VARIANT).glob("*.tar")).unlink()
    assert failure(samples, 0).reason == "shard_unreadable"


def test_neighbours_of_different_size_are_a_failed_sample(tmp_path: Path) -> None:
    first = video_sample("a", 0, encode_chunk(0, CHUNK_FRAMES))
    second = video_sample("a", 2000, encode_chunk(CHUNK_FRAMES, CHUNK_FRAMES, size_px=96))
    write_shard(tmp_path, 0, [first, second], split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 1.0, 3.0, "both")])
    failed = failure(open_set(tmp_path), 0)
    assert failed.reason == "chunks_differ" and "(96, 96, 0)" in failed.detail


def test_the_fingerprint_follows_the_captions(data_dir: Path, tmp_path: Path) -> None:
    assert open_set(data_dir).fingerprint == open_set(data_dir).fingerprint
    frames = set()
    write_shard(tmp_path, 0, chunks_of("a", CHUNK_FRAMES), split="train")
    for end_s in (1.0, 1.5):
        write_captions(tmp_path, {"a": "train"}, [Caption("a", 0.0, end_s, "it begins")])
        frames.add(open_set(tmp_path).fingerprint)
    assert len(frames) == 2


def test_spans_are_rounded_once(data_dir: Path) -> None:
    assert Fraction(to_us(1.2)) == 1_200_000
    assert open_set(data_dir).span_s(1) == (1.2, 2.8)


@pytest.mark.parametrize("decode", ["filter", "plain"])
def test_the_other_ways_of_decoding_show_the_same_frames(data_dir: Path, decode: DecodeRule) -> None:
    samples, expected = open_set(data_dir, decode=decode), open_set(data_dir)
    for seed in range(20):
        sample = seed % len(samples)
        assert numbers(samples, sample, seed=seed) == numbers(expected, sample, seed=seed)


def test_rgb_is_the_same_clip_in_colour(data_dir: Path) -> None:
    yuv, rgb = load(open_set(data_dir), 1), load(open_set(data_dir, shape=replace(SHAPE, rgb=True)), 1)
    assert rgb["video"].shape == (4, 64, 64, 3) and rgb["video"].dtype == np.uint8
    assert [read_frame_number(picture) for picture in rgb["video"]] == numbers_in(yuv)


def test_samples_that_share_a_chunk_are_what_they_are_alone(data_dir: Path) -> None:
    """The samples are decoded together, with random crops. They are sorted by chunk, so neighbours share one."""
    shape = replace(SHAPE, min_crop_area=0.2, size_px=32)
    alone, together = open_set(data_dir, shape=shape), open_set(data_dir, shape=shape, group=3)
    assert together.fingerprint != alone.fingerprint
    texts = [alone.text(sample) + alone.key(sample) for sample in range(9)]
    requests = [SampleRequest(sample, 100 + sample, 5) for sample in range(9)]
    for begin in range(0, 9, 3):
        for request, sample in zip(requests[begin:], together.reader.load(requests[begin : begin + 3]), strict=False):
            assert not isinstance(sample, FailedSample)
            number = texts.index(together.text(request.sample) + together.key(request.sample))
            [expected] = alone.reader.load([SampleRequest(number, request.position, 5)])
            assert not isinstance(expected, FailedSample)
            assert np.array_equal(sample["video"], expected["video"]) and sample["key"] == expected["key"]


def test_a_damaged_packet_fails_those_samples_of_a_group_that_need_it(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", CHUNK_FRAMES), split="train")
    spans = [(0.0, 0.8), (0.8, 1.6), (1.6, 2.0)]  # one group of pictures each
    write_captions(tmp_path, {"a": "train"}, [Caption("a", *span, "part") for span in spans])
    samples = open_set(tmp_path, group=3)
    shard = Variant.open(tmp_path).shards()[0]
    table = shard.packet_tables.packet_table(0)
    flip_byte(shard, int(table.offset[table.frame.tolist().index(8)]) + 20)
    outcomes = samples.reader.load([SampleRequest(sample, sample, None) for sample in range(3)])
    assert [isinstance(outcome, FailedSample) for outcome in outcomes] == [False, True, False]
    assert isinstance(outcomes[1], FailedSample) and outcomes[1].reason == "checksum"


def flip_byte(shard: CommittedShard, place: int) -> None:
    """Flip a bit of the chunk in the first row."""
    begin, _ = shard.member_range(0, "mp4")
    with shard.tar_path.open("r+b") as file:
        file.seek(begin + place)
        byte = file.read(1)[0]
        file.seek(begin + place)
        file.write(bytes([byte ^ 1]))


LIES: dict[str, Callable[[list[int]], list[int]]] = {
    "packet_offset": lambda values: [values[0] + 1, *values[1:]],
    "packet_size": lambda values: [4_000_000_000, *values[1:]],
    "packet_crc32": lambda values: [values[0] ^ 1, *values[1:]],
    "packet_frame": lambda values: [{1: 2, 2: 1}.get(value, value) for value in values],
    "packet_flags": lambda values: [0] * len(values),
}


@pytest.mark.parametrize("field", LIES)
def test_a_packet_table_that_lies_is_a_failed_sample(tmp_path: Path, field: str) -> None:
    """This holds even if the commit record confirms the wrong table."""
    [sample] = chunks_of("a", CHUNK_FRAMES)
    fields = {**sample.fields, field: LIES[field](sample.fields[field])}
    write_shard(tmp_path, 0, [replace(sample, fields=fields)], split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 0.0, 0.4, "four frames")])
    samples = open_set(tmp_path)
    if field == "packet_flags":  # no key frame is known, so the container's key frames are used
        assert numbers(samples, 0) == [0, 1, 2, 3]
    else:
        assert failure(samples, 0).reason in ("checksum", "undecodable", "frame_missing")


def test_an_index_that_is_not_the_committed_one_is_a_failed_sample(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", CHUNK_FRAMES), split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 0.0, 2.0, "all of it")])
    samples = open_set(tmp_path)
    index = Variant.open(tmp_path).shards()[0].index_path
    content = bytearray(index.read_bytes())
    content[-100] ^= 1
    index.write_bytes(content)
    failed = failure(samples, 0)
    assert failed.reason == "shard_unreadable" and "its content differs from the commit" in failed.detail


def test_neighbours_of_different_codecs_make_one_clip(tmp_path: Path) -> None:
    """Each neighbour is decoded with its own codec, and the same crop is cut from both."""
    first = video_sample("a", 0, encode_chunk(0, CHUNK_FRAMES))
    second = video_sample("a", 2000, encode_chunk(CHUNK_FRAMES, CHUNK_FRAMES, codec="mpeg4"))
    write_shard(tmp_path, 0, [first, second], split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 1.0, 3.0, "both")])
    samples = open_set(tmp_path)
    assert numbers(samples, 0) == [12, 17, 22, 27]
    assert numbers(samples, 0, seed=3) == numbers(samples, 0, seed=3)


def test_an_open_gop_is_decoded_by_way_of_the_container(tmp_path: Path) -> None:
    [sample] = [video_sample("a", 0, encode_chunk(0, 40, open_gop=True))]
    write_shard(tmp_path, 0, [sample], split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 0.0, 4.0, "all of it")])
    samples = open_set(tmp_path)
    assert not Variant.open(tmp_path).shards()[0].packet_tables.packet_table(0).has_closed_gops
    assert "1 of 1 shard decoded through the container because of open GOPs" in samples.describe()
    for seed in range(20):
        shown = numbers(samples, 0, seed=seed)
        assert [number // 10 for number in shown] == [0, 1, 2, 3]
        assert shown == numbers(open_set(tmp_path, decode="plain"), 0, seed=seed)


def test_the_whole_of_a_video_is_its_frames_at_a_rate_that_is_no_round_number(tmp_path: Path) -> None:
    """16 frames at 30 / 1.001 per second end between two microseconds.

    Four frames with a stride of four cover them exactly.
    """
    payload = encode_chunk(0, 16, fps=Fraction(30000, 1001))
    write_shard(tmp_path, 0, [video_sample("a", 0, payload, fps=Fraction(30000, 1001))], split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 0.0, float("inf"), "all of it")])
    samples = open_set(tmp_path, shape=replace(SHAPE, sampling=Sampling(num_frames=4, rule="stride", stride=4)))
    assert numbers(samples, 0) == [0, 4, 8, 12] and "smaller stride" not in samples.describe()
    assert numbers(open_set(tmp_path), 0) == [2, 6, 10, 14]


def test_clips_shorter_than_the_window_are_counted(data_dir: Path) -> None:
    shape = replace(SHAPE, sampling=Sampling(num_frames=4, rule="stride", stride=5))
    samples = open_set(data_dir, shape=shape)
    assert "6 shorter than 4 x 5 frames and sampled with a smaller stride" in samples.describe()
    assert numbers(samples, 2) == [32, 37, 42, 47]  # the middle 20 of frames 30 to 54
    assert numbers(samples, 0) == [0, 2, 5, 7]  # 10 frames, so the stride is 2.5


@pytest.mark.parametrize(("begin_s", "end_s"), [(0.0, 9.3e12), (0.0, 1e300), (0.0, float("inf")), (1e18, 1e19)])
def test_times_beyond_every_video_do_not_wrap_around(tmp_path: Path, begin_s: float, end_s: float) -> None:
    write_shard(tmp_path, 0, [video_sample("a", 0, encode_chunk(0, CHUNK_FRAMES))], split="train")
    shown = [Caption("a", 0, 1, "an ordinary one"), Caption("a", begin_s, end_s, "a long one")]
    write_captions(tmp_path, {"a": "train"}, shown)
    samples = open_set(tmp_path)
    if begin_s:
        assert len(samples) == 1 and "1 begins after the last chunk" in samples.describe()
    else:
        assert max(samples.span_s(sample)[1] for sample in range(2)) == pytest.approx(CHUNK_FRAMES / FPS, abs=1e-6)
        assert ("1 shortened to the end of the video" in samples.describe()) == (end_s < float("inf"))
