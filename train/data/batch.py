"""What passes from the loader to a task, by name. This is the one list of the names.

    input        "pixels" or "latents"  what the pictures are: `video`, or `latents`
    position     int64 [B]            place in the endless order of samples (train.data.order)
    key          sequence of B strings  chunk in which the clip begins
    caption_id   int64 [B]            of the manifest
    video        uint8 [B, T, H, W, 3]  RGB frames of the clip, cropped and resized
    tokens       int64 [B, L]         ids of the caption's tokens
    latents      float16 or bfloat16 [B, T, C, h, w]  of a segment of the chunk, scaled as its recipe says
    num_frames   int64 [B]            real frames among the T, where tails are filled up with zeros
    text         float16 [B, D]       embedding of the caption, of unit length

A task says which of them it needs; a sample has the same names without the B.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    import torch

Input = Literal["pixels", "latents"]

_TENSORS = ("position", "caption_id", "video", "tokens", "latents", "num_frames", "text")


class Sample(TypedDict, total=False):
    """One clip of pixels."""

    position: int
    key: str
    caption_id: int
    video: "torch.Tensor"
    tokens: "torch.Tensor"


class Batch(TypedDict, total=False):
    """Several clips."""

    input: Input
    position: "torch.Tensor"
    key: Sequence[str]
    caption_id: "torch.Tensor"
    video: "torch.Tensor"
    tokens: "torch.Tensor"
    latents: "torch.Tensor"
    num_frames: "torch.Tensor"
    text: "torch.Tensor"


def collate(samples: Sequence[Sample]) -> Batch:
    """Puts samples of equal shapes into one batch, in their order."""
    import torch

    batch = Batch(
        input="pixels",
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
    for name in _TENSORS:
        if name in moved:
            moved[name] = moved[name].to(device, non_blocking=True)  # type: ignore[literal-required]
    return moved
