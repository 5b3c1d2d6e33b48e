"""The expression language of `--where`, which selects chunks and captions by their fields.

An expression is an SQL expression whose value depends only on the fields of one row. It consists of comparisons, `and`,
`or`, `not`, `in`, `between`, `is null`, `like`, arithmetic, `case`, and the functions in `FUNCTIONS`. DuckDB parses the
expression. Any other node in the parse tree is an error, because the expression may come from another person's settings
file or checkpoint.

An unknown (null) condition does not hold, and neither does its negation. A comparison with a literal uses the precision
of the column: `motion <= 0.2` is true for a stored float32 of 0.2. Arithmetic uses float64, and the result of a
division by zero is unknown. Unlike standard SQL, the language does not convert between numbers, strings and conditions.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.errors import UserError
from clipmill.manifests.store import open_captions
from clipmill.shards.column_fields import COLUMN_FIELDS, is_number
from clipmill.shards.score_fields import NUMBERS

if TYPE_CHECKING:
    import duckdb


MAX_CHARS = 10_000
MAX_DEPTH = 50
EXAMPLE = "write a condition such as: motion > 0.2 and cuts = 0 and not duplicate and source in ('human', 'narrator')"
FUNCTIONS = (
    *("abs", "ceil", "floor", "round", "least", "greatest"),
    *("lower", "upper", "length", "contains", "starts_with", "ends_with", "regexp_matches", "concat", "md5"),
)
_ARITHMETIC = ("+", "-", "*", "/", "//", "%")
_LIKE = ("~~", "!~~", "~~*", "!~~*", "~~~", "like_escape", "not_like_escape", "ilike_escape", "not_ilike_escape")
_MEMBERSHIPS = ("COMPARE_IN", "COMPARE_NOT_IN")
_OPERATORS = (*_MEMBERSHIPS, "OPERATOR_NOT", "OPERATOR_IS_NULL", "OPERATOR_IS_NOT_NULL", "OPERATOR_COALESCE")
_CLASSES = ("COLUMN_REF", "CONSTANT", "COMPARISON", "CONJUNCTION", "BETWEEN", "CASE", "OPERATOR", "FUNCTION")

Kind = Literal["number", "text", "condition", "unknown"]
_KIND_NAMES = {"number": "a number", "text": "a string", "condition": "a condition", "unknown": "unknown"}
_KINDS: dict[str, Kind] = {"VARCHAR": "text", "BOOLEAN": "condition", '"NULL"': "unknown"}  # other types are numbers
_TYPES: dict[Kind, str] = {"number": "double", "text": "varchar", "condition": "boolean"}

_PREFIX, _SUFFIX = "select (\n", "\n)"  # on separate lines, so that a comment in the expression does not hide them
_MAX_SHOWN_CHARS = 200
_MAX_DIGITS = 38  # precision of DuckDB's decimals
_EXPONENT_LITERAL = re.compile(r"[0-9._]+[eE][+-]?[0-9]{1,2}")  # literal that DuckDB would read as float64
_Node = dict[str, Any]  # node of a parse tree from DuckDB's `json_serialize_sql`


@dataclass(frozen=True)
class Condition:
    """A condition in an expression.

    Attributes:
        text: Canonical form, which parses to the same condition.
        sql: SQL expression to evaluate.
        names: Names of the fields that the condition uses.
        labels: Kind of the values that each label in the condition is compared with, by name of the label.
    """

    text: str
    sql: str
    names: frozenset[str]
    labels: Mapping[str, Kind]


def connect() -> "duckdb.DuckDBPyConnection":
    """Return a connection to an empty in-memory database, with its own namespace for registered tables.

    The database has no access to files, the network, extensions or Python variables.
    """
    return _database(os.getpid()).cursor()


@cache
def _database(process: int) -> "duckdb.DuckDBPyConnection":
    """Open the database of a process once, because opening takes 10 ms. Forked processes must not share its locks."""
    import duckdb  # takes 65 MB of memory, so it is loaded only if needed

    return duckdb.connect(
        config={
            "enable_external_access": "false",
            "python_enable_replacements": "false",
            "autoload_known_extensions": "false",
            "autoinstall_known_extensions": "false",
            "max_expression_depth": str(MAX_DEPTH),
            "error_on_division_by_zero": "false",
            "ieee_floating_point_ops": "false",
            "threads": "1",
            "lock_configuration": "true",
        }
    )


def expression_error(text: str, problem: str, *, hint: str | None = None) -> UserError:
    """Return the error for an expression that cannot be parsed or evaluated."""
    excerpt = text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]} ..."
    return UserError(f"{_FLAG} '{excerpt}': {problem.partition(chr(10))[0]}", hint=hint or EXAMPLE, flags=(_FLAG,))


class _Parser:
    """Parser that checks the nodes of an expression's parse tree.

    Args:
        fields: Kind of each field's values, by name of the field.
        labels: Names of labels in the expression.
        known_labels: Function that returns the names of the labels of the data folder.
    """

    def __init__(
        self,
        database: "duckdb.DuckDBPyConnection",
        text: str,
        *,
        fields: Mapping[str, Kind],
        labels: Collection[str],
        known_labels: Callable[[], list[str]],
    ) -> None:
        self._database, self._text, self._fields = database, text, fields
        self._labels, self._known_labels = frozenset(labels), known_labels
        self._statement_tree: _Node = {}  # parse tree of a statement that selects a single expression
        self._parse("0")
        self._typeof, self._cast = self._parse("typeof(0)"), self._parse("cast(0 as double)")

    def conditions(self) -> list[Condition]:
        """Return the conditions that the expression joins with `and`.

        Raises:
            UserError: The expression is invalid.
        """
        root = self._parse(self._text)
        for node in _nodes(root):
            self._check(node)
        label_kinds = self._label_kinds(root)
        self._fields = {**self._fields, **label_kinds}
        self._check_kinds(root)
        parts = root["children"] if root["type"] == "CONJUNCTION_AND" else [root]
        texts = [self._to_sql(part) for part in parts]
        for node in _nodes(root):
            self._set_precision(node)
        conditions = []
        for text, part in zip(texts, parts, strict=True):
            references = (node for node in _nodes(part) if node["class"] == "COLUMN_REF")
            names = frozenset(node["column_names"][0].lower() for node in references)
            labels = {name: self._fields[name] for name in names & self._labels}
            conditions.append(Condition(text, self._to_sql(part), names, labels))
        return conditions

    def _parse(self, expression: str) -> _Node:
        """Return the root node of an expression."""
        import duckdb

        try:
            (tree_json,) = self._fetch_row("select json_serialize_sql(?)", f"{_PREFIX}{expression}{_SUFFIX}")
            tree = json.loads(tree_json)
        except RecursionError:
            tree = {"error": True, "error_message": "depth"}
        except duckdb.Error as error:
            self._fail(str(error))
        if tree["error"]:
            if "depth" in tree["error_message"]:
                self._fail("the expression is nested too deeply", hint=f"nest at most {MAX_DEPTH} levels")
            self._fail(tree["error_message"], int(tree["position"]) if "position" in tree else None)
        root: _Node = tree["statements"][0]["node"].get("select_list", [{}])[0]
        self._statement_tree = self._statement_tree or tree
        if self._select_only(root) != tree:
            self._fail("it is not a single expression; clauses such as order by are not allowed")
        return root

    def _check(self, node: _Node) -> None:
        """Reject a node unless its value depends only on the fields of a row."""
        location = node["query_location"]
        if node["class"] not in _CLASSES or (node["class"] == "OPERATOR" and node["type"] not in _OPERATORS):
            self._fail(f"{node['type'].lower().replace('_', ' ')} is not part of the language", location)
        if node["class"] == "FUNCTION" and node["function_name"] == "row":  # (a, b), or ()
            if not node["arguments"]:
                self._fail("a value or a condition is missing", location)
            hint = "write decimals with a point, such as 0.02, and join conditions with `and` or `or`"
            self._fail("commas are allowed only in the arguments of a function and in `in (...)`", hint=hint)
        if node["class"] == "FUNCTION" and node["function_name"] not in (*_ARITHMETIC, *_LIKE, *FUNCTIONS):
            hint = f"use one of the functions {', '.join(FUNCTIONS)}"
            self._fail(f"there is no function {node['function_name']}", location, hint=hint)
        if node["class"] == "COLUMN_REF" and (name := ".".join(node["column_names"])).lower() not in self._fields:
            labels = self._known_labels()
            suggestions = {label.removeprefix(LABEL_PREFIX): label for label in labels}
            suggestions |= {label: label for label in (*suggestions.values(), *self._fields)}
            close_names = difflib.get_close_matches(name.lower(), suggestions, n=1)
            hint = (
                f"did you mean {suggestions[close_names[0]]}? " if close_names else "write strings in 'single quotes'; "
            )
            hint = "select unknown values with `NAME is null`; " if name == "None" else hint
            if "_" in name and not close_names:  # the name of a plug-in's field begins with the name of its column
                hint += f"if {name.partition('_')[0]} is a column of a plug-in, its package is not installed here; "
            self._fail(
                f"there is no name {name}",
                location,
                hint=f"{hint}names: {', '.join(self._fields)}; labels: {', '.join(labels) or 'none'}",
            )

    def _check_kinds(self, root: _Node) -> None:
        """Reject SQL's implicit conversions between numbers, strings and conditions."""
        conditions, comparisons = _conditions_and_comparisons(root)
        kinds = self._kinds([*conditions, *(operand for operands in comparisons for operand in operands)])
        for node in conditions:
            if (kind := kinds[id(node)]) != "condition":
                sql = self._to_sql(node)
                hint = f"compare it, for example {sql} > 0" if kind == "number" else None
                self._fail(f"{sql} is {_KIND_NAMES[kind]}, not a condition", node["query_location"], hint=hint)
        for first, *other_nodes in comparisons:
            first_kind = kinds[id(first)]
            for other in other_nodes:
                if first_kind != (kind := kinds[id(other)]):
                    first_text = f"{self._to_sql(first)} is {_KIND_NAMES[first_kind]}"
                    self._fail(
                        f"{first_text}, but {self._to_sql(other)} is {_KIND_NAMES[kind]}, so they cannot be compared",
                        other["query_location"],
                        hint="compare numbers with numbers, and strings with 'strings'; select unknown values with "
                        "`NAME is null`",
                    )

    def _label_kinds(self, root: _Node) -> dict[str, Kind]:
        """Return the kind of each label that is used as a condition, or compared with values of a single kind."""
        conditions, comparisons = _conditions_and_comparisons(root)
        kinds: dict[str, Kind] = dict.fromkeys(filter(None, map(self._label_name, conditions)), "condition")
        for operands in comparisons:
            other_nodes = [node for node in operands if not self._label_name(node)]
            other_kinds = (
                set(self._kinds(other_nodes).values()).difference(("unknown",))
                if len(other_nodes) < len(operands)
                else ()
            )
            for name in filter(None, map(self._label_name, operands)) if len(other_kinds) == 1 else ():
                kinds.setdefault(name, *other_kinds)
        return kinds

    def _label_name(self, node: _Node) -> str:
        """Return the name of the label that a node refers to; empty for other nodes."""
        name = node["column_names"][0].lower() if node["class"] == "COLUMN_REF" else ""
        return name if name in self._labels else ""

    def _kinds(self, nodes: list[_Node]) -> dict[int, Kind]:
        """Return the kind of each node's value, by `id(node)`. DuckDB derives it from the types of the fields."""
        import duckdb

        if not nodes:
            return {}
        (argument,) = self._typeof["arguments"]
        calls = [{**self._typeof, "arguments": [{**argument, "expression": node}]} for node in nodes]
        columns = ", ".join(f"null::{_TYPES[kind]} as {name}" for name, kind in self._fields.items())
        try:
            types = self._fetch_row(f"select {self._to_sql(*calls)} from (select {columns})")
        except duckdb.Error as error:
            self._fail(str(error))
        return {id(node): _KINDS.get(name, "number") for node, name in zip(nodes, types, strict=True)}

    def _set_precision(self, node: _Node) -> None:
        """Change a node, so that arithmetic uses float64, and comparisons use the precision of the column."""
        if node["class"] == "CONSTANT" and node["literal"]["kind"] == "NUMERIC":
            text = node["literal"]["text"]
            if _EXPONENT_LITERAL.fullmatch(text) and len(digits := f"{Decimal(text):f}") <= _MAX_DIGITS:
                node["literal"]["text"] = digits
        if node["class"] == "FUNCTION" and node["function_name"] in _ARITHMETIC:
            for argument in node["arguments"]:
                if argument["expression"]["class"] == "COLUMN_REF":
                    argument["expression"] = {**self._cast, "child": argument["expression"]}

    def _select_only(self, *nodes: _Node) -> _Node:
        """Return the parse tree of a statement that only selects `nodes`."""
        tree = self._statement_tree
        (statement,) = tree["statements"]
        return {**tree, "statements": [{**statement, "node": {**statement["node"], "select_list": [*nodes]}}]}

    def _to_sql(self, *nodes: _Node) -> str:
        """Return nodes as SQL in canonical form, with parentheses where necessary."""
        (sql,) = self._fetch_row("select json_deserialize_sql(?)", json.dumps(self._select_only(*nodes)))
        return str(sql).removeprefix("SELECT ")

    def _fetch_row(self, query: str, *values: str) -> tuple[Any, ...]:
        """Run a query with parameters, and return the first row of the result."""
        return self._database.execute(query, values).fetchone() or ()

    def _fail(self, problem: str, location: int | None = None, *, hint: str | None = None) -> NoReturn:
        # DuckDB's locations are in bytes. Nodes that DuckDB adds have no location.
        if location is not None and len(_PREFIX) <= location < 1 << 63:
            valid_text = f"{_PREFIX}{self._text}".encode()[:location].decode(errors="ignore")
            position = len(valid_text) - len(_PREFIX)
            if position >= len(self._text):
                position, problem = len(self._text), "the expression ends too early"
            problem = f"character {position + 1}: {problem}"
        raise expression_error(self._text, problem, hint=hint)


