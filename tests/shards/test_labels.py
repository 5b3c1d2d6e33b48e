"""Tests of labels in `--where`: the captions and chunks that have them, compared with loops over all pairs."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clipmill.manifests.errors import UserError
from clipmill.prep.text.captions import CaptionReader
from clipmill.shards.selection import Spans, labelled_captions, match_labels, read_label_rows, selected_captions
from clipmill.shards.where import parse_where
from tests.train.tiny_data import Caption, write_captions

VIDEOS = ["a", "b", "c"]


def random_captions(rng: np.random.Generator, *, count: int) -> list[Caption]:
    """Draw captions that start and end at multiples of half a second.

    Some last to the end of the video, and most have no labels.
    """
    captions = []
    for number in range(count):
        begin_s = float(rng.integers(0, 12)) / 2
        end_s = math.inf if rng.random() < 0.2 else begin_s + float(rng.integers(1, 8)) / 2
        values = {f"label_{name}": str(rng.choice(["x", "y"])) for name in ("one", "two") if rng.random() < 0.25}
        captions.append(Caption(str(rng.choice(VIDEOS)), begin_s, end_s, f"text {number}", labels=values))
    return captions


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("covering", [False, True])
def test_labelled_captions_of_a_part_are_those_that_overlap_or_cover_it(
    seed: int, covering: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    captions = random_captions(rng, count=60)
    write_captions(tmp_path, dict.fromkeys(VIDEOS, "train"), captions)
    label_rows = read_label_rows(tmp_path, {"label_one": "text"})
    assert label_rows.num_rows == sum("label_one" in caption.labels for caption in captions)
    video_row = rng.integers(-1, 2, 40)  # -1: not one of the videos
    begin_s = rng.integers(0, 10, 40) / 2
    end_s = begin_s + rng.integers(1, 5, 40)
    part, caption = match_labels(
        label_rows, Spans(video_row, begin_s, end_s), video_ids=pa.array(VIDEOS[:2]), must_cover=covering
    )
    pairs = []
    for number, (row, begin, end) in enumerate(zip(video_row, begin_s, end_s, strict=True)):
        matches = [
            place
            for place, other in enumerate(label_rows.to_pylist())
            if row >= 0 and other["video_id"] == VIDEOS[row]
            if (
                other["begin_s"] <= begin and other["end_s"] >= end
                if covering
                else other["begin_s"] < end and other["end_s"] > begin
            )
        ]
        pairs += [(number, place) for place in matches or [-1]]
    assert sorted(zip(part.tolist(), caption.tolist(), strict=True)) == pairs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("label_one = 'x'", lambda a, b, text: a == "x"),
        ("label_one = 'x' and label_two != 'x'", lambda a, b, text: a == "x" and b not in (None, "x")),
        ("label_one is null", lambda a, b, text: a is None),
        ("label_one = 'y' or text like '%7'", lambda a, b, text: a == "y" or text.endswith("7")),
    ],
)
def test_a_caption_has_its_own_labels_or_those_that_cover_it(seed: int, expression: str, holds, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    captions = random_captions(np.random.default_rng(seed), count=150)
    write_captions(tmp_path, dict.fromkeys(VIDEOS, "train"), captions)
    where = parse_where(expression)
    used = sorted(where.labels)
    table = pa.table(
        {
            "text": [caption.text for caption in captions],
            **{name: pa.array([getattr(caption, name) for caption in captions]) for name in ("begin_s", "end_s")},
            **{name: pa.array([caption.labels.get(name) for caption in captions], pa.string()) for name in used},
        }
    )
    selected = selected_captions(
        where,
        tmp_path,
        table,
        rows=np.arange(len(captions)),
        video_ids=pa.array(VIDEOS),
        video_row=np.array([VIDEOS.index(caption.video_id) for caption in captions]),
        label_rows=labelled_captions(where, tmp_path),
    )
    expected = []
    for caption in captions:
        has_own = any(name in caption.labels for name in used)
        covering = [
            other
            for other in captions
            if other.video_id == caption.video_id and any(name in other.labels for name in used)
            if other.begin_s <= caption.begin_s and other.end_s >= caption.end_s
        ]
        sets = [caption.labels] if has_own else [other.labels for other in covering] or [{}]
        expected.append(any(holds(labels.get("label_one"), labels.get("label_two"), caption.text) for labels in sets))
    assert selected.tolist() == expected and any(expected)


def test_a_label_that_captions_lack_is_named_with_those_that_they_have(tmp_path: Path) -> None:
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 0.0, 1.0, "text", labels={"label_one": "x"})])
    with pytest.raises(UserError, match="have no column label_two") as error:
        read_label_rows(tmp_path, {"label_two": "text"})
    assert error.value.hint == "use one of the labels label_one"


def test_texts_to_encode_are_selected_by_labels(tmp_path: Path) -> None:
    captions = random_captions(np.random.default_rng(0), count=150)
    write_captions(tmp_path, dict.fromkeys(VIDEOS, "train"), captions)
    with CaptionReader(tmp_path, where=parse_where("label_one = 'x'")) as reader:
        texts = {text for batch in reader.batches(pa.array(VIDEOS)) for text in batch.texts.to_pylist()}
    labels_by_text = {caption.text: caption.labels.get("label_one") for caption in captions}
    assert {text for text, value in labels_by_text.items() if value == "x"} < texts
    assert not {text for text, value in labels_by_text.items() if value == "y"} & texts


@pytest.mark.parametrize(
    ("expression", "numbers"),
    [
        ("label_done = 'true'", [0, 2]),
        ("label_done = true and label_grade > 2", [2]),
        ("label_done", [0, 2]),
        ("not label_done", [1]),
        ("label_grade >= 2.5", [2, 3]),
        ("label_grade in (1, 10)", [0, 3]),
        ("label_grade between 1 and 2", [0, 1]),
        ("label_grade = '10'", [3]),
        ("label_class = 7", [1]),
        ("label_class = '7'", [1]),
        ("label_done is null", [3]),
    ],
)
def test_labels_are_compared_as_what_an_expression_takes_them_for(
    expression: str, numbers: list[int], tmp_path: Path
) -> None:
    """The labels are strings of a user's table, and numbers of a dataset, such as verb classes."""
    labels: list[dict[str, object]] = [
        {"label_done": "true", "label_grade": "1", "label_class": 5},
        {"label_done": "false", "label_grade": "2", "label_class": 7},
        {"label_done": "true", "label_grade": "2.5", "label_class": None},
        {"label_done": None, "label_grade": "10", "label_class": 3},
    ]
    captions = [Caption("a", number, number + 1, f"{number}", labels=values) for number, values in enumerate(labels)]
    write_captions(tmp_path, dict.fromkeys(VIDEOS, "train"), captions)
    with CaptionReader(tmp_path, where=parse_where(expression)) as reader:
        texts = [text for batch in reader.batches(pa.array(VIDEOS)) for text in batch.texts.to_pylist()]
    assert texts == [str(number) for number in numbers]


def test_a_label_of_another_kind_is_named_with_a_value(tmp_path: Path) -> None:
    labels = [{"label_grade": "high", "label_done": "true"}, {"label_grade": "3", "label_done": "yes"}]
    captions = [Caption("a", number, number + 1, "x", labels=values) for number, values in enumerate(labels)]
    write_captions(tmp_path, {"a": "train"}, captions)
    for expression, message in (
        ("label_grade > 2", "expects label_grade to be a number, but it has the value 'high'"),
        ("label_done", "expects label_done to be true or false, but it has the value 'yes'"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read_label_rows(tmp_path, parse_where(expression).labels)
        assert "compare it with strings" in str(caught.value.hint)
    for expression, hint in (
        ("done = 'true'", "did you mean label_done? names: motion"),
        ("is_done = 'true'", "did you mean label_done?"),
        ("zzz_qqq = 1", "labels: label_done, label_grade"),
    ):
        with pytest.raises(UserError, match="there is no name") as caught:
            parse_where(expression, data_dir=tmp_path)
        assert hint in str(caught.value.hint)
