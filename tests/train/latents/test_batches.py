import shutil
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import split_key
from clipmill.shards.reader import Variant
from clipmill.train.data.batch import Batch
from clipmill.train.data.producers.latent_segments import open_latent_segments
from tests.train.latents.conftest import CAPTIONS, SHARDS, WITHOUT_EMBEDDING
from tests.train.latents.querying import segments
from tests.train.latents.written import Caption, Chunk, Written, write_all, write_captions, write_latents

T = 20


def evaluation(written: Written, **settings: Any) -> list[Batch]:
    loader = open_latent_segments(segments(written.data_dir, split="train", **settings, can_keep=True))
    return [loaded.batch for loaded in loader.evaluation_batches()]


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def segments_of(written: Written, *, num_frames: int = T) -> dict[tuple[str, int], np.ndarray]:
    """Return the bits of every full segment, by key and number, in the order of videos and time."""
    return {
        (key, number): latents[number * num_frames : (number + 1) * num_frames]
        for key, latents in sorted(written.latents.items(), key=lambda item: split_key(item[0]))
        for number in range(len(latents) // num_frames)
    }


def rows_of(batches: list[Batch], name: str) -> list[Any]:
    return [row for batch in batches for row in batch[name]]  # type: ignore[literal-required]


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_every_segment_comes_as_it_was_written(written_data: Written, batch: int) -> None:
    batches = evaluation(written_data, captions="none", batch=batch)
    expected = segments_of(written_data)
    assert rows_of(batches, "key") == [key for key, _ in expected]
    for got, expected_latents in zip(rows_of(batches, "latents"), expected.values(), strict=True):
        assert got.shape == (T, 2, 4, 4) and got.dtype == torch.float16
        assert np.array_equal(bits(got), expected_latents)
    assert [int(place) for place in rows_of(batches, "position")] == list(range(len(expected)))
    assert {batch["input"] for batch in batches} == {"latents"}


def overlapping(key: str, number: int, *, seconds: float = 5.0) -> list[int]:
    """Return the ids of the embedded captions of a segment, by definition."""
    video_id, start_ms = split_key(key)
    begin = start_ms / 1000 + number * seconds
    return [
        caption_id
        for caption_id, caption in enumerate(CAPTIONS)
        if caption.video_id == video_id
        and caption.begin_s < min(caption.end_s, begin + seconds)
        and caption.end_s > begin
        and caption_id not in WITHOUT_EMBEDDING
    ]


def test_a_segment_is_shown_with_the_captions_that_overlap_it(written_data: Written) -> None:
    expected = {place: ids for place in segments_of(written_data) if (ids := overlapping(*place))}
    assert 0 < len(expected) < len(segments_of(written_data))
    batches = evaluation(written_data, batch=4)
    assert rows_of(batches, "key") == [key for key, _ in expected]
    assert [int(caption_id) for caption_id in rows_of(batches, "caption_id")] == [ids[0] for ids in expected.values()]
    for latents, place in zip(rows_of(batches, "latents"), expected, strict=True):
        assert np.array_equal(bits(latents), segments_of(written_data)[place])
    drawn: dict[tuple[str, int], set[int]] = {place: set() for place in expected}
    loader = open_latent_segments(segments(written_data.data_dir, split="train", batch=7, can_keep=True))
    places = list(expected)
    by_bits = {latents.tobytes(): place for place, latents in segments_of(written_data).items()}
    for loaded in islice(loader.batches(), 60):
        batch = loaded.batch
        for latents, caption, text in zip(batch["latents"], batch["caption_id"], batch["text"], strict=True):
            drawn[by_bits[bits(latents).tobytes()]].add(int(caption))
            assert np.array_equal(bits(text), written_data.text[int(caption)])
    assert drawn == {place: set(expected[place]) for place in places}


def test_embeddings_come_as_they_were_written(written_data: Written) -> None:
    batches = evaluation(written_data, batch=3)
    for caption, text in zip(rows_of(batches, "caption_id"), rows_of(batches, "text"), strict=True):
        assert text.dtype == torch.float16 and np.array_equal(bits(text), written_data.text[int(caption)])


def test_the_log_says_what_is_left_out(written_data: Written) -> None:
    line = open_latent_segments(segments(written_data.data_dir, split="train")).describe()
    num_segments = sum(1 for place in segments_of(written_data) if overlapping(*place))
    assert line.startswith(f"{num_segments} segments of 20 frames (2 x 4 x 4 float16 at 4 frames a second) in 7 chunks")
    assert "2 shorter tails left out" in line
    assert "1 caption without embedding" in line
    assert f"{len(segments_of(written_data)) - num_segments} segments without captions left out" in line
    assert "3 captions outside all segments" in line


def test_a_tail_is_filled_up_with_zeros_and_says_so(written_data: Written) -> None:
    batches = evaluation(written_data, captions="none", tails="pad", batch=3)
    expected = [
        (key, latents[first : first + T])
        for key, latents in sorted(written_data.latents.items(), key=lambda item: split_key(item[0]))
        for first in range(0, len(latents), T)
    ]
    assert rows_of(batches, "key") == [key for key, _ in expected]
    assert [int(num) for num in rows_of(batches, "num_frames")] == [len(latents) for _, latents in expected]
    for got, (_, expected_latents) in zip(rows_of(batches, "latents"), expected, strict=True):
        assert (
            np.array_equal(bits(got[: len(expected_latents)]), expected_latents)
            and not got[len(expected_latents) :].any()
        )


def test_a_buffer_that_held_a_full_segment_shows_nothing_of_it_behind_a_tail(written_data: Written) -> None:
    loader = open_latent_segments(segments(written_data.data_dir, split="train", captions="none", tails="pad", batch=1))
    shown = [
        (int(loaded.batch["num_frames"]), loaded.batch["latents"][0].any(dim=(1, 2, 3)).tolist())
        for loaded in islice(loader.batches(), 40)
    ]
    assert {num for num, _ in shown} == {8, 12, 20}
    assert all(frames == [True] * num + [False] * (T - num) for num, frames in shown)


@settings(max_examples=15, deadline=None)
@given(
    num_frames=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    frame=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 7)),
    segment=st.integers(1, 9),
    width=st.sampled_from([1, 3, 100, 256, 300]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
)
def test_sizes_that_fit_no_block_come_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory,
    num_frames: list[int],
    frame: tuple[int, int, int],
    segment: int,
    width: int,
    dtype: str,
) -> None:
    chunks = [Chunk(f"v{number}", 0, num, frame, dtype, Fraction(1)) for number, num in enumerate(num_frames)]
    captions = [Caption(chunk.video_id, 0, float("inf"), chunk.video_id) for chunk in chunks]
    shards = [part for part in (chunks[:2], chunks[2:]) if part]
    written = write_all(tmp_path_factory.mktemp("sizes"), shards, captions, width=width)
    batches = evaluation(written, segment=f"{segment}s", tails="pad", batch=2)
    expected = [
        (written.latents[chunk.key][first : first + segment], number)
        for number, chunk in enumerate(chunks)
        for first in range(0, chunk.num_frames, segment)
    ]
    for got, text, (latents, number) in zip(
        rows_of(batches, "latents"), rows_of(batches, "text"), expected, strict=True
    ):
        assert got.dtype == getattr(torch, dtype)
        assert np.array_equal(bits(got.contiguous())[: len(latents)], latents)
        assert not bits(got)[len(latents) :].any()
        assert np.array_equal(bits(text), written.text[number])


