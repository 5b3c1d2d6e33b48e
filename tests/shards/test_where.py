import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clipmill.manifests.errors import UserError
from clipmill.shards.expressions import MAX_CHARS
from clipmill.shards.where import FIELDS, parse_where

TABLE = pa.table(
    {
        "motion": pa.array([0.1, 0.2, 0.3, None], pa.float32()),
        "cuts": pa.array([0, 1, 2, 3], pa.int32()),
        "speech": pa.array([None, 0.5, 0, 1], pa.float32()),
        "phash": pa.array([1 << 63, 1, 2, None], pa.uint64()),
        "duplicate_of": pa.array([-1, -1, 0, -1], pa.int64()),
        "start_ms": pa.array([0, 1500, 3000, 4000], pa.int64()),
        "text": ["a dog", "", "the  cat sat", "ü"],
        "source": pa.array(["human", "asr", "human", None]).dictionary_encode(),
    }
)


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("motion > 0.2", [2]),
        ("motion <= 0.2", [0, 1]),  # float32(0.2) is more than 0.2
        ("0.2 >= motion", [0, 1]),
        ("0.1 < motion < 0.3", [1]),
        ("cuts == 1 or cuts == 2 and motion > 0.2", [1, 2]),
        ("(cuts == 1 or cuts == 2) and motion > 0.2", [2]),
        ("cuts < 1.5", [0, 1]),
        ("cuts in (1, 2.0, 2.5)", [1, 2]),
        ("cuts not in [0, 3]", [1, 2]),
        ("cuts == 2 * 3 / 3", [2]),
        ("motion * 2 + cuts > 2.2", [2]),
        ("-motion > -0.2", [0]),
        ("1 / cuts < 0.6", [2, 3]),  # a division by zero is unknown
        ("begin_s >= 1.5", [1, 2, 3]),
        ("duplicate", [2]),
        ("not duplicate and cuts <= 1", [0, 1]),
        ("duplicate == False", [0, 1, 3]),
        ("phash == 9223372036854775808", [0]),
        ("phash != -1", [0, 1, 2]),
        ("phash * 1 == 9223372036854775808", [0]),
        ("motion < 16777217", [0, 1, 2]),  # neither float32 nor float64 has these numbers
        ("motion in (16777217, 0.2)", [1]),
        ("begin_s < 9007199254740993", [0, 1, 2, 3]),
        ("begin_s > -9007199254740993 and cuts > 2", [3]),
        ("source == 'human'", [0, 2]),
        ('source in ("asr", "other")', [1]),
        ("'ca' in text", [2]),
        ("words >= 2", [0, 2]),
        ("text == 'ü'", [3]),
        ("source == 'human'\n and\tcuts == 0", [0]),
        ("1 < 2", [0, 1, 2, 3]),
        ("True and not False", [0, 1, 2, 3]),
    ],
)
def test_rows_that_meet_the_condition_are_selected(expression: str, rows: list[int]) -> None:
    assert np.flatnonzero(parse_where(expression).mask(TABLE)).tolist() == rows


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("speech > 0.4", [1, 3]),
        ("not speech > 0.4", [2]),
        ("speech != 1", [1, 2]),
        ("not source in ('human',)", [1]),
        ("source not in ('human',)", [1]),
        ("not motion in (0.1, 0.2)", [2]),
        ("speech is None", [0]),
        ("speech is not None and motion is None", [3]),
        ("speech is None or speech > 0.4", [0, 1, 3]),
        ("speech > 0.4 or cuts == 0", [0, 1, 3]),  # unknown or true is true
        ("not (speech > 0.4 and cuts == 3)", [0, 1, 2]),
    ],
)
def test_what_is_unknown_is_selected_by_neither_a_comparison_nor_its_opposite(expression: str, rows: list[int]) -> None:
    assert np.flatnonzero(parse_where(expression).mask(TABLE)).tolist() == rows