def _conditions_and_comparisons(root: _Node) -> tuple[list[_Node], list[list[_Node]]]:
    """Return the nodes that must be conditions, and lists of nodes that are compared with each other."""
    conditions, comparisons = [root], []
    for node in _nodes(root):
        if node["class"] == "CONJUNCTION" or node["type"] == "OPERATOR_NOT":
            conditions += node["children"]
        elif node["class"] == "CASE":
            conditions += [case["when_expr"] for case in node["case_checks"]]
        elif node["class"] in ("COMPARISON", "BETWEEN") or node["type"] in _MEMBERSHIPS:
            operands = [node[name] for name in ("left", "right", "input", "lower", "upper") if name in node]
            comparisons.append([*operands, *node.get("children", ())])
    return conditions, comparisons


def _nodes(tree: object) -> Iterator[_Node]:
    """Yield all expressions in a part of a parse tree. Each expression comes before its subexpressions."""
    if isinstance(tree, dict):
        if "class" in tree:
            yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _nodes(part)


_FLAG = "--where"

Level = Literal["chunk", "video", "caption", "label"]
_LABEL = re.compile(rf"\b{LABEL_PREFIX}\w+")


@dataclass(frozen=True)
class Field:
    """A name in the expression language.

    Attributes:
        kind: Kind of the values.
        level: Kind of object that the values describe.
        column: Table column that the values are read from.
        sql: Expression that computes the values from the table column; empty if the column contains the values.
        stored_in: Column of the data folder that stores the values; empty for values from the manifest or `video`.
    """

    kind: Kind
    level: Level
    column: str
    sql: str = ""
    stored_in: str = ""


