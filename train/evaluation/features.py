"""Extract one feature vector per clip with frozen video towers. Several towers share one pass over the clips.

Each rank extracts the features of its clips. `gather_features` gathers them on every rank, in the order of the samples.

Shape suffixes: B clips in a batch, C channels, T frames, H height, W width, D width of the features, N all clips.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import nn

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.distributed.world import World, gather_uneven


class Tower(Protocol):
    """Video tower that computes features."""

    def features(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Return one vector per clip, [B, D], before any projection or classification layer."""
        ...


@dataclass(frozen=True)
class ClipFeatures:
    """Features, with a row for each clip that could be decoded.

    Attributes:
        tower_features: Features from each tower, float32 [N, D].
        sample: Indices of the samples, int64 [N].
        num_failed: Number of samples that could not be decoded on this rank or, after `gather_features`, on all ranks.
        failed: Samples that could not be decoded on this rank.
    """

    tower_features: tuple[torch.Tensor, ...]
    sample: torch.Tensor
    num_failed: int
    failed: tuple[FailedSample, ...]


def tower_of(model: nn.Module) -> Tower:
    """Return the tower of a model: the model itself if it has `features`, otherwise its `video` tower."""
    # A wrapper such as DDP forwards calls, but does not have the other methods of the model.
    unwrapped_model = getattr(model, "module", model)
    return cast(Tower, unwrapped_model if hasattr(unwrapped_model, "features") else unwrapped_model.video)


@torch.no_grad()  # not inference_mode, because training also uses the tensors that a model caches
def extract(
    towers: Sequence[Tower],
    batches: Iterable[LoadedBatch],
    *,
    inputs: Callable[[Batch], torch.Tensor],
    device: torch.device,
) -> ClipFeatures:
    """Extract features from all batches of this rank with each tower.

    Args:
        towers: Video towers, on the device and in evaluation mode.
        batches: Batches of this rank.
        inputs: Function that takes a batch and returns the input of the towers, clips [B, C, T, H, W].
        device: Device of the towers.

    Raises:
        FailedWork: A feature is not finite.
    """
    parts: list[list[torch.Tensor]] = [[] for _ in towers]
    samples: list[torch.Tensor] = []
    failed: list[FailedSample] = []
    for loaded_batch in batches:
        failed += loaded_batch.failed
        if not loaded_batch.batch:
            continue
        clips_BCTHW = inputs(to_device(loaded_batch.batch, device))
        for tower, features in zip(towers, parts, strict=True):
            features.append(tower.features(clips_BCTHW).float())
        # Clone the positions, because later batches reuse the buffers.
        samples.append(loaded_batch.batch["position"].clone())
    empty = torch.empty(0, 0, device=device)
    tower_features = tuple(torch.cat(features) if features else empty for features in parts)
    sample_N = torch.cat(samples) if samples else torch.empty(0, dtype=torch.int64)
    for rows in tower_features:
        if num_bad := int((~rows.isfinite().all(dim=1)).sum()):
            raise FailedWork(
                f"features of {num_bad} of {count_noun(len(rows), 'clip')} are not finite: the weights have diverged"
            )
    return ClipFeatures(tower_features, sample_N.to(device), len(failed), tuple(failed))


def gather_features(features: ClipFeatures, world: World) -> ClipFeatures:
    """Return the features of all ranks in the order of the samples. All ranks must call this function.

    Raises:
        FailedWork: No rank has any features.
    """
    sample_N = gather_uneven(features.sample, world)
    num_failed = int(world.gather(torch.tensor([features.num_failed], device=sample_N.device)).sum())
    if not len(sample_N):
        detail = f"; the first failure: {features.failed[0].detail}" if features.failed else ""
        raise FailedWork(f"none of the {count_noun(num_failed, 'sample')} to probe could be decoded{detail}")
    order = sample_N.argsort()
    rows = tuple(gather_uneven(rows, world)[order] for rows in features.tower_features)
    return replace(features, tower_features=rows, sample=sample_N[order], num_failed=num_failed)
