"""A classifier over all clips of a split."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from manifests.errors import FailedWork
from train.data.batch import Batch, to_device
from train.data.classes import ClassList
from train.data.failures import FailedSample
from train.data.outcomes import LoadedBatch
from train.distributed.world import World
from train.tasks.classify.evaluating import Scores, view_mean


@dataclass(frozen=True)
class ClassResult:
    """What an evaluation found.

    Attributes:
        numbers: see `Scores.numbers`; of all ranks.
        num_samples, num_failed: of all ranks.
        failed: of this rank.
    """

    numbers: dict[str, float]
    num_samples: int
    num_failed: int
    failed: tuple[FailedSample, ...]


@torch.no_grad()  # not inference_mode: what a model keeps of a pass must serve training too
def score_classifier(
    model: nn.Module,
    batches: Iterable[LoadedBatch],
    *,
    inputs: Callable[[Batch], torch.Tensor],
    classes: ClassList,
    num_views: int,
    world: World,
    device: torch.device,
) -> ClassResult:
    """Runs a model, which is in evaluation mode, over this rank's part; all ranks call it.

    Args:
        inputs: clips [B, C, T, H, W] of a batch, the frames of all views one after another.

    Raises:
        FailedWork: nothing could be decoded, or logits are no numbers.
    """
    scores = Scores(classes, device)
    failed: list[FailedSample] = []
    is_finite = True
    for loaded in batches:
        failed += loaded.failed
        if not loaded.batch:
            continue
        batch = to_device(loaded.batch, device)
        views = inputs(batch).unflatten(2, (num_views, -1)).unbind(2)
        logits_BVK = torch.stack([model(view_BCTHW) for view_BCTHW in views], dim=1)
        is_finite &= bool(logits_BVK.isfinite().all())
        scores.add(view_mean(logits_BVK), batch["label"])
    num_samples = int(world.sum(scores.tallies[classes.label].num_all).sum())
    counts = world.sum(torch.tensor([len(failed), not is_finite], device=device)).tolist()
    numbers = scores.numbers(world)
    if counts[1]:
        raise FailedWork("logits are not finite: the weights have diverged")
    if not num_samples:
        raise FailedWork(f"none of the {counts[0]} clips could be decoded")
    return ClassResult(numbers, num_samples, counts[0], tuple(failed))
