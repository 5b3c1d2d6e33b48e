"""Clips, sentences and relevancies of multi-instance retrieval, from the manifest and from files.

Clips are the captions of a split, sentences their distinct texts.

Rows of the relevancy are the captions of the split in the order of their ids, which is that of the rows of the
annotation file. Columns are the distinct texts in the order in which they first appear, or those of a sentence file
(EPIC_100_retrieval_test_sentence.csv: `narration_id,narration`).
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.adapters.annotations import read_csv, split_in_file_name
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import REJECTED_FILE, manifest_dir, read_captions, read_rejected_rows, read_videos
from clipmill.train.data.chunk_table import rows_of
from clipmill.train.data.chunks import videos_of_split
from clipmill.train.data.relevancy import (
    Actions,
    NoRelevancy,
    Relevancy,
    compress_matrix,
    has_actions,
    relevancy_of_classes,
)
from clipmill.train.tasks.dual_encoder.array_pickle import load_array_pickle

_VERB, _NOUNS = "label_verb", "label_nouns"
_LOST = re.compile(r"captions lost: (\d+)$")  # clipmill.manifests.adapters.reading
# Narrations with the same text may have different classes, so not every clip has relevancy 1 for its own sentence.
_LEAST_OWN_SHARE = 0.5


@dataclass(frozen=True)
class MirTable:
    """The clips and sentences of a split.

    Attributes:
        relevancy: [N, M].
        sentences: the texts [M].
        caption_ids: int64 [N], ascending.
        span_of_N: int64, equal for captions of the same span of a video, which are one clip for the loader.
        sentence_of_N: int64, the clip's own sentence; -1 if it is not among the sentences.
        source: description of where the relevancy comes from.
        num_rejected: captions of the split's annotation files that the manifest rejected, as far as it says.
    """

    relevancy: Relevancy
    sentences: tuple[str, ...]
    caption_ids: NDArray[np.int64]
    span_of_N: NDArray[np.int64]
    sentence_of_N: NDArray[np.int64]
    source: str
    num_rejected: int = 0

    def missing(self, num_shown: int) -> str:
        """What a result of `num_shown` clips lacks of the split; empty for nothing."""
        num_clips = len(self.caption_ids)
        parts = [f"{num_shown:,} of {count_noun(num_clips, 'clip')} scored"] if num_shown < num_clips else []
        if self.num_rejected:
            parts.append(f"{count_noun(self.num_rejected, 'caption')} of the split rejected by prep manifest")
        return "; ".join([*parts, "not comparable with published numbers"]) if parts else ""

    def rows_shown(self, caption_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows whose clips were embedded, ascending, and for each an index into `caption_ids` of its clip.

        Args:
            caption_ids: one caption of each embedded clip; ids without a row are ignored.
        """
        place = np.searchsorted(self.caption_ids, caption_ids).clip(max=len(self.caption_ids) - 1)
        given = np.flatnonzero(self.caption_ids[place] == caption_ids)
        place_of_span = np.full(int(self.span_of_N.max()) + 1, -1)
        place_of_span[self.span_of_N[place[given]]] = given
        rows = np.flatnonzero(place_of_span[self.span_of_N] >= 0)
        return rows, place_of_span[self.span_of_N[rows]]


def open_mir_table(data_dir: Path, *, split: str, relevancy: Path | None, sentences: Path | None) -> MirTable:
    """Read the captions of a split, and their relevancies from a file or from their classes.

    Raises:
        UserError: a file cannot be read or is of another split, or there are no classes to compute relevancies from.
    """
    captions = read_captions(data_dir)
    captions = captions.filter(pa.array(rows_of(captions["video_id"], videos_of_split(data_dir, split)) >= 0))
    if _VERB in captions.column_names:
        # Captions without classes belong to another dataset in the same folder.
        captions = captions.filter(pc.is_valid(captions[_VERB]))
    texts = captions["text"].combine_chunks()
    names = pc.unique(texts) if sentences is None else _sentences(sentences, texts, split=split)
    sentence_of_N = pc.fill_null(pc.index_in(texts, value_set=names), -1).to_numpy().astype(np.int64)
    caption_ids = captions["caption_id"].to_numpy()
    if relevancy is None:
        matrix = _of_classes(captions, sentence_of_N, num_sentences=len(names), split=split)
        source = "computed from verb and noun classes, a sentence's being those of its first clip"
    else:
        matrix = _read_matrix(relevancy)
        _require_fit(matrix, sentence_of_N, num_sentences=len(names), path=relevancy, split=split)
        source = relevancy.name
    return MirTable(
        matrix,
        tuple(names.to_pylist()),
        caption_ids,
        _spans(captions),
        sentence_of_N,
        source,
        _count_rejected(data_dir, captions, split=split),
    )


