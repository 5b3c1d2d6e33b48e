from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import read_captions
from clipmill.train.data.classes import (
    ClassList,
    class_labels,
    class_names_of,
    class_numbers_of,
    proposed_label,
    read_classes,
)
from clipmill.train.tasks.classify.evaluation import names_of_numbers
from tests.train.tiny_data import Caption, write_captions

VIDEOS = {"a": "train", "b": "val", "c": "test"}


def action(verb: int | None, noun: int | None, **more: Any) -> dict[str, Any]:
    return {"label_verb": verb, "label_noun": noun, "label_nouns": [noun], **more}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    captions = [
        Caption("a", 0, 1, "one", labels=action(0, 2, label_class="9", label_mood="calm")),
        Caption("a", 1, 2, "two", labels=action(0, 10, label_class="10", label_mood="wild")),
        Caption("a", 2, 3, "three", labels=action(11, 2, label_class="9", label_mood="calm")),
        Caption("a", 3, 4, "without", labels=action(None, 3)),
        Caption("b", 0, 1, "four", labels=action(2, 0, label_class="-1", label_mood="10")),
        Caption("b", 1, 2, "five", labels=action(0, 2, label_class="2", label_mood="9")),
        Caption("c", 0, 1, "of a test", labels=action(90, 90, label_class="90", label_mood="calm")),
    ]
    write_captions(tmp_path, VIDEOS, captions)
    return tmp_path


def test_actions_are_sorted_as_strings_over_training_and_evaluation_together(data_dir: Path) -> None:
    classes = read_classes(data_dir, label="action", splits=("train", "val"))
    assert classes.names == ("0:10", "0:2", "11:2", "2:0")
    assert classes.parts["verb"].tolist() == [0, 0, 11, 2] and classes.parts["noun"].tolist() == [10, 2, 2, 0]
    names = class_names_of(read_captions(data_dir), label="action")
    assert class_numbers_of(names, classes).tolist() == [1, 0, 2, -1, 3, 1, -1]


def test_the_order_of_actions_is_that_of_the_definition() -> None:
    """All pairs of 97 verbs and 300 nouns have the order of Python strings."""
    rng = np.random.default_rng(0)
    pairs = {f"{verb}:{noun}" for verb, noun in zip(rng.integers(0, 97, 4000), rng.integers(0, 300, 4000), strict=True)}
    classes = ClassList("action", tuple(sorted(pairs)))
    parts = classes.parts
    for number, name in enumerate(classes.names):
        verb, noun = name.split(":")
        assert (parts["verb"][number], parts["noun"][number]) == (int(verb), int(noun))


def test_other_labels_are_sorted_as_numbers_where_all_are_numbers(data_dir: Path) -> None:
    assert read_classes(data_dir, label="class", splits=("train", "val")).names == ("-1", "2", "9", "10")
    assert read_classes(data_dir, label="mood", splits=("train", "val")).names == ("10", "9", "calm", "wild")
    assert read_classes(data_dir, label="verb", splits=("train", "val", "test")).names == ("0", "2", "11", "90")


@pytest.mark.parametrize(
    ("label", "splits", "message"),
    [
        ("flavour", ("train",), "no column label_flavour"),
        ("nouns", ("train",), "a caption can have several values of 'nouns'"),
        ("class", ("test",), "have only the value '.*' of 'class'"),
    ],
)
def test_labels_that_make_no_classes_are_named(
    data_dir: Path, label: str, splits: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_classes(data_dir, label=label, splits=splits)


def test_labels_that_can_be_classes_are_listed_and_actions_proposed(data_dir: Path) -> None:
    labels = class_labels(read_captions(data_dir).schema)
    assert labels == ("class", "mood", "noun", "verb", "action") and proposed_label(labels) == "action"
    with pytest.raises(UserError) as refused:
        read_classes(data_dir, label="nouns", splits=("train",))
    assert refused.value.hint == "use an available label: class, mood, noun, verb, action; for example --label action"


def test_numbers_of_verbs_nouns_and_actions_get_the_names_of_class_files(tmp_path: Path) -> None:
    verbs, nouns = tmp_path / "verbs.csv", tmp_path / "nouns.txt"
    verbs.write_text("id,key,instances,category\n0,take,\"['grab', 'get']\",retrieve\n1,wash,['rinse'],clean\n")
    nouns.write_text("tap|faucet\nplate\ncup\n")
    actions = ClassList("action", ("0:1", "1:2"))
    names = names_of_numbers(actions, [verbs, nouns])
    assert names["action"] == {"0:1": "take plate", "1:2": "wash cup"}
    assert names["verb"]["1"] == "wash" and names["noun"]["0"] == "tap"
    assert names_of_numbers(ClassList("verb", ("0", "1")), [verbs])["verb"] == {"0": "take", "1": "wash"}
    for classes, files, message in (
        (actions, [verbs], "--classes lists 1 file, but action needs 2"),
        (ClassList("noun", ("0", "3")), [nouns], "names 3 classes, numbered from 0, but the captions have noun 3"),
        (ClassList("class", ("sing", "dance")), [nouns], "classes of the label 'class' are not numbers"),
    ):
        with pytest.raises(UserError, match=message):
            names_of_numbers(classes, files)


def test_an_action_with_names_of_its_own_is_a_label_like_any_other(tmp_path: Path) -> None:
    labels = [{"label_verb": verb, "label_noun": "1", "label_action": f"{verb}:it"} for verb in ("open", "close")]
    captions = [Caption("a", n, n + 1, str(n), labels=label) for n, label in enumerate(labels)]
    write_captions(tmp_path, VIDEOS, captions)
    classes = read_classes(tmp_path, label="action", splits=("train",))
    assert classes.names == ("close:it", "open:it") and classes.parts == {}
    assert class_labels(read_captions(tmp_path).schema) == ("action", "noun", "verb")
    without = read_captions(tmp_path).drop_columns(["label_action"])
    with pytest.raises(UserError, match="have no column label_action"):  # names have no numbers to combine
        class_names_of(without, label="action")