FIELDS: dict[str, Field] = {
    **{name: Field("number", "chunk", name, stored_in="scores") for name in NUMBERS},
    "duplicate": Field("condition", "chunk", "duplicate_of", "duplicate_of >= 0", stored_in="scores"),
    "caption_text": Field("text", "chunk", "caption_text", stored_in="captions"),
    "caption_words": Field("number", "chunk", "caption_words", stored_in="captions"),
    "begin_s": Field("number", "chunk", "start_ms", "start_ms / 1000"),
    **{name: Field("number", "chunk", name) for name in ("duration_s", "width", "height")},
    "video": Field("text", "video", "video_id"),
    "dataset": Field("text", "video", "dataset"),
    "split": Field("text", "video", "split"),
    "num_captions": Field("number", "video", "num_captions"),
    "text": Field("text", "caption", "text"),
    "words": Field("number", "caption", "text", r"len(regexp_extract_all(text, '\S+'))"),
    "source": Field("text", "caption", "source"),
    "likelihood": Field("number", "caption", "likelihood"),
}


@cache
def known_fields() -> dict[str, Field]:
    """Return all fields by name: `FIELDS`, and the fields of plug-in columns."""
    fields = dict(FIELDS)
    for column in COLUMN_FIELDS.list_usable():
        for name, arrow_type in column.fields.items():
            kind: Kind = "text" if pa.types.is_string(arrow_type) else "condition"
            kind = "number" if is_number(arrow_type) else kind
            fields.setdefault(name, Field(kind, "chunk", name, stored_in=column.name))
    return fields