@pytest.mark.parametrize(
    ("expression", "message", "hint"),
    [
        ("cuts == 0 and motin > 1", "character 15: there is no name motin", "did you mean motion?"),
        ("'ü' == text and motin > 1", "character 17: there is no name motin", "did you mean motion?"),
        ("Motion > 1", "there is no name Motion", "did you mean motion?"),
        ("true", "there is no name true", "write True"),
        ("motion < -1e308", "character 11: 1e308 is out of range", "numbers are less than"),
        ("cuts == 1e400", "character 9: 1e400 is out of range", "numbers are less than"),
        ("motion", "motion is a number, where a condition is needed", "motion > 0"),
        ("motion and cuts == 1", "motion is a number, where a condition is needed", ""),
        ("motion > 'high'", "motion is a number, and 'high' a text", ""),
        ("duplicate > 1", "cannot be compared", ""),
        ("text < 'b'", "it has no order", "=="),
        ("text + 'b' == 'c'", "text is a text, where a number is needed", ""),
        ("cuts in (1, 'a')", "literals that are a number each", ""),
        ("cuts in ()", "literals", ""),
        ("cuts in (cuts,)", "literals", ""),
        ("motion == None", "character 11: None", "is None"),
        ("motion is 3", "None alone", ""),
        ("cuts = 1", "invalid syntax", "=="),
        ("cuts == 1 && motion > 2", "character 12: invalid syntax", "`and`"),
        ("(cuts == 1) & (motion > 2)", "bit operators", "`and`"),
        ("cuts == 1 # and motion > 2", "character 11: comments", ""),
        ("motion > 1e999", "1e999", ""),
        (r"text == '\ud800'", r"character 9: '\ud800' is neither", ""),
        (r"source in ('a', '\udfff')", r"character 17: '\udfff' is neither", ""),
        (r"'\ud800' in text", r"character 1: '\ud800' is neither", ""),
        ("cuts == 1 / 0", "division by zero", ""),
        ("", "empty", "motion > 0.2"),
        ("cuts ==", "character 8: the expression ends too early", ""),
        ("cuts == 1 and", "character 14: the expression ends too early", ""),
        ("motion\0 > 1", "null bytes", ""),
        ("cuts == 1" + " " * MAX_CHARS, "10,009 characters", ""),
    ],
)
def test_a_mistake_is_named_with_its_position_and_a_remedy(expression: str, message: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        parse_where(expression)
    assert message in str(error.value)
    assert hint in (error.value.hint or "")


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('touch hacked')",
        "open('hacked', 'w') == 1",
        "motion.__class__ == 1",
        "().__class__.__bases__[0].__subclasses__()",
        "text[0] == 'a'",
        "f'{__import__(\"os\")}' == text",
        "(lambda: True)()",
        "[motion for motion in (1, 2)] == 1",
        "(x := 1) == 1",
        "cuts == 9 ** 9 ** 9 ** 9",
        "text == 'a' * 10 ** 10",
        "cuts == 1 if duplicate else False",
        "await motion",
        "(yield)",
        "*text == 'a'",
        "import os",
        "cuts == 1; import os",
        "`motion` > 1",
        "b'a' == text",
        "1j == cuts",
        "... == cuts",
        "{**text}",
    ],
)
def test_nothing_is_executed(expression: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="character"):
        parse_where(expression)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 300 + "duplicate" + ")" * 300,
        "-" * 9000 + "1 > cuts",
        "not " * 2400 + "duplicate",
        "1" + "+1" * 4000 + ">cuts",
    ],
)
def test_deep_nesting_is_refused_rather_than_exhausting_the_stack(expression: str) -> None:
    with pytest.raises(UserError, match="nested"):
        parse_where(expression)


def test_many_values_and_many_conditions_are_not_deep() -> None:
    many = ", ".join(f"'video{number}'" for number in range(500))
    assert not parse_where(f"source in ({many})").mask(TABLE).any()
    assert parse_where(" or ".join(f"cuts == {number}" for number in range(200))).mask(TABLE).all()


def test_conditions_are_told_apart_by_what_they_are_about() -> None:
    where = parse_where("motion > 0.2 and (words > 2 or source == 'x') and split == 'val' and video != text")
    of_chunks, of_captions = where.by_level()
    assert of_chunks is not None and of_captions is not None
    assert of_chunks.names == {"motion", "split"}
    assert of_captions.names == {"words", "source", "video", "text"}
    assert of_chunks.uses_scores and not of_captions.uses_scores
    assert parse_where("cuts == 0").by_level()[1] is None
    with pytest.raises(UserError, match=r"fields of chunks \(motion\) and of captions \(words\)"):
        parse_where("motion > 0.2 or words > 2").by_level()


def test_the_canonical_text_reads_back_as_the_same_expression() -> None:
    where = parse_where("motion>.2   and (cuts==0 or duplicate) and(speech is None or 'a' in text)")
    assert where.text == "motion > 0.2 and (cuts == 0 or duplicate) and (speech is None or 'a' in text)"
    assert parse_where(where.text).text == where.text
    assert parse_where(where.text).mask(TABLE).tolist() == where.mask(TABLE).tolist()


def test_each_name_has_values() -> None:
    columns = {field.column: field for field in FIELDS.values()}
    strings = ("video_id", "dataset", "split", "text", "source")
    table = pa.table({name: ["a b", "c"] if name in strings else [1, 2] for name in columns})
    for name, field in FIELDS.items():
        condition = {"number": f"{name} > 1.5", "text": f"{name} == 'c'", "condition": name}[field.kind]
        expected = {"words": [True, False], "begin_s": [False, False], "duplicate": [True, True]}
        assert parse_where(condition).mask(table).tolist() == expected.get(name, [False, True]), name


def test_the_documentation_names_each_field_with_its_level(repository: Path) -> None:
    lines = (repository / "docs/data.md").read_text().splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| `")]
    told = {name: level.strip() for names, level in rows for name in re.findall(r"`(\w+)`", names)}
    assert told.items() >= {name: field.level for name, field in FIELDS.items()}.items()


def test_an_expression_without_names_is_true_or_false_for_all_rows() -> None:
    assert not parse_where("1 > 2").mask(TABLE).any()
    assert parse_where("not 1 > 2").mask(TABLE).all()