def test_a_segment_that_is_no_whole_number_of_frames_is_refused(written_data: Written) -> None:
    with pytest.raises(UserError, match=r"0\.3s' is 1\.2 frames at 4 frames"):
        open_latent_segments(segments(written_data.data_dir, split="train", segment="0.3s"))
    with pytest.raises(UserError, match="not a segment length"):
        open_latent_segments(segments(written_data.data_dir, split="train", segment="5 minutes"))


def test_segments_that_would_show_two_crops_are_refused(tmp_path: Path) -> None:
    captions = [Caption("a", 0, 1, "a")]
    written = write_all(tmp_path / "data", [[Chunk("a", 0, 60)]], captions, crop="random", segment="5s")
    open_latent_segments(segments(written.data_dir, split="train", segment="2.5s"))
    for segment in ("10s", "3s"):
        with pytest.raises(UserError, match="two crops"):
            open_latent_segments(segments(written.data_dir, split="train", segment=segment))


@pytest.mark.parametrize("captions", ["none", "stored"])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 100])
def test_a_video_has_at_most_so_many_segments_evenly_over_it(written_data: Written, captions: str, most: int) -> None:
    every = evaluation(written_data, captions=captions, batch=100)[0]
    batch = evaluation(written_data, captions=captions, batch=100, max_segments=most)[0]
    of_all = [content.tobytes() for content in bits(every["latents"])]
    kept = [of_all.index(content.tobytes()) for content in bits(batch["latents"])]
    assert kept == sorted(set(kept)) and batch["key"] == [every["key"][row] for row in kept]
    videos = np.array([split_key(key)[0] for key in every["key"]])
    for video in set(videos.tolist()):
        first, count = int(np.flatnonzero(videos == video)[0]), int((videos == video).sum())
        parts = [(row - first) * min(most, count) // count for row in kept if videos[row] == video]
        assert parts == list(range(min(most, count))), "one segment in each equal part of the video"
    assert batch["clip_id"].tolist() == list(range(len(kept)))
    if captions == "stored":
        assert batch["caption_id"].tolist() == every["caption_id"][kept].tolist()


def test_other_segments_are_another_set(written_data: Written) -> None:
    sets = [
        open_latent_segments(segments(written_data.data_dir, split="train", captions="none", max_segments=most))
        for most in (None, 1, 2, 100)
    ]
    every, first, second, all_of_them = (samples.fingerprint for samples in sets)
    assert len({every, first, second}) == 3 and all_of_them == every
    assert "7 further segments of long videos left out" in sets[2].describe() and "further" not in sets[3].describe()


@pytest.mark.parametrize("tails", ["drop", "pad"])
@pytest.mark.parametrize("captions", ["none", "stored"])
def test_compressed_latents_make_the_same_batches(
    written_data: Written, tmp_path: Path, tails: str, captions: str
) -> None:
    packed = Written(tmp_path / "data")
    shutil.copytree(written_data.data_dir, packed.data_dir)
    shutil.rmtree(packed.latents_dir)
    write_latents(packed, SHARDS, is_compressed=True)  # the same noise
    given: dict[str, Any] = {"captions": captions, "tails": tails, "batch": 4, "can_keep": True, "seed": 3}
    plain, compressed = (
        open_latent_segments(segments(data.data_dir, split="train", **given)) for data in (written_data, packed)
    )
    assert compressed.describe() == plain.describe().replace(" a second", " a second, compressed")
    for plain_batch, other in zip(islice(plain.batches(), 9), islice(compressed.batches(), 9), strict=True):
        assert plain_batch.batch["key"] == other.batch["key"] and plain_batch.cursor == other.cursor
        assert np.array_equal(bits(plain_batch.batch["latents"]), bits(other.batch["latents"]))
    folders = (written_data, packed) if captions == "stored" else ()
    shown = [open_latent_segments(segments(data.data_dir, split="train", **given)) for data in folders]
    pictures = [np.stack(samples.shown_frames(2, num_frames=3)) for samples in shown]
    assert captions == "none" or np.array_equal(pictures[0], pictures[1])


def test_damaged_compressed_latents_are_failures_by_name(tmp_path: Path) -> None:
    packed = Written(tmp_path / "data")
    packed.data_dir.mkdir()
    write_captions(packed.data_dir, {"a": "train", "c": "train"}, [])
    write_latents(packed, [[Chunk("a", 0, 60), Chunk("c", 0, 40)]], is_compressed=True)
    shard = Variant.open(packed.data_dir, column="latents").shards()[0]
    with shard.tar_path.open("r+b") as tar:
        tar.seek(shard.index["latents.npy.zst_offset"][0].as_py() + 100)
        tar.write(b"\x00\x01\x02\x03")
    loaded = list(
        open_latent_segments(segments(packed.data_dir, split="train", captions="none", batch=5)).evaluation_batches()
    )
    failed = [failure for part in loaded for failure in part.failed]
    assert {failure.key for failure in failed} == {"a_000000000"} and {failure.reason for failure in failed} == {
        "checksum"
    }
    assert rows_of([part.batch for part in loaded], "key") == ["c_000000000"] * 2
