"""Collating samples of latents: each row of a batch is one copy into memory that is used again.

A row is copied by assigning to a part of a `memoryview`, which holds the interpreter lock: if the lock were released
for every row, a loader next to another busy thread would wait for it once per row. This is as fast as `memcpy` of the C
library, and does not depend on torch's threads, which are slow when they share a core.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.batch import Batch, BatchMemory
from clipmill.train.data.captions import Captions
from clipmill.train.data.latents.reading import LatentSample
from clipmill.train.data.latents.segments import LatentSegments
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.mapped_tars import Part

if TYPE_CHECKING:
    import torch


class LatentRing:
    """Makes batches of the samples of a set, or of sets that are alike.

    Args:
        loading: Size of the largest batch, and its memory.
        keys_of: Gives the keys of the chunks that clips are in.
        captions: Captions of the segments, for their tokens; None without.
    """

    def __init__(
        self,
        segments: LatentSegments,
        loading: LoaderSettings,
        *,
        keys_of: Callable[[NDArray[np.int64]], list[str]],
        captions: Captions | None = None,
    ) -> None:
        import torch

        batch, pin, can_keep = loading.batch, loading.pin, loading.can_keep
        shape, text = segments.records.shape, segments.text
        num_frames, picture = segments.num_frames, (shape.height, shape.width)
        # A VAE of videos puts the channels before the frames; the batch is a view with the frames first.
        self._channels_first = shape.segment_frames > 0
        row_shape = (num_frames, shape.channels, *picture)
        if self._channels_first:
            row_shape = (shape.channels, num_frames, *picture)
        self._latents = _Rows((batch, *row_shape), getattr(torch, shape.dtype), pin=pin, can_keep=can_keep)
        self._text = None
        if text is not None:
            tokens = (text.max_tokens,) if text.max_tokens else ()
            self._text = _Rows((batch, *tokens, text.width), torch.float16, pin=pin, can_keep=can_keep)
            self._arange = torch.arange(text.max_tokens)
        self._keys_of, self._captions, self._from_numpy = keys_of, captions, torch.from_numpy

    def collate(self, samples: Sequence[LatentSample]) -> Batch:
        """The batch of `samples`, in their order."""
        columns, rows, latents, texts = zip(*samples)  # noqa: B905 - all have four entries
        first, end = rows[0], rows[0] + len(rows)
        is_slice = columns[-1] is columns[0] and rows[-1] + 1 == end
        # A literal: calling `Batch` costs a microsecond, which a batch of one notices.
        pictures = self._latents.filled(latents)
        batch: Batch = {
            "input": "latents",
            "latents": pictures.transpose(1, 2) if self._channels_first else pictures,
        }
        for name, column in columns[0].items():
            # Slices of arrays, which nothing overwrites, take half as long as slices of tensors.
            values = column[first:end] if is_slice else np.array([of[name][row] for of, row, _, _ in samples])
            batch[name] = self._from_numpy(values)  # type: ignore[literal-required]
        batch["key"] = Keys(batch["clip_id"], self._keys_of)
        if self._captions is not None and (tokenize := self._captions.tokenize) is not None:
            captions = self._captions.texts_at(batch.pop("text_row").numpy())
            batch["tokens"] = self._from_numpy(np.stack([tokenize(text) for text in captions]))
        if self._text is not None:
            batch["text"] = self._text.filled(texts)
            if (num_tokens := batch.pop("num_tokens", None)) is not None:
                longest = int(num_tokens.max())
                batch["text"] = batch["text"][:, :longest]
                batch["text_mask"] = self._arange[:longest] < num_tokens[:, None]
        return batch


class _Rows(BatchMemory):
    """Memory whose rows are copied from bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: "torch.dtype", *, pin: bool, can_keep: bool) -> None:
        super().__init__(shape, dtype, pin=pin, can_keep=can_keep)
        size = self._row_bytes = dtype.itemsize * int(np.prod(shape[1:]))
        self._places = [slice(begin, begin + size) for begin in range(0, shape[0] * size, size)]

    def filled(self, parts: Sequence[Part]) -> "torch.Tensor":
        """A tensor of rows; a part that is shorter than a row is followed by zeros."""
        (rows, content), size = self.rows(len(parts)), self._row_bytes
        for place, (source, begin, end) in zip(self._places, parts):  # noqa: B905 - the last batch may be smaller
            content[place] = source[begin:end] if end - begin == size else bytes(source[begin:end]).ljust(size, b"\0")
        return rows


class Keys(Sequence[str]):
    """Keys of the chunks of clips, made on access: a training step does not need them. Equal to a list of them."""

    __slots__ = ("_clips", "_keys_of")

    def __init__(self, clips: "torch.Tensor", keys_of: Callable[[NDArray[np.int64]], list[str]]) -> None:
        self._clips, self._keys_of = clips, keys_of

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int | slice) -> Any:  # as a list
        if isinstance(index, slice):
            return self._keys_of(self._clips[index].numpy())
        return self._keys_of(self._clips[index].numpy()[None])[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which are not hashable

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)
