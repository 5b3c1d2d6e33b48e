"""`Captions`: which of its captions a sample is shown with, and what a sample gets of it: tokens, a text, an embedding.

Training shows one of the captions at a time (clipmill.train.data.caption_choice), an evaluation the first one of the
first source.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.batch import Sample
from clipmill.train.data.caption_choice import all_the_same, describe_cut

if TYPE_CHECKING:
    import pyarrow as pa

    from clipmill.train.data.loader import SampleRequest
    from clipmill.train.data.relevancy import RelevantCaptions
    from clipmill.train.data.stored_text import StoredText
    from clipmill.train.data.table import RowCaptions
    from clipmill.train.models.text import Tokenize

_BLOCK = 1 << 16


class Annotations(Protocol):
    """Entries of samples beside frames and names, such as captions or labels."""

    def add(self, sample: Sample, request: "SampleRequest") -> None:
        """Add it to a sample; `request.sample` is the row of the table."""


class Captions:
    """The captions of the rows of a table. Thread-safe.

    Args:
        rows: Captions of each row.
        texts: The stored texts of the manifest.
        tokenize: Tokenizer of captions; None for texts.
        stored_text: Embeddings that samples get in place of captions; None for captions.
        relevant: Captions drawn by relevancy; None to draw among those of a clip.
    """

    def __init__(
        self,
        rows: "RowCaptions",
        texts: "pa.ChunkedArray",
        *,
        tokenize: "Tokenize | None" = None,
        stored_text: "StoredText | None" = None,
        relevant: "RelevantCaptions | None" = None,
    ) -> None:
        self.rows, self.stored_texts = rows, texts
        self.tokenize, self.stored_text, self._relevant = tokenize, stored_text, relevant

    @property
    def num_entries(self) -> int:
        """Number of captions of all clips."""
        return self.rows.num_entries

    def visits_per_epoch(self, num_samples: int) -> float:
        """Number of samples that training takes in an epoch."""
        return num_samples

    def add(self, sample: Sample, request: "SampleRequest") -> None:
        """Add a caption and its id."""
        entry, relevancy = self._draw(request)
        caption_id = sample["caption_id"] = self.caption_id(entry)
        if self.stored_text is not None:
            sample["text"] = self.stored_text.embedding(caption_id, key=sample["key"])
        if self.tokenize is not None:
            sample["tokens"] = self.tokenize(self.text_at(entry))
        elif self.stored_text is None:
            sample["caption"] = self.text_at(entry)
        if self._relevant is not None:
            sample["relevancy"] = relevancy

    def caption_id(self, entry: int) -> int:
        """Id of a caption in the manifest."""
        return int(self.rows.caption_id[self.rows.of_entries(entry)])

    def text(self, row: int) -> str:
        """The text of a row's caption in an evaluation."""
        return self.text_at(self.first_entry(row))

    def text_at(self, entry: int) -> str:
        """The text of a caption."""
        return self.texts(np.array([entry]))[0]

    def texts(self, entries: NDArray[np.int64]) -> list[str]:
        """The texts of some captions."""
        return self.texts_at(self.rows.text_row[self.rows.of_entries(entries)])

    def texts_at(self, text_rows: NDArray[np.integer]) -> list[str]:
        """The texts at some rows of the stored captions."""
        # Arrow's own `take` concatenates all chunks first.
        return [str(self.stored_texts[row].as_py()) for row in text_rows.tolist()]

    def texts_of(self, row: int) -> list[str]:
        """The texts of all captions of a row, in the order of their sources."""
        return self.texts(np.array(self.rows.choice.entries(row)))

    def all_texts(self) -> Iterator[str]:
        """The texts of all captions in use."""
        for begin in range(0, self.num_entries, _BLOCK):
            yield from self.texts(np.arange(begin, min(begin + _BLOCK, self.num_entries)))

    def first_entry(self, row: int) -> int:
        """Entry of the caption that an evaluation shows."""
        return int(self.rows.choice.first(np.array([row]))[0])

    def require_different_texts(self, *, split: str) -> None:
        """Raise a UserError if all captions are the same text, so that there is nothing to tell apart."""
        if self.rows.same_text is not None:
            raise all_the_same(self.rows.same_text, len(self.rows.caption_id), split=split)

    def describe(self) -> list[str]:
        """How many captions are cut by the tokenizer, for the log."""
        return (
            []
            if self.tokenize is None
            else [describe_cut(self.stored_texts, np.sort(self.rows.text_row), self.tokenize)]
        )

    def facts(self) -> tuple[Any, ...]:
        """Facts on which the samples depend, for their fingerprint."""
        return () if self._relevant is None else (self._relevant.sha256,)

    def _draw(self, request: "SampleRequest") -> tuple[int, float]:
        """Entry of the caption to show, and its relevancy."""
        if request.seed is None:
            return self.first_entry(request.sample), 1.0
        if self._relevant is not None:
            return self._relevant.draw(request.sample, position=request.position, seed=request.seed)
        entry = self.rows.choice.draw_one(request.sample, position=request.position, seed=request.seed)
        return entry, 1.0
