"""Copies the rows of a batch from the mapped tars into buffers that are used again and again.

Each row is one `memmove`, called while the interpreter's lock is held: with the lock let go for every row, a loader
beside any other busy thread would wait for it as many times as a batch has rows. On two cores this is as fast as
`torch.index_select` on a view of the whole area (95 % of one large copy), needs no alignment, and does not depend on
torch's threads, which crawl where they share a core.
"""

import ctypes
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from train.data.batch import Batch
from train.data.caption_texts import CaptionTexts
from train.data.latents.keys import Keys
from train.data.latents.segment_set import SegmentSet, Visits

if TYPE_CHECKING:
    import torch

    from train.models.text import Tokenize

_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


@dataclass(frozen=True)
class Buffers:
    """Room for one batch: float16 or bfloat16 [B, T, C, h, w], and float16 [B, D] in a set with text."""

    latents: "torch.Tensor"
    text: "torch.Tensor | None"
    latents_at: int  # addresses
    text_at: int


class Gather:
    """Fills batches.

    Args:
        batch: samples of the largest batch.
        depth: buffers; a batch is overwritten by the `depth`-th after it. None gives every batch new ones.
        words: of captions that have no stored embeddings.
    """

    def __init__(self, samples: SegmentSet, *, batch: int, depth: int | None, words: "Words | None" = None) -> None:
        self._samples, self._words = samples, words
        self._row_bytes = samples.segment_bytes
        self._text_bytes = 0 if samples.text is None else samples.text.row_bytes
        self._pads = samples.segments.tails == "pad"
        self._ring = deque(self._new_buffers(batch, is_kept=True) for _ in range(depth or 0))

    def block(self, visits: Visits) -> "VisitBlock":
        """`visits`, ready for `fill`."""
        return VisitBlock(visits, pads=self._pads)

    def fill(self, visits: "VisitBlock", begin: int, end: int) -> Batch:
        """The batch of visits[begin:end]."""
        num = end - begin
        if self._ring:
            buffers = self._ring[0]
            self._ring.rotate(-1)
        else:
            buffers = self._new_buffers(num, is_kept=False)
        latents, text = buffers.latents, buffers.text
        if num < len(latents):
            latents, text = latents[:num], None if text is None else text[:num]
        of = visits.visits
        addresses = of.address[begin:end].tolist()
        if self._pads:
            self._copy_padded(addresses, of.num_frames[begin:end].tolist(), latents, buffers.latents_at)
        else:
            _copy(addresses, buffers.latents_at, self._row_bytes)
        batch = Batch(
            input="latents",
            position=visits.position[begin:end],
            key=Keys(of.chunk[begin:end], self._samples),
            clip_id=visits.clip_id[begin:end],
            latents=latents,
        )
        if visits.caption_id is not None:
            batch["caption_id"] = visits.caption_id[begin:end]
            if self._words is not None:
                batch["tokens"] = self._words.tokens(batch["caption_id"])
        if text is not None and of.text_address is not None:
            _copy(of.text_address[begin:end].tolist(), buffers.text_at, self._text_bytes)
            batch["text"] = text
        if visits.label is not None:
            batch["label"] = visits.label[begin:end]
        if visits.num_frames is not None:
            batch["num_frames"] = visits.num_frames[begin:end]
        return batch

    def _copy_padded(self, addresses: list[int], num_frames: list[int], latents: "torch.Tensor", target: int) -> None:
        frame_bytes = self._samples.records.shape.frame_bytes
        _copy(addresses, target, self._row_bytes, sizes=[frames * frame_bytes for frames in num_frames])
        for row, frames in enumerate(num_frames):
            if frames < latents.shape[1]:
                latents[row, frames:] = 0

    def _new_buffers(self, num: int, *, is_kept: bool) -> Buffers:
        import torch

        # Zeros touch every page now; pages met for the first time would cost the first batches more than the copy.
        make = torch.zeros if is_kept else torch.empty
        pinned = is_kept and torch.cuda.is_available()
        shape, text = self._samples.records.shape, self._samples.text
        size = (num, self._samples.segments.num_frames, shape.channels, shape.height, shape.width)
        latents = make(size, dtype=getattr(torch, shape.dtype), pin_memory=pinned)
        if text is None:
            return Buffers(latents, None, latents.data_ptr(), 0)
        embeddings = make((num, text.width), dtype=torch.float16, pin_memory=pinned)
        return Buffers(latents, embeddings, latents.data_ptr(), embeddings.data_ptr())


class Words:
    """Captions as tokens, from their ids."""

    def __init__(self, texts: CaptionTexts, tokenize: "Tokenize") -> None:
        self._texts, self._tokenize = texts, tokenize

    def tokens(self, caption_id: "torch.Tensor") -> "torch.Tensor":
        """int64 [B, L]."""
        import torch

        return torch.from_numpy(np.stack([self._tokenize(self._texts.text(one)) for one in caption_id.tolist()]))


class VisitBlock:
    """Visits as tensors where a batch has them; a batch's tensors are slices of these, which nothing overwrites."""

    def __init__(self, visits: Visits, *, pads: bool) -> None:
        import torch

        self.visits = visits
        self.position = torch.from_numpy(visits.position)
        self.clip_id = torch.from_numpy(visits.sample)
        self.caption_id = None if visits.caption_id is None else torch.from_numpy(visits.caption_id)
        self.label = None if visits.label is None else torch.from_numpy(visits.label)
        self.num_frames = torch.from_numpy(visits.num_frames) if pads else None

    def __len__(self) -> int:
        return len(self.visits)


def _copy(sources: list[int], target: int, row_bytes: int, *, sizes: Iterable[int] | None = None) -> None:
    targets = range(target, target + len(sources) * row_bytes, row_bytes)
    # A deque of no length runs through the calls faster than a loop does.
    deque(map(_memmove, targets, sources, repeat(row_bytes) if sizes is None else sizes), maxlen=0)
