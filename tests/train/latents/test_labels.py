"""Labels of latent segments."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import read_captions
from clipmill.train.data.classes import ClassList, read_classes
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.samples import Samples
from tests.train.latents.querying import segments
from tests.train.latents.written import Chunk, Written, write_latents
from tests.train.tiny_data import Caption, write_captions

MOTION = ClassList("motion", ("falls", "rests", "rises"))


def caption(video_id: str, begin_s: float, end_s: float, motion: str | None, shape: str | None = None) -> Caption:
    return Caption(video_id, begin_s, end_s, "x", labels={"label_motion": motion, "label_shape": shape})


# With segments of 5 s at 4 frames per second, a has three segments in each of two chunks, and b has three.
CAPTIONS = [
    caption("a", 0.0, 3.0, "rises", "disc"),
    caption("a", 3.0, 5.0, "falls", "star"),  # the shorter part of the segment
    caption("a", 5.0, 8.0, None, "disc"),  # longer, but without a motion label
    caption("a", 8.0, 10.0, "falls"),
    caption("a", 10.0, 12.5, "rests"),
    caption("a", 12.5, 15.0, "rises"),  # as long as the previous caption
    caption("a", 16.0, float("inf"), "falls"),  # until the end of the video
    caption("a", 7.0, 7.0, "rises"),  # has no duration
    caption("b", 1.0, 2.0, "hovers"),  # has no class
    caption("b", 5.0, 6.0, None, "star"),
]


@pytest.fixture(scope="module")
def written_data(tmp_path_factory: pytest.TempPathFactory) -> Written:
    data_dir = tmp_path_factory.mktemp("labelled")
    write_captions(data_dir, {"a": "train", "b": "train", "c": "val"}, CAPTIONS)
    made = Written(data_dir)
    write_latents(made, [[Chunk("a", 0, 60), Chunk("a", 15000, 60), Chunk("b", 0, 60)], [Chunk("c", 0, 60)]])
    return made


def open_segments(
    data_dir: Path, *, split: str = "train", also: tuple[ClassList, ...] = (), **ranks: Any
) -> Samples[Any]:
    query = segments(data_dir, split=split, classes=(MOTION, *also), captions="none", batch=4, **ranks)
    return open_latent_segments(query)


def test_a_segment_has_the_label_of_the_caption_that_shares_most_time_with_it(written_data: Written) -> None:
    samples = open_segments(written_data.data_dir)
    names = [MOTION.names[label] for label in samples.labels]
    # The segments of a are 0-5, 5-10, 10-15, 15-20, 20-25 and 25-30 s; b has none.
    assert names == ["rises", "falls", "rests", "falls", "falls", "falls"]
    assert samples.video.tolist() == [0] * 6 and len(samples) == 6


def test_labels_of_several_lists_belong_to_one_sample(written_data: Written) -> None:
    shapes = read_classes(written_data.data_dir, label="shape", splits=("train",))
    samples = open_segments(written_data.data_dir, also=(shapes,))
    assert samples.all_labels.tolist() == [[2, 0], [0, 0], [1, -1], [0, -1], [0, -1], [0, -1], [-1, 1]]
    assert samples.video.tolist() == [0] * 6 + [1]


def test_batches_have_the_labels_and_the_latents_of_their_segments(written_data: Written) -> None:
    samples = open_segments(written_data.data_dir)
    of_chunk = {key: bits.reshape(3, 20, *bits.shape[1:]) for key, bits in written_data.latents.items()}
    labels_by_segment = {}
    for rank in range(2):
        for loaded in open_segments(written_data.data_dir, rank=rank, num_ranks=2).evaluation_batches():
            rows = zip(loaded.batch["position"].tolist(), loaded.batch["label"].tolist(), strict=True)
            for (sample, label), key, latents in zip(rows, loaded.batch["key"], loaded.batch["latents"], strict=True):
                assert np.array_equal(latents.numpy().view(np.uint16), of_chunk[key][sample % 3])
                labels_by_segment[sample] = label
    assert [labels_by_segment[sample] for sample in range(len(samples))] == samples.labels.tolist()
    trained = next(samples.batches()).batch
    assert samples.labels[trained["clip_id"]].tolist() == trained["label"].tolist()


def test_what_is_left_out_is_counted(written_data: Written) -> None:
    told = open_segments(written_data.data_dir).describe()
    assert "6 segments of 20 frames" in told and "3 of 3 classes (motion)" in told
    assert "3 segments without label left out" in told
    assert "captions: 2 without label, 1 of other classes" in told
    # Overlaps are 3, 2, 2.5, 4, 5 and 5 of 5 seconds.
    assert "covers 72% of a segment on average" in told


def test_a_caption_that_is_stated_later_changes_what_the_set_is(written_data: Written, tmp_path: Path) -> None:
    before = open_segments(written_data.data_dir).fingerprint
    assert open_segments(written_data.data_dir, rank=1, num_ranks=2).fingerprint == before
    (tmp_path / "latents").symlink_to(written_data.data_dir / "latents")
    (tmp_path / "dataset.json").write_bytes((written_data.data_dir / "dataset.json").read_bytes())
    changed = [caption("a", 0.0, 3.0, "falls"), *CAPTIONS[1:]]
    write_captions(tmp_path, {"a": "train", "b": "train", "c": "val"}, changed)
    assert len(read_captions(tmp_path)) == len(CAPTIONS)
    assert open_segments(tmp_path).fingerprint != before


def test_a_split_without_labels_has_nothing_to_show(written_data: Written) -> None:
    with pytest.raises(UserError, match="no segment of split 'val' is usable: 0 segments"):
        open_segments(written_data.data_dir, split="val")


def test_labels_stay_with_their_segments_where_a_video_has_too_many(written_data: Written) -> None:
    every, some = (open_segments(written_data.data_dir, max_segments=most) for most in (None, 2))
    spans = np.stack([every.video, *every.span_us(np.arange(len(every)))], axis=1).tolist()
    kept = [spans.index(span) for span in np.stack([some.video, *some.span_us(np.arange(len(some)))], axis=1).tolist()]
    assert 0 < len(some) < len(every) and kept == sorted(set(kept))
    assert some.labels.tolist() == every.labels[kept].tolist() and some.video.tolist() == every.video[kept].tolist()
    [batch] = [loaded.batch for loaded in some.evaluation_batches()]
    assert batch["label"].tolist() == some.labels.tolist()
