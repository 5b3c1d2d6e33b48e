import re
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from clipmill.manifests.errors import UserError
from clipmill.shards.where import FIELDS, FUNCTIONS, MAX_CHARS, connect, parse_where

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
        ("motion <= 0.2", [0, 1]),  # float32(0.2) is greater than 0.2
        ("0.2 >= motion", [0, 1]),
        ("motion > 0.1 and motion < 0.3", [1]),
        ("cuts between 1 and 2", [1, 2]),
        ("cuts == 1 or cuts == 2 and motion > 0.2", [1, 2]),
        ("(cuts == 1 or cuts == 2) and motion > 0.2", [2]),
        ("cuts < 1.5", [0, 1]),
        ("cuts in (1, 2.0, 2.5)", [1, 2]),
        ("cuts not in (0, 3)", [1, 2]),
        ("cuts == 2 * 3 / 3", [2]),
        ("motion * 2 + cuts > 2.2", [2]),
        ("-motion > -0.2", [0]),
        ("1 / cuts < 0.6", [2, 3]),  # the result of a division by zero is unknown
        ("cuts / (motion - motion) > 0", []),
        ("cuts * 2000000000 > 5e9", [3]),  # exceeds the range of int32
        ("motion <= 2e-1 and '2e-1' != '0.2'", [0, 1]),
        ("motion < 1e999999999 and cuts <= 1e-999999999", [0]),
        ("begin_s >= 1.5", [1, 2, 3]),
        ("duplicate", [2]),
        ("not duplicate and cuts <= 1", [0, 1]),
        ("duplicate == False", [0, 1, 3]),
        ("phash == 9223372036854775808", [0]),
        ("phash != -1", [0, 1, 2]),
        ("phash * 1 == 9223372036854775808", [0]),
        ("motion < 16777217", [0, 1, 2]),  # float32 cannot represent this number
        ("motion in (16777217, 0.2)", [1]),
        ("begin_s < 9007199254740993", [0, 1, 2, 3]),
        ("begin_s > -9007199254740993 and cuts > 2", [3]),
        ("source == 'human'", [0, 2]),
        ("source in ('asr', 'other')", [1]),
        ("'ca' in text", [2]),
        ("words >= 2", [0, 2]),
        ("text == 'ü'", [3]),
        ("lower(text) like '%dog' or starts_with(source, 'as')", [0, 1]),
        ("case when motion > 0.2 then cuts = 2 else cuts = 0 end", [0, 2]),
        ("coalesce(motion, 1) >= least(cuts, 1)", [0, 3]),
        ("`motion` > 0.2", [2]),
        ("Motion > 0.2 AND NOT Duplicate = FALSE", [2]),
        ("motion > 0.2 -- a remark", [2]),
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
        ("speech is null", [0]),
        ("speech is not null and motion is null", [3]),
        ("speech is null or speech > 0.4", [0, 1, 3]),
        ("speech > 0.4 or cuts == 0", [0, 1, 3]),  # unknown or true is true
        ("not (speech > 0.4 and cuts == 3)", [0, 1, 2]),
    ],
)
def test_what_is_unknown_is_selected_by_neither_a_comparison_nor_its_opposite(expression: str, rows: list[int]) -> None:
    assert np.flatnonzero(parse_where(expression).mask(TABLE)).tolist() == rows


