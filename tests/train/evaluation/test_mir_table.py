import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.write import write_manifest
from clipmill.train.evaluation.tables import table_of
from clipmill.train.tasks.dual_encoder.egocentric import MirTable, open_mir_table
from clipmill.train.tasks.dual_encoder.spec import MIR

# Text, verb and nouns of the test split, in the order of the annotation file. The fourth row shares a span with the
# third.
ROWS: list[tuple[str, float, str, int | None, list[int] | None]] = [
    ("a", 0.0, "take plate", 0, [1]),
    ("a", 2.0, "wash plate and cup", 2, [1, 4]),
    ("a", 4.0, "take cup", 0, [4]),
    ("a", 4.0, "grab cup", 0, [4]),
    ("b", 0.0, "take plate", 0, [1, 7]),  # the same text with different classes
    ("b", 2.0, "open tap", 3, [9]),
]
SENTENCES = ["take plate", "wash plate and cup", "take cup", "grab cup", "open tap"]
RELEVANCY = np.array(
    [
        [1, 0.25, 0.5, 0.5, 0],
        [0.25, 1, 0.25, 0.25, 0],
        [0.5, 0.25, 1, 1, 0],
        [0.5, 0.25, 1, 1, 0],
        [0.75, 1 / 6, 0.5, 0.5, 0],
        [0, 0, 0, 0, 1],
    ]
)


def table(rows: list[tuple[str, float, str, int | None, list[int] | None]], *, has_labels: bool) -> pa.Table:
    video_id, begin_s, text, verb, nouns = zip(*rows, strict=True)
    columns: dict[str, Any] = {
        "video_id": pa.array(video_id).dictionary_encode(),
        "begin_s": pa.array(begin_s, pa.float64()),
        "end_s": pa.array([begin + 2 for begin in begin_s], pa.float64()),
        "text": pa.array(text),
        "source": pa.array(["test"] * len(rows)).dictionary_encode(),
    }
    if has_labels:
        columns |= {
            "label_verb": pa.array(verb, pa.int32()),
            "label_noun": pa.array([None if its is None else its[0] for its in nouns], pa.int32()),
            "label_nouns": pa.array(nouns, pa.list_(pa.int32())),
        }
    return pa.table(columns)


