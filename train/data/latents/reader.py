"""`LatentReader` reads segments of latents in blocks, and collates them with their captions or labels.

`MixedLatentReader` reads the segments of several data folders.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.shards.columns import LATENTS
from clipmill.shards.format import BLOCK_BYTES
from clipmill.shards.npy import decompress_frame
from clipmill.train.data.batch import Batch, BatchMemory
from clipmill.train.data.captions import Captions
from clipmill.train.data.latents.segments import FALSE_COLOUR_STDS, LatentSegments, frame_starts_s, frame_times_us
from clipmill.train.data.loader import Block, LoaderSettings
from clipmill.train.data.mapped_tars import Part, Problem, VerifiedMembers
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.samples import Samples, SampleTable
from clipmill.train.data.workers import StuckResult, map_in_order

if TYPE_CHECKING:
    import torch

    from clipmill.train.data.mixed_samples import Numbering


_AHEAD_BYTES = 1 << 28  # maximum total size of the members that are loaded ahead

Columns = dict[str, NDArray[Any]]  # entries of batches, by name

# Sample: columns that contain its entries, its row in these columns, its latents, and its stored text or None.
LatentSample = tuple[Columns, int, Part, Part | None]
_Text = tuple[int, int, int]  # member, place, and number of vectors of a stored text
_Segment = tuple[int, int, _Text | None]  # first frame, number of frames, and stored text
_Loaded = tuple[Part, Part | None] | Problem


@dataclass(frozen=True)
class SegmentRequests:
    """Requests for segments. Each array has one entry per request.

    Attributes:
        columns: Entries of batches other than latents and stored texts. The columns may also contain rows of other
            requests.
        rows: Rows of these requests in `columns`, ascending.
        chunk: Row of the chunk in the records.
        frame: First frame of the segment in the chunk.
        num_frames: Number of frames. A tail has fewer frames than a full segment.
        text_place: Place of the caption's stored embedding or sequence; None without stored texts. The column
            `num_tokens` contains the lengths of sequences.
    """

    columns: Columns
    rows: Sequence[int]
    chunk: NDArray[np.int64]
    frame: NDArray[np.int64]
    num_frames: NDArray[np.int64]
    text_place: NDArray[np.int64] | None

    def column(self, name: str, *, default: int) -> NDArray[np.int64]:
        """Return a column for these requests, or an array filled with `default` if the column is missing."""
        column = self.columns.get(name)
        return np.full(len(self.rows), default) if column is None else column[np.asarray(self.rows)]


class SegmentReader:
    """Reader of the bytes of segments. Thread-safe."""

    def __init__(self, segments: LatentSegments) -> None:
        records = segments.records
        self._segments, self._records, self._tars = segments, records, segments.maps
        self._latents = VerifiedMembers(self._tars, len(records), records.payload, column=LATENTS, noun="bytes")
        self._text = None if segments.text is None else segments.text.loader(self._tars)

    def read(self, requests: SegmentRequests, loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        """Return the samples or failures for these requests, in order.

        Args:
            loading: Settings for the threads that load members which have not been verified or mapped yet.

        Raises:
            UserError: A tar can no longer be mapped.
        """
        frame_bytes = self._records.shape.frame_bytes
        latents = self._records.array_place[requests.chunk] + requests.frame * frame_bytes
        # Find the requests that have to load a member. All other requests use verified members.
        are_mapped = not self._records.shape.is_compressed and self._tars.are_mapped(latents)
        must_load = self._latents.first_unverified(requests.chunk)
        if self._text is not None and self._segments.text is not None and requests.text_place is not None:
            are_mapped = are_mapped and self._tars.are_mapped(requests.text_place)
            must_load |= self._text.first_unverified(self._segments.text.member_at(requests.text_place))
        if not are_mapped:
            must_load[:] = True
        if must_load.any():
            return self._read_ahead(requests, must_load, loading)
        texts: Iterator[Part | None] = repeat(None)
        if self._segments.text is not None and requests.text_place is not None:
            num_tokens = requests.column("num_tokens", default=1)
            texts = self._tars.parts(requests.text_place, num_tokens * self._segments.text.row_bytes)
        parts = self._tars.parts(latents, requests.num_frames * frame_bytes)
        return zip(repeat(requests.columns), requests.rows, parts, texts)

    def _read_ahead(
        self, requests: SegmentRequests, must_load: NDArray[np.bool_], loading: LoaderSettings
    ) -> Iterator[LatentSample | FailedSample]:
        """Yield samples or failures. Threads load members ahead, once per run of consecutive requests for a chunk.

        Args:
            must_load: Mask of the requests that have to load a member.
        """
        chunk: list[int] = requests.chunk.tolist()
        text: Iterable[_Text | None] = repeat(None, len(chunk))
        if self._segments.text is not None and (place := requests.text_place) is not None:
            num_tokens = requests.column("num_tokens", default=1)
            text = zip(self._segments.text.member_at(place).tolist(), place.tolist(), num_tokens.tolist(), strict=True)
        segments = [*zip(requests.frame.tolist(), requests.num_frames.tolist(), text, strict=True)]
        runs = [*pairwise([0, *(np.flatnonzero(np.diff(requests.chunk)) + 1).tolist(), len(chunk)])]
        must_wait = np.logical_or.reduceat(must_load, [begin for begin, _ in runs]).tolist()

        def load(run: tuple[int, int]) -> list[_Loaded]:
            return self._load(chunk[run[0]], segments[slice(*run)])

        outcomes = map_in_order(
            load,
            [run for run, has_to_wait in zip(runs, must_wait, strict=True) if has_to_wait],
            num_threads=max(self._tars.num_readers, loading.num_threads),
            num_ahead=loading.num_ahead,
            stuck_after_s=loading.stuck_after_s,
            size_of=lambda run: self._records.payload(chunk[run[0]]).size_bytes,
            max_bytes=_AHEAD_BYTES,
        )
        with closing(outcomes):
            for run, has_to_wait in zip(runs, must_wait, strict=True):
                run_chunk, rows = chunk[run[0]], requests.rows[slice(*run)]
                outcome = next(outcomes)[1] if has_to_wait else load(run)
                parts = (
                    [self._latents.give_up(run_chunk, outcome)] * len(rows)
                    if isinstance(outcome, StuckResult)
                    else outcome
                )
                for row, part in zip(rows, parts, strict=True):
                    if isinstance(part, Problem):
                        position = int(requests.columns["position"][row])
                        yield FailedSample(position, self._segments.key(run_chunk), part.reason, part.detail)
                    else:
                        yield requests.columns, row, *part

    def _load(self, chunk: int, segments: Iterable[_Segment]) -> list[_Loaded]:
        """Load a chunk, and return its parts for these segments, each with its stored text."""
        content, shape, results = self._latents.load(chunk), self._records.shape, list[_Loaded]()
        array_begin = int(self._records.header_bytes[chunk])
        if shape.is_compressed and not isinstance(content, Problem):
            array_begin = BLOCK_BYTES
            size_bytes = array_begin + int(self._records.num_frames[chunk]) * shape.frame_bytes
            content = memoryview(decompress_frame(content, size_bytes=size_bytes))
        for frame, num_frames, text in segments:
            embedding: Part | Problem | None = None
            if text is not None and self._text is not None and self._segments.text is not None:
                member, place, num_tokens = text
                text_bytes = self._text.load(member)
                if isinstance(text_bytes, Problem):
                    embedding = text_bytes
                else:
                    embedding = self._segments.text.row_of(text_bytes, member, place, num_tokens=num_tokens)
            if isinstance(content, Problem):
                results.append(content)
            elif isinstance(embedding, Problem):
                results.append(embedding)
            else:
                begin = array_begin + frame * shape.frame_bytes
                results.append(((content, begin, begin + num_frames * shape.frame_bytes), embedding))
        return results


class LatentRing:
    """Collator for samples of equal shape, and the memory of their batches.

    Each row is copied by a single assignment to a slice of a `memoryview`, which keeps the interpreter lock. If each
    copy released the lock, the loader would have to wait for the lock once per row while another thread is busy. The
    copy is as fast as the C library's `memcpy`, and does not use torch's threads, which are slow if they share a core.

    Args:
        segments: Segments with the shape of the samples.
        loading: Loader settings, with the maximum batch size and the memory options (`pin`, `can_keep`).
        keys_of: Function that takes clip IDs and returns the keys of their chunks.
        captions: Captions that are tokenized for batches; None if batches have no captions.
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
        num_frames, frame_size = segments.num_frames, (shape.height, shape.width)
        # Latents from a video VAE are stored with the channels first. The batch is a view with the frames first.
        self._channels_first = shape.segment_frames > 0
        row_shape = (num_frames, shape.channels, *frame_size)
        if self._channels_first:
            row_shape = (shape.channels, num_frames, *frame_size)
        self._latents = _Rows((batch, *row_shape), getattr(torch, shape.dtype), pin=pin, can_keep=can_keep)
        self._text = None
        if text is not None:
            tokens = (text.max_tokens,) if text.max_tokens else ()
            self._text = _Rows((batch, *tokens, text.width), torch.float16, pin=pin, can_keep=can_keep)
            self._arange = torch.arange(text.max_tokens)
        self._keys_of, self._captions, self._from_numpy = keys_of, captions, torch.from_numpy

    def collate(self, samples: Sequence[LatentSample]) -> Batch:
        """Collate samples into a batch, in order."""
        columns, rows, latents, texts = zip(*samples)  # noqa: B905 - all have four entries
        first, end = rows[0], rows[0] + len(rows)
        is_slice = columns[-1] is columns[0] and rows[-1] + 1 == end
        rows_of_latents = self._latents.fill(latents)
        # Use a literal, because calling `Batch` takes a microsecond, which matters for a batch of one sample.
        batch: Batch = {
            "input": "latents",
            "latents": rows_of_latents.transpose(1, 2) if self._channels_first else rows_of_latents,
        }
        for name, column in columns[0].items():
            # Slice arrays, because slicing tensors takes twice as long. The arrays are never overwritten.
            values = column[first:end] if is_slice else np.array([entries[name][row] for entries, row, _, _ in samples])
            batch[name] = self._from_numpy(values)  # type: ignore[literal-required]
        batch["key"] = Keys(batch["clip_id"], self._keys_of)
        if self._captions is not None and (tokenize := self._captions.tokenize) is not None:
            captions = self._captions.texts_at(batch.pop("text_row").numpy())
            batch["tokens"] = self._from_numpy(np.stack([tokenize(text) for text in captions]))
        if self._text is not None:
            batch["text"] = self._text.fill(texts)
            if (num_tokens := batch.pop("num_tokens", None)) is not None:
                longest = int(num_tokens.max())
                batch["text"] = batch["text"][:, :longest]
                batch["text_mask"] = self._arange[:longest] < num_tokens[:, None]
        return batch