@pytest.mark.parametrize(
    ("expression", "message", "hint"),
    [
        ("cuts = 0 and motin > 1", "character 14: there is no name motin", "did you mean motion?"),
        ("'ü' = text and motin > 1", "character 16: there is no name motin", "did you mean motion?"),
        ('source in ("asr")', "character 12: there is no name asr", "'single quotes'; names: motion"),
        ("fields.motion > 1", "there is no name fields.motion", ""),
        (
            "mood_mean > 1",
            "there is no name mood_mean",
            "if mood is a column of a plug-in, its package is",
        ),
        (
            "label_success = 1 and label_success = 'x'",
            "label_success is a number, but 'x' is a string",
            "strings with 'strings'",
        ),
        ("label_success and label_success > 1", "label_success is a condition, but 1 is a number", ""),
        ("labels = 'true'", "there is no name labels", "; labels: label_NAME"),
        ("rowid > 1", "there is no name rowid", ""),
        ("motion", "motion is a number, not a condition", "motion > 0"),
        ("motion and cuts = 1", "motion is a number, not a condition", ""),
        ("case when cuts then true end", "character 11: cuts is a number", ""),
        ("not text", "character 5", ""),
        ("motion > 'high'", "motion is a number, but 'high' is a string", ""),
        ("text = 1", "cannot be compared", "'strings'"),
        ("cuts between 1 and '2'", "cannot be compared", ""),
        ("1 in text", "No function matches", ""),
        ("duplicate > 1", "cannot be compared", ""),
        ("cuts in (1, 'a')", "cannot be compared", ""),
        ("motion = null", "but NULL is unknown", "is null"),
        ("text + 'b' = 'c'", "No function matches", ""),
        ("cuts in ()", "character 9", ""),
        ("motion is None", "character 11: syntax error", ""),
        ("motion == None", "character 11: there is no name None", "is null"),
        ("0.2 < motion < 1", "use AND to combine comparisons", ""),
        ("cuts = 1 && motion > 2", "use AND to combine", "motion > 0.2 and cuts = 0"),
        ("(cuts = 1) & (motion > 2)", "there is no function &", ""),
        ("lower(1, 2) = text", "No function matches", ""),
        ("text = 'a", "unterminated", ""),
        ("text = 'a\ud800'", "surrogate", ""),
        ("", "empty", "motion > 0.2"),
        ("-- nothing", "a value or a condition is missing", ""),
        ("motion > 0,02", "commas are allowed only", "write decimals with a point, such as 0.02"),
        ("cuts =", "character 7: the expression ends too early", ""),
        ("(cuts = 1 and", "character 14: the expression ends too early", ""),
        ("motion\0 > 1", "there is no name motion\0", ""),
        ("cuts = 1" + " " * MAX_CHARS + "-", "10,009 characters", ""),
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
        "(select true)",
        "exists (select 1)",
        "cuts in (select 1)",
        "cuts = any (select 1)",
        "cuts = 1) from (select 1",
        "cuts = 1); select (1",
        "cuts = 1; copy (select 1) to 'hacked'",
        "cuts = 1) where (true",
        "cuts = 1) union select (true",
        "cuts = 1), (true",
        "cuts = 1) as more, (true",
        "attach 'hacked'",
        "text in (select content from read_text('secret'))",
        "text = (from read_csv('secret'))",
        "text = getenv('SECRET')",
        "text = current_setting('home_directory')",
        "query_table('secret') = 1",
        "nextval('secret') = 1",
        "random() > 0.5",
        "cuts = 1 and now() is null",
        "count(*) > 1",
        "sum(cuts) > 1",
        "max(cuts) filter (cuts > 1) > 1",
        "row_number() over () = 1",
        "cuts = ?",
        "cuts = $secret",
        "#1 = 1",
        "* = 1",
        "columns('cuts') = 1",
        "cuts::varchar = '1'",
        "try(cuts = 1)",
        "list_filter([1], lambda x: x > 0) = [1]",
        "text[1] = 'a'",
        "{'a': 1} = {'a': 1}",
        "(cuts, 1) = (1, 1)",
        "repeat('a', 10000000000) = text",
        "cuts = 9 ** 9 ** 9 ** 9",
        "text collate nocase = 'a'",
        "interval 1 day > interval 1 hour",
        "__import__('os').system('touch hacked')",
        "motion.__class__ = 1",
    ],
)
def test_only_expressions_on_the_fields_are_evaluated(
    expression: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text("a dog")
    monkeypatch.setenv("SECRET", "a dog")
    with pytest.raises(UserError, match=r"^--where '") as error:
        parse_where(expression)
    assert error.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    "query",
    ["select * from read_text('secret')", "copy (select 1) to 'hacked'", "set threads=2", "load httpfs", "TABLE"],
)
def test_what_evaluates_an_expression_reaches_nothing_else(
    query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text("a dog")
    with connect() as database, pytest.raises(duckdb.Error):
        database.execute("from TABLE" if query == "TABLE" else query)
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 300 + "duplicate" + ")" * 300,
        "- " * 4000 + "1 > cuts",
        "case when cuts = 1 then " * 200 + "duplicate" + " end" * 200,
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
    of_chunks, of_captions = where.split_by_level()
    assert of_chunks is not None and of_captions is not None
    assert of_chunks.names == {"motion", "split"}
    assert of_captions.names == {"words", "source", "video", "text"}
    assert set(of_chunks.stored_in) == {"scores"} and not of_captions.stored_in
    assert parse_where("cuts == 0").split_by_level()[1] is None
    with pytest.raises(UserError, match=r"fields of chunks \(motion\) and fields of captions \(words\)"):
        parse_where("motion > 0.2 or words > 2").split_by_level()


def test_the_text_of_a_part_reads_back_as_the_same_conditions() -> None:
    whole = parse_where(
        "motion*2>.2   and (cuts==0 or duplicate) and text like 'a%' and(speech is null or motion=1e-3)"
    )
    chunks, captions = whole.split_by_level()
    assert chunks is not None and captions is not None
    assert captions.text == """("text" ~~ 'a%')"""
    for part in (chunks, captions):
        again = parse_where(part.text)
        assert [condition.sql for condition in again.conditions] == [condition.sql for condition in part.conditions]
        assert again.mask(TABLE).tolist() == part.mask(TABLE).tolist()


def test_the_text_of_an_expression_is_as_it_was_written() -> None:
    text = "motion>.2   and(cuts==0 or  duplicate)"
    assert parse_where(f" {text} ").text == text
    assert parse_where(text).split_by_level() == (parse_where(text), None)


def test_each_name_has_values() -> None:
    columns = {field.column: field for field in FIELDS.values()}
    strings = ("video_id", "dataset", "split", "text", "source", "caption_text")
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
    functions = "\n".join(lines).partition("The functions are ")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", functions) == list(FUNCTIONS)


def test_an_expression_without_names_is_true_or_false_for_all_rows() -> None:
    assert not parse_where("1 > 2").mask(TABLE).any()
    assert parse_where("not 1 > 2").mask(TABLE).all()


def test_a_value_out_of_the_range_of_functions_is_an_error_that_names_the_expression() -> None:
    with pytest.raises(UserError, match=r"--where 'abs\(cuts\) > 0': Out of Range"):
        parse_where("abs(cuts) > 0").mask(pa.table({"cuts": pa.array([-(2**31)], pa.int32())}))
