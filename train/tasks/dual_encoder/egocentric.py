"""Benchmarks of egocentric video: multi-instance retrieval (MIR) in EPIC-KITCHENS-100, and EgoMCQ.

MIR: each caption of a split stands for a clip, and the sentences are the distinct texts of the captions. The rows of
the relevancy matrix are the captions in the order of their IDs, as in the annotation file. The columns are the
sentences in order of first occurrence, or in the order of a sentence file (EPIC_100_retrieval_test_sentence.csv:
`narration_id,narration`). The published relevancy matrix is a pickle, and a pickle can run code. Therefore the few
functions that rebuild an array are replaced by stand-ins that only record their arguments, and all other names are
rejected. The array is then built from the checked arguments.

EgoMCQ (Lin et al. 2022, section 4.1) asks which of five clips matches a narration. The questions are in `egomcq.json`.
The clips are captions in the manifest (`prep manifest ego4d`), identified by video, start and end. The kind of a
question is inter if its clips come from different videos, and intra if its clips come from one video.

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
_LOST_CAPTIONS = re.compile(r"captions lost: (\d+)$")  # written by clipmill.manifests.adapters.reading
# Minimum fraction of clips that have relevancy 1 for their own sentence. The limit is below 1, because narrations with
# the same text may have different classes.
_MIN_CORRECT_FRACTION = 0.5


@dataclass(frozen=True)
class MirTable:
    """Clips and sentences of a split, with their relevancies.

    Attributes:
        relevancy: Relevancies [N, M].
        sentences: Texts of the M sentences.
        caption_ids: IDs of the captions, int64 [N], ascending.
        span_of_N: Index of each caption's span, int64. Captions with the same span share the embedding of one clip.
        sentence_of_N: Index of each clip's sentence, int64; -1 if `sentences` does not contain the clip's text.
        source: Description of the source of the relevancies.
        num_rejected: Number of rejected captions in the split's annotation files; 0 if unknown.
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
            caption_ids: Caption ID of each embedded clip. IDs without a row are ignored.

        Returns:
            Rows in ascending order, and the index of each row's clip in `caption_ids`.
        """
        index = np.searchsorted(self.caption_ids, caption_ids).clip(max=len(self.caption_ids) - 1)
        indices_with_row = np.flatnonzero(self.caption_ids[index] == caption_ids)
        index_by_span = np.full(int(self.span_of_N.max()) + 1, -1)
        index_by_span[self.span_of_N[index[indices_with_row]]] = indices_with_row
        rows = np.flatnonzero(index_by_span[self.span_of_N] >= 0)
        return rows, index_by_span[self.span_of_N[rows]]


def open_mir_table(data_dir: Path, *, split: str, relevancy: Path | None, sentences: Path | None) -> MirTable:
    """Read the captions of a split, and read or compute their relevancies.

    Args:
        relevancy: File with the relevancy matrix; None to compute the relevancies from the classes of the captions.
        sentences: Sentence file; None for the distinct texts of the captions.

    Raises:
        UserError: A file cannot be read or belongs to a different split, or the required classes are missing.
    """
    captions = select_split(read_captions(data_dir), data_dir, split)
    if _VERB in captions.column_names:
        # Captions without classes belong to another dataset in the same folder.
        captions = captions.filter(pc.is_valid(captions[_VERB]))
    texts = captions["text"].combine_chunks()
    sentence_texts = pc.unique(texts) if sentences is None else _read_sentences(sentences, texts, split=split)
    sentence_of_N = pc.fill_null(pc.index_in(texts, value_set=sentence_texts), -1).to_numpy().astype(np.int64)
    caption_ids = captions["caption_id"].to_numpy()
    if relevancy is None:
        matrix = _compute_relevancy(captions, sentence_of_N, num_sentences=len(sentence_texts), split=split)
        source = "computed from verb and noun classes; each sentence takes the classes of its first clip"
    else:
        matrix = _read_matrix(relevancy)
        _check_fit(matrix, sentence_of_N, num_sentences=len(sentence_texts), path=relevancy, split=split)
        source = relevancy.name
    # Assign an index to each distinct span of a video.
    spans = captions.select(["video_id", "begin_s", "end_s"]).append_column("row", pa.array(np.arange(len(captions))))
    groups = spans.group_by(["video_id", "begin_s", "end_s"], use_threads=False).aggregate([("row", "list")])
    span_of_N = np.empty(len(captions), np.int64)
    rows_of_span = groups["row_list"].combine_chunks()
    span_of_N[pc.list_flatten(rows_of_span).to_numpy()] = pc.list_parent_indices(rows_of_span).to_numpy()
    return MirTable(
        matrix,
        tuple(sentence_texts.to_pylist()),
        caption_ids,
        span_of_N,
        sentence_of_N,
        source,
        _count_rejected(data_dir, captions, split=split),
    )


def _count_rejected(data_dir: Path, captions: pa.Table, *, split: str) -> int:
    """Count the rejected captions in a split's annotation files.

    The result is 0 for remote data, because remote data have no list of rejected rows.
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
            # The row of a missing video file stands for all captions of the video. Other rows stand for one caption.
            count += int(lost[1]) if (lost := _LOST_CAPTIONS.search(row["detail"])) else 1
    return count


