"""Tests that reading JSON entry by entry equals reading it at once, wherever the windows are split."""

import json
from pathlib import Path

import pytest

from clipmill.manifests.adapters.json_stream import array_items, object_items
from clipmill.manifests.errors import UserError

VALUES = {
    'text "quoted" \\ é🎬': [1, -2.5e-3, True, None, {"a": []}, ""],
    "long": "x" * 300,
    "number": 1234567890,
    "videos": {"a": {"b": [1, 2]}, "empty": {}, "n": 12345},
    "last": 7,
}


@pytest.mark.parametrize("window_chars", [1, 2, 7, 64, 4096])
@pytest.mark.parametrize("indent", [None, 2])
def test_entries_are_those_of_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_chars: int, indent: int | None
) -> None:
    monkeypatch.setattr("clipmill.manifests.adapters.json_stream._WINDOW_CHARS", window_chars)
    path = tmp_path / "x.json"
    path.write_text("\ufeff" + json.dumps(VALUES, indent=indent) + "\n", encoding="utf-8")
    expected = [(key, value) for key, value in VALUES.items() if key != "videos"]
    expected[3:3] = list(VALUES["videos"].items())  # type: ignore[attr-defined]
    assert list(object_items(path, nested_key="videos")) == expected
    path.write_text(json.dumps(list(VALUES.values()), indent=indent, ensure_ascii=False), encoding="utf-8")
    assert list(array_items(path)) == list(VALUES.values())


@pytest.mark.parametrize("text", ["[]", " [ ] "])
def test_an_empty_list_has_no_items(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert list(array_items(path)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "line 1: expected a list"),
        ("[1,\n2,\nx]", "line 3"),
        ("[1 2]", "expected , or ]"),
        ("[1,", "is truncated"),
        ('["abc', "line 1: Unterminated string"),
        ("[1] 2", "expected the end"),
        ("[[1, 2\n, x" + " " * 300 + "]]", "line 2"),
        ("[" * 100_000, "line 1"),
    ],
)
def test_what_is_not_json_is_a_users_error_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        list(array_items(path))
    assert message in str(caught.value)


def test_bytes_that_are_no_text_are_a_users_error(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'["\xff"]')
    with pytest.raises(UserError, match="not UTF-8"):
        list(array_items(path))
