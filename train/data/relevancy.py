"""Relevancy of sentences for clips, as in EPIC-KITCHENS-100's multi-instance retrieval, and random draws by relevancy.

    relevancy = ((1 if the verb classes are equal, otherwise 0) + IoU of the sets of noun classes) / 2

(Damen et al. 2022, after Wray et al. 2019). As float64, the matrix of EK-100's training split, 67,217 x 15,989, would
take 8.6 GB. However, a row depends only on the classes of its clip, so most rows and columns occur many times, and
there are only a few different values. Therefore only distinct rows and columns are stored, and each entry is one byte:
an index into the list of values. No value is rounded.

Training for multi-instance retrieval shows a clip with any sentence of the split whose relevancy for the clip is above
a threshold (0.1 in the paper's evaluation code), with equal probability. A sentence is a distinct text, with the
classes of the first caption (by ID) that has this text. The clip's own sentence can always be drawn, with relevancy 1.

Shape suffixes: N clips, M sentences, R distinct rows, C distinct columns, V distinct values, K noun classes.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.train.device.random import integers_below

if TYPE_CHECKING:
    from clipmill.train.data.captions import RowCaptions

MAX_VALUES = 256  # maximum number of different values of a matrix, because an index is stored in one byte
# Label columns, with functions that check their types.
LABELS = {"label_verb": pa.types.is_integer, "label_nouns": pa.types.is_list}
_BLOCK_ROWS = 256


class NoRelevancy(ValueError):
    """The values are not relevancies: a value is outside [0, 1], or there are too many different values."""


@dataclass(frozen=True)
class Relevancy:
    """Compressed matrix [N, M] of the relevancy of sentences for clips.

    Attributes:
        values_V: Distinct values, ascending, float64.
        codes_RC: Distinct rows and columns of the matrix, as indices into the values, uint8.
        row_of_N, column_of_M: Row of each clip and column of each sentence in `codes_RC`, int32.
    """

    values_V: NDArray[np.float64]
    codes_RC: NDArray[np.uint8]
    row_of_N: NDArray[np.int32]
    column_of_M: NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of clips and number of sentences."""
        return len(self.row_of_N), len(self.column_of_M)

    @property
    def size_bytes(self) -> int:
        """Size of all arrays in memory, in bytes."""
        return sum(array.nbytes for array in (self.values_V, self.codes_RC, self.row_of_N, self.column_of_M))

    def rows(self, clips: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        """Return the rows of these clips, float64 [n, M]."""
        # Select the rows first, so that no array is larger than the result.
        return self.values_V[self.codes_RC[self.row_of_N[clips]][:, self.column_of_M]]

    def at(self, clips: NDArray[np.int64], sentences: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the relevancy of `sentences[i]` for `clips[i]`, float64, with the shape of the arguments."""
        return self.values_V[self.codes_RC[self.row_of_N[clips], self.column_of_M[sentences]]]

    def take(self, clips: NDArray[np.int64], sentences: NDArray[np.int64]) -> "Relevancy":
        """Return the matrix for these clips and sentences, in this order."""
        return Relevancy(self.values_V, self.codes_RC, self.row_of_N[clips], self.column_of_M[sentences])

    def transpose(self) -> "Relevancy":
        """Return the transposed matrix: the relevancy of clips for sentences."""
        return Relevancy(self.values_V, np.ascontiguousarray(self.codes_RC.T), self.column_of_M, self.row_of_N)


@dataclass(frozen=True)
class Actions:
    """Classes of N captions.

    Attributes:
        verb_N: Verb class, int64.
        nouns_NK: Mask of the noun classes, bool.
    """

    verb_N: NDArray[np.int64]
    nouns_NK: NDArray[np.bool_]

    def distinct_rows(self) -> tuple["Actions", NDArray[np.int32]]:
        """Return the distinct combinations of classes, and the index of each caption's combination, int32 [N]."""
        bits = np.packbits(self.nouns_NK, axis=1)
        rows = np.concatenate([self.verb_N.astype("<i8")[:, None].view(np.uint8), bits], axis=1)
        _, first, index = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        return Actions(self.verb_N[first], self.nouns_NK[first]), index.reshape(-1).astype(np.int32)


def relevancy_of_classes(clips: Actions, sentences: Actions) -> Relevancy:
    """Return the relevancy of sentences for clips. If neither the clip nor the sentence has nouns, the IoU is 0."""
    clips, row_of_N = clips.distinct_rows()
    sentences, column_of_M = sentences.distinct_rows()
    num_clip, num_sentence = clips.nouns_NK.sum(1), sentences.nouns_NK.sum(1)
    size = int(num_clip.max(initial=0) + num_sentence.max(initial=0)) + 1
    # A triple determines each value: whether the verbs are equal, and the numbers of nouns in the intersection and the
    # union.
    num_shared, union = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    iou = np.divide(num_shared, union, out=np.zeros(union.shape), where=union > 0)
    value_of_triple = np.stack([iou / 2, (1 + iou) / 2]).reshape(-1)
    triple_RC = np.empty((len(clips.verb_N), len(sentences.verb_N)), np.uint16 if 2 * size**2 <= 1 << 16 else np.int64)
    nouns_KC = sentences.nouns_NK.T.astype(np.float32)
    occurs = np.zeros(len(value_of_triple), bool)
    for begin in range(0, len(triple_RC), _BLOCK_ROWS):
        part = slice(begin, begin + _BLOCK_ROWS)
        # float32 is exact here, because all values are small integers.
        num_shared = (clips.nouns_NK[part].astype(np.float32) @ nouns_KC).astype(np.int64)
        union = num_clip[part, None] + num_sentence - num_shared
        has_verb = clips.verb_N[part, None] == sentences.verb_N
        triple_RC[part] = (has_verb * size + num_shared) * size + union
        occurs[triple_RC[part]] = True
    values_V = np.unique(value_of_triple[occurs])
    _require_few_values(values_V)
    code_of_triple = np.searchsorted(values_V, value_of_triple).clip(max=len(values_V) - 1).astype(np.uint8)
    return Relevancy(values_V, code_of_triple[triple_RC], row_of_N, column_of_M)


def compress_matrix(matrix_NM: NDArray[np.floating] | NDArray[np.integer]) -> Relevancy:
    """Compress a matrix, a few rows at a time. The matrix may be memory-mapped.

    Raises:
        NoRelevancy: A value is NaN or outside [0, 1], or there are more than 256 different values.
    """
    num_rows, num_columns = matrix_NM.shape
    parts = (matrix_NM[begin : begin + _BLOCK_ROWS] for begin in range(0, num_rows, _BLOCK_ROWS))
    values_V, row_codes, row_of = _distinct_rows(parts)
    codes_RM = np.stack(row_codes) if row_codes else np.empty((0, num_columns), np.uint8)
    order = np.argsort(values_V)
    index_of = np.empty_like(order)
    index_of[order] = np.arange(len(order))
    codes_RM = index_of.astype(np.uint8)[codes_RM]
    codes_MR, column_of = np.unique(np.ascontiguousarray(codes_RM.T), axis=0, return_inverse=True)
    return Relevancy(
        values_V[order],
        np.ascontiguousarray(codes_MR.T),
        np.array(row_of, np.int32),
        column_of.reshape(-1).astype(np.int32),
    )


def _distinct_rows(
    parts: Iterable[NDArray[np.floating] | NDArray[np.integer]],
) -> tuple[NDArray[np.float64], list[NDArray[np.uint8]], list[int]]:
    """Return values in order of occurrence, distinct rows as indices of values, and the distinct row of each row."""
    values_V = np.empty(0)
    index_of: dict[bytes, int] = {}
    rows: list[NDArray[np.uint8]] = []
    row_of: list[int] = []
    for part in parts:
        for row in np.ascontiguousarray(part):
            # Most rows have occurred before, and hashing a row takes a tenth of the time of looking up its values.
            digest = hashlib.blake2b(row, digest_size=16).digest()
            index = index_of.setdefault(digest, len(rows))
            if index == len(rows):
                values_V, codes = _encode_row(row.astype(np.float64), values_V)
                rows.append(codes)
            row_of.append(index)
    return values_V, rows, row_of


def _encode_row(
    row: NDArray[np.float64], values_V: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Add the new values of a row to `values_V`; return all values, and the row as indices of values."""
    new_values = np.setdiff1d(row, values_V)
    if len(new_values) and not (new_values[0] >= 0 and new_values[-1] <= 1):  # NaN is sorted last
        raise NoRelevancy(
            f"it has {new_values[0] if new_values[0] < 0 else new_values[-1]}, but a relevancy is between 0 and 1"
        )
    values_V = np.concatenate([values_V, new_values])
    _require_few_values(values_V)
    order = np.argsort(values_V)
    return values_V, order.astype(np.uint8)[np.searchsorted(values_V[order], row)]


def _require_few_values(values_V: NDArray[np.float64]) -> None:
    if len(values_V) > MAX_VALUES:
        raise NoRelevancy(f"it has more than {MAX_VALUES} different values, but relevancies have only a few")


class RelevantCaptions:
    """Random choice of captions by relevancy (clipmill.train.data.captions.CaptionDraw).

    Args:
        rows: Captions of each clip.
        captions: Table of all captions, with their labels. `rows.text_row` contains rows of this table.
        min_relevancy: Relevancy above which a sentence can be drawn.

    Attributes:
        sha256: SHA-256 digest of the labels in use.

    Raises:
        UserError: A caption has no verb class or no noun classes.
    """

    def __init__(self, rows: "RowCaptions", captions: pa.Table, *, min_relevancy: float) -> None:
        # Entries of the captions, ordered by caption ID.
        self._entry: NDArray[np.int64] = np.argsort(rows.text_row, kind="stable")
        labels = [name for name in LABELS if name in captions.column_names]
        captions = captions.select(["text", *labels]).take(pa.array(rows.text_row[self._entry]))
        self.sha256 = hashlib.sha256(repr(captions.select(labels).to_pydict()).encode()).hexdigest()
        caption_of_entry = np.empty_like(self._entry)
        caption_of_entry[self._entry] = np.arange(len(self._entry))
        first_caption = caption_of_entry[rows.choice.first_entries(np.arange(rows.choice.num_rows))]
        actions = _actions(captions)
        encoded_texts = captions["text"].combine_chunks().dictionary_encode()
        sentence = encoded_texts.indices.to_numpy().astype(np.int64)
        _, self._caption_of_sentence = np.unique(sentence, return_index=True)
        self._first_sentence = sentence[first_caption]
        self._min_relevancy = min_relevancy
        self._relevancy: Relevancy = relevancy_of_classes(
            *(
                Actions(actions.verb_N[rows], actions.nouns_NK[rows])
                for rows in (first_caption, self._caption_of_sentence)
            )
        )

    def draw(self, clip: int, *, position: int, seed: int) -> tuple[int, float]:
        """Draw a caption; return its entry and relevancy. The result is a pure function of (clip, position, seed)."""
        # Find the sentences that can be shown with the clip, and the entries of their captions.
        values_M = self._relevancy.rows(np.array([clip]))[0]
        values_M[self._first_sentence[clip]] = 1.0
        sentences = np.flatnonzero(values_M > self._min_relevancy)
        entries, values = self._entry[self._caption_of_sentence[sentences]], values_M[sentences]
        bound, positions = np.array([len(entries)]), np.array([position])
        index = int(integers_below(bound, positions, seed=seed, purpose="relevant caption")[0])
        return int(entries[index]), float(values[index])


def has_actions(schema: pa.Schema) -> bool:
    """Return True if the schema has columns for a verb class and noun classes, as in EPIC-KITCHENS-100."""
    return all(_is_class(schema, name) for name in LABELS)


def _is_class(schema: pa.Schema, name: str) -> bool:
    return name in schema.names and bool(LABELS[name](schema.field(name).type))


def _actions(captions: pa.Table) -> Actions:
    for name in LABELS:
        num_missing = captions[name].null_count if _is_class(captions.schema, name) else captions.num_rows
        if num_missing:
            raise UserError(
                f"{num_missing:,} of {captions.num_rows:,} captions have no {name}, but --captions.min-relevancy "
                "needs their classes",
                hint="omit the flag, or use a dataset with verb and noun classes: prep manifest epic-kitchens",
                flags=("--captions.min-relevancy",),
            )
    verb = captions["label_verb"].to_numpy().astype(np.int64)
    nouns = captions["label_nouns"].combine_chunks()
    flat = pc.list_flatten(nouns).to_numpy().astype(np.int64)
    nouns_NK = np.zeros((len(verb), int(flat.max(initial=-1)) + 1), bool)
    nouns_NK[pc.list_parent_indices(nouns).to_numpy(), flat] = True
    return Actions(verb, nouns_NK)