def _fields_of(names: Iterable[str]) -> dict[str, Field]:
    """Return the fields with these names. Unknown names are labels, which depend on the data folder."""
    fields = known_fields()
    return {name: fields[name] if name in fields else Field("text", "label", name) for name in names}


@dataclass(frozen=True)
class Where:
    """A parsed expression: conditions that must all hold.

    Attributes:
        text: Expression as the user wrote it; the canonical form for a part of an expression.
        conditions: Conditions that the expression joins with `and`.
    """

    text: str
    conditions: tuple[Condition, ...]

    @property
    def names(self) -> frozenset[str]:
        """Names that the expression uses."""
        return frozenset[str]().union(*(condition.names for condition in self.conditions))

    @property
    def columns(self) -> frozenset[str]:
        """Table columns that `mask` needs."""
        return frozenset(field.column for field in _fields_of(self.names).values())

    @property
    def labels(self) -> dict[str, Kind]:
        """Labels that the expression uses, with the kinds of their values."""
        return {name: kind for condition in self.conditions for name, kind in condition.labels.items()}

    @property
    def stored_in(self) -> dict[str, set[str]]:
        """Fields that the expression needs from columns of the data folder except `video`, by column."""
        fields: dict[str, set[str]] = {}
        for field in _fields_of(sorted(self.names)).values():
            if field.stored_in:
                fields.setdefault(field.stored_in, set()).add(field.column)
        return fields

    def mask(self, table: pa.Table) -> NDArray[np.bool_]:
        """Return True for each row that satisfies all conditions, bool [rows]. Unknown conditions are not satisfied.

        Args:
            table: Rows to select from, with at least the columns `columns`.

        Raises:
            UserError: A condition cannot be evaluated, for example because a number exceeds the range of its type.
        """
        import duckdb

        fields_of_names = _fields_of(sorted(self.names))
        fields = ", ".join(f'{field.sql or field.column} as "{name}"' for name, field in fields_of_names.items())
        conditions = " and ".join(condition.sql for condition in self.conditions)
        with connect() as database:
            database.register("rows", table.select(sorted(self.columns) or table.column_names[:1]))
            query = f"select coalesce({conditions}, false) as selected from (select {fields or '1'} from rows)"
            try:
                mask = database.execute(query).fetchnumpy()["selected"]
            except duckdb.Error as error:
                raise expression_error(self.text, str(error)) from error
        return np.asarray(mask, bool)

    def split_by_level(self, *, label_level: Level = "caption") -> "tuple[Where | None, Where | None]":
        """Split the expression into conditions on chunks and videos, and conditions on captions.

        Args:
            label_level: Kind of object that conditions on labels apply to: caption or chunk.

        Returns:
            The two parts; None for a part without conditions.

        Raises:
            UserError: A condition uses fields of both chunks and captions.
        """
        chunk_conditions: list[Condition] = []
        caption_conditions: list[Condition] = []
        for condition in self.conditions:
            names: dict[Level, list[str]] = {}
            for name, field in _fields_of(sorted(condition.names)).items():
                names.setdefault(label_level if field.level == "label" else field.level, []).append(name)
            if "chunk" in names and "caption" in names:
                raise UserError(
                    f"{_FLAG}: the condition {condition.text} mixes fields of chunks ({', '.join(names['chunk'])}) "
                    f"and fields of captions ({', '.join(names['caption'])})",
                    hint="write separate conditions on chunks and on captions, and join them with `and`",
                    flags=(_FLAG,),
                )
            (caption_conditions if "caption" in names else chunk_conditions).append(condition)
        return self._keep_conditions(chunk_conditions), self._keep_conditions(caption_conditions)

    def require(self, levels: Collection[Level], *, because: str) -> None:
        """Raise a UserError if the expression uses names whose level is not in `levels`.

        Args:
            because: Reason why only these levels are supported.
        """
        fields = _fields_of(self.names)
        if unsupported_names := sorted(name for name in self.names if fields[name].level not in levels):
            supported_names = ", ".join(name for name, field in known_fields().items() if field.level in levels)
            raise UserError(
                f"{_FLAG} uses {', '.join(unsupported_names)}, but {because}",
                hint=f"use one of {supported_names}",
                flags=(_FLAG,),
            )

    def _keep_conditions(self, conditions: list[Condition]) -> "Where | None":
        """Return the expression with only these of its conditions; None if there are none."""
        if len(conditions) == len(self.conditions):
            return self
        text = " and ".join(condition.text for condition in conditions)
        return Where(text, tuple(conditions)) if conditions else None


