"""What passes from the loader to a task, by name. This is the one list of the names.

    position     int64 [B]            place in the endless order of samples (train.data.order)
    key          list of B strings    chunk in which the clip begins
    caption_id   int64 [B]            of the manifest
    video        uint8 [B, T, H, W, 3]  RGB frames of the clip, cropped and resized
    tokens       int64 [B, L]         ids of the caption's tokens

A task says which of them it needs; a sample has the same names without the B.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch


class Sample(TypedDict, total=False):
    """One clip."""

    position: int
    key: str
    caption_id: int
    video: "torch.Tensor"
    tokens: "torch.Tensor"


class Batch(TypedDict, total=False):
    """Several clips."""

    position: "torch.Tensor"
    key: list[str]
    caption_id: "torch.Tensor"
    video: "torch.Tensor"
    tokens: "torch.Tensor"


def collate(samples: Sequence[Sample]) -> Batch:
    """Puts samples of equal shapes into one batch, in their order."""
    import torch

    batch = Batch(
        position=torch.tensor([sample["position"] for sample in samples]),
        key=[sample["key"] for sample in samples],
        caption_id=torch.tensor([sample["caption_id"] for sample in samples]),
    )
    if "video" in samples[0]:
        batch["video"] = torch.stack([sample["video"] for sample in samples])
    if "tokens" in samples[0]:
        batch["tokens"] = torch.stack([sample["tokens"] for sample in samples])
    return batch


def to_device(batch: Batch, device: "torch.device") -> Batch:
    """The batch with its tensors on `device`."""
    moved = batch.copy()
    for name in ("position", "caption_id", "video", "tokens"):
        if name in moved:
            moved[name] = moved[name].to(device, non_blocking=True)  # type: ignore[literal-required]
    return moved
