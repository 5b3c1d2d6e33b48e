"""Benchmarks of egocentric video: multi-instance retrieval (MIR) in EPIC-KITCHENS-100, and EgoMCQ.

MIR: clips are the captions of a split; sentences are their distinct texts. The rows of the relevancy matrix are the
captions of the split in the order of their IDs, as in the annotation file. The columns are the distinct texts in the
order of their first occurrence, or the texts of a sentence file (EPIC_100_retrieval_test_sentence.csv:
`narration_id,narration`). The published relevancy is a pickle, and a pickle can run code. The few functions that
rebuild an array are replaced by stand-ins that only record their arguments, and all other names are rejected. The array
is then built from the checked arguments.

EgoMCQ (Lin et al. 2022, section 4.1): which of five clips does a narration describe? The questions are in
`egomcq.json`. Their clips are captions of the manifest (`prep manifest ego4d`), identified by video, start
and end. The kind of a question is inter if its clips come from different videos, and intra if they come from one video.
"""

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.adapters.annotations import read_csv, split_in_file_name
from clipmill.manifests.adapters.egomcq import Question, read_questions
from clipmill.manifests.divided_videos import select_split
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import REJECTED_FILE, manifest_dir, read_captions, read_rejected_rows, read_videos
from clipmill.train.data.relevancy import (
    Actions,
    NoRelevancy,
    Relevancy,
    compress_matrix,
    has_actions,
    relevancy_of_classes,
)
from clipmill.train.tasks.dual_encoder.protocols import Embeddings, EmbedTexts

_VERB, _NOUNS = "label_verb", "label_nouns"
_LOST = re.compile(r"captions lost: (\d+)$")  # clipmill.manifests.adapters.reading
# Minimum fraction of clips with relevancy 1 for their own sentences. It is below 1, because narrations with the same
# text may have different classes.
_MIN_RIGHT_FRACTION = 0.5


