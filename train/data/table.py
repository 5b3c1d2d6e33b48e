"""`SampleTable`: what is trained on, a row for each sample; every kind of data makes one, and every loader reads one.

A row says where its sample is: in which parts of the data (chunks of videos, arrays of latents, images), from when to
when or from which frame on, which captions it may be shown with, and which labels it has. Rows are in the order of
videos and times, so that a table does not depend on shards.

A table is made of arrays, and stored as one Arrow file with a column for each of them (clipmill.train.data.node_cache):
made once per machine, found by a digest of everything that it depends on, and mapped by all ranks.

Suffixes: N rows, R runs, P captions of rows, C captions, L labels.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.caption_choice import CaptionChoice, Sources, same_text
from clipmill.train.data.node_cache import open_shared
from clipmill.train.data.order import set_fingerprint

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class RowCaptions:
    """The captions of rows.

    Attributes:
        choice: Choice of an entry, by the weights of caption sources.
        sources: The caption sources in use.
        texts_sha256: Digest of the texts.
        same_text: The text, if all captions have the same.
        caption_id: int [C], ids of captions in the manifest.
        caption: int32 [P], index of each entry in the arrays of captions; None if entries and captions are the same.
        text_row: int32 [C], rows of the texts in the stored captions.
        place: int64 [C], where stored embeddings lie (clipmill.train.data.mapped_tars); None without them.
        num_tokens: int32 [C], lengths of stored sequences; None if embeddings are single vectors.
    """

    choice: CaptionChoice
    sources: Sources
    texts_sha256: str
    caption_id: NDArray[Any]
    text_row: NDArray[np.int32]
    caption: NDArray[np.int32] | None = None
    place: NDArray[np.int64] | None = None
    num_tokens: NDArray[np.int32] | None = None
    same_text: str | None = None

    @classmethod
    def of_one_each(cls, text_row: NDArray[np.int32], *, texts: "pa.ChunkedArray", texts_sha256: str) -> "RowCaptions":
        """The captions of rows that have one each, whose ids are the numbers of the rows.

        Args:
            text_row: Rows of the texts, ascending.
        """
        count = len(text_row)
        return cls(
            choice=CaptionChoice(np.arange(count + 1), None, None),
            sources=Sources(("",), np.ones(1), np.zeros(1, np.int16)),
            texts_sha256=texts_sha256,
            caption_id=np.arange(count),
            text_row=text_row,
            same_text=same_text(texts, text_row) if count else None,
        )

    @property
    def num_entries(self) -> int:
        """Number of captions of all rows."""
        return int(self.choice.first_entry[-1])

    def of_entries(self, entries: Any) -> Any:
        """The captions of some entries, or of one, as indices of the arrays of captions."""
        return entries if self.caption is None else self.caption[entries]


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Rows of samples.

    Attributes:
        first_part, last_part: int [N], the parts that hold a sample, as rows of the tables of parts. The last part is
            None if every sample lies in one part.
        begin_us, end_us: int64 [N], span in the video in microseconds; None for parts without time, or as a whole.
        frame: int32 [N], first frame of a segment of its part; None for other samples.
        captions: Captions of each row; None without.
        label: int64 [N, L], class in each class list, -1 if a sample has none of them; None without.
        caption_id: int [N], id of the caption that has the label; None for other tables.
        remarks: What was counted or left out, for the log.
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
        """Ids of captions are in [0, num_caption_ids); 0 in a table without captions."""
        ids = self.caption_id if self.captions is None else self.captions.caption_id
        return 0 if ids is None else int(ids.max(initial=-1)) + 1


_TYPES = (SampleTable, RowCaptions, CaptionChoice, Sources)


def open_table(
    name: str, make: Callable[[], SampleTable], *, depends_on: Sequence[object], num_rows: int
) -> SampleTable:
    """The table that `make` makes, once per machine if it is large; see `clipmill.train.data.node_cache.open_shared`.

    Args:
        name: Name of the kind of samples, for the file.
        depends_on: Everything that the table depends on.
        num_rows: Approximate number of rows.
    """
    return open_shared(make, of=(name, *depends_on), num_rows=num_rows, types=_TYPES, column=name)


def open_fingerprint(
    table: SampleTable,
    facts: Sequence[object],
    parts: Callable[[], Sequence[NDArray[Any]]] = tuple,
    *,
    depends_on: Sequence[object],
    num_rows: int,
) -> str:
    """Hash of the samples and their order, and of the texts of their captions; computed once per machine if it is long.

    Args:
        facts: What the samples depend on beside the rows, such as variants.
        parts: Gives arrays that identify the parts, where rows do not.
        depends_on, num_rows: See `open_table`.
    """
    return open_shared(
        lambda: fingerprint_of(table, facts, parts()),
        of=("fingerprint", *depends_on, *facts),
        num_rows=num_rows,
        types=(),
        column="fingerprint",
    )


def fingerprint_of(table: SampleTable, facts: Sequence[object], parts: Sequence[NDArray[Any]] = ()) -> str:
    """See `open_fingerprint`."""
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
