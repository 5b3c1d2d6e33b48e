"""Unreadable commits and indexes are reported before a run starts."""

import os
from itertools import islice
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.models.text import load_tokenizer
from tests.train.latents.querying import segments
from tests.train.latents.written import Caption as LatentsCaption
from tests.train.latents.written import Chunk, write_all
from tests.train.test_video_captions import SHAPE
from tests.train.tiny_data import CHUNK_FRAMES, Caption, encode_chunk, video_sample, write_captions, write_shard


@pytest.mark.parametrize("what", ["tar", "index.arrow"])
def test_a_pipe_in_place_of_a_file_fails_its_own_samples_alone(tmp_path: Path, what: str) -> None:
    """Opening a named pipe blocks until a writer opens it."""
    for number, video in enumerate(("a", "b")):
        write_shard(tmp_path, number, [video_sample(video, 0, encode_chunk(0, CHUNK_FRAMES))], split="train")
    captions = [Caption(video, at, at + 0.5, f"{video} at {at}") for video in ("a", "b") for at in (0, 0.5)]
    write_captions(tmp_path, {"a": "train", "b": "train"}, captions)
    loading = LoaderSettings(batch=2, num_threads=2, num_ahead=4, seed=0, stuck_after_s=20.0)
    samples = open_captioned_clips(
        ClipQuery(tmp_path, split="train", shape=SHAPE, loading=loading), tokenize=load_tokenizer()
    )
    [path] = tmp_path.glob(f"video/*/000000-*.{what}")
    path.unlink()
    os.mkfifo(path)
    batches = samples.batches(max_failures=100)
    loaded = list(islice(batches, 8))
    batches.close()
    failed = [failure for loaded_batch in loaded for failure in loaded_batch.failed]
    assert failed and {(failure.key, failure.reason) for failure in failed} == {("a_000000000", "shard_unreadable")}
    assert {key for loaded_batch in loaded for key in loaded_batch.batch["key"]} == {"b_000000000"}


@pytest.mark.parametrize("what", ["tar", "index.arrow"])
def test_a_pipe_in_place_of_a_file_of_latents_is_named(tmp_path: Path, what: str) -> None:
    written = write_all(tmp_path / "data", [[Chunk("a", 0, 60)]], [LatentsCaption("a", 0, 15, "one")])
    [path] = written.latents_dir.glob(f"*.{what}")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=f"{path.name} cannot be used: .*not a regular file"):
        open_latent_segments(segments(written.data_dir, split="train"))