def parse_where(text: str, *, data_dir: Path | None = None) -> Where:
    """Parse an expression.

    Args:
        data_dir: Data folder whose labels are listed in messages; None if it is unknown.

    Raises:
        UserError: The expression is invalid. The message states the position of the error.
    """
    if not isinstance(text, str):
        raise UserError(
            f"{_FLAG} is {text!r}, not a string", hint="write a condition, such as 'motion > 0.2'", flags=(_FLAG,)
        )
    text = text.strip()
    names = [*known_fields(), *_LABEL.findall(text.lower())]
    fields = _fields_of(names)
    kinds = {name: field.kind for name, field in fields.items()}
    labels = [name for name, field in fields.items() if field.level == "label"]

    def list_labels() -> list[str]:
        if data_dir is None:
            return [f"{LABEL_PREFIX}NAME"]
        with open_captions(data_dir) as file:
            return label_names(file.schema_arrow)

    if len(text) > MAX_CHARS:
        raise UserError(
            f"{_FLAG} has {len(text):,} characters, more than the {MAX_CHARS:,} that are allowed",
            hint="use a shorter expression",
            flags=(_FLAG,),
        )
    if not text:
        raise UserError(f"{_FLAG} is empty", hint=EXAMPLE, flags=(_FLAG,))
    with connect() as database:
        parser = _Parser(database, text, fields=kinds, labels=labels, known_labels=list_labels)
        return Where(text, tuple(parser.conditions()))


def label_names(schema: pa.Schema) -> list[str]:
    """Return the names of the labels that an expression can use: the label columns of captions that are not lists."""
    return [
        field.name for field in schema if field.name.startswith(LABEL_PREFIX) and not pa.types.is_nested(field.type)
    ]