def _read_sentences(path: Path, texts: pa.Array, *, split: str) -> pa.Array:
    rows = list(read_csv(path, required=["narration"]))
    if faulty := next((row for row in rows if row.fault is not None), None):
        raise UserError(f"{path}, row {faulty.number}: {faulty.fault}", hint="use the published sentence file")
    sentences = pa.array([row.values["narration"].strip() for row in rows], pa.string())
    unknown_sentences = sentences.filter(pc.invert(pc.is_in(sentences, value_set=texts)))
    if len(unknown_sentences):
        raise UserError(
            f"{path} contains {count_noun(len(unknown_sentences), 'sentence')} missing from the captions of split "
            f"{split!r}; the first: {unknown_sentences[0]}",
            hint="use the sentence file of this split",
        )
    if len(pc.unique(sentences)) != len(sentences):
        raise UserError(f"{path} contains a duplicate sentence", hint="use the published sentence file")
    return sentences


def _compute_relevancy(
    captions: pa.Table, sentence_of_N: NDArray[np.int64], *, num_sentences: int, split: str
) -> Relevancy:
    if not has_actions(captions.schema) or not captions.num_rows:
        raise UserError(
            f"captions of split {split!r} have no verb and noun classes, so relevancies cannot be computed",
            hint="use prep manifest epic-kitchens, or --relevancy FILE (during training: --evaluate.relevancy)",
        )
    nouns = captions[_NOUNS].combine_chunks()
    row_of_noun, noun = pc.list_parent_indices(nouns).to_numpy(), pc.list_flatten(nouns).to_numpy()
    nouns_NK = np.zeros((captions.num_rows, int(noun.max(initial=0)) + 1), bool)
    nouns_NK[row_of_noun, noun] = True
    actions = Actions(captions[_VERB].to_numpy().astype(np.int64), nouns_NK)
    sentences, first_clips = np.unique(sentence_of_N, return_index=True)
    first_clips = first_clips[sentences >= 0]
    assert len(first_clips) == num_sentences  # each sentence is the text of a caption
    return relevancy_of_classes(actions, Actions(actions.verb_N[first_clips], nouns_NK[first_clips]))


def _read_matrix(path: Path) -> Relevancy:
    if path.suffix.lower() in (".csv", ".tsv", ".txt"):
        raise UserError(
            f"{path} is a text table, but relevancies are a matrix of numbers (clips x sentences)",
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
            f"{path} contains a {matrix.dtype} array of shape {matrix.shape}, but relevancies are a matrix of numbers "
            "(clips x sentences)",
            hint="use a relevancy file",
        )
    try:
        return compress_matrix(matrix)
    except NoRelevancy as error:
        raise UserError(f"{path} does not contain relevancies: {error}", hint="use a relevancy file") from error


def _check_fit(
    matrix: Relevancy, sentence_of_N: NDArray[np.int64], *, num_sentences: int, path: Path, split: str
) -> None:
    expected = (len(sentence_of_N), num_sentences)
    if matrix.shape != expected:
        raise UserError(
            f"{path} is {matrix.shape[0]:,} clips x {matrix.shape[1]:,} sentences, but split {split!r} has "
            f"{expected[0]:,} x {expected[1]:,}",
            hint="use the relevancy file of this split, pass its sentence file to --sentences, and check that the "
            "manifest contains all rows of the split",
        )
    clips = np.flatnonzero(sentence_of_N >= 0)
    correct_fraction = float((matrix.at(clips, sentence_of_N[clips]) == 1).mean()) if len(clips) else 0.0
    if correct_fraction < _MIN_CORRECT_FRACTION:
        raise UserError(
            f"{path} gives only {100 * correct_fraction:.0f} % of the clips relevancy 1 for their own sentence: its "
            f"rows or columns are not in the order of the clips and sentences of split {split!r}",
            hint="pass the sentence file that belongs to the relevancy file to --sentences",
        )


