"""Benchmarks of egocentric video: multi-instance retrieval (MIR) in EPIC-KITCHENS-100, and EgoMCQ.

MIR: each caption of a split stands for a clip, and the sentences are the distinct texts of the captions. The rows of
the relevancy matrix are the captions in the order of their IDs, as in the annotation file. The columns are the
sentences in the order in which they first occur, or in the order of a sentence file
(EPIC_100_retrieval_test_sentence.csv: `narration_id,narration`). The published relevancy matrix is a pickle, and a
pickle can run code. Therefore the few functions that rebuild an array are replaced by stand-ins that only record their
arguments, and all other names are rejected. The array is then built from the checked arguments.

EgoMCQ (Lin et al. 2022, section 4.1) asks which of five clips matches a narration. The questions are in `egomcq.json`.
Their clips are captions of the manifest (`prep manifest ego4d`), identified by video, start and end. The kind of a
question is inter if its clips come from different videos, and intra if they come from one video.

Shape suffixes: N clips, M sentences, K noun classes, Q questions, E embedding width.
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
_LOST_CAPTIONS = re.compile(r"captions lost: (\d+)$")  # clipmill.manifests.adapters.reading
# Minimum fraction of clips that have relevancy 1 for their own sentence. It is below 1, because narrations with the
# same text may have different classes.
_MIN_CORRECT_FRACTION = 0.5


@dataclass(frozen=True)
class MirTable:
    """Clips and sentences of a split, with their relevancies.

    Attributes:
        relevancy: Relevancies [N, M].
        sentences: Texts of the M sentences.
        caption_ids: IDs of the captions, int64 [N], ascending.
        span_of_N: Number of each caption's span, int64. The loader treats captions with the same span of a video as one
            clip.
        sentence_of_N: Index of each clip's sentence, int64; -1 if it is not among the sentences.
        source: Description of the source of the relevancies.
        num_rejected: Number of captions in the split's annotation files that prep manifest rejected; 0 if unknown.
    """

    relevancy: Relevancy
    sentences: tuple[str, ...]
    caption_ids: NDArray[np.int64]
    span_of_N: NDArray[np.int64]
    sentence_of_N: NDArray[np.int64]
    source: str
    num_rejected: int = 0

    def describe_missing(self, num_scored: int) -> str:
        """Describe what is missing from a result for `num_scored` clips; return "" if the result is complete."""
        num_clips = len(self.caption_ids)
        parts = [f"{num_scored:,} of {count_noun(num_clips, 'clip')} scored"] if num_scored < num_clips else []
        if self.num_rejected:
            parts.append(f"{count_noun(self.num_rejected, 'caption')} of the split rejected by prep manifest")
        return "; ".join([*parts, "not comparable with published numbers"]) if parts else ""

    def find_rows(self, caption_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the rows whose clips were embedded.

        Args:
            caption_ids: ID of one caption of each embedded clip. IDs without a row are ignored.

        Returns:
            Rows in ascending order, and the index of each row's clip in `caption_ids`.
        """
        index = np.searchsorted(self.caption_ids, caption_ids).clip(max=len(self.caption_ids) - 1)
        with_row = np.flatnonzero(self.caption_ids[index] == caption_ids)
        index_by_span = np.full(int(self.span_of_N.max()) + 1, -1)
        index_by_span[self.span_of_N[index[with_row]]] = with_row
        rows = np.flatnonzero(index_by_span[self.span_of_N] >= 0)
        return rows, index_by_span[self.span_of_N[rows]]


