"""From requests to samples: parts of mapped tars, or bytes that were fetched or unpacked; all of them verified.

Once all members that some requests need were verified, their samples are parts of the maps, and reading costs nothing.
Until then, and always for members that are compressed or not on this machine, threads load members ahead of the caller.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise, repeat

import numpy as np
from numpy.typing import NDArray

from clipmill.shards.columns import LATENTS
from clipmill.shards.format import BLOCK_BYTES
from clipmill.shards.npy import decompress_frame
from clipmill.train.data.latents.segments import LatentSegments
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.mapped_tars import Part, Problem, VerifiedMembers
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.workers import Stuck, in_order

_AHEAD_BYTES = 1 << 28  # of members that are loaded ahead

Columns = dict[str, NDArray[np.int64]]  # entries of batches, by name

# A sample: columns of batches and its row there; its latents, and its embedding in a set with stored text.
LatentSample = tuple[Columns, int, Part, Part | None]
_Text = tuple[int, int, int]  # member and place of the embedding, or of a sequence, and number of vectors
_Wanted = tuple[int, int, _Text | None]  # first frame, number of frames; text
_Loaded = tuple[Part, Part | None] | Problem


@dataclass(frozen=True)
class SegmentRequests:
    """Samples to read; one entry of each array per request.

    Attributes:
        columns: What a batch has beside latents and embeddings, perhaps of further requests too.
        rows: Rows of the requests in `columns`, ascending.
        chunk: Index in the records.
        frame: First frame in its chunk.
        num_frames: Number of frames; fewer than in a full segment for a tail.
        text_place: Where the embedding or sequence of the caption begins; None without stored text. The lengths of
            sequences are the column `num_tokens`.
    """

    columns: Columns
    rows: Sequence[int]
    chunk: NDArray[np.int64]
    frame: NDArray[np.int64]
    num_frames: NDArray[np.int64]
    text_place: NDArray[np.int64] | None

    def column(self, name: str, *, default: int) -> NDArray[np.int64]:
        """A column for the requests alone; `default` for each where there is none."""
        column = self.columns.get(name)
        return np.full(len(self.rows), default) if column is None else column[np.asarray(self.rows)]


class SegmentReader:
    """Reads segments. Thread-safe."""

    def __init__(self, segments: LatentSegments) -> None:
        records = segments.records
        self._segments, self._records, self._tars = segments, records, segments.maps
        self._latents = VerifiedMembers(self._tars, len(records), records.payload, column=LATENTS, noun="bytes")
        self._text = None if segments.text is None else segments.text.verified(self._tars)

    def read(self, requests: SegmentRequests, loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        """Read the samples of some requests, in their order.

        Args:
            loading: How members are loaded that are not parts of maps.

        Raises:
            UserError: a tar cannot be mapped any more.
        """
        frame_bytes = self._records.shape.frame_bytes
        latents = self._records.array_place[requests.chunk] + requests.frame * frame_bytes
        due = self._due(requests, latents)
        if due.any():
            return self._loaded(requests, due, loading)
        texts: Iterator[Part | None] = repeat(None)
        if self._segments.text is not None and requests.text_place is not None:
            num_tokens = requests.column("num_tokens", default=1)
            texts = self._tars.parts(requests.text_place, num_tokens * self._segments.text.row_bytes)
        parts = self._tars.parts(latents, requests.num_frames * frame_bytes)
        return zip(repeat(requests.columns), requests.rows, parts, texts)

    def _due(self, requests: SegmentRequests, latents: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The requests that have to wait for a member; once these were loaded, all others are verified too."""
        are_parts = not self._records.shape.is_compressed and self._tars.are_mapped(latents)
        due = self._latents.are_due(requests.chunk)
        if self._text is not None and self._segments.text is not None and requests.text_place is not None:
            are_parts = are_parts and self._tars.are_mapped(requests.text_place)
            due |= self._text.are_due(self._segments.text.member_at(requests.text_place))
        return due if are_parts else np.ones(len(requests.chunk), bool)

    def _loaded(
        self, requests: SegmentRequests, due: NDArray[np.bool_], loading: LoaderSettings
    ) -> Iterator[LatentSample | FailedSample]:
        """As `read`; threads load what is due. Requests in a row that show the same chunk load it once."""
        chunk: list[int] = requests.chunk.tolist()
        text: Iterable[_Text | None] = repeat(None, len(chunk))
        if self._segments.text is not None and (place := requests.text_place) is not None:
            num_tokens = requests.column("num_tokens", default=1)
            text = zip(self._segments.text.member_at(place).tolist(), place.tolist(), num_tokens.tolist(), strict=True)
        segments = [*zip(requests.frame.tolist(), requests.num_frames.tolist(), text, strict=True)]
        runs = [*pairwise([0, *(np.flatnonzero(np.diff(requests.chunk)) + 1).tolist(), len(chunk)])]
        waits = np.logical_or.reduceat(due, [begin for begin, _ in runs]).tolist()

        def load(run: tuple[int, int]) -> list[_Loaded]:
            return self._load(chunk[run[0]], segments[slice(*run)])

        outcomes = in_order(
            load,
            [run for run, has_to_wait in zip(runs, waits, strict=True) if has_to_wait],
            num_threads=max(self._tars.num_readers, loading.num_threads),
            num_ahead=loading.num_ahead,
            stuck_after_s=loading.stuck_after_s,
            size_of=lambda run: self._records.payload(chunk[run[0]]).size_bytes,
            max_bytes=_AHEAD_BYTES,
        )
        with closing(outcomes):
            for run, has_to_wait in zip(runs, waits, strict=True):
                its_chunk, rows = chunk[run[0]], requests.rows[slice(*run)]
                loaded = next(outcomes)[1] if has_to_wait else load(run)
                parts = [self._latents.give_up(its_chunk, loaded)] * len(rows) if isinstance(loaded, Stuck) else loaded
                for row, part in zip(rows, parts, strict=True):
                    if isinstance(part, Problem):
                        position = int(requests.columns["position"][row])
                        yield FailedSample(position, self._segments.key(its_chunk), part.reason, part.detail)
                    else:
                        yield requests.columns, row, *part

    def _load(self, chunk: int, segments: Iterable[_Wanted]) -> list[_Loaded]:
        """The parts of a chunk for some segments, each with its embedding."""
        content, shape, loaded = self._latents.load(chunk), self._records.shape, list[_Loaded]()
        first = int(self._records.header_bytes[chunk])
        if shape.is_compressed and not isinstance(content, Problem):
            first = BLOCK_BYTES
            size_bytes = first + int(self._records.num_frames[chunk]) * shape.frame_bytes
            content = memoryview(decompress_frame(content, size_bytes=size_bytes))
        for frame, num_frames, text in segments:
            embedding = None if text is None else self._embedding(*text)
            if isinstance(content, Problem):
                loaded.append(content)
            elif isinstance(embedding, Problem):
                loaded.append(embedding)
            else:
                begin = first + frame * shape.frame_bytes
                loaded.append(((content, begin, begin + num_frames * shape.frame_bytes), embedding))
        return loaded

    def _embedding(self, member: int, place: int, num_tokens: int) -> Part | Problem:
        assert self._text is not None and self._segments.text is not None
        content = self._text.load(member)
        if isinstance(content, Problem):
            return content
        return self._segments.text.row_of(content, member, place, num_tokens=num_tokens)