_NUMBER_TYPES = re.compile(r"[fiu][1248]|b1")
_BYTE_ORDERS = ("<", ">", "|", "=")


def load_array_pickle(path: Path) -> NDArray[Any]:
    """Read an array of numbers from a pickle (any protocol, Python 2 or 3) without running code from the pickle.

    Raises:
        UserError: The file cannot be read, is not a pickle, or contains anything other than one array of numbers.
    """
    try:
        with path.open("rb") as file:
            value = _ArrayUnpickler(file, encoding="latin1").load()
        if not isinstance(value, _Array):
            raise UserError(f"{path} contains a {type(value).__name__}, but a numpy array is needed", hint=_HINT)
        return value.array()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except _ForbiddenObject as error:
        raise UserError(
            f"{path} contains {error}, which is not loaded, because it could run code and is not part of an array of "
            "numbers",
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
    """Error for a pickle that contains an object other than the parts of an array of numbers."""


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
        """Build the array from the recorded state. The array shares memory with the pickle's bytes.

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
    "EgoMCQ (Lin et al. 2022): of five clips, the model selects the clip with the highest cosine similarity to the "
    "question's text; separate accuracies for questions with clips from different videos (inter) and from one video "
    "(intra); ties count against the model"
)


@dataclass(frozen=True)
class EgoMcqScorer:
    """Scorer for EgoMCQ.

    Attributes:
        questions: Questions whose clips are all in the data.
        ids: Caption IDs of each question's clips.
        source: Name of the question file.
        num_in_file: Number of questions in the question file.
    """

    questions: tuple[Question, ...]
    ids: tuple[tuple[int, ...], ...]
    source: str
    num_in_file: int
    definition: str = EGOMCQ_PROTOCOL

    @property
    def averaged_items(self) -> tuple[int, str]:
        """Number and name of the items over which the metrics are averaged."""
        return len(self.questions), "question"

    def score(self, embeddings: Embeddings, embed: EmbedTexts) -> dict[str, Any]:
        rows = {caption_id: row for row, caption_id in enumerate(embeddings.caption_id.tolist())}
        indices = [index for index, ids in enumerate(self.ids) if rows.keys() >= set(ids)]
        if not indices:
            raise FailedWork("every question has a clip that could not be decoded")
        text_QE = embed([self.questions[index].text for index in indices])
        is_correct, chance, is_intra = [], [], []
        for text_E, index in zip(text_QE, indices, strict=True):
            similarity = embeddings.video[[rows[caption_id] for caption_id in self.ids[index]]] @ text_E
            is_correct.append(is_nearest(similarity, self.questions[index].answer))
            chance.append(1 / len(similarity))
            is_intra.append(self.questions[index].is_intra)
        result: dict[str, Any] = {
            "protocol": self.definition,
            "questions": self.source,
            "incomplete": "",
        }
        if len(indices) < self.num_in_file:
            missing = f"{len(indices):,} of {self.num_in_file:,} questions scored"
            result["incomplete"] = f"{missing}: not comparable with published numbers"
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
    """Return True if the clip at index `answer` is nearer than all other clips, and False for NaN values."""
    other_similarities = np.delete(similarity, answer)
    return bool((other_similarities < similarity[answer]).all())


def open_questions(path: Path | None, captions: pa.Table, *, data_dir: Path) -> EgoMcqScorer:
    """Read the questions whose clips are all in the data.

    Args:
        path: Question file (egomcq.json); None raises a UserError.
        captions: Captions of EgoMCQ in the manifest.

    Raises:
        UserError: `path` is None or cannot be read, or no question has all its clips in the data.
    """
    if path is None:
        raise UserError(
            "EgoMCQ needs a file with questions",
            hint="use --questions egomcq.json (during training: --evaluate.questions)",
        )
    videos = read_videos(data_dir, columns=["video_id", "source_id"]).to_pydict()
    source_ids = dict(zip(videos["video_id"], videos["source_id"], strict=True))
    rows = captions.select(["video_id", "begin_s", "end_s", "caption_id"]).to_pylist()
    caption_ids = {(source_ids[row["video_id"]], row["begin_s"], row["end_s"]): row["caption_id"] for row in rows}
    questions, ids, num_in_file = [], [], 0
    for question in read_questions(path):
        num_in_file += 1
        if isinstance(question, str):  # the question is faulty, and the string describes the fault
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
    return EgoMcqScorer(tuple(questions), tuple(ids), path.name, num_in_file)
