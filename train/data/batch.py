"""What passes from the loader to a task, by name. This is the one list of the names.

    input        "pixels" or "latents"  what the pictures are: `video`, or `latents`
    position     int64 [B]            place in the endless order of samples (train.data.order)
    key          sequence of B strings  chunk in which the clip begins
    clip_id      int64 [B]            of the span that is shown, 0 <= id < num_clips of the set
    caption_id   int64 [B]            of the manifest, 0 <= id < num_caption_ids of the set
    relevancy    float32 [B]          of the caption for the clip, where captions are drawn by it
    label        int64 [B]            class of the clip, in a labelled set
    targets      int64 [B, K, L]      tokens of K captions of the clip, each with its end; -100 where there is none
    video        uint8 [B, T, S * S * 3 / 2]  frames of the clip, cropped and resized to S x S, as YUV 4:2:0: each
                                      picture is Y [S, S], then U and V [S / 2, S / 2]; or RGB where asked for,
                                      [B, T, S, S, 3]; T counts the frames of all views, one view after another
    colour       uint8 [B]            matrix and range of YUV frames (train.augment.colour)
    tokens       int64 [B, L]         ids of the caption's tokens
    latents      float16 or bfloat16 [B, T, C, h, w]  of a segment of the chunk, scaled as its recipe says
    num_frames   int64 [B]            real frames among the T, where tails are filled up with zeros
    text         float16 [B, D]       embedding of the caption, of unit length
    length       int64 [B]            tokens of the caption with its end; of the longest of K. `to_device` counts them:
                                      they stay on the CPU, where they are asked for, when the tokens have left it

A task says which of them it needs; a sample has the same names without the B.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Input = Literal["pixels", "latents"]

PICTURES = ("video", "colour", "latents")
# What a model works on; position, key and ids stay on the CPU, where they are asked for.
TENSORS = (*PICTURES, "tokens", "num_frames", "text", "relevancy", "label", "targets")


class Sample(TypedDict, total=False):
    """One clip of pixels."""

    position: int
    key: str
    clip_id: int
    caption_id: int
    relevancy: float
    label: int
    targets: NDArray[np.int64]
    video: NDArray[np.uint8]
    colour: int
    tokens: NDArray[np.int64]
    text: NDArray[np.float16]


class Batch(TypedDict, total=False):
    """Several clips."""

    input: Input
    position: "torch.Tensor"
    key: Sequence[str]
    clip_id: "torch.Tensor"
    caption_id: "torch.Tensor"
    relevancy: "torch.Tensor"
    label: "torch.Tensor"
    targets: "torch.Tensor"
    video: "torch.Tensor"
    colour: "torch.Tensor"
    tokens: "torch.Tensor"
    latents: "torch.Tensor"
    num_frames: "torch.Tensor"
    text: "torch.Tensor"
    length: "torch.Tensor"


class BatchRing:
    """Puts samples of equal shapes into batches whose videos lie in two buffers by turns.

    Args:
        batch: samples of the largest batch.
        pin: whether the buffers are pinned, for copies to a GPU.
    """

    def __init__(self, batch: int, *, pin: bool) -> None:
        self._batch = batch
        self._pin = pin
        self._buffers: list[torch.Tensor] = []

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """The batch of `samples`, in their order; its video is overwritten by the second batch after it."""
        import torch

        batch = Batch(
            input="pixels",
            position=torch.tensor([sample["position"] for sample in samples]),
            key=[sample["key"] for sample in samples],
        )
        for name in ("clip_id", "caption_id", "label"):
            if name in samples[0]:
                batch[name] = torch.tensor([sample[name] for sample in samples])  # type: ignore[literal-required]
        if "relevancy" in samples[0]:
            batch["relevancy"] = torch.tensor([sample["relevancy"] for sample in samples], dtype=torch.float32)
        if "video" in samples[0]:
            batch["video"] = self._video([sample["video"] for sample in samples])
        if "colour" in samples[0]:
            batch["colour"] = torch.tensor([sample["colour"] for sample in samples], dtype=torch.uint8)
        if "tokens" in samples[0]:
            batch["tokens"] = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]))
        if "targets" in samples[0]:
            batch["targets"] = torch.from_numpy(np.stack([sample["targets"] for sample in samples]))
        if "text" in samples[0]:
            batch["text"] = torch.from_numpy(np.stack([sample["text"] for sample in samples]))
        return batch

    def _video(self, clips: list[NDArray[np.uint8]]) -> "torch.Tensor":
        import torch

        if not self._buffers:
            size = (self._batch, *clips[0].shape)
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._pin) for _ in range(2)]
        self._buffers.reverse()
        buffer = self._buffers[0][: len(clips)]
        np.stack(clips, out=buffer.numpy())
        return buffer


def to_device(batch: Batch, device: "torch.device", *, names: Sequence[str] = TENSORS) -> Batch:
    """The batch with what a model works on on `device`, and with the lengths of its captions on the CPU.

    Args:
        names: what is moved.
    """
    moved = batch.copy()
    if "length" not in moved:
        if "tokens" in moved:
            # CLIP's end of text has the largest id.
            moved["length"] = moved["tokens"].argmax(dim=1).add_(1).cpu()
        elif "targets" in moved:
            moved["length"] = (moved["targets"] >= 0).sum(dim=-1).amax(dim=-1).cpu()
    for name in names:
        if name in moved:
            moved[name] = moved[name].to(device, non_blocking=True)  # type: ignore[literal-required]
    return moved