def videos(splits: dict[str, str]) -> pa.Table:
    return pa.table(
        {
            "video_id": list(splits),
            "source_id": list(splits),
            "path": [f"/v/{name}.mp4" for name in splits],
            "split": list(splits.values()),
        }
    )


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data folder with captions of a different split first, and of a dataset without classes last."""
    data_dir = tmp_path_factory.mktemp("kitchen")
    rows = [("t", 0.0, "take plate", 0, [1]), *ROWS]
    write_manifest(data_dir, "epic", videos({"t": "train", "a": "test", "b": "test"}), table(rows, has_labels=True))
    write_manifest(data_dir, "other", videos({"z": "test"}), table([("z", 0.0, "a dog", None, None)], has_labels=False))
    return data_dir


def open_mir(data_dir: Path, **files: Path) -> MirTable:
    return open_mir_table(data_dir, split="test", relevancy=files.get("relevancy"), sentences=files.get("sentences"))


def save_matrix(path: Path, matrix: NDArray[np.floating]) -> Path:
    if path.suffix == ".npy":
        np.save(path, matrix)
    else:
        path.write_bytes(pickle.dumps(matrix))
    return path


def sentence_file(path: Path, sentences: list[str]) -> Path:
    lines = [f'P01_{number},"{sentence}"' for number, sentence in enumerate(sentences)]
    path.write_text("\n".join(["narration_id,narration", *lines]) + "\n")
    return path


def test_relevancy_of_the_classes_by_hand(kitchen: Path) -> None:
    mir = open_mir(kitchen)
    assert mir.sentences == tuple(SENTENCES)
    assert np.array_equal(mir.relevancy.rows(slice(None)), RELEVANCY)
    assert mir.sentence_of_N.tolist() == [0, 1, 2, 3, 0, 4]
    assert mir.caption_ids.tolist() == [1, 2, 3, 4, 5, 6] and "computed" in mir.source


@pytest.mark.parametrize("ending", [".npy", ".pkl"])
def test_a_relevancy_file_stands_for_the_classes(kitchen: Path, tmp_path: Path, ending: str) -> None:
    matrix = RELEVANCY.copy()
    matrix[1, 4] = 0.125
    path = save_matrix(tmp_path / f"frozen{ending}", matrix)
    mir = open_mir(kitchen, relevancy=path)
    assert np.array_equal(mir.relevancy.rows(slice(None)), matrix) and "frozen" in mir.source


def test_a_sentence_file_gives_the_order_of_the_columns(kitchen: Path, tmp_path: Path) -> None:
    order = [3, 1, 4, 0, 2]
    path = sentence_file(tmp_path / "sentence.csv", [SENTENCES[place] for place in order])
    computed = open_mir(kitchen, sentences=path)
    assert np.array_equal(computed.relevancy.rows(slice(None)), RELEVANCY[:, order])
    matrix = save_matrix(tmp_path / "relevancy.pkl", RELEVANCY[:, order])
    assert open_mir(kitchen, sentences=path, relevancy=matrix).sentences == computed.sentences


def test_columns_in_another_order_are_noticed(kitchen: Path, tmp_path: Path) -> None:
    path = save_matrix(tmp_path / "relevancy.pkl", RELEVANCY[:, [3, 2, 4, 0, 1]])
    with pytest.raises(UserError, match="not in the order of the clips and sentences") as caught:
        open_mir(kitchen, relevancy=path)
    assert "--sentences" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("matrix", "what"),
    [
        (np.ones((9668, 3)), r"9,668 clips x 3 sentences, but split 'test' has 6 x 5"),
        (RELEVANCY.T, r"5 clips x 6 sentences, but split 'test' has 6 x 5"),
        (RELEVANCY[0], r"of shape \(5,\)"),
        (2 * RELEVANCY, r"it has 2\.0, but a relevancy is between 0 and 1"),
    ],
)
def test_what_is_not_of_this_split_is_named(
    kitchen: Path, tmp_path: Path, matrix: NDArray[np.float64], what: str
) -> None:
    with pytest.raises(UserError, match=what):
        open_mir(kitchen, relevancy=save_matrix(tmp_path / "relevancy.npy", matrix))


@pytest.mark.parametrize(
    ("sentences", "what"),
    [
        ([*SENTENCES, "peel carrot"], "1 sentence missing from the captions of split 'test'; the first: peel carrot"),
        ([*SENTENCES, "open tap"], "contains a duplicate sentence"),
    ],
)
def test_a_sentence_file_of_another_split_is_named(
    kitchen: Path, tmp_path: Path, sentences: list[str], what: str
) -> None:
    with pytest.raises(UserError, match=what):
        open_mir(kitchen, sentences=sentence_file(tmp_path / "sentence.csv", sentences))


def test_files_that_cannot_be_read_are_named(kitchen: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY")
    for path in (tmp_path / "none.npy", tmp_path / "none.pkl", tmp_path / "cut.npy"):
        with pytest.raises(UserError, match=path.name):
            open_mir(kitchen, relevancy=path)


def test_a_table_in_place_of_the_matrix_is_named(kitchen: Path, tmp_path: Path) -> None:
    path = sentence_file(tmp_path / "EPIC_100_retrieval_test.csv", SENTENCES)
    with pytest.raises(UserError, match="is a text table") as caught:
        open_mir(kitchen, relevancy=path)
    assert "--sentences" in str(caught.value.hint)


def test_captions_without_classes_cannot_be_compared(kitchen: Path, tmp_path: Path) -> None:
    write_manifest(tmp_path, "plain", videos({"z": "test"}), table([("z", 0.0, "x", None, None)], has_labels=False))
    with pytest.raises(UserError, match="no verb and noun classes") as caught:
        open_mir(tmp_path)
    assert "--relevancy" in str(caught.value.hint)


def test_clips_that_are_not_scored_and_captions_that_were_rejected_are_missing(kitchen: Path, tmp_path: Path) -> None:
    assert open_mir(kitchen).describe_missing(6) == ""
    assert open_mir(kitchen).describe_missing(5) == "5 of 6 clips scored; not comparable with published numbers"
    lists = ("EPIC_100_retrieval_test.csv", "EPIC_100_retrieval_train.csv")
    details = ["no matching video file; captions lost: 3", "the end is not after the begin"]
    rejected = pa.table(
        {
            "file": [f"/lists/{name}" for name in lists for _ in details],
            "row": pa.array([None, 4] * 2, pa.int64()),
            "source_id": ["c", "a"] * 2,
            "reason": ["missing_file", "bad_time"] * 2,
            "detail": details * 2,
            "dataset": ["epic"] * 4,
        }
    )
    write_manifest(
        tmp_path, "epic", videos({"a": "test", "b": "test"}), table(ROWS, has_labels=True), rejected=rejected
    )
    missing = open_mir(tmp_path).describe_missing(6)
    assert missing == "4 captions of the split rejected by prep manifest; not comparable with published numbers"


@pytest.mark.parametrize(
    ("relevancy", "which"),
    [
        ("computed from verb and noun classes", "computed relevancy"),
        ("relevancy computed from verb and noun classes", "computed relevancy"),  # as earlier versions wrote it
        ("frozen.pkl", "frozen.pkl"),
    ],
)
def test_results_name_their_relevancy_and_count_queries_that_have_a_score(relevancy: str, which: str) -> None:
    scores = {"gallery_size": 8, "mean_ap": 0.5, "ndcg": 0.5, "chance_mean_ap": 0.1, "chance_ndcg": 0.1}
    scores |= {"num_queries": 15, "num_without_ap": 7, "num_without_ndcg": 0}
    facts = {"data": "", "variant": "", "protocol": "", "shards": "data", "step": 2, "weights": "", "clip": ""}
    result = {**facts, "relevancy": relevancy, "coverage": "8 of 15 clips", "incomplete": "8 of 15 clips scored"}
    result |= {"video_to_text": scores, "text_to_video": scores, "average": {"mean_ap": 0.5, "ndcg": 0.5}}
    results = table_of(MIR.table, result)
    assert results.title == f"Multi-instance retrieval (EK-100 MIR, {which}) (incomplete)"
    of_file = "" if which == "computed relevancy" else f", {which}"
    assert results.rows[results.headline].label == f"average{of_file} (incomplete)"  # the label of its tile
    assert results.rows[1].detail == "8 queries, 8 to rank" and results.rows[1].label == "text → video (incomplete)"
    assert "relevancy" not in results.protocol["relevancy"] and results.protocol["incomplete"] == "8 of 15 clips scored"


def test_captions_of_one_span_share_the_clip_that_shows_it(kitchen: Path) -> None:
    """The loader shows rows 2 and 3 as one clip, with the caption of row 2."""
    mir = open_mir(kitchen)
    rows, place = mir.find_rows(np.array([6, 3, 7, 1]))  # 7 belongs to the other dataset
    assert rows.tolist() == [0, 2, 3, 5] and place.tolist() == [3, 1, 1, 0]
