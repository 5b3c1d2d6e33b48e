"""Videos whose captions belong to several splits: no second of one split is shown to another split."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill import chunks_table, read_chunks
from clipmill.prep.core.other_splits import LostTime, lost_lines, stored_lost_times
from clipmill.prep.synthetic import read_frame_number
from clipmill.shards.scores import find_leakage, look_alike_keys
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.classes import ClassList, read_classes
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.producers.chunk_clips import open_chunk_clips, open_labelled_clips
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.samples import Samples
from clipmill.train.quickstart.choice import survey
from tests.shards.made_scores import phash, write_scores
from tests.train.latents.querying import segments
from tests.train.latents.written import Chunk, Written, write_latents
from tests.train.tiny_data import FPS, SIZE_PX, Caption, encode_chunk, video_sample, write_captions, write_shard

SHAPE = ClipShape(sampling=Sampling(num_frames=8), size_px=SIZE_PX, crop="centre")
LOADING = LoaderSettings(batch=3, num_threads=1, num_ahead=3, seed=1)
LENGTH_S, CHUNK_S = 18, 6
SPLITS = {"a": "train", "b": "val", "c": "train"}


def span(video: str, begin_s: float, end_s: float, split: str | None, label: str | None = None) -> Caption:
    """Make a caption whose text states its span."""
    labels = {"split": split, "label_done": label}
    return Caption(video, begin_s, end_s, f"{video} {begin_s:g} {end_s:g}", labels=labels)


# The frame numbers of a video count up in each second: frame n appears at n / 10 s.
CAPTIONS = [
    span("a", 0, 5, None, "yes"),
    span("a", 5, 9.05, "val", "no"),  # ends within a frame
    span("a", 9.05, 12, None, "no"),
    span("a", 11, 14, None, "yes"),  # overlaps seconds of the test split
    span("a", 13, 15, "test", "no"),
    span("a", 15, 15.5, "val", "yes"),  # too short for a sample without captions
    span("b", 0, 7, None, "no"),
    span("b", 7, 18, "train", "yes"),
    span("c", 0, float("inf"), None, "no"),
]
# Expected frames of each video by split, written by hand.
FRAMES = {
    "train": {"a": {*range(50), *range(91, 130), *range(155, 180)}, "b": set(range(70, 180)), "c": set(range(180))},
    "val": {"a": set(range(50, 91)), "b": set(range(70))},
    "test": {"a": set(range(130, 150))},
}


@pytest.fixture(scope="module")
def data_of_splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divided") / "data"
    starts = range(0, LENGTH_S, CHUNK_S)
    for shard, video in enumerate("abc"):
        first = 1000 * shard
        samples = [
            video_sample(video, 1000 * start, encode_chunk(first + FPS * start, FPS * CHUNK_S)) for start in starts
        ]
        write_shard(folder, shard, samples, split=SPLITS[video])
    write_captions(folder, SPLITS, CAPTIONS)
    write_latents(Written(folder), [[Chunk(video, 1000 * start, 24) for video in "abc" for start in starts]])
    return folder


def query(folder: Path, split: str, *, where: str | None = None) -> ClipQuery:
    return ClipQuery(folder, split=split, shape=SHAPE, loading=LOADING, where=where)


def frames_of(samples: Samples[Any], *, num_batches: int = 40) -> dict[str, set[int]]:
    """Return the frames of each video that training shows, read from the images."""
    seconds_by_split: dict[str, set[int]] = {}
    batches = samples.batches(max_failures=0)
    for _ in range(num_batches):
        shown = next(batches).batch["video"].numpy()[:, :, : SIZE_PX**2]
        for picture in shown.reshape(-1, SIZE_PX, SIZE_PX):
            number = read_frame_number(picture)
            seconds_by_split.setdefault("abc"[number // 1000], set()).add(number % 1000)
    return seconds_by_split


@pytest.mark.parametrize("split", FRAMES)
def test_chunks_show_the_frames_of_their_split_and_no_others(data_of_splits: Path, split: str) -> None:
    samples = open_chunk_clips(query(data_of_splits, split))
    frames_shown = frames_of(samples)
    assert frames_shown.keys() == FRAMES[split].keys()
    for video, frames in frames_shown.items():
        assert frames <= FRAMES[split][video]
        assert len(frames) > 0.8 * len(FRAMES[split][video])
    chunks = read_chunks(data_of_splits, split=split)
    read = [read_frame_number(frame[..., 1]) for chunk in chunks for frame in chunk.frames]
    assert read == [
        1000 * "abc".index(video) + frame for video in FRAMES[split] for frame in sorted(FRAMES[split][video])
    ]
    times = np.concatenate([chunk.time_s for chunk in chunks])
    np.testing.assert_allclose(times, np.array(read) % 1000 / FPS)
    assert len(chunks) == len(samples)


def test_segments_of_chunks_are_cut_from_the_parts(data_of_splits: Path) -> None:
    samples = open_chunk_clips(query(data_of_splits, "val"), segment_us=2_000_000)
    spans = [tuple(np.round(samples.span_s(number), 2)) for number in range(len(samples))]
    assert spans == [(5, 6), (6, 8), (8, 9.05), (0, 2), (2, 4), (4, 6), (6, 7)]


def test_the_log_and_the_status_say_what_is_left_out(data_of_splits: Path) -> None:
    assert (
        open_chunk_clips(query(data_of_splits, "train"))
        .describe()
        .startswith(
            "8 chunks of 3 videos of split 'train'; 13.6 s of 5 chunks left out, because they belong to other splits"
        )
    )
    lost = stored_lost_times(data_of_splits)
    assert lost == {"train": LostTime(6.55, 3), "val": LostTime(11.0, 2)}
    assert lost_lines(lost, indent=10)[1] == (
        "splits    val: 11.0 s of 2 chunks belong to captions of other splits; training without captions omits them"
    )


@pytest.mark.parametrize("split", FRAMES)
def test_captions_of_a_split_are_shown_whatever_the_split_of_their_video(data_of_splits: Path, split: str) -> None:
    samples = open_captioned_clips(query(data_of_splits, split))
    texts = {samples.text(number) for number in range(len(samples))}
    assert (
        texts
        == {
            "train": {"a 0 5", "a 9.05 12", "b 7 18", "c 0 inf"},
            "val": {"a 5 9.05", "a 15 15.5", "b 0 7"},
            "test": {"a 13 15"},
        }[split]
    )
    assert ("1 shows seconds of another split" in samples.describe()) == (split == "train")
    for video, frames in frames_of(samples, num_batches=20).items():
        assert frames <= FRAMES[split][video] | set(range(150, 155)) | {90}, "captions may start within a frame"


def test_labels_of_a_split_and_their_classes(data_of_splits: Path) -> None:
    classes = [ClassList("done", ("no", "yes"))]
    seconds_by_split = {}
    for split in FRAMES:
        samples = open_labelled_clips(query(data_of_splits, split), classes=classes)
        seconds_by_split[split] = {
            (*samples.span_s(row), classes[0].names[samples.labels[row]]) for row in range(len(samples))
        }
        num_captions = {"train": "4 of 5", "val": "3 of 3", "test": "1 of 1"}[split]
        assert samples.describe().startswith(f"{num_captions} caption")
    assert seconds_by_split["train"] == {(0, 5, "yes"), (9.05, 12, "no"), (7, 18, "yes"), (0, 18, "no")}
    assert seconds_by_split["val"] == {(5, 9.05, "no"), (15, 15.5, "yes"), (0, 7, "no")}
    assert seconds_by_split["test"] == {(13, 15, "no")}
    assert read_classes(data_of_splits, label="done", splits=["val"]).names == ("no", "yes")


def test_a_selection_of_captions_keeps_the_splits(data_of_splits: Path) -> None:
    samples = open_captioned_clips(query(data_of_splits, "val", where="label_done = 'no' and text like 'a%'"))
    assert [samples.text(number) for number in range(len(samples))] == ["a 5 9.05"]
    assert "2 of 6 chunks" not in samples.describe()


def test_segments_of_latents_have_no_second_of_another_split(data_of_splits: Path) -> None:
    splits_by_key: dict[tuple[str, str], set[str]] = {}
    for split in FRAMES:
        for captions in ("none", "words"):
            samples = open_latent_segments(
                segments(data_of_splits, split=split, segment="1s", captions=captions, batch=1)
            )
            for number in range(len(samples)):
                (begin_s, end_s), video = samples.span_s(number), samples.key(number)[0]
                shown = {round(begin_s * FPS) + frame for frame in range(round((end_s - begin_s) * FPS))}
                short = set(range(150, 155)) | {90} if split == "val" else set()
                assert shown <= FRAMES[split][video] | short, (split, video, begin_s)
                splits_by_key.setdefault((split, captions), set()).add(f"{video}{begin_s:g}")
    assert splits_by_key["val", "none"] == {
        *(f"a{second}" for second in range(5, 9)),
        *(f"b{second}" for second in range(7)),
    }
    assert splits_by_key["val", "words"] == splits_by_key["val", "none"]
    assert splits_by_key["test", "words"] == {"a13", "a14"}
    line = open_latent_segments(
        segments(data_of_splits, split="test", segment="1s", captions="none", batch=1)
    ).describe()
    assert "16 segments (16.0 s of 3 chunks) left out, because they overlap other splits" in line


def test_look_alikes_are_of_the_split_of_their_middle_frame(data_of_splits: Path) -> None:
    keys = chunks_table(data_of_splits)["key"].to_pylist()
    assert len(keys) == 9
    hashes = {key: phash(number) for number, key in enumerate(keys)}
    hashes["b_000012000"] = hashes["a_000006000"]  # the middle frame of chunk a_000006000, at 9 s, is in val
    hashes["c_000000000"] = hashes["b_000000000"]
    write_scores(data_of_splits, {key: {"phash": value} for key, value in hashes.items()})
    leakage = find_leakage(data_of_splits)
    assert leakage is not None and leakage.counts == {("val", "train"): 2}
    assert look_alike_keys(data_of_splits, split="val", other_split="train") == {"a_000006000", "b_000000000"}


def test_quickstart_counts_what_each_split_has(data_of_splits: Path) -> None:
    splits = survey(str(data_of_splits)).splits
    assert {name: (facts.num_videos, facts.num_chunks, facts.num_captions) for name, facts in splits.items()} == {
        "train": (3, 9, 5),
        "val": (2, 4, 3),
        "test": (1, 1, 1),
    }