def open_mir_table(data_dir: Path, *, split: str, relevancy: Path | None, sentences: Path | None) -> MirTable:
    """Read the captions of a split, and read their relevancies or compute them from the classes of the captions.

    Args:
        relevancy: File with the relevancy matrix; None to compute the relevancies.
        sentences: Sentence file; None for the distinct texts of the captions.

    Raises:
        UserError: A file cannot be read or belongs to a different split; or the captions have no classes.
    """
    captions = select_split(read_captions(data_dir), data_dir, split)
    if _VERB in captions.column_names:
        # Captions without classes belong to another dataset in the same folder.
        captions = captions.filter(pc.is_valid(captions[_VERB]))
    texts = captions["text"].combine_chunks()
    names = pc.unique(texts) if sentences is None else _read_sentences(sentences, texts, split=split)
    sentence_of_N = pc.fill_null(pc.index_in(texts, value_set=names), -1).to_numpy().astype(np.int64)
    caption_ids = captions["caption_id"].to_numpy()
    if relevancy is None:
        matrix = _compute_relevancy(captions, sentence_of_N, num_sentences=len(names), split=split)
        source = "computed from verb and noun classes; a sentence has the classes of its first clip"
    else:
        matrix = _read_matrix(relevancy)
        _check_fit(matrix, sentence_of_N, num_sentences=len(names), path=relevancy, split=split)
        source = relevancy.name
    # Number the spans, so that captions with the same span of a video have the same number.
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
    """Count the captions in a split's annotation files that prep manifest rejected.

    The result is 0 for remote data, which have no list of rejected rows.
    """
    if not (manifest_dir(data_dir) / REJECTED_FILE).exists():
        return 0
    videos, rejected = read_videos(data_dir), read_rejected_rows(data_dir)
    has_captions = pc.is_in(videos["video_id"], value_set=pc.unique(captions["video_id"].cast(pa.string())))
    datasets = set(videos.filter(has_captions)["dataset"].to_pylist())
    count = 0
    for row in rejected.to_pylist():
        file = row["file"]
        if row["dataset"] not in datasets or not file.endswith(".csv"):
            continue
        if split_in_file_name(file.rsplit("/", 1)[-1]) == split:
            # A row for a video without a file stands for all captions of the video, any other row for one caption.
            count += int(lost[1]) if (lost := _LOST_CAPTIONS.search(row["detail"])) else 1
    return count


def _read_sentences(path: Path, texts: pa.Array, *, split: str) -> pa.Array:
    rows = list(read_csv(path, required=["narration"]))
    if faulty := next((row for row in rows if row.fault is not None), None):
        raise UserError(f"{path}, row {faulty.number}: {faulty.fault}", hint="use the published sentence file")
    names = pa.array([row.values["narration"].strip() for row in rows], pa.string())
    unknown = names.filter(pc.invert(pc.is_in(names, value_set=texts)))
    if len(unknown):
        raise UserError(
            f"{path} has {count_noun(len(unknown), 'sentence')} that no caption of split {split!r} has; the first: "
            f"{unknown[0]}",
            hint="use the sentence file of this split",
        )
    if len(pc.unique(names)) != len(names):
        raise UserError(f"{path} has a sentence twice", hint="use the published sentence file")
    return names


