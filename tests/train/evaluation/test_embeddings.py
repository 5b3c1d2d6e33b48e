"""Embedding a split in parts and combining the parts, without a real model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clipmill.manifests.errors import FailedWork
from clipmill.train.data.batch import Batch
from clipmill.train.data.order import Cursor
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.distributed.world import World
from clipmill.train.tasks.dual_encoder.protocols import Embeddings, embed_all, gather_embeddings, text_keys
from tests.train.evaluation.threads import on_two_ranks

CPU = torch.device("cpu")


class Towers(nn.Module):
    """Towers that embed a clip as the colours of its first two frames, and a caption as its first two tokens."""

    def forward(self, clips: torch.Tensor, captions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normalize = nn.functional.normalize
        return normalize(clips[:, :, 0, 0, 0], dim=-1), normalize(captions[:, :2].float(), dim=-1)


class Task:
    def inputs(self, batch: Batch, *, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        assert not is_training
        return batch["video"], batch["tokens"]


def load_batch(samples: list[int], *, num_looks: int = 1, failed: int = 0) -> LoadedBatch:
    """Make a batch in which each view of sample i points in a different direction."""
    failures = tuple(FailedSample(1000 + number, "k", "undecodable", "broken") for number in range(failed))
    if not samples:
        return LoadedBatch(Batch(), failures, Cursor(0))
    angle = torch.tensor([[0.3 * sample + 0.1 * look for look in range(num_looks)] for sample in samples])
    video = torch.stack([angle.cos(), angle.sin()], 1)[:, :, :, None, None].repeat_interleave(3, dim=2)  # T = 3
    batch = Batch(
        input="pixels",
        position=torch.tensor(samples),
        caption_id=torch.tensor(samples) + 100,
        video=video,
        tokens=torch.tensor([[sample % 4, 7, 9] for sample in samples]),
    )
    return LoadedBatch(batch, failures, Cursor(0))


def embed(batches: list[LoadedBatch], **options: Any) -> Embeddings:
    return embed_all(Task(), Towers().eval(), batches, device=CPU, **options)


def same(first: Embeddings, other: Embeddings) -> bool:
    names = ("video", "text", "text_key", "caption_id", "samples")
    return all(np.array_equal(getattr(first, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize(
    "parts",
    [
        ([[0, 2], [4, 6]], [[1, 3], [5]]),  # the second rank has one sample less
        ([[0, 2, 4, 6]], [[1], [3], [5]]),  # in batches of different sizes
        ([[0, 1, 2, 3, 4, 5, 6]], []),  # the second rank has no sample
        ([[]], [[0, 1, 2], [3, 4, 5, 6], []]),
    ],
)
def test_two_ranks_have_what_one_has(parts: tuple[list[list[int]], list[list[int]]]) -> None:
    whole = gather_embeddings(embed([load_batch([0, 1, 2, 3, 4, 5, 6])]), World(), device=CPU)
    for embeddings in on_two_ranks(
        lambda world: gather_embeddings(embed([load_batch(its) for its in parts[world.rank]]), world, device=CPU)
    ):
        assert same(embeddings, whole)


def test_failures_of_all_ranks_are_counted() -> None:
    def work(world: World) -> Embeddings:
        return gather_embeddings(embed([load_batch([world.rank], failed=1 + world.rank)]), world, device=CPU)

    assert [embeddings.num_failed for embeddings in on_two_ranks(work)] == [3, 3]


def test_nothing_at_all_is_failed_work_that_says_why() -> None:
    with pytest.raises(FailedWork, match=r"none of the samples.*broken"):
        gather_embeddings(embed([load_batch([], failed=2)]), World(), device=CPU)


def test_looks_at_a_clip_are_averaged() -> None:
    embeddings = embed([load_batch([0, 5], num_looks=3)], num_clips=3)
    # The mean of three unit vectors that are 0.1 apart has the direction of the middle vector.
    angles = np.array([0.1, 1.6])
    assert embeddings.video == pytest.approx(np.stack([np.cos(angles), np.sin(angles)], 1), abs=1e-6)
    assert len(embeddings) == 2 and np.linalg.norm(embeddings.video, axis=1) == pytest.approx(1, abs=1e-6)


def test_embeddings_that_are_no_numbers_are_not_scored() -> None:
    batch = load_batch([0, 1])
    batch.batch["video"][1] = torch.nan
    with pytest.raises(FailedWork, match="1 of 2 embeddings"):
        embed([batch])


def test_what_a_batch_lends_is_copied() -> None:
    """The loader reuses its buffers."""

    def lend_batches() -> Iterator[LoadedBatch]:
        batch = load_batch([0, 1])
        yield batch
        batch.batch["position"].fill_(-1)
        batch.batch["caption_id"].fill_(-1)
        yield load_batch([])

    embeddings = embed_all(Task(), Towers(), lend_batches(), device=CPU)
    assert embeddings.samples.tolist() == [0, 1] and embeddings.caption_id.tolist() == [100, 101]


def test_keys_of_texts_are_equal_where_the_texts_are() -> None:
    tokens = np.array([[5, 6, 0], [1, 2, 0], [5, 6, 0], [5, 6, 7]])
    first, second, again, longer = text_keys(tokens).tolist()
    assert first == again and len({first, second, longer}) == 3