@dataclass(frozen=True)
class MirTable:
    """The clips and sentences of a split.

    Attributes:
        relevancy: Relevancies [N, M].
        sentences: Texts [M].
        caption_ids: IDs of the captions, int64 [N], ascending.
        span_of_N: Number of the caption's span, int64. The loader treats captions with the same span of a video as one
            clip.
        sentence_of_N: Index of the clip's sentence, int64; -1 if it is not among the sentences.
        source: Description of the source of the relevancy.
        num_rejected: Number of captions in the split's annotation files that prep manifest rejected, if it is recorded.
    """

    relevancy: Relevancy
    sentences: tuple[str, ...]
    caption_ids: NDArray[np.int64]
    span_of_N: NDArray[np.int64]
    sentence_of_N: NDArray[np.int64]
    source: str
    num_rejected: int = 0

    def describe_missing(self, num_shown: int) -> str:
        """Describe the part of the split that is missing in a result for `num_shown` clips; empty if it is complete."""
        num_clips = len(self.caption_ids)
        parts = [f"{num_shown:,} of {count_noun(num_clips, 'clip')} scored"] if num_shown < num_clips else []
        if self.num_rejected:
            parts.append(f"{count_noun(self.num_rejected, 'caption')} of the split rejected by prep manifest")
        return "; ".join([*parts, "not comparable with published numbers"]) if parts else ""

    def rows_shown(self, caption_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows whose clips were embedded, ascending, and each clip's index in `caption_ids`.

        Args:
            caption_ids: ID of a caption of each embedded clip; IDs without a row are ignored.
        """
        index = np.searchsorted(self.caption_ids, caption_ids).clip(max=len(self.caption_ids) - 1)
        embedded = np.flatnonzero(self.caption_ids[index] == caption_ids)
        index_by_span = np.full(int(self.span_of_N.max()) + 1, -1)
        index_by_span[self.span_of_N[index[embedded]]] = embedded
        rows = np.flatnonzero(index_by_span[self.span_of_N] >= 0)
        return rows, index_by_span[self.span_of_N[rows]]


def open_mir_table(data_dir: Path, *, split: str, relevancy: Path | None, sentences: Path | None) -> MirTable:
    """Read the captions of a split and their relevancies, or compute relevancies from classes.

    Raises:
        UserError: A file cannot be read or belongs to a different split; or there are no classes for relevancies.
    """
    captions = select_split(read_captions(data_dir), data_dir, split)
    if _VERB in captions.column_names:
        # Captions without classes belong to a different dataset in the same folder.
        captions = captions.filter(pc.is_valid(captions[_VERB]))
    texts = captions["text"].combine_chunks()
    names = pc.unique(texts) if sentences is None else _sentences(sentences, texts, split=split)
    sentence_of_N = pc.fill_null(pc.index_in(texts, value_set=names), -1).to_numpy().astype(np.int64)
    caption_ids = captions["caption_id"].to_numpy()
    if relevancy is None:
        matrix = _compute_relevancy(captions, sentence_of_N, num_sentences=len(names), split=split)
        source = "computed from verb and noun classes; a sentence has the classes of its first clip"
    else:
        matrix = _read_matrix(relevancy)
        _require_fit(matrix, sentence_of_N, num_sentences=len(names), path=relevancy, split=split)
        source = relevancy.name
    # Give the same number to clips with the same span of a video.
    spans = captions.select(["video_id", "begin_s", "end_s"]).append_column("row", pa.array(np.arange(len(captions))))
    groups = spans.group_by(["video_id", "begin_s", "end_s"], use_threads=False).aggregate([("row", "list")])
    numbers = np.empty(len(captions), np.int64)
    rows_of_span = groups["row_list"].combine_chunks()
    numbers[pc.list_flatten(rows_of_span).to_numpy()] = pc.list_parent_indices(rows_of_span).to_numpy()
    return MirTable(
        matrix,
        tuple(names.to_pylist()),
        caption_ids,
        numbers,
        sentence_of_N,
        source,
        _count_rejected(data_dir, captions, split=split),
    )


def _count_rejected(data_dir: Path, captions: pa.Table, *, split: str) -> int:
    """Count the captions in a split's annotation files that were rejected; 0 for remote data without the list."""
    if not (manifest_dir(data_dir) / REJECTED_FILE).exists():
        return 0
    videos, rejected = read_videos(data_dir), read_rejected_rows(data_dir)
    shown = pc.is_in(videos["video_id"], value_set=pc.unique(captions["video_id"].cast(pa.string())))
    datasets = set(videos.filter(shown)["dataset"].to_pylist())
    count = 0
    for row in rejected.to_pylist():
        file = row["file"]
        if row["dataset"] not in datasets or not file.endswith(".csv"):
            continue
        if split_in_file_name(file.rsplit("/", 1)[-1]) == split:
            # If a video has no file, a row stands for all captions of the video, otherwise for a single caption.
            count += int(lost[1]) if (lost := _LOST.search(row["detail"])) else 1
    return count


def _sentences(path: Path, texts: pa.Array, *, split: str) -> pa.Array:
    rows = list(read_csv(path, required=["narration"]))
    if bad := next((row for row in rows if row.fault is not None), None):
        raise UserError(f"{path}, row {bad.number}: {bad.fault}", hint="use the sentence file as it was published")
    names = pa.array([row.values["narration"].strip() for row in rows], pa.string())
    unknown = names.filter(pc.invert(pc.is_in(names, value_set=texts)))
    if len(unknown):
        raise UserError(
            f"{path} has {count_noun(len(unknown), 'sentence')} that no caption of split {split!r} has; the first: "
            f"{unknown[0]}",
            hint="use the sentence file of this split",
        )
    if len(pc.unique(names)) != len(names):
        raise UserError(f"{path} has a sentence twice", hint="use the sentence file as it was published")
    return names


def _compute_relevancy(
    captions: pa.Table, sentence_of_N: NDArray[np.int64], *, num_sentences: int, split: str
) -> Relevancy:
    if not has_actions(captions.schema) or not captions.num_rows:
        raise UserError(
            f"captions of split {split!r} have no verb and noun classes, which relevancies are computed from",
            hint="use prep manifest epic-kitchens, or --relevancy FILE (in training --evaluate.relevancy)",
        )
    nouns = captions[_NOUNS].combine_chunks()
    row_of_noun, noun = pc.list_parent_indices(nouns).to_numpy(), pc.list_flatten(nouns).to_numpy()
    nouns_NK = np.zeros((captions.num_rows, int(noun.max(initial=0)) + 1), bool)
    nouns_NK[row_of_noun, noun] = True
    actions = Actions(captions[_VERB].to_numpy().astype(np.int64), nouns_NK)
    sentences, first = np.unique(sentence_of_N, return_index=True)
    first = first[sentences >= 0]
    assert len(first) == num_sentences  # sentences are texts of captions
    return relevancy_of_classes(actions, Actions(actions.verb_N[first], nouns_NK[first]))


def _read_matrix(path: Path) -> Relevancy:
    if path.suffix.lower() in (".csv", ".tsv", ".txt"):
        raise UserError(
            f"{path} is a table of text, but relevancies are a matrix of numbers: clips x sentences",
            hint="use the pickle or .npy file of the matrix; a list of sentences belongs to --sentences",
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
            f"{path} holds {matrix.dtype} of shape {matrix.shape}, not a matrix of numbers: clips x sentences",
            hint="use a relevancy file",
        )
    try:
        return compress_matrix(matrix)
    except NoRelevancy as error:
        raise UserError(f"{path} holds no relevancies: {error}", hint="use a relevancy file") from error


def _require_fit(
    matrix: Relevancy, sentence_of_N: NDArray[np.int64], *, num_sentences: int, path: Path, split: str
) -> None:
    expected = (len(sentence_of_N), num_sentences)
    if matrix.shape != expected:
        raise UserError(
            f"{path} is {matrix.shape[0]:,} clips x {matrix.shape[1]:,} sentences, but split {split!r} has "
            f"{expected[0]:,} x {expected[1]:,}",
            hint="use the relevancy file of this split, with --sentences, and a manifest with all its rows",
        )
    clips = np.flatnonzero(sentence_of_N >= 0)
    right_share = float((matrix.at(clips, sentence_of_N[clips]) == 1).mean()) if len(clips) else 0.0
    if right_share < _MIN_RIGHT_FRACTION:
        raise UserError(
            f"{path} has relevancy 1 for only {100 * right_share:.0f} % of the clips with their own sentences: its "
            f"rows or columns are in a different order than the clips and sentences of split {split!r}",
            hint="use --sentences with the sentence file that the relevancy was made with",
        )


_NUMBER_TYPES = re.compile(r"[fiu][1248]|b1")
_BYTE_ORDERS = ("<", ">", "|", "=")


def load_array_pickle(path: Path) -> NDArray[Any]:
    """Read an array of numbers from a pickle of any protocol, written by Python 2 or 3.

    Raises:
        UserError: The file cannot be read, is not a pickle, or contains anything but one array of numbers.
    """
    try:
        with path.open("rb") as file:
            value = _ArrayUnpickler(file, encoding="latin1").load()
        if not isinstance(value, _Array):
            raise UserError(f"{path} holds a {type(value).__name__}, but a numpy array is needed", hint=_HINT)
        return value.array()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except _Refused as error:
        raise UserError(
            f"{path} refers to {error}, which is refused: loading it could run code, and an array of numbers does not "
            "need it",
            hint=_HINT,
        ) from error
    # A damaged pickle may raise other errors than UnpicklingError (see Python's documentation of pickle.load).
    except (
        pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError,
        MemoryError,
    ) as error:  # fmt: skip
        raise UserError(
            f"{path} is not a complete pickle of an array: {error or type(error).__name__}", hint=_HINT
        ) from error


_HINT = "save it as .npy: numpy.save(FILE, array)"


class _Refused(Exception):
    """The pickle refers to an object that arrays of numbers do not need."""


class _Dtype:
    """Stand-in for numpy.dtype that records code and byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        if not isinstance(code, str) or not _NUMBER_TYPES.fullmatch(code):
            raise _Refused(f"an array of type {code!r:.20}")
        self.code, self.byte_order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, byte_order, inner, names, fields, *_ = state
        if byte_order not in _BYTE_ORDERS or inner is not None or names or fields:
            raise _Refused("an array of records")
        self.byte_order = byte_order


class _Array:
    """Stand-in for numpy.ndarray that records its state."""

    def __init__(self, *_: Any) -> None:
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def array(self) -> NDArray[Any]:
        """Return the array, which shares the pickle's bytes.

        Raises:
            ValueError: The recorded parts are inconsistent.
        """
        _, shape, dtype, is_fortran, content = self._state
        if not isinstance(dtype, _Dtype):
            raise ValueError("it has no type")
        # Pickles of Python 2 store bytes as text.
        raw = content.encode("latin1") if isinstance(content, str) else bytes(content)
        flat = np.frombuffer(raw, np.dtype(dtype.byte_order + dtype.code))
        return flat.reshape(shape, order="F" if is_fortran else "C")


def _from_buffer(content: bytes, dtype: Any, shape: Any, order: str, *_: Any) -> _Array:
    """Stand-in for the function by which protocol 5 stores an array."""
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Stand-in for the function by which protocols before 3 store bytes."""
    if encoding != "latin1":
        raise _Refused(f"the encoding {encoding!r:.20}")
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("__builtin__", "bytes"): lambda: b"",  # protocols before 3 store empty bytes as a call of this
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused(f"the outside object {pid!r:.40}")


KINDS = ("inter", "intra")
EGOMCQ_PROTOCOL = (
    "EgoMCQ (Lin et al. 2022): the text of a question against its five clips; accuracy of the nearest clip by cosine, "
    "where they are of different videos (inter) and of one (intra); ties count against the model"
)


@dataclass(frozen=True)
class EgoMcqScorer:
    """Scorer for EgoMCQ.

    Attributes:
        questions: Questions whose clips are all in the data.
        ids: Caption IDs of the clips of each question.
        source: Name of the file with the questions.
        num_all: Number of questions in the file.
    """

    questions: tuple[Question, ...]
    ids: tuple[tuple[int, ...], ...]
    source: str
    num_all: int
    definition: str = EGOMCQ_PROTOCOL

    @property
    def means_of(self) -> tuple[int, str]:
        """Number and noun of the items that the metrics average over."""
        return len(self.questions), "question"

    def score(self, embeddings: Embeddings, embed: EmbedTexts) -> dict[str, Any]:
        row_of = {caption_id: row for row, caption_id in enumerate(embeddings.caption_id.tolist())}
        scored = [number for number, ids in enumerate(self.ids) if row_of.keys() >= set(ids)]
        if not scored:
            raise FailedWork("every question has a clip that could not be decoded")
        text_QE = embed([self.questions[number].text for number in scored])
        is_right, chance, is_intra = [], [], []
        for text_E, number in zip(text_QE, scored, strict=True):
            similarity = embeddings.video[[row_of[caption_id] for caption_id in self.ids[number]]] @ text_E
            is_right.append(is_nearest(similarity, self.questions[number].answer))
            chance.append(1 / len(similarity))
            is_intra.append(self.questions[number].is_intra)
        result: dict[str, Any] = {
            "protocol": self.definition,
            "questions": self.source,
            "incomplete": "",
        }
        if len(scored) < self.num_all:
            missing = f"{len(scored):,} of {self.num_all:,} questions scored: not comparable with published numbers"
            result["incomplete"] = missing
        for kind, mask in zip(KINDS, (~np.array(is_intra), np.array(is_intra)), strict=True):
            num = int(mask.sum())
            result[kind] = {
                "num_questions": num,
                "accuracy": float(np.array(is_right)[mask].mean()) if num else None,
                "chance": float(np.array(chance)[mask].mean()) if num else None,
            }
        return result

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        accuracies = {f"{kind}_accuracy": result[kind]["accuracy"] for kind in KINDS}
        return {name: value for name, value in accuracies.items() if value is not None}


def is_nearest(similarity: NDArray[np.float32], answer: int) -> bool:
    """Return True if the answer is nearer than all other clips; False for NaN."""
    others = np.delete(similarity, answer)
    return bool((others < similarity[answer]).all())


def open_questions(path: Path | None, captions: pa.Table, *, data_dir: Path) -> EgoMcqScorer:
    """Read the questions whose clips are all among `captions`, the captions of EgoMCQ in the manifest.

    Raises:
        UserError: The file is missing, or has no question about these captions.
    """

    if path is None:
        raise UserError(
            "EgoMCQ needs its file of questions",
            hint="use --questions egomcq.json (in training --evaluate.questions)",
        )
    videos = read_videos(data_dir, columns=["video_id", "source_id"]).to_pydict()
    source_of = dict(zip(videos["video_id"], videos["source_id"], strict=True))
    rows = captions.select(["video_id", "begin_s", "end_s", "caption_id"]).to_pylist()
    id_of = {(source_of[row["video_id"]], row["begin_s"], row["end_s"]): row["caption_id"] for row in rows}
    questions, ids, num_all = [], [], 0
    for question in read_questions(path):
        num_all += 1
        if isinstance(question, str):
            continue
        clip_ids = tuple(id_of.get((clip.source_id, clip.begin_s, clip.end_s), -1) for clip in question.choices)
        if min(clip_ids) >= 0:
            questions.append(question)
            ids.append(clip_ids)
    if not questions:
        raise UserError(
            f"no question in {path} has all its clips in {data_dir}",
            hint="pass the same file to prep manifest ego4d --annotations",
        )
    return EgoMcqScorer(tuple(questions), tuple(ids), path.name, num_all)