class _Rows(BatchMemory):
    """Memory for batches. Bytes are copied into its rows."""

    def __init__(self, shape: tuple[int, ...], dtype: "torch.dtype", *, pin: bool, can_keep: bool) -> None:
        super().__init__(shape, dtype, pin=pin, can_keep=can_keep)
        size = self._row_bytes = dtype.itemsize * int(np.prod(shape[1:]))
        self._slices = [slice(begin, begin + size) for begin in range(0, shape[0] * size, size)]

    def fill(self, parts: Sequence[Part]) -> "torch.Tensor":
        """Copy each part into a row, and return the rows as a tensor. Shorter parts are padded with zeros."""
        (rows, content), size = self.rows(len(parts)), self._row_bytes
        for row, (source, begin, end) in zip(self._slices, parts):  # noqa: B905 - the last batch may be smaller
            content[row] = source[begin:end] if end - begin == size else bytes(source[begin:end]).ljust(size, b"\0")
        return rows


class Keys(Sequence[str]):
    """Keys of the chunks of clips. The keys are made on access, because training steps do not need them.

    The sequence compares equal to a list with the same keys.
    """

    __slots__ = ("_clips", "_keys_of")

    def __init__(self, clips: "torch.Tensor", keys_of: Callable[[NDArray[np.int64]], list[str]]) -> None:
        self._clips, self._keys_of = clips, keys_of

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int | slice) -> Any:  # a slice returns a list
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


