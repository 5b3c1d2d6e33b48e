from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.write import write_manifest
from clipmill.train.tasks.dual_encoder.zero_shot import ClassPrompts, open_class_prompts

TEXTS = ["take plate", "wash cup", "grab plate", "wash cup", "a dog"]


def data(path: Path, **labels: pa.Array) -> Path:
    """Data folder with five captions in split val."""
    captions = pa.table(
        {
            "video_id": pa.array(["a"] * 5).dictionary_encode(),
            "begin_s": pa.array([float(number) for number in range(5)]),
            "end_s": pa.array([number + 1.0 for number in range(5)]),
            "text": pa.array(TEXTS),
            "source": pa.array(["test"] * 5).dictionary_encode(),
            **{f"label_{name}": column for name, column in labels.items()},
        }
    )
    videos = pa.table({"video_id": ["a"], "source_id": ["a"], "path": ["/a.mp4"], "split": ["val"]})
    write_manifest(path, "test", videos, captions)
    return path


def open_prompts(data_dir: Path, **options: Any) -> ClassPrompts:
    files = {name: options.get(name) for name in ("classes", "templates", "label")}
    return open_class_prompts(data_dir, split="val", **files)


def lines(path: Path, *texts: str) -> Path:
    path.write_text("\n".join(texts) + "\n")
    return path


def test_labels_that_are_names_name_the_classes(tmp_path: Path) -> None:
    prompts = open_prompts(data(tmp_path, **{"class": pa.array(["sing", "dance", None, "sing", "dance"])}))
    assert prompts.names == (("dance",), ("sing",)) and prompts.class_of_N.tolist() == [1, 0, 1, 0]
    assert prompts.caption_ids.tolist() == [0, 1, 3, 4] and prompts.num_without_class == 1
    assert prompts.prompts()[0] == ["dance", "sing"]


def test_labels_that_are_numbers_are_named_by_all_their_captions(tmp_path: Path) -> None:
    labels = {
        "verb": pa.array([7, 2, 7, 2, None], pa.int32()),
        "noun": pa.array([0, 1, 0, 1, 0], pa.int32()),
        "nouns": pa.array([[0]] * 5),
    }
    data_dir = data(tmp_path, **labels)
    prompts = open_prompts(data_dir, label="verb", templates=lines(tmp_path / "t.txt", "a video of {}", "{}, as {} is"))
    assert prompts.names == (("wash cup",), ("take plate", "grab plate"))
    texts, classes = prompts.prompts()
    assert texts[2:4] == ["a video of take plate", "take plate, as take plate is"]
    assert classes.tolist() == [0, 0, 1, 1, 1, 1]
    with pytest.raises(UserError, match="several labels") as caught:
        open_prompts(data_dir)
    assert "noun, verb, action" in str(caught.value.hint)
    with pytest.raises(UserError, match="no label 'nouns'"):
        open_prompts(data_dir, label="nouns")


def test_numbers_are_lines_of_a_class_file(tmp_path: Path) -> None:
    data_dir = data(tmp_path, verb=pa.array([0, 2, 0, 5, 1], pa.int32()))
    prompts = open_prompts(
        data_dir, classes=lines(tmp_path / "c.txt", "take | pick up", "open", "wash", "cut", "mix", "pour")
    )
    assert prompts.names == (("take", "pick up"), ("open",), ("wash",), ("cut",), ("mix",), ("pour",))
    assert prompts.class_of_N.tolist() == [0, 2, 0, 5, 1] and prompts.num_without_class == 0
    with pytest.raises(UserError, match="names 3 classes, numbered from 0, but the captions have label_verb 5"):
        open_prompts(data_dir, classes=lines(tmp_path / "short.txt", "take", "open", "wash"))


def test_the_table_of_epic_kitchens_names_classes_by_their_id(tmp_path: Path) -> None:
    data_dir = data(tmp_path, verb=pa.array([0, 2, 0, None, 1], pa.int32()))
    rows = (
        "2,wash,\"['clean', 'rinse']\",clean",
        "0,take,\"['grab', 'pick-up']\",retrieve",
        "1,turn-on,['start'],access",
    )
    table = lines(tmp_path / "verbs.csv", "id,key,instances,category", *rows)
    prompts = open_prompts(data_dir, classes=table)
    assert prompts.names == (("take",), ("turn-on",), ("wash",)) and prompts.class_of_N.tolist() == [0, 2, 0, 1]
    assert prompts.prompts()[0] == ["take", "turn-on", "wash"]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        (
            "v.csv",
            ("verb_id,class_key,verbs", "0,take,[]"),
            "v.csv is not a list of classes: it begins with the line",
        ),
        ("v.csv", ("id,key,frames", "0,take,3"), "begins with the line 'id,key,frames'"),
        ("v.csv", ("take", "wash"), "begins with the line 'take'"),
        ("v.txt", ("id,name", "0,take"), "begins with the line 'id,name'"),
        ("v.csv", ("id,key", "0,take", "2,wash"), "has 2 rows, but none with id 1"),
        ("v.csv", ("id,key", "0,take", "0,wash"), "row 1: id is '0', not a unique number"),
        ("v.csv", ("id,key", "0,take,retrieve"), "row 0: 3 cells, expected 2"),
    ],
)
def test_other_tables_of_classes_are_refused(tmp_path: Path, name: str, content: tuple[str, ...], what: str) -> None:
    with pytest.raises(UserError, match=what):
        open_prompts(data(tmp_path, verb=pa.array([0] * 5)), classes=lines(tmp_path / name, *content))


def test_a_comma_makes_no_header_of_a_class(tmp_path: Path) -> None:
    names = ("lifting one end of something, then letting it drop", "folding something")
    prompts = open_prompts(data(tmp_path, verb=pa.array([0, 1, 0, 1, 0])), classes=lines(tmp_path / "c.txt", *names))
    assert prompts.names == ((names[0],), (names[1],))


def test_actions_are_named_by_their_captions(tmp_path: Path) -> None:
    labels = {"verb": pa.array([7, 2, 7, 2, None]), "noun": pa.array([0, 1, 0, 1, 0])}
    prompts = open_prompts(data(tmp_path, **labels), label="action")
    assert prompts.names == (("wash cup",), ("take plate", "grab plate")) and prompts.num_without_class == 1


def test_without_labels_the_caption_is_the_class(tmp_path: Path) -> None:
    data_dir = data(tmp_path)
    prompts = open_prompts(data_dir, classes=lines(tmp_path / "c.txt", "wash cup", "take plate|grab plate"))
    assert prompts.class_of_N.tolist() == [1, 0, 1, 0] and prompts.num_without_class == 1
    with pytest.raises(UserError, match="no labels") as caught:
        open_prompts(data_dir)
    assert "--classes" in str(caught.value.hint)
    with pytest.raises(UserError, match=r"\(such as 'take plate'\) is among the 1 class"):
        open_prompts(data_dir, classes=lines(tmp_path / "d.txt", "sing"))


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("classes", "a\na\n", "'a' twice"),
        ("classes", "a\n|\n", "a line without a name"),
        ("classes", "\n", "contains no class names"),
        ("classes", "id,key\n", "contains no class names"),
        ("templates", "a video\n", "template 'a video'"),
        ("templates", "\n", "contains no templates"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, what: str) -> None:
    data_dir = data(tmp_path)
    given = {"classes": lines(tmp_path / "good.txt", *dict.fromkeys(TEXTS))}
    (tmp_path / "bad.txt").write_text(content)
    with pytest.raises(UserError, match=what):
        open_prompts(data_dir, **{**given, name: tmp_path / "bad.txt"})
