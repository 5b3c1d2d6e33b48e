"""Features of a split on one rank and on two, and the handling of failed samples."""

import pytest
import torch
from torch import nn

from clipmill.manifests.errors import FailedWork
from clipmill.train.data.batch import Batch
from clipmill.train.data.order import Cursor
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.features import ClipFeatures, extract, gather_features, tower_of
from tests.train.evaluation.threads import on_two_ranks

CPU = torch.device("cpu")


class Colours:
    """Tower that returns the colours of the first frame, or their opposites."""

    def __init__(self, sign: float) -> None:
        self.sign = sign

    def features(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        return (self.sign * video_BCTHW[:, :, 0, 0, 0]).to(torch.bfloat16)


def load_batch(samples: list[int], *, num_failed: int = 0) -> LoadedBatch:
    failed = tuple(FailedSample(1000 + number, "k", "undecodable", "broken") for number in range(num_failed))
    if not samples:
        return LoadedBatch(Batch(), failed, Cursor(0))
    video = torch.tensor(samples, dtype=torch.float32)[:, None, None, None, None].repeat(1, 2, 1, 1, 1)
    return LoadedBatch(Batch(input="pixels", position=torch.tensor(samples), video=video), failed, Cursor(0))


def find_features(batches: list[LoadedBatch], world: World) -> ClipFeatures:
    rank_features = extract([Colours(1), Colours(-1)], batches, inputs=lambda batch: batch["video"], device=CPU)
    return gather_features(rank_features, world)


@pytest.mark.parametrize(
    "parts",
    [
        ([[0, 2], [4, 6]], [[1, 3], [5]]),  # the second rank has one sample less
        ([[0, 1, 2, 3, 4, 5, 6]], []),  # the second rank has no sample
        ([[]], [[0, 1, 2], [3, 4, 5, 6], []]),
    ],
)
def test_two_ranks_have_the_features_of_one_in_the_order_of_the_samples(
    parts: tuple[list[list[int]], list[list[int]]],
) -> None:
    for whole in on_two_ranks(lambda world: find_features([load_batch(its) for its in parts[world.rank]], world)):
        assert whole.sample.tolist() == list(range(7))
        features, other = whole.tower_features
        assert features.dtype == torch.float32 and features[:, 0].tolist() == list(range(7))
        assert torch.equal(other, -features)


def test_failed_samples_of_all_ranks_are_counted() -> None:
    def work(world: World) -> int:
        return find_features([load_batch([world.rank], num_failed=1 + world.rank)], world).num_failed

    assert on_two_ranks(work) == [3, 3]
    with pytest.raises(FailedWork, match=r"none of the 2 samples.*broken"):
        find_features([load_batch([], num_failed=2)], World())


def test_features_that_are_no_numbers_are_not_scored() -> None:
    batch = load_batch([0, 1, 2])
    batch.batch["video"][1] = torch.nan
    with pytest.raises(FailedWork, match="features of 1 of 3 clips are not finite"):
        find_features([batch], World())


def test_what_is_probed_is_a_classifier_or_a_video_tower_whatever_wraps_it() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.video = nn.Identity()

    class Classifier(Towers):
        def features(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
            return video_BCTHW

    towers, classifier = Towers(), Classifier()
    for model, expected in ((towers, towers.video), (classifier, classifier), (nn.DataParallel(towers), towers.video)):
        tower: object = tower_of(model)
        assert tower is expected
