from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from open_clip.tokenizer import SimpleTokenizer

from clipmill.train.tasks.caption.java import MetricUnavailable
from clipmill.train.weights.hf_clip import cleaning_normalizer
from tests.figures import encoded_once
from tests.small_tiny import restore, shrink
from tests.train.classify.moving import write_moving
from tests.train.full_disk import small_disk
from tests.train.latents.columns import write_columns
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

NUM_FRAMES = 55  # chunks of 20, 20 and 15 frames
# These files use Java. In the other files METEOR is unavailable, because it takes longer to start than a complete test.
WITH_JAVA = ("test_java_metrics.py",)
VIDEOS = {"a": "train", "b": "train", "c": "train", "d": "val"}


@pytest.fixture(scope="module")
def complete_tiny() -> Iterator[None]:
    """Use the model `tiny` with its published size, for recorded numbers and weights."""
    restore()
    yield
    shrink()


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_are_built_once() -> Iterator[None]:
    """Cache CLIP's tokenizer and its form for transformers, which takes most of the time of an export."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("open_clip.tokenizer.SimpleTokenizer", cache(SimpleTokenizer))
        patch.setattr("clipmill.train.weights.hf_clip.cleaning_normalizer", cache(cleaning_normalizer))
        yield


@pytest.fixture(scope="session", autouse=True)
def _figures_are_encoded_once() -> Iterator[None]:
    """Cache the encoded figures, because evaluations of many runs show the same clips."""
    with encoded_once():
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_java(request: pytest.FixtureRequest) -> Iterator[None]:
    """Behave as a machine without Java, except in the files of `WITH_JAVA`."""

    def java() -> None:
        raise MetricUnavailable("left out of this test")

    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in WITH_JAVA:
            patch.setattr("clipmill.train.tasks.caption.java.java", java)
        yield


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos for training and one held-out video, with three captions each.

    The second caption of each video crosses a chunk boundary.
    """
    data_dir = tmp_path_factory.mktemp("data")
    for shard_id, split in enumerate(("train", "val")):
        samples = [sample for name, its in VIDEOS.items() if its == split for sample in chunks_of(name, NUM_FRAMES)]
        write_shard(data_dir, shard_id, samples, split=split)
    captions = []
    for video_id in VIDEOS:
        captions += [
            Caption(video_id, 0.0, 1.0, "it begins"),
            Caption(video_id, 1.2, 2.8, f"the middle of {video_id}"),
            Caption(video_id, 3.0, float("inf"), f"the end of {video_id}"),
        ]
    write_captions(data_dir, VIDEOS, captions)
    return data_dir


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of half a megabyte."""
    with small_disk(tmp_path / "disk") as folder:
        yield folder


@pytest.fixture(scope="session")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled clips from twelve videos, three of them held out."""
    data_dir = tmp_path_factory.mktemp("moving")
    write_moving(data_dir)
    return data_dir


@pytest.fixture(scope="session")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents and text embeddings from sixteen videos, half of them held out."""
    return write_columns(tmp_path_factory.mktemp("columns"))
