"""Copies the rows of a batch from the mapped tars into reusable buffers.

Each row is one `memmove`, called with the interpreter lock held: if the lock were released for every row, a loader next
to another busy thread would wait for it once per row. On two cores this is as fast as `torch.index_select` on a view of
the whole area (95 % of one large copy), needs no alignment, and does not depend on torch's threads, which are slow when
they share a core.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.train.data.batch import Batch, KeptMemory
from clipmill.train.data.latents.requests import SegmentRequests
from clipmill.train.data.latents.segment_set import SegmentSet

if TYPE_CHECKING:
    import torch

_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


@dataclass(frozen=True)
class Buffers:
    """Memory for one batch: float16 or bfloat16 [B, T, C, h, w], and float16 [B, D] in a set with embeddings."""

    num_rows: int  # B
    latents: "torch.Tensor"
    text: "torch.Tensor | None"
    latents_address: int
    text_address: int


class Gather:
    """Fills batches.

    Args:
        batch: number of samples in the largest batch.
        depth: number of buffers; a batch is overwritten by the `depth`-th after it. None never overwrites a batch that
            is still in use.
        tokenize: from ids of captions, int64 [B], to tokens, int64 [B, L]; None if captions are embeddings.
    """

    def __init__(
        self,
        samples: SegmentSet,
        *,
        batch: int,
        depth: int | None,
        tokenize: "Callable[[torch.Tensor], torch.Tensor] | None" = None,
    ) -> None:
        import torch

        self._samples, self._tokenize, self._from_numpy = samples, tokenize, torch.from_numpy
        self._row_bytes = samples.segment_bytes
        self._dtype: torch.dtype = getattr(torch, samples.records.shape.dtype)
        self._text_bytes = 0 if samples.text is None else samples.text.row_bytes
        self._pads = samples.segments.tails == "pad"
        self._is_compressed = samples.records.shape.is_compressed
        self._holds = not samples.tars.is_whole
        self._ring = deque(self._new_buffers(batch) for _ in range(depth or 0))
        self._kept = KeptMemory((batch, *self._row_shape), np.int16)
        self._kept_text = None if samples.text is None else KeptMemory((batch, samples.text.width), np.float16)

    def block(self, requests: SegmentRequests) -> "RequestBlock":
        """`requests`, prepared for `fill`."""
        return RequestBlock(requests, pads=self._pads)

    def fill(self, block: "RequestBlock", begin: int, end: int) -> Batch:
        """The batch of the requests [begin, end)."""
        num = end - begin
        held = self._hold(block.requests, begin, end) if self._holds else []
        if self._ring:
            buffers = self._ring[0]
            self._ring.rotate(-1)
        else:
            buffers = self._kept_buffers(num)
        latents, text = buffers.latents, buffers.text
        if num < buffers.num_rows:
            latents, text = latents[:num], None if text is None else text[:num]
        addresses = block.address[begin:end]
        if self._is_compressed:
            self._unpack(block.requests, range(begin, end), latents)
        elif self._pads:
            num_frames = block.requests.num_frames[begin:end].tolist()
            self._copy_padded(addresses, num_frames, latents, buffers.latents_address)
        else:
            _copy(addresses, buffers.latents_address, self._row_bytes)
        # A literal: calling `Batch` costs a microsecond, which a batch of one notices.
        batch: Batch = {
            "input": "latents",
            "key": Keys(block.requests.chunk[begin:end], self._samples),
            "latents": latents,
        }
        for name, column in block.columns:
            batch[name] = self._from_numpy(column[begin:end])  # type: ignore[literal-required]
        if self._tokenize is not None:
            batch["tokens"] = self._tokenize(batch["caption_id"])
        if text is not None:
            _copy(block.text_address[begin:end], buffers.text_address, self._text_bytes)
            batch["text"] = text
        for address in held:
            self._samples.tars.release(address, 1)
        return batch

    def _hold(self, requests: SegmentRequests, begin: int, end: int) -> list[int]:
        """Map the tars of some requests until they are released; return an address in each of them."""
        records, text_address = self._samples.records, requests.text_address
        addresses = (records.base + records.array_address[requests.chunk[begin:end]]).tolist()
        if text_address is not None:
            addresses += text_address[begin:end].tolist()
        for address in addresses:
            try:
                self._samples.tars.hold(address, 1)
            except OSError as error:
                raise UserError(f"data has changed during training: {error}", hint="see prep verify") from error
        return addresses

    def _copy_padded(self, addresses: list[int], num_frames: list[int], latents: "torch.Tensor", target: int) -> None:
        frame_bytes = self._samples.records.shape.frame_bytes
        _copy(addresses, target, self._row_bytes, sizes=[frames * frame_bytes for frames in num_frames])
        for row, frames in enumerate(num_frames):
            if frames < latents.shape[1]:
                latents[row, frames:] = 0

    def _unpack(self, requests: SegmentRequests, numbers: range, latents: "torch.Tensor") -> None:
        import torch

        target = latents.view(torch.int16).numpy().view(np.uint16)
        for row, number in enumerate(numbers):
            frames = self._samples.frames(requests, number)
            target[row, : len(frames)] = frames
            target[row, len(frames) :] = 0

    @property
    def _row_shape(self) -> tuple[int, int, int, int]:
        shape = self._samples.records.shape
        return self._samples.segments.num_frames, shape.channels, shape.height, shape.width

    def _new_buffers(self, num: int) -> Buffers:
        import torch

        # Zeros touch every page now: page faults would cost the first batches more than the copy.
        pinned, text = torch.cuda.is_available(), self._samples.text
        latents = torch.zeros((num, *self._row_shape), dtype=self._dtype, pin_memory=pinned)
        if text is None:
            return _buffers(latents, None)
        return _buffers(latents, torch.zeros((num, text.width), dtype=torch.float16, pin_memory=pinned))

    def _kept_buffers(self, num: int) -> Buffers:
        latents = self._from_numpy(self._kept.array(num)).view(self._dtype)  # NumPy has no bfloat16
        return _buffers(latents, None if self._kept_text is None else self._from_numpy(self._kept_text.array(num)))


def _buffers(latents: "torch.Tensor", text: "torch.Tensor | None") -> Buffers:
    return Buffers(len(latents), latents, text, latents.data_ptr(), 0 if text is None else text.data_ptr())


class RequestBlock:
    """Requests as batches need them: whatever can be computed for many batches at once.

    Attributes:
        address, text_address: where the latents and the embedding of each request lie (empty in a set without text).
        columns: int64 [requests] each, by name. A batch's tensors are slices of these, which nothing overwrites.
            Arrays, because slicing an array takes half as long as slicing a tensor.
    """

    def __init__(self, requests: SegmentRequests, *, pads: bool) -> None:
        self.requests = requests
        self.address: list[int] = requests.address.tolist()
        self.text_address: list[int] = [] if requests.text_address is None else requests.text_address.tolist()
        columns = {
            "position": requests.position,
            "clip_id": requests.sample,
            "caption_id": requests.caption_id,
            "label": requests.label,
            "num_frames": requests.num_frames if pads else None,
        }
        self.columns = [(name, column) for name, column in columns.items() if column is not None]

    def __len__(self) -> int:
        return len(self.address)


def _copy(sources: list[int], target: int, row_bytes: int, *, sizes: Iterable[int] | None = None) -> None:
    if len(sources) == 1 and sizes is None:
        _memmove(target, sources[0], row_bytes)
        return
    targets = range(target, target + len(sources) * row_bytes, row_bytes)
    # A deque of length 0 runs through the calls faster than a loop does.
    deque(map(_memmove, targets, sources, repeat(row_bytes) if sizes is None else sizes), maxlen=0)


class Keys(Sequence[str]):
    """Keys of `chunks`, in order, made on access: a training step does not need them. Equal to a list of them."""

    __slots__ = ("_chunks", "_set")

    def __init__(self, chunks: NDArray[np.int64], samples: SegmentSet) -> None:
        self._chunks = chunks
        self._set = samples

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: int | slice) -> Any:  # as a list
        if isinstance(index, slice):
            return [self._set.key(chunk) for chunk in self._chunks[index].tolist()]
        return self._set.key(int(self._chunks[index]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which are not hashable

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)
