"""Repeated augmentation: a clip is visited several times in a row and decoded once."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.classes import read_classes
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.decoders import ChunkDecoder
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.chunk_clips import open_labelled_clips
from clipmill.train.data.samples import Samples

NUM_CLIPS = 36


def labelled_clips(data_dir: Path, *, repeats: int, batch: int = 12, rank: int = 0, num_ranks: int = 1) -> Samples[Any]:
    return open_labelled_clips(
        ClipQuery(
            data_dir,
            split="train",
            shape=ClipShape(sampling=Sampling(num_frames=2), size_px=32, min_crop_area=0.3),
            loading=LoaderSettings(
                batch=batch, num_threads=1, num_ahead=batch, seed=0, group=repeats, rank=rank, num_ranks=num_ranks
            ),
        ),
        classes=[read_classes(data_dir, label="class", splits=["train"])],
        repeats=repeats,
    )


def test_an_epoch_shows_every_clip_as_often_as_asked_for_each_time_in_another_way(
    moving: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Any] = []
    decode = ChunkDecoder.decode

    def count_decode(chunks: ChunkDecoder, read: Any) -> Any:
        decoded.append(read)
        return decode(chunks, read)

    monkeypatch.setattr(ChunkDecoder, "decode", count_decode)
    samples = labelled_clips(moving, repeats=3)
    assert samples.num_samples == 3 * NUM_CLIPS and samples.num_clips == NUM_CLIPS
    assert "36 of 37 captions" in samples.describe() and "3 samples of each clip per epoch" in samples.describe()
    batches = list(islice(samples.batches(max_failures=0), 9))
    # Each clip lies in one chunk, and the loader may have decoded ahead.
    assert NUM_CLIPS <= len(decoded) <= NUM_CLIPS + 12
    clips = np.concatenate([loaded.batch["clip_id"].numpy() for loaded in batches]).reshape(-1, 3)
    assert (clips == clips[:, :1]).all() and sorted(clips[:, 0]) == list(range(NUM_CLIPS))
    for loaded in islice(samples.batches(position=0, max_failures=0), 3):
        batch = loaded.batch
        assert (batch["label"].numpy() == samples.labels[batch["clip_id"].numpy()]).all()
        first, second, third = batch["video"].unflatten(0, (-1, 3)).unbind(1)
        assert (first != second).flatten(1).any(1).all() and (second != third).flatten(1).any(1).all()
