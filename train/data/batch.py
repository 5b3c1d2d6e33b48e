"""Batches: their entries, the collation of samples, and the transfer to the device.

    input        "pixels" or "latents"  input of the model: `video` for "pixels", `latents` for "latents"
    position     int64 [B]            position in the endless sample order (clipmill.train.data.order)
    key          sequence of B strings  key of the chunk in which the clip begins, or name of the sample in a tar
    clip_id      int64 [B]            ID of the clip, 0 <= ID < `num_clips` of the samples
    caption_id   int64 [B]            ID of the caption in the manifest, 0 <= ID < `num_caption_ids` of the samples
    relevancy    float32 [B]          relevancy of the caption for the clip, if captions are drawn by relevancy
    text_row     int64 [B]            row of the caption in the stored texts, for latents without tokens
    label        int64 [B]            class of the clip, for labelled samples
    targets      int64 [B, K, L]      tokens of K captions per clip, each with an end token; padded with -100
    video        uint8 [B, T, S * S * 3 / 2]  frames of the clip, cropped and resized to S x S, as YUV 4:2:0: for each
                                      frame Y [S, S], then U and V [S / 2, S / 2]; or RGB on request,
                                      [B, T, S, S, 3]. T counts the frames of all views, one view after another
    time_s       float64 [B, T]       time in the video at which each frame appears on screen, in seconds; for latents,
                                      the time of each latent frame; nan for images and padding. T counts the frames of
                                      all temporal views. The entry stays on the CPU
    is_padded    bool [B, T]          for clips at given times: True for moments outside the video or the row's span
    colour       uint8 [B]            colour matrix and range of YUV frames (clipmill.train.augment.colour)
    tokens       int64 [B, L]         token IDs of the caption
    latents      float16 or bfloat16 [B, T, C, h, w]  latents of the segment, scaled as their recipe specifies. For a
                                      video VAE, the stored layout is [B, C, T, h, w], and this tensor is a view of it
    num_frames   int64 [B]            number of valid frames among the T frames, if tails are zero-padded
    text         float16 [B, D]       unit-length embedding of the caption; or, for stored sequences, [B, L, D]: the
                                      vectors of the caption's tokens, zero-padded to the longest sequence in the batch
    text_mask    bool [B, L]          True for token vectors, False for padding
    length       int64 [B]            number of tokens in the caption, or in the longest of K captions, including the
                                      end token. `to_device` computes the entry and leaves it on the CPU
    caption      list of B strings    text of the caption, if captions are neither tokenized nor embedded
    begin_s, end_s  float64 [B]       start and end of the clip in its video, seconds (clipmill.train.data.interface)
    folder       int64 [B]            in a mixture, index of the data folder (clipmill.train.data.interface)

Each task declares the entries that it needs. A sample has the same entries without the batch dimension B.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Input = Literal["pixels", "latents"]

PICTURES = ("video", "colour", "latents")
# Entries that `to_device` moves. Positions, keys and IDs stay on the CPU, where they are used.
TENSORS = (*PICTURES, "tokens", "num_frames", "text", "text_mask", "relevancy", "label", "targets")

# Dtypes of the sample entries that are numbers or lists of numbers.
_SCALARS = {"clip_id": "int64", "caption_id": "int64", "label": "int64", "relevancy": "float32", "colour": "uint8"}
_SCALARS |= {"time_s": "float64", "is_padded": "bool"}
NUM_BUFFERS = 2  # a batch is overwritten by the second batch after it
_ARRAYS = ("tokens", "targets", "text")


class Sample(TypedDict, total=False):
    """Clip of video frames, and its annotations."""

    position: int
    key: str
    clip_id: int
    caption_id: int
    relevancy: float
    label: int
    targets: NDArray[np.int64]
    video: NDArray[np.uint8]
    time_s: Sequence[float]
    is_padded: Sequence[bool]
    colour: int
    tokens: NDArray[np.int64]
    text: NDArray[np.float16]
    caption: str


class Batch(TypedDict, total=False):
    """Batch of clips or latents. See the module docstring for the entries."""

    input: Input
    position: "torch.Tensor"
    key: Sequence[str]
    clip_id: "torch.Tensor"
    caption_id: "torch.Tensor"
    relevancy: "torch.Tensor"
    label: "torch.Tensor"
    targets: "torch.Tensor"
    video: "torch.Tensor"
    time_s: "torch.Tensor"
    is_padded: "torch.Tensor"
    colour: "torch.Tensor"
    tokens: "torch.Tensor"
    latents: "torch.Tensor"
    num_frames: "torch.Tensor"
    text: "torch.Tensor"
    text_mask: "torch.Tensor"
    num_tokens: "torch.Tensor"  # only during the collation of stored sequences
    text_row: "torch.Tensor"
    length: "torch.Tensor"
    caption: list[str]
    begin_s: "torch.Tensor"
    end_s: "torch.Tensor"
    folder: "torch.Tensor"


class LoanedMemory:
    """Memory for batches that the caller may keep. Memory is reused once its array is no longer referenced.

    Newly allocated memory for each batch would cause page faults, which take as long as a large copy.
    """

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self._shape, self._dtype = shape, dtype
        self._free: deque[NDArray[Any]] = deque(maxlen=2)
        self._loans: dict[int, _Loan] = {}

    def array(self, num: int) -> NDArray[Any]:
        """Return an uninitialised array with `num` rows. `num` must not exceed the first dimension of the shape."""
        memory = self._free.pop() if self._free else np.empty(self._shape, self._dtype)
        rows = memory[:num]
        # A tensor made from the array keeps the array alive, and so does everything that shares the tensor's memory.
        loan = _Loan(rows, self._give_back)  # weakref.finalize takes five times as long
        loan.memory = memory
        self._loans[id(loan)] = loan
        return rows

    def _give_back(self, loan: "_Loan") -> None:
        del self._loans[id(loan)]
        self._free.append(loan.memory)


class _Loan(weakref.ref[NDArray[Any]]):
    __slots__ = ("memory",)
    memory: NDArray[Any]


class BatchMemory:
    """Memory for the rows of batches: `NUM_BUFFERS` buffers used in rotation, `LoanedMemory`, or pinned memory.

    Args:
        shape: Shape of the largest batch.
        pin: True to use pinned memory, for copies to a GPU. Batches are then never overwritten
            (clipmill.train.device.transfer).
        can_keep: True to reuse memory only when its batch is no longer referenced, instead of rotating buffers.
    """

    def __init__(self, shape: tuple[int, ...], dtype: "torch.dtype", *, pin: bool, can_keep: bool) -> None:
        import torch

        self._shape, self._dtype, self._from_numpy = shape, dtype, torch.from_numpy
        # Use integers of the same size, because NumPy has no bfloat16.
        self._loaned = LoanedMemory(shape, np.dtype(f"i{dtype.itemsize}").type) if can_keep and not pin else None
        has_ring = not (pin or can_keep)
        # Zeroing touches every page now. Otherwise the first batches would cause page faults, which cost more than the
        # copy.
        rings = [torch.zeros(shape, dtype=dtype) for _ in range(NUM_BUFFERS if has_ring else 0)]
        self._ring = deque((tensor, _bytes_of(tensor)) for tensor in rings)

    def rows(self, num: int) -> "tuple[torch.Tensor, memoryview]":
        """Return uninitialised memory for a batch of `num` rows, as a tensor and as bytes."""
        if self._loaned is not None:
            array = self._loaned.array(num)
            return self._from_numpy(array).view(self._dtype), array.data.cast("B")
        if self._ring:
            self._ring.rotate()
            tensor, content = self._ring[0]
        else:
            from clipmill.train.device.transfer import (
                pinned_memory,  # imported late, so that reading tars does not load torch
            )

            # Always allocate the full size, so that the memory of a smaller batch can be reused for a full batch.
            tensor = pinned_memory(self._shape, self._dtype)
            content = _bytes_of(tensor)
        return (tensor if num == self._shape[0] else tensor[:num]), content


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    import torch

    content: memoryview = tensor.view(torch.uint8).numpy().data.cast("B")
    return content


class BatchRing:
    """Collator for samples of equal shape. The `video` entries of batches are stored in a `BatchMemory`.

    Args:
        batch: Maximum number of samples in a batch.
        pin, can_keep: See `BatchMemory`.
    """

    def __init__(self, batch: int, *, pin: bool, can_keep: bool = False) -> None:
        self._batch, self._pin, self._can_keep = batch, pin, can_keep
        self._memory: BatchMemory | None = None

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples, in order. With rotating buffers, the second batch after this one overwrites `video`."""
        import torch

        batch = Batch(
            input="pixels",
            position=torch.tensor([sample["position"] for sample in samples]),
            key=[sample["key"] for sample in samples],
        )
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}  # type: ignore[literal-required]
        for name, dtype in _SCALARS.items():
            if name in columns:
                batch[name] = torch.tensor(columns[name], dtype=getattr(torch, dtype))  # type: ignore[literal-required]
        for name in _ARRAYS:
            if name in columns:
                batch[name] = torch.from_numpy(np.stack(columns[name]))  # type: ignore[literal-required]
        if "caption" in columns:
            batch["caption"] = columns["caption"]
        if "video" in columns:
            import torch

            clips = columns["video"]
            if self._memory is None:
                size = (self._batch, *clips[0].shape)
                self._memory = BatchMemory(size, torch.uint8, pin=self._pin, can_keep=self._can_keep)
            rows, _ = self._memory.rows(len(clips))
            np.stack(clips, out=rows.numpy())
            batch["video"] = rows
        return batch


def to_device(batch: Batch, device: "torch.device", *, names: Sequence[str] = TENSORS) -> Batch:
    """Return a copy of a batch, with the tensors in `names` moved to `device` and with `length` on the CPU."""
    from clipmill.train.device.transfer import send_pinned  # imported late, so that reading tars does not load torch

    moved = batch.copy()
    if "length" not in moved:
        if "tokens" in moved:
            # CLIP's end token has the largest ID.
            moved["length"] = moved["tokens"].argmax(dim=1).add_(1).cpu()
        elif "targets" in moved:
            moved["length"] = (moved["targets"] >= 0).sum(dim=-1).amax(dim=-1).cpu()
    for name in names:
        if name in moved:
            moved[name] = send_pinned(moved[name], device)  # type: ignore[literal-required]
    return moved