def _count_rejected(data_dir: Path, captions: pa.Table, *, split: str) -> int:
    """Captions of a split's annotation files that the manifest lacks; 0 of remote data, whose list is not copied."""
    if not (manifest_dir(data_dir) / REJECTED_FILE).exists():
        return 0
    videos, rejected = read_videos(data_dir), read_rejected_rows(data_dir)
    shown = pc.is_in(videos["video_id"], value_set=pc.unique(captions["video_id"].cast(pa.string())))
    datasets = set(videos.filter(shown)["dataset"].to_pylist())
    its = [
        row["detail"] for row in rejected.to_pylist() if row["dataset"] in datasets and _is_of_split(row["file"], split)
    ]
    # A row stands for all captions of a video without a file, and otherwise for one.
    return sum(int(lost[1]) if (lost := _LOST.search(detail)) else 1 for detail in its)


def _is_of_split(file: str, split: str) -> bool:
    return file.endswith(".csv") and split_in_file_name(file.rsplit("/", 1)[-1]) == split


def _spans(captions: pa.Table) -> NDArray[np.int64]:
    spans = captions.select(["video_id", "begin_s", "end_s"]).append_column("row", pa.array(np.arange(len(captions))))
    groups = spans.group_by(["video_id", "begin_s", "end_s"], use_threads=False).aggregate([("row", "list")])
    numbers = np.empty(len(captions), np.int64)
    rows = groups["row_list"].combine_chunks()
    numbers[pc.list_flatten(rows).to_numpy()] = pc.list_parent_indices(rows).to_numpy()
    return numbers


def _sentences(path: Path, texts: pa.Array, *, split: str) -> pa.Array:
    rows = list(read_csv(path, required=["narration"]))
    if bad := next((row for row in rows if row.fault is not None), None):
        raise UserError(f"{path}, row {bad.number}: {bad.fault}", hint="give the sentence file as it was published")
    names = pa.array([row.values["narration"].strip() for row in rows], pa.string())
    strange = names.filter(pc.invert(pc.is_in(names, value_set=texts)))
    if len(strange):
        raise UserError(
            f"{path} has {count_noun(len(strange), 'sentence')} that no caption of split {split!r} has; the first: "
            f"{strange[0]}",
            hint="give the sentence file of this split",
        )
    if len(pc.unique(names)) != len(names):
        raise UserError(f"{path} has a sentence twice", hint="give the sentence file as it was published")
    return names


def _of_classes(captions: pa.Table, sentence_of_N: NDArray[np.int64], *, num_sentences: int, split: str) -> Relevancy:
    if not has_actions(captions.schema) or not captions.num_rows:
        raise UserError(
            f"captions of split {split!r} have no verb and noun classes, from which relevancies are computed",
            hint="use prep manifest epic-kitchens, or give --relevancy FILE (in training --evaluate.relevancy)",
        )
    nouns = captions[_NOUNS].combine_chunks()
    of_noun, noun = pc.list_parent_indices(nouns).to_numpy(), pc.list_flatten(nouns).to_numpy()
    nouns_NK = np.zeros((captions.num_rows, int(noun.max(initial=0)) + 1), bool)
    nouns_NK[of_noun, noun] = True
    actions = Actions(captions[_VERB].to_numpy().astype(np.int64), nouns_NK)
    own, first = np.unique(sentence_of_N, return_index=True)
    first = first[own >= 0]
    assert len(first) == num_sentences  # sentences are texts of captions
    return relevancy_of_classes(actions, Actions(actions.verb_N[first], nouns_NK[first]))


def _read_matrix(path: Path) -> Relevancy:
    if path.suffix.lower() in (".csv", ".tsv", ".txt"):
        raise UserError(
            f"{path} is a table of text, and the relevancies are a matrix of numbers: clips x sentences",
            hint="give the pickle or .npy file of the matrix; a list of sentences belongs to --sentences",
        )
    if path.suffix == ".npy":
        try:
            matrix = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"cannot read {path}: {error}", hint="save it with numpy.save(FILE, array)") from error
    else:
        matrix = load_array_pickle(path)
    if matrix.ndim != 2 or matrix.dtype.kind not in "fiub":
        raise UserError(
            f"{path} holds {matrix.dtype} of shape {matrix.shape}, and a table of numbers is needed: clips x sentences",
            hint="give a relevancy file",
        )
    try:
        return compress_matrix(matrix)
    except NoRelevancy as error:
        raise UserError(f"{path} holds no relevancies: {error}", hint="give a relevancy file") from error


def _require_fit(
    matrix: Relevancy, sentence_of_N: NDArray[np.int64], *, num_sentences: int, path: Path, split: str
) -> None:
    wanted = (len(sentence_of_N), num_sentences)
    if matrix.shape != wanted:
        raise UserError(
            f"{path} is {matrix.shape[0]:,} clips x {matrix.shape[1]:,} sentences, and split {split!r} has "
            f"{wanted[0]:,} x {wanted[1]:,}",
            hint="give the relevancy file of this split, with --sentences, and a manifest that has every row of it",
        )
    clips = np.flatnonzero(sentence_of_N >= 0)
    own_share = float((matrix.at(clips, sentence_of_N[clips]) == 1).mean()) if len(clips) else 0.0
    if own_share < _LEAST_OWN_SHARE:
        raise UserError(
            f"{path} has relevancy 1 for only {100 * own_share:.0f} % of the clips with their own sentences: its rows "
            f"or columns are in a different order from those of split {split!r}",
            hint="give --sentences, the sentence file that the relevancy was made with",
        )