class LatentReader:
    """Reader of the segments in a table (clipmill.train.data.samples.RowReader). Sample i shows row i.

    Args:
        segments: Data that contain the segments. The parts in the table are rows of `segments.records`.
        table: Table of segments.
        captions: Captions of the rows; None without captions.
    """

    mixture: ClassVar[str] = "clipmill.train.data.latents.reader:MixedLatentReader"

    def __init__(self, segments: LatentSegments, table: SampleTable, captions: Captions | None) -> None:
        assert table.frame is not None
        self.segments, self.captions = segments, captions
        self._chunk, self._frame = table.first_part, table.frame
        self._label_N = None if table.label is None else table.label[:, 0]
        self._rings: dict[LoaderSettings, LatentRing] = {}

    @property
    def num_frames(self) -> int:
        """Number of frames of a full segment."""
        return self.segments.num_frames

    @property
    def segment_s(self) -> float:
        """Length of a full segment, in seconds."""
        return float(self.num_frames / self.segments.records.shape.fps)

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        """Return the samples or failures of the blocks, in order."""
        # Do not use a generator, because it would have to be resumed for every sample.
        return chain.from_iterable(self.read(block, loading) for block in blocks)

    def read(self, block: Block, loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        """Return the samples or failures of a block, in order."""
        return self.segment_reader.read(self.requests(block), loading)

    @cached_property
    def segment_reader(self) -> SegmentReader:
        """Reader of the bytes of segments. The first access starts the download of remote tars."""
        self.segments.maps.start_downloads()
        return SegmentReader(self.segments)

    def requests(self, block: Block) -> SegmentRequests:
        """Return the requests of a block. Captions are drawn at random; an evaluation uses the first caption."""
        rows, chunk, frame = block.samples, self._chunk[block.samples], self._frame[block.samples].astype(np.int64)
        num_frames = np.minimum(self.segments.records.num_frames[chunk] - frame, self.num_frames)
        columns: Columns = {"position": block.positions, "clip_id": rows.astype(np.int64)}
        columns["time_s"] = frame_starts_s(self.segments.records, chunk, frame, num_frames=self.num_frames)
        text_place = None
        if self.captions is not None:
            captions = self.captions.rows
            choice, seed = captions.choice, block.seed
            entry = (
                choice.first_entries(rows) if seed is None else choice.draw(rows, position=block.positions, seed=seed)
            )
            caption = captions.captions_at(entry)
            columns["caption_id"] = captions.caption_id[caption].astype(np.int64)
            if captions.place is None:
                columns["text_row"] = captions.text_row[caption].astype(np.int64)
            else:
                text_place = captions.place[caption]
            if captions.num_tokens is not None:
                columns["num_tokens"] = captions.num_tokens[caption].astype(np.int64)
        if self._label_N is not None:
            columns["label"] = self._label_N[rows]
        if self.segments.has_tails:
            columns["num_frames"] = num_frames
        return SegmentRequests(columns, range(len(rows)), chunk, frame, num_frames, text_place)

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[LatentSample]], Batch]:
        """Return a function that collates samples into batches. All iterations use the same memory."""
        if loading not in self._rings:
            self._rings[loading] = LatentRing(self.segments, loading, keys_of=self.keys_of, captions=self.captions)
        return self._rings[loading].collate

    def keys_of(self, rows: NDArray[np.int64]) -> list[str]:
        """Return the key of the chunk that contains each row."""
        return [self.segments.key(chunk) for chunk in self._chunk[rows].tolist()]

    def key(self, sample: int) -> str:
        """Return the key of the chunk that contains a sample."""
        return self.segments.key(int(self._chunk[sample]))

    def video_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the video that contains each segment."""
        return self.segments.records.video_row[self._chunk[rows]].astype(np.int64)

    def span_us(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the start and end of segments in their videos, in microseconds."""
        chunk, frame = self._chunk[rows], self._frame[rows]
        return frame_times_us(self.segments.records, chunk, frame, num_frames=self.num_frames)

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Return the start and end of the `num_frames` frames in the middle of the segment, seconds in the video."""
        begin_us, _ = self.span_us(np.array([sample]))
        fps = self.segments.records.shape.fps
        begin_s = float(begin_us[0]) / 1e6 + float((self.num_frames - num_frames) // 2 / fps)
        return begin_s, begin_s + float(num_frames / fps)

    def shown_frames(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Return latents in false colours: the first three channels as red, green and blue, uint8 [h, w, 3].

        The list is empty if the latents cannot be read or do not match their checksum.
        """
        index, shape = np.array([sample]), self.segments.records.shape
        [outcome] = self.read(Block(index, index, None), LoaderSettings())
        if isinstance(outcome, FailedSample):
            return []
        content, begin, end = outcome[2]
        bits = np.frombuffer(content[begin:end], np.uint16)
        if shape.segment_frames:
            bits = bits.reshape(shape.channels, -1, shape.height, shape.width).swapaxes(0, 1)
        else:
            bits = bits.reshape(-1, shape.channels, shape.height, shape.width)
        if shape.dtype == "bfloat16":
            latents = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            latents = bits.view(np.float16).astype(np.float32)
        frames = (np.arange(num_frames) * 2 + 1) * len(latents) // (2 * num_frames)
        colours = latents[frames][:, np.arange(3) % shape.channels].transpose(0, 2, 3, 1)
        return list((np.clip(colours / (2 * FALSE_COLOUR_STDS) + 0.5, 0, 1) * 255).astype(np.uint8))

    def deviations(self) -> list[str]:
        """Return remarks on latents that were made from outdated chunks, and on the tars in the cache."""
        return [self.segments.source_remark, self.segments.maps.describe()]


