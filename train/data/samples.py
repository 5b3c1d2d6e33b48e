"""`Samples`: a table of samples, the reader of its rows, and the loader that batches the samples.

Each kind of data has a producer (clipmill.train.data.producers), a function that returns `Samples`, so tasks do not
depend on the kind of data.

A row of a `SampleTable` describes a sample: the parts of the data that contain it (chunks of videos, arrays of latents,
or images), its time span or first frame, the captions with which it may be shown, and its labels. Rows are ordered by
video and time, so a table does not depend on how the data are divided into shards.

A table consists of arrays. A large table is made once per machine and stored as an Arrow file with one column per array
(clipmill.train.data.node_cache). The file is identified by a digest of everything that affects the table, and all ranks
memory-map the file.

Shape suffixes: N rows, L class lists.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.train.data.captions import CaptionChoice, RowCaptions, Sources
from clipmill.train.data.frame_sampling import US_PER_S
from clipmill.train.data.loader import Loader, LoaderSettings, Reader
from clipmill.train.data.node_cache import open_shared
from clipmill.train.data.order import Cursor, LoaderState, set_fingerprint
from clipmill.train.data.outcomes import LoadedBatch


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Table with one row per sample.

    Attributes:
        first_part, last_part: First and last part that contain the sample, as rows of the table of parts, int [N].
            `last_part` is None if every sample lies in a single part.
        begin_us, end_us: Span of the sample in the video, microseconds, int64 [N]; None for images and latents.
        frame: First frame of a segment of latents in its part, int32 [N]; None for other samples.
        captions: Captions of each row; None without captions.
        label: Class of the sample in each class list, int64 [N, L], or -1 if the list does not contain the sample's
            class; None without labels.
        caption_id: ID of the caption that has the label, int [N]; None without labels.
        remarks: Remarks for the log about used and omitted samples.
    """

    first_part: NDArray[Any]
    last_part: NDArray[Any] | None = None
    begin_us: NDArray[np.int64] | None = None
    end_us: NDArray[np.int64] | None = None
    frame: NDArray[np.int32] | None = None
    captions: RowCaptions | None = None
    label: NDArray[np.int64] | None = None
    caption_id: NDArray[Any] | None = None
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.first_part)

    @property
    def num_caption_ids(self) -> int:
        """Exclusive upper bound of the caption IDs; 0 in a table without captions."""
        ids = self.caption_id if self.captions is None else self.captions.caption_id
        return 0 if ids is None else int(ids.max(initial=-1)) + 1


_TYPES = (SampleTable, RowCaptions, CaptionChoice, Sources)


def open_table(
    name: str, make: Callable[[], SampleTable], *, depends_on: Sequence[object], num_rows: int
) -> SampleTable:
    """Return the table that `make` creates. A large table is made once per machine (clipmill.train.data.node_cache).

    Args:
        name: Name of the kind of samples; also the prefix of the file name.
        make: Function that creates the table.
        depends_on: Values that identify everything that affects the table.
        num_rows: Approximate number of rows.
    """
    return open_shared(make, depends_on=(name, *depends_on), num_rows=num_rows, types=_TYPES, prefix=name)


def open_fingerprint(
    table: SampleTable,
    facts: Sequence[object],
    parts: Callable[[], Sequence[NDArray[Any]]] = tuple,
    *,
    depends_on: Sequence[object],
    num_rows: int,
) -> str:
    """Return the hash of the samples, their order, and the texts of their captions.

    The hash of a large table is computed once per machine.

    Args:
        facts: Other values that affect the samples, such as the names of variants.
        parts: Function that returns arrays that identify the parts; needed if the rows do not identify the parts.
        depends_on, num_rows: See `open_table`.
    """
    return open_shared(
        lambda: fingerprint_of(table, facts, parts()),
        depends_on=("fingerprint", *depends_on, *facts),
        num_rows=num_rows,
        types=(),
        prefix="fingerprint",
    )