def _compute_relevancy(
    captions: pa.Table, sentence_of_N: NDArray[np.int64], *, num_sentences: int, split: str
) -> Relevancy:
    if not has_actions(captions.schema) or not captions.num_rows:
        raise UserError(
            f"captions of split {split!r} have no verb and noun classes, from which relevancies are computed",
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
            hint="use the pickle or .npy file of the matrix; pass a list of sentences to --sentences",
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


def _check_fit(
    matrix: Relevancy, sentence_of_N: NDArray[np.int64], *, num_sentences: int, path: Path, split: str
) -> None:
    expected = (len(sentence_of_N), num_sentences)
    if matrix.shape != expected:
        raise UserError(
            f"{path} is {matrix.shape[0]:,} clips x {matrix.shape[1]:,} sentences, but split {split!r} has "
            f"{expected[0]:,} x {expected[1]:,}",
            hint="use the relevancy file of this split, --sentences, and a manifest with all rows of the split",
        )
    clips = np.flatnonzero(sentence_of_N >= 0)
    correct_fraction = float((matrix.at(clips, sentence_of_N[clips]) == 1).mean()) if len(clips) else 0.0
    if correct_fraction < _MIN_CORRECT_FRACTION:
        raise UserError(
            f"{path} has relevancy 1 for only {100 * correct_fraction:.0f} % of the clips and their own sentences: the "
            f"rows or columns are in a different order than the clips and sentences of split {split!r}",
            hint="pass the sentence file that belongs to the relevancy file to --sentences",
        )


_NUMBER_TYPES = re.compile(r"[fiu][1248]|b1")
_BYTE_ORDERS = ("<", ">", "|", "=")


def load_array_pickle(path: Path) -> NDArray[Any]:
    """Read an array of numbers from a pickle of any protocol, written by Python 2 or 3, without running its code.

    Raises:
        UserError: The file cannot be read, is not a pickle, or contains anything other than one array of numbers.
    """
    try:
        with path.open("rb") as file:
            value = _ArrayUnpickler(file, encoding="latin1").load()
        if not isinstance(value, _Array):
            raise UserError(f"{path} holds a {type(value).__name__}, but a numpy array is needed", hint=_HINT)
        return value.array()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except _ForbiddenObject as error:
        raise UserError(
            f"{path} refers to {error}, which is not allowed: loading it could run code, and an array of numbers does "
            "not need it",
            hint=_HINT,
        ) from error
    # A damaged pickle may raise errors other than UnpicklingError (see the documentation of pickle.load).
    except (
        pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError,
        MemoryError,
    ) as error:  # fmt: skip
        raise UserError(
            f"{path} is not a complete pickle of an array: {error or type(error).__name__}", hint=_HINT
        ) from error


_HINT = "save it as .npy: numpy.save(FILE, array)"


class _ForbiddenObject(Exception):
    """Error for a pickle that refers to an object which arrays of numbers do not need."""


class _Dtype:
    """Stand-in for numpy.dtype that records the type code and the byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        if not isinstance(code, str) or not _NUMBER_TYPES.fullmatch(code):
            raise _ForbiddenObject(f"an array of type {code!r:.20}")
        self.code, self.byte_order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, byte_order, inner, names, fields, *_ = state
        if byte_order not in _BYTE_ORDERS or inner is not None or names or fields:
            raise _ForbiddenObject("an array of records")
        self.byte_order = byte_order


class _Array:
    """Stand-in for numpy.ndarray that records the array's state."""

    def __init__(self, *_: Any) -> None:
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def array(self) -> NDArray[Any]:
        """Build the array from the recorded state. It shares memory with the pickle's bytes.

        Raises:
            ValueError: The recorded parts are inconsistent.
        """
        _, shape, dtype, is_fortran, content = self._state
        if not isinstance(dtype, _Dtype):
            raise ValueError("the array has no dtype")
        # Python 2 stored bytes as text.
        raw = content.encode("latin1") if isinstance(content, str) else bytes(content)
        flat = np.frombuffer(raw, np.dtype(dtype.byte_order + dtype.code))
        return flat.reshape(shape, order="F" if is_fortran else "C")


def _from_buffer(content: bytes, dtype: Any, shape: Any, order: str, *_: Any) -> _Array:
    """Stand-in for the function that pickles of protocol 5 call to rebuild an array."""
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Stand-in for the function that pickles of protocols 0 to 2 call to rebuild bytes."""
    if encoding != "latin1":
        raise _ForbiddenObject(f"the encoding {encoding!r:.20}")
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("__builtin__", "bytes"): lambda: b"",  # protocols 0 to 2 call this to rebuild empty bytes
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
            raise _ForbiddenObject(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _ForbiddenObject(f"the external object {pid!r:.40}")


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
        ids: Caption IDs of each question's clips.
        source: Name of the question file.
        num_all: Number of questions in this file.
    """

    questions: tuple[Question, ...]
    ids: tuple[tuple[int, ...], ...]
    source: str
    num_all: int
    definition: str = EGOMCQ_PROTOCOL

    @property
    def means_of(self) -> tuple[int, str]:
        """Number and name of the items over which the metrics are averaged."""
        return len(self.questions), "question"

    def score(self, embeddings: Embeddings, embed: EmbedTexts) -> dict[str, Any]:
        rows = {caption_id: row for row, caption_id in enumerate(embeddings.caption_id.tolist())}
        numbers = [number for number, ids in enumerate(self.ids) if rows.keys() >= set(ids)]
        if not numbers:
            raise FailedWork("every question has a clip that could not be decoded")
        text_QE = embed([self.questions[number].text for number in numbers])
        is_correct, chance, is_intra = [], [], []
        for text_E, number in zip(text_QE, numbers, strict=True):
            similarity = embeddings.video[[rows[caption_id] for caption_id in self.ids[number]]] @ text_E
            is_correct.append(is_nearest(similarity, self.questions[number].answer))
            chance.append(1 / len(similarity))
            is_intra.append(self.questions[number].is_intra)
        result: dict[str, Any] = {
            "protocol": self.definition,
            "questions": self.source,
            "incomplete": "",
        }
        if len(numbers) < self.num_all:
            missing = f"{len(numbers):,} of {self.num_all:,} questions scored: not comparable with published numbers"
            result["incomplete"] = missing
        for kind, mask in zip(KINDS, (~np.array(is_intra), np.array(is_intra)), strict=True):
            num_questions = int(mask.sum())
            result[kind] = {
                "num_questions": num_questions,
                "accuracy": float(np.array(is_correct)[mask].mean()) if num_questions else None,
                "chance": float(np.array(chance)[mask].mean()) if num_questions else None,
            }
        return result

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        accuracies = {f"{kind}_accuracy": result[kind]["accuracy"] for kind in KINDS}
        return {name: value for name, value in accuracies.items() if value is not None}


def is_nearest(similarity: NDArray[np.float32], answer: int) -> bool:
    """Return True if the clip `answer` is nearer than all other clips. NaN counts as not nearer."""
    others = np.delete(similarity, answer)
    return bool((others < similarity[answer]).all())


def open_questions(path: Path | None, captions: pa.Table, *, data_dir: Path) -> EgoMcqScorer:
    """Read the questions whose clips are all in the data.

    Args:
        path: File with the questions (egomcq.json), required.
        captions: Captions of EgoMCQ in the manifest.

    Raises:
        UserError: `path` is None or cannot be read, or no question has all its clips in the data.
    """
    if path is None:
        raise UserError(
            "EgoMCQ needs the file with its questions",
            hint="use --questions egomcq.json (in training --evaluate.questions)",
        )
    videos = read_videos(data_dir, columns=["video_id", "source_id"]).to_pydict()
    source_ids = dict(zip(videos["video_id"], videos["source_id"], strict=True))
    rows = captions.select(["video_id", "begin_s", "end_s", "caption_id"]).to_pylist()
    caption_ids = {(source_ids[row["video_id"]], row["begin_s"], row["end_s"]): row["caption_id"] for row in rows}
    questions, ids, num_all = [], [], 0
    for question in read_questions(path):
        num_all += 1
        if isinstance(question, str):  # a description of a faulty question
            continue
        clip_ids = tuple(caption_ids.get((clip.source_id, clip.begin_s, clip.end_s), -1) for clip in question.choices)
        if min(clip_ids) >= 0:
            questions.append(question)
            ids.append(clip_ids)
    if not questions:
        raise UserError(
            f"no question in {path} has all its clips in {data_dir}",
            hint="pass the same file to prep manifest ego4d --annotations",
        )
    return EgoMcqScorer(tuple(questions), tuple(ids), path.name, num_all)
