import json
from pathlib import Path

import pytest

from manifests.errors import UserError
from train.tasks.caption.commands import read_coco_results, write_coco_results


def test_captions_are_read_as_they_were_written(tmp_path: Path) -> None:
    captions = {"b": "A man <b>plays</b> 吉他 \x01", "a_000001_000011": ""}
    write_coco_results(tmp_path / "results.json", captions)
    assert list(read_coco_results(tmp_path / "results.json").items()) == list(captions.items())
    rows = json.loads((tmp_path / "results.json").read_bytes())
    assert rows[1] == {"image_id": "a_000001_000011", "caption": ""}
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_ids_of_coco_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('[{"image_id": 42, "caption": "a dog", "score": 1}]')
    assert read_coco_results(tmp_path / "results.json") == {"42": "a dog"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not JSON"),
        ("\xff", "is not JSON"),
        ("{}", "is not a list"),
        ('[{"image_id": "a"}]', "row 0"),
        ('[{"image_id": "a", "caption": "x"}, {"image_id": true, "caption": "x"}]', "row 1"),
        ('[{"image_id": "a", "caption": null}]', "row 0"),
        ('["a"]', "row 0"),
        ('[{"image_id": 1, "caption": "x"}, {"image_id": "1", "caption": "y"}]', "has 1 twice"),
    ],
)
def test_another_format_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "results.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=told):
        read_coco_results(tmp_path / "results.json")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json cannot be read"):
        read_coco_results(tmp_path / "none.json")
