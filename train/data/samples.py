"""`Samples`: what a task trains on or evaluates: a table, what reads its rows, and the loader of their batches.

Producers (clipmill.train.data.query) make them, one for each kind of data. A task asks for samples and gets batches; it
does not ask what kind they are.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.train.data.frame_sampling import US_PER_S
from clipmill.train.data.loader import Loader, LoaderSettings, Reader
from clipmill.train.data.order import Cursor, LoaderState
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.data.table import RowCaptions, SampleTable


class RowReader(Reader, Protocol):
    """A reader, and what an evaluation shows of single samples.

    Attributes:
        mixture: Import path of the reader of such samples of several data folders.
    """

    mixture: ClassVar[str]

    def key(self, sample: int) -> str:
        """The chunk in which a sample begins, or its name in a tar."""

    def span_us(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of rows in their videos, microseconds."""

    def video_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the videos of rows."""

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Start and end of the frames that an evaluation shows of a sample, in its video, seconds."""

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as a model sees them in an evaluation, RGB [H, W, 3]; empty if the sample cannot be read."""

    def deviations(self) -> list[str]:
        """Deviations from the settings, with numbers."""


class RowCaptioner(Protocol):
    """The captions of rows, as evaluations and losses use them (clipmill.train.data.captions.Captions)."""

    @property
    def rows(self) -> RowCaptions:
        """Captions of each row."""

    def text(self, row: int) -> str:
        """The text of a row's caption in an evaluation."""

    def require_different_texts(self, *, split: str) -> None:
        """Raise a UserError if all captions are the same text."""

    def describe(self) -> list[str]:
        """Remarks on the captions, for the log."""

    def visits_per_epoch(self, num_samples: int) -> float:
        """Number of samples that training takes in an epoch."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where samples come from.

    Attributes:
        split: Split of the manifest.
        variant_name: Variants of the columns.
        fingerprint: Computes the hash of the samples and their order, and of the texts of their captions.
        nothing: Error message and hint for a set without samples.
        alike: What has to be the same in all sets of a mixture, by name.
        frame_shape: Shape of latents (clipmill.train.data.latents.segments.FrameShape); None for pixels.
        text_width: Width of stored embeddings of captions; None if captions are tokens or texts.
    """

    split: str
    variant_name: str
    fingerprint: Callable[[], str]
    nothing: tuple[str, str]
    alike: Mapping[str, str] = field(default_factory=dict)
    frame_shape: Any = None
    text_width: int | None = None


AnyReader = TypeVar("AnyReader", bound=RowReader)


class BatchedSamples:
    """Samples that have a loader: what the training loop needs (clipmill.train.data.loader.TrainingSet).

    Attributes:
        loader: Loader of the batches.
    """

    loader: Loader

    @property
    def cursor(self) -> Cursor:
        """Position in the order up to which batches have been taken."""
        return self.loader.cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self.loader.cursor = cursor

    def batches(self, *, position: int | None = None, max_failures: int = 100) -> Generator[LoadedBatch, None, None]:
        """See `Loader.batches`."""
        return self.loader.batches(position=position, max_failures=max_failures)

    def evaluation_batches(self, *, every: int = 1, begin: int = 0) -> Iterator[LoadedBatch]:
        """See `Loader.evaluation_batches`."""
        return self.loader.evaluation_batches(every=every, begin=begin)

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
    """The samples of one folder; sample i shows row i // repeats of a table.

    Args:
        captions: Captions of the rows; None without.
        repeats: Samples of a row in an epoch.

    Raises:
        UserError: there are no samples.
    """

    folders = None  # of a mixture

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
        if not len(table):
            message, hint = source.nothing
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
        """Number of samples that training takes in an epoch: each once, unless a captioner counts captions."""
        return len(self) if self._captions is None else self._captions.visits_per_epoch(len(self))

    @property
    def num_clips(self) -> int:
        """Number of distinct clips; ids of clips are in [0, num_clips)."""
        return len(self.table)

    @cached_property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids); 0 in a set without captions."""
        return self.table.num_caption_ids

    @property
    def all_labels(self) -> NDArray[np.int64]:
        """int64 [clips, labels], the class of each in each class list; -1 if it has none."""
        assert self.table.label is not None, "these samples have no labels"
        return self.table.label

    @property
    def labels(self) -> NDArray[np.int64]:
        """int64 [clips], the class of each in the first class list."""
        return self.all_labels[:, 0]

    @property
    def video(self) -> NDArray[np.int64]:
        """int64 [clips], number of the video of each."""
        return self.reader.video_of(np.arange(len(self.table)))

    @property
    def captions(self) -> Any:
        """The captions of the clips."""
        assert self._captions is not None, "these samples have no captions"
        return self._captions

    @property
    def split(self) -> str:
        """Split of the manifest."""
        return self.source.split

    @property
    def variant_name(self) -> str:
        """The variants that the samples come from."""
        return self.source.variant_name

    @property
    def frame_shape(self) -> Any:
        """Shape of latents (clipmill.train.data.latents.segments.FrameShape); None for pixels."""
        return self.source.frame_shape

    @property
    def text_width(self) -> int | None:
        """Width of the stored embeddings of captions; None if captions are tokens or texts."""
        return self.source.text_width

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the samples and their order, and of the texts of their captions."""
        return self.source.fingerprint()

    def describe(self) -> str:
        """One line for the log: what the set contains, what was left out and why, and deviations from the settings."""
        of_captions = [] if self._captions is None or not len(self.table) else self._captions.describe()
        return "; ".join(filter(None, [*self.table.remarks, *of_captions, *self.reader.deviations()]))

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions are the same text, so that there is nothing to tell apart."""
        if self._captions is not None:
            self._captions.require_different_texts(split=self.split)

    def text(self, sample: int) -> str:
        """The text of a sample's caption in an evaluation."""
        return str(self.captions.text(sample // self._repeats))

    def key(self, sample: int) -> str:
        """The chunk in which a sample begins, or its name in a tar."""
        return self.reader.key(sample)

    def span_us(self, clips: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of clips in their videos, microseconds."""
        return self.reader.span_us(clips)

    def span_s(self, sample: int) -> tuple[float, float]:
        """Start and end of a sample in its video, seconds."""
        begin_us, end_us = self.reader.span_us(np.array([sample // self._repeats]))
        return float(begin_us[0]) / US_PER_S, float(end_us[0]) / US_PER_S

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Start and end of the frames that an evaluation shows of a sample, in its video, seconds."""
        return self.reader.shown_span_s(sample, num_frames=num_frames)

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as a model sees them in an evaluation, RGB [H, W, 3]; empty if the sample cannot be read."""
        return self.reader.pictures(sample, num_frames=num_frames)