class MixedLatentReader:
    """Reader of the segments of several data folders. See `MixedReader` for the arguments."""

    def __init__(self, parts: Sequence[Samples], addresses: Sequence[str], numbering: "Numbering") -> None:
        self._readers: list[LatentReader] = [part.reader for part in parts]  # type: ignore[misc]
        self._numbering = numbering
        self._rings: dict[LoaderSettings, LatentRing] = {}

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        """Return the samples or failures of the blocks, in order."""
        return chain.from_iterable(self._read(block, loading) for block in blocks)

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[LatentSample]], Batch]:
        """Return a function that collates samples into batches. All iterations use the same memory."""
        if loading not in self._rings:
            self._rings[loading] = LatentRing(
                self._readers[0].segments, loading, keys_of=self.keys_of, captions=self.captions
            )
        return self._rings[loading].collate

    @cached_property
    def captions(self) -> Captions | None:
        """Captions with the texts of all folders, one folder after another; None without captions."""
        parts = [reader.captions for reader in self._readers if reader.captions is not None]
        if not parts:
            return None
        # Join the texts, because finding the folder of each caption would take longer than reading its text.
        texts = pa.chunked_array([chunk for part in parts for chunk in part.stored_texts.chunks], pa.string())
        return Captions(parts[0].rows, texts, tokenize=parts[0].tokenize)

    @cached_property
    def _first_text(self) -> list[int]:
        """Index of the first text of each folder, followed by the number of texts."""
        counts = [0 if reader.captions is None else len(reader.captions.stored_texts) for reader in self._readers]
        return np.cumsum([0, *counts]).tolist()

    def keys_of(self, clips: NDArray[np.int64]) -> list[str]:
        """Return the key of the chunk that contains each clip."""
        keys: list[str] = [""] * len(clips)
        for folder, indices, rows in self._numbering.divide(clips):
            for index, key in zip(indices.tolist(), self._readers[folder].keys_of(rows), strict=True):
                keys[index] = key
        return keys

    def _read(self, block: Block, loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        columns: Columns = {}
        parts: dict[int, Iterator[Any]] = {}
        folder_of = self._numbering.folder_of(block.samples)
        for folder, indices, rows in self._numbering.divide(block.samples):
            reader = self._readers[folder]
            requests = reader.requests(Block(rows, block.positions[indices], block.seed))
            offsets = {
                "clip_id": self._numbering.first_clip[folder],
                "caption_id": self._numbering.first_caption[folder],
                "text_row": self._first_text[folder],
            }
            for name, column in requests.columns.items():
                array = columns.setdefault(name, np.empty((len(block.samples), *column.shape[1:]), column.dtype))
                array[indices] = column + offsets.get(name, 0)
            requests = replace(requests, columns=columns, rows=indices.tolist())
            parts[folder] = reader.segment_reader.read(requests, loading)
        for folder in folder_of.tolist():
            yield next(parts[folder])
