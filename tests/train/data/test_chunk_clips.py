"""Complete chunks as samples: the window of a visit, several samples per chunk, epochs, ranks and damage."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.prep.synthetic import read_frame_number
from clipmill.train.data.batch import Batch
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.decoders import ChunkBytes, ChunkDecoder, ChunkFrames
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.chunk_clips import open_chunk_clips
from clipmill.train.data.samples import Samples
from tests.train.tiny_data import SIZE_PX, encode_chunk, video_sample, write_captions, write_shard

# Each row is (video, start in ms, number of the first frame, number of frames). Two chunks are longer than 16 x 4
# frames, one has exactly that length, and two are shorter.
CHUNKS = (("a", 0, 0, 90), ("a", 9000, 90, 40), ("b", 0, 200, 64), ("b", 6400, 264, 1), ("c", 0, 300, 80))
LENGTHS = np.array([frames for *_, frames in CHUNKS])
FIRSTS = np.array([first for *_, first, _ in CHUNKS])
# The complete frame at its own resolution keeps the numbers in it readable.
SHAPE = ClipShape(sampling=Sampling(num_frames=16, rule="stride", stride=4), size_px=SIZE_PX, crop="centre")
LOADING = LoaderSettings(batch=5, num_threads=1, num_ahead=5, seed=3)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos without captions; the fourth video has no chunks."""
    return write_videos(tmp_path_factory.mktemp("videos"))


def write_videos(data_dir: Path) -> Path:
    samples = [video_sample(video, begin, encode_chunk(first, frames)) for video, begin, first, frames in CHUNKS]
    write_shard(data_dir, 0, samples, split="train")
    write_captions(data_dir, dict.fromkeys("abcd", "train"), [])
    return data_dir


def chunk_clips(
    data_dir: Path, *, per_chunk: int = 1, same_frames: bool = False, shape: ClipShape = SHAPE, **loading: Any
) -> Samples[Any]:
    return open_chunk_clips(
        ClipQuery(data_dir, split="train", shape=shape, loading=replace(LOADING, group=per_chunk, **loading)),
        same_frames=same_frames,
    )


def batches_shown(samples: Samples[Any], num_batches: int) -> list[tuple[dict[str, list[int]], np.ndarray]]:
    """Return the positions and clip ids of batches, and their frame numbers, read before the batch memory is reused."""
    taken = islice(samples.batches(max_failures=0), num_batches)
    shown = []
    for loaded_batch in taken:
        batch = loaded_batch.batch
        places = {"position": batch["position"].tolist(), "clip_id": batch["clip_id"].tolist()}
        shown.append((places, numbers(batch)))
    return shown


def numbers(batch: Batch) -> np.ndarray:
    """Return the frame numbers that the images show, [B, T]."""
    luma = batch["video"].numpy()[:, :, : SIZE_PX**2].reshape(*batch["video"].shape[:2], SIZE_PX, SIZE_PX)
    return np.array([[read_frame_number(picture) for picture in clip] for clip in luma])


def test_an_evaluation_shows_the_middle_of_every_chunk_and_shrinks_the_stride_of_short_ones(videos: Path) -> None:
    samples = chunk_clips(videos)
    [loaded] = samples.evaluation_batches()
    strides = np.minimum(4, LENGTHS / 16)
    expected = ((LENGTHS - 16 * strides) / 2)[:, None] + np.arange(16) * strides[:, None]
    assert (numbers(loaded.batch) - FIRSTS[:, None] == np.floor(expected)).all()
    assert samples.describe() == (
        "5 chunks of 3 videos of split 'train'; 1 video without chunks; 1 of a single frame, which is repeated; "
        "2 shorter than 16 x 4 frames and sampled with a smaller stride"
    )


def test_training_shows_a_window_at_another_place_each_time(videos: Path) -> None:
    begins: dict[int, set[int]] = {chunk: set() for chunk in range(len(CHUNKS))}
    for ids, rows in batches_shown(chunk_clips(videos), 6):
        clip_ids = ids["clip_id"]
        assert sorted(clip_ids) == [0, 1, 2, 3, 4], "an epoch shows every chunk once"
        for chunk, row in zip(clip_ids, rows - FIRSTS[clip_ids][:, None], strict=True):
            assert (np.diff(row) == 4).all() == (LENGTHS[chunk] >= 64)
            begins[chunk].add(int(row[0]))
    assert len(begins[0]) > 3 and max(begins[0]) <= 90 - 64 and len(begins[4]) > 3
    assert begins[2] == {0} and begins[3] == {0}