def fingerprint_of(table: SampleTable, facts: Sequence[object], parts: Sequence[NDArray[Any]] = ()) -> str:
    """Compute the hash that `open_fingerprint` returns, without storing it."""
    captions = table.captions
    if captions is None:
        return _sha256(facts, [*parts, table.begin_us, table.end_us, table.frame, table.label, table.caption_id])
    order = _sha256(
        [*facts, captions.sources.names, captions.sources.weights.tolist()],
        [*parts, table.begin_us, table.end_us, table.frame, table.label, captions.caption, captions.caption_id],
    )
    content = _sha256([captions.texts_sha256], [captions.choice.first_entry, captions.choice.first_run])
    return set_fingerprint(order, content)


def _sha256(facts: Sequence[object], arrays: Sequence[NDArray[Any] | None]) -> str:
    digest = hashlib.sha256("\n".join(map(str, facts)).encode())
    for array in arrays:
        if array is not None:
            digest.update(f"\n{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class RowReader(Reader, Protocol):
    """Reader of the rows of a table. It can also show individual samples on the pages of an evaluation.

    Attributes:
        mixture: Import path of the reader for a mixture of such samples from several data folders.
    """

    mixture: ClassVar[str]

    def key(self, sample: int) -> str:
        """Return the key of the chunk in which a sample begins, or the sample's name in a tar."""

    def span_us(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the start and end of rows in their videos, in microseconds."""

    def video_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the video that contains each row."""

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Return the span of the video that an evaluation shows for a sample: start and end, in seconds."""

    def shown_frames(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Return the frames that the model sees in an evaluation, RGB [H, W, 3]; [] if the sample cannot be read."""

    def deviations(self) -> list[str]:
        """Return remarks on the number of samples that deviate from the settings."""


class RowCaptioner(Protocol):
    """Captions of the rows of a table, for evaluations and losses (clipmill.train.data.captions.Captions)."""

    @property
    def rows(self) -> RowCaptions:
        """Captions of each row."""

    def text(self, row: int) -> str:
        """Return the text of the caption that an evaluation shows for a row."""

    def require_different_texts(self, *, split: str) -> None:
        """Raise a UserError if all captions have the same text."""

    def describe(self) -> list[str]:
        """Return remarks on the captions, for the log."""

    def visits_per_epoch(self, num_samples: int) -> float:
        """Return the number of samples in a training epoch."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Description of the data that samples come from.

    Attributes:
        split: Split of the manifest.
        variant_name: Names of the variants that are read; empty for data without a manifest, which have no variants.
        fingerprint: Function that computes the hash of the samples, their order, and the texts of their captions.
        empty_error: Message and hint of the error for a table without rows.
        mixture_facts: Properties that must be the same in all folders of a mixture, such as the VAE of latents, by
            name.
        frame_shape: Shape of latents (clipmill.train.data.latents.segments.FrameShape); None for pixels.
        text_width: Dimension of stored caption embeddings; None if captions are tokens or text.
    """

    split: str
    variant_name: str
    fingerprint: Callable[[], str]
    empty_error: tuple[str, str]
    mixture_facts: Mapping[str, str] = field(default_factory=dict)
    frame_shape: Any = None
    text_width: int | None = None


AnyReader = TypeVar("AnyReader", bound=RowReader)


class BatchedSamples:
    """Base class of samples with a loader, for the training loop (clipmill.train.data.loader.TrainingSet).

    Attributes:
        loader: Loader that batches the samples.
    """

    loader: Loader

    @property
    def cursor(self) -> Cursor:
        """Positions in the order that have been used."""
        return self.loader.cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self.loader.cursor = cursor

    def batches(self, *, position: int | None = None, max_failures: int = 100) -> Generator[LoadedBatch, None, None]:
        """See `Loader.batches`."""
        return self.loader.batches(position=position, max_failures=max_failures)

    def evaluation_batches(self, *, stride: int = 1, begin: int = 0) -> Iterator[LoadedBatch]:
        """See `Loader.evaluation_batches`."""
        return self.loader.evaluation_batches(stride=stride, begin=begin)

    def outcomes(self, samples: Iterable[int]) -> Iterator[Any]:
        """See `Loader.outcomes`."""
        return self.loader.outcomes(samples)

    def state_dict(self) -> LoaderState:
        """See `Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, *states: LoaderState) -> None:
        """See `Loader.load_state_dict`."""
        self.loader.load_state_dict(*states)


class Samples(BatchedSamples, Generic[AnyReader]):
    """Samples from one data folder, or from tars. Sample i shows row i // repeats of the table.

    Args:
        captions: Captions of the rows; None if the samples have no captions.
        repeats: Number of samples per row in an epoch.

    Attributes:
        split, variant_name, frame_shape, text_width: See `Source`.

    Raises:
        UserError: The table has no rows.
    """

    folders = None  # only a mixture has folders

    def __init__(
        self,
        table: SampleTable,
        reader: AnyReader,
        source: Source,
        loading: LoaderSettings,
        *,
        captions: RowCaptioner | None = None,
        repeats: int = 1,
    ) -> None:
        self.table, self.reader, self.source, self._captions, self._repeats = table, reader, source, captions, repeats
        self.split, self.variant_name = source.split, source.variant_name
        self.frame_shape, self.text_width = source.frame_shape, source.text_width
        if not len(table):
            message, hint = source.empty_error
            raise UserError(f"{message}: {self.describe()}", hint=hint)
        self.loader = Loader(self, reader, loading)

    def __len__(self) -> int:
        return len(self.table) * self._repeats

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""
        return len(self)

    @property
    def visits_per_epoch(self) -> float:
        """Number of samples in a training epoch: `num_samples`, unless the captions determine the number."""
        return len(self) if self._captions is None else self._captions.visits_per_epoch(len(self))

    @property
    def num_clips(self) -> int:
        """Number of distinct clips. Clip IDs are in [0, num_clips)."""
        return len(self.table)

    @cached_property
    def num_caption_ids(self) -> int:
        """Exclusive upper bound of the caption IDs; 0 without captions."""
        return self.table.num_caption_ids

    @property
    def all_labels(self) -> NDArray[np.int64]:
        """Class of each clip in each class list, int64 [clips, labels]; -1 if the clip's class is not in the list."""
        assert self.table.label is not None, "these samples have no labels"
        return self.table.label

    @property
    def labels(self) -> NDArray[np.int64]:
        """Class of each clip in the first class list, int64 [clips]."""
        return self.all_labels[:, 0]

    @property
    def video(self) -> NDArray[np.int64]:
        """Index of the video that contains each clip, int64 [clips]."""
        return self.reader.video_of(np.arange(len(self.table)))

    @property
    def captions(self) -> Any:
        """Captions of the clips."""
        assert self._captions is not None, "these samples have no captions"
        return self._captions

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the samples and their order, and of the texts of their captions."""
        return self.source.fingerprint()

    def describe(self) -> str:
        """Return a line for the log: contents, omitted samples with reasons, and deviations from the settings."""
        caption_remarks = [] if self._captions is None or not len(self.table) else self._captions.describe()
        return "; ".join(filter(None, [*self.table.remarks, *caption_remarks, *self.reader.deviations()]))

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions have the same text, because a model could not learn from them."""
        if self._captions is not None:
            self._captions.require_different_texts(split=self.split)

    def text(self, sample: int) -> str:
        """Return the text of the caption that an evaluation shows for a sample."""
        return str(self.captions.text(sample // self._repeats))

    def key(self, sample: int) -> str:
        """Return the key of the chunk in which a sample begins, or the sample's name in a tar."""
        return self.reader.key(sample)

    def span_us(self, clips: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the start and end of clips in their videos, in microseconds."""
        return self.reader.span_us(clips)

    def span_s(self, sample: int) -> tuple[float, float]:
        """Return the start and end of a sample in its video, in seconds."""
        begin_us, end_us = self.reader.span_us(np.array([sample // self._repeats]))
        return float(begin_us[0]) / US_PER_S, float(end_us[0]) / US_PER_S

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Return the span of the video that an evaluation shows for a sample: start and end, in seconds."""
        return self.reader.shown_span_s(sample, num_frames=num_frames)

    def shown_frames(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Return the frames that a model sees in an evaluation, RGB [H, W, 3]; [] if the sample cannot be read."""
        return self.reader.shown_frames(sample, num_frames=num_frames)