def test_samples_of_a_chunk_are_visited_in_a_row_and_decoded_once(
    videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    decode = ChunkDecoder.decode

    def note_and_decode(self: ChunkDecoder, content: ChunkBytes) -> ChunkFrames:
        decoded.append(content.key)
        return decode(self, content)

    monkeypatch.setattr(ChunkDecoder, "decode", note_and_decode)
    samples = chunk_clips(videos, per_chunk=3)
    assert samples.num_samples == len(samples) == 15 and samples.num_clips == 5
    assert "3 samples of each clip per epoch" in samples.describe()
    batches = batches_shown(samples, 3)
    assert 5 <= len(decoded) <= 5 + 2, "the loader may have decoded ahead"
    clip_ids = np.concatenate([ids["clip_id"] for ids, _ in batches]).reshape(5, 3)
    assert sorted(clip_ids[:, 0]) == [0, 1, 2, 3, 4] and (clip_ids == clip_ids[:, :1]).all()
    windows = np.concatenate([rows for _, rows in batches]).reshape(5, 3, 16)
    begins = {chunk: set(its[:, 0]) for chunk, its in zip(clip_ids[:, 0].tolist(), windows, strict=True)}
    assert len(begins[0]) == len(begins[4]) == 3, "every sample has a different window"
    # Evaluations show each chunk once, even where training shows it several times.
    assert [samples.key(number) for number in (0, 2, 3)] == ["a_000000000", "a_000000000", "a_000009000"]


def test_repeated_masks_show_the_same_frames_cut_out_in_different_ways(videos: Path) -> None:
    whole = chunk_clips(videos, per_chunk=3, same_frames=True)
    visits = np.concatenate([rows for _, rows in batches_shown(whole, 6)]).reshape(10, 3, 16)
    assert (visits == visits[:, :1]).all()
    assert len(set(visits[:, 0, 0].tolist())) > 5, "the next epoch has different windows"
    cropped = chunk_clips(videos, per_chunk=3, same_frames=True, shape=replace(SHAPE, crop="multi-scale"))
    taken = islice(cropped.batches(max_failures=0), 3)
    pictures = np.concatenate([loaded.batch["video"].numpy().copy() for loaded in taken])
    first, second, third = pictures.reshape(5, 3, -1).swapaxes(0, 1)
    assert sum((first != second).any(1) | (second != third).any(1)) >= 4
    others = {chunk_clips(videos, per_chunk=per_chunk).fingerprint for per_chunk in (1, 3)}
    assert len(others | {whole.fingerprint}) == 3


def test_ranks_together_show_what_one_shows_and_another_seed_shows_others(videos: Path) -> None:
    alone = batches_shown(chunk_clips(videos, per_chunk=2, batch=4), 3)
    ranks = [batches_shown(chunk_clips(videos, per_chunk=2, batch=2, rank=rank, num_ranks=2), 3) for rank in range(2)]
    for (ids, rows), *parts in zip(alone, *ranks, strict=True):
        numbers_by_chunk: dict[int, list[int]] = {}
        for part_ids, part_rows in parts:
            numbers_by_chunk |= dict(zip(part_ids["position"], part_rows.tolist(), strict=True))
        assert [numbers_by_chunk[at] for at in ids["position"]] == rows.tolist()
    assert (batches_shown(chunk_clips(videos, per_chunk=2, batch=4, seed=4), 1)[0][1] != alone[0][1]).any()


def test_damaged_chunks_are_failures_by_name_and_others_take_their_place(tmp_path: Path) -> None:
    write_videos(tmp_path)
    [tar] = tmp_path.glob("video/*/*.tar")
    content = bytearray(tar.read_bytes())
    payload = encode_chunk(FIRSTS[4], LENGTHS[4])
    at = bytes(content).index(payload[:4096])
    content[at + 48 : at + len(payload) - 2048] = bytes(len(payload) - 2096)
    tar.write_bytes(content)
    failed = []
    for loaded in islice(chunk_clips(tmp_path, per_chunk=2).batches(max_failures=9), 2):
        assert len(loaded.batch["position"]) == 5 and 4 not in loaded.batch["clip_id"]
        failed += [(failure.key, failure.reason) for failure in loaded.failed]
    assert failed and set(failed) == {("c_000000000", "checksum")}


def test_a_split_without_chunks_is_named(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [video_sample("a", 0, encode_chunk(0, 4))], split="train")
    write_captions(tmp_path, {"a": "train", "b": "val"}, [])
    with pytest.raises(UserError, match="no clip of split 'val' is usable: 0 chunks of 0 videos"):
        open_chunk_clips(ClipQuery(tmp_path, split="val", shape=SHAPE, loading=LOADING))
