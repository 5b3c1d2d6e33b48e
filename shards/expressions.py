"""SQL expressions on the fields of a row, for `--where`: parsed by DuckDB, and checked before anything is evaluated.

An expression is a pure function of the fields of one row: comparisons, `and`, `or`, `not`, `in`, `between`, `is null`,
`like`, arithmetic, `case`, and the functions in `FUNCTIONS`. A node of the parse tree that is not known to be one of
them is an error. The text is the user's own, but it may come from a file of settings or a checkpoint of someone else.

A condition that is unknown (null) does not hold, and neither does its negation. A comparison with a literal is made in
the precision of the column: `motion <= 0.2` holds for a stored float32 of 0.2. Arithmetic is in float64; a division by
zero is unknown. Numbers, texts and conditions are not converted into each other, unlike elsewhere in SQL.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from clipmill.manifests.errors import UserError

if TYPE_CHECKING:
    import duckdb

MAX_CHARS = 10_000
MAX_DEPTH = 50
EXAMPLE = "conditions look like: motion > 0.2 and cuts = 0 and not duplicate and source in ('human', 'narrator')"
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
_A = {"number": "a number", "text": "a text", "condition": "a condition", "unknown": "unknown"}
_KINDS: dict[str, Kind] = {"VARCHAR": "text", "BOOLEAN": "condition", '"NULL"': "unknown"}  # other types are numbers
_TYPES: dict[Kind, str] = {"number": "double", "text": "varchar", "condition": "boolean"}

_BEFORE, _AFTER = "select (\n", "\n)"  # on lines of their own, which a comment does not swallow
_SHOWN_CHARS = 200
_MAX_DIGITS = 38  # of DuckDB's decimals
_WITH_EXPONENT = re.compile(r"[0-9._]+[eE][+-]?[0-9]{1,2}")  # a number that DuckDB reads as a float64
_Node = dict[str, Any]  # of DuckDB's parse tree, as `json_serialize_sql` gives it


@dataclass(frozen=True)
class Condition:
    """A part of an expression.

    Attributes:
        text: in canonical form, which parses to the same condition.
        sql: what is evaluated.
        names: the fields in it.
    """

    text: str
    sql: str
    names: frozenset[str]


def connect() -> "duckdb.DuckDBPyConnection":
    """Return a connection to an empty database in memory; what is registered with it is its own.

    It has no access to files, the network, extensions or Python's variables.
    """
    return _database(os.getpid()).cursor()


@cache
def _database(process: int) -> "duckdb.DuckDBPyConnection":
    """The database of a process: opening it takes 10 ms, and its locks must not be shared with forked processes."""
    import duckdb  # 65 MB, which only a selection needs

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


def parse_conditions(text: str, *, fields: Mapping[str, Kind], flag: str) -> list[Condition]:
    """Parse an expression into the conditions that it joins by `and`.

    Args:
        fields: the names that it may use.
        flag: what the text was given to, for messages.

    Raises:
        UserError: it is not a condition; the message has the position, and the nearest name for one that is unknown.
    """
    if len(text) > MAX_CHARS:
        raise UserError(f"{flag} has {len(text):,} characters", hint=f"use {MAX_CHARS:,} or fewer", flags=(flag,))
    if not text:
        raise UserError(f"{flag} is empty", hint=EXAMPLE, flags=(flag,))
    with connect() as database:
        return _Parser(database, text, fields=fields, flag=flag).conditions()


def expression_error(text: str, problem: str, *, flag: str, hint: str | None = None) -> UserError:
    """The error for an expression that cannot be parsed or evaluated."""
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..."
    return UserError(f"{flag} '{shown}': {problem.partition(chr(10))[0]}", hint=hint or EXAMPLE, flags=(flag,))


class _Parser:
    """Parses one expression, and checks the nodes of its parse tree."""

    def __init__(
        self, database: "duckdb.DuckDBPyConnection", text: str, *, fields: Mapping[str, Kind], flag: str
    ) -> None:
        self._database, self._text, self._fields, self._flag = database, text, fields, flag
        self._plain: _Node = {}
        self._parse("0")
        self._typeof, self._cast = self._parse("typeof(0)"), self._parse("cast(0 as double)")

    def conditions(self) -> list[Condition]:
        root = self._parse(self._text)
        for node in _nodes(root):
            self._check(node)
        self._check_kinds(root)
        parts = root["children"] if root["type"] == "CONJUNCTION_AND" else [root]
        texts = [self._sql(part) for part in parts]
        for node in _nodes(root):
            self._set_precision(node)
        return [
            Condition(text, self._sql(part), frozenset(_names(part))) for text, part in zip(texts, parts, strict=True)
        ]

    def _parse(self, expression: str) -> _Node:
        """The parse tree of an expression."""
        import duckdb

        try:
            (answer,) = self._row("select json_serialize_sql(?)", f"{_BEFORE}{expression}{_AFTER}")
            tree = json.loads(answer)
        except RecursionError:
            tree = {"error": True, "error_message": "depth"}
        except duckdb.Error as error:
            self._fail(str(error))
        if tree["error"]:
            if "depth" in tree["error_message"]:
                self._fail("the expression is nested too deeply", hint=f"nest at most {MAX_DEPTH} levels")
            self._fail(tree["error_message"], int(tree["position"]) if "position" in tree else None)
        root: _Node = tree["statements"][0]["node"].get("select_list", [{}])[0]
        self._plain = self._plain or tree
        if self._select(root) != tree:
            self._fail("it has to be an expression, without clauses of a statement")
        return root

    def _check(self, node: _Node) -> None:
        """Refuse a node that is not known to be a pure function of the fields of a row."""
        place = node["query_location"]
        if node["class"] not in _CLASSES or (node["class"] == "OPERATOR" and node["type"] not in _OPERATORS):
            self._fail(f"{node['type'].lower().replace('_', ' ')} is not part of the language", place)
        if node["class"] == "FUNCTION" and node["function_name"] == "row":  # (a, b), or ()
            if not node["arguments"]:
                self._fail("a value or a condition is missing", place)
            hint = "decimals have a point, such as 0.02; conditions are joined by and, or"
            self._fail("a comma separates only the arguments of a function and the values of in (...)", hint=hint)
        if node["class"] == "FUNCTION" and node["function_name"] not in (*_ARITHMETIC, *_LIKE, *FUNCTIONS):
            hint = f"functions: {', '.join(FUNCTIONS)}"
            self._fail(f"there is no function {node['function_name']}", place, hint=hint)
        if node["class"] == "COLUMN_REF" and (name := ".".join(node["column_names"])).lower() not in self._fields:
            nearest = difflib.get_close_matches(name.lower(), self._fields, n=1)
            hint = f"did you mean {nearest[0]}? " if nearest else "texts are written in 'single quotes'; "
            hint = "ask for unknown values by `NAME is null`; " if name == "None" else hint
            if "_" in name:  # the fields of a plug-in's column are named after it
                hint += f"if {name.partition('_')[0]} is a column of a plug-in, its package is not installed here; "
            self._fail(
                f"there is no name {name}", place, hint=f"{hint}names: {', '.join(self._fields)}; labels: label_NAME"
            )

    def _check_kinds(self, root: _Node) -> None:
        """Refuse what SQL would convert: a number as a condition, and a text as a number."""
        conditions, alike = [root], []
        for node in _nodes(root):
            if node["class"] == "CONJUNCTION" or node["type"] == "OPERATOR_NOT":
                conditions += node["children"]
            elif node["class"] == "CASE":
                conditions += [check["when_expr"] for check in node["case_checks"]]
            elif node["class"] in ("COMPARISON", "BETWEEN") or node["type"] in _MEMBERSHIPS:
                alike.append(_operands(node))
        kinds = self._kinds([*conditions, *(one for group in alike for one in group)])
        for node in conditions:
            if (kind := kinds[id(node)]) != "condition":
                shown = self._sql(node)
                hint = f"compare it, for example {shown} > 0" if kind == "number" else None
                self._fail(f"{shown} is {_A[kind]}, where a condition is needed", node["query_location"], hint=hint)
        for first, *others in alike:
            for other in others:
                if (one := kinds[id(first)]) != (kind := kinds[id(other)]):
                    self._fail(
                        f"{self._sql(first)} is {_A[one]}, and {self._sql(other)} {_A[kind]}: they cannot be compared",
                        other["query_location"],
                        hint="compare numbers with numbers, texts with 'texts'; unknown values: NAME is null",
                    )

    def _kinds(self, nodes: list[_Node]) -> dict[int, Kind]:
        """The kind of each node, by its id; DuckDB binds functions to their arguments for it."""
        import duckdb

        (argument,) = self._typeof["arguments"]
        calls = [{**self._typeof, "arguments": [{**argument, "expression": node}]} for node in nodes]
        columns = ", ".join(f"null::{_TYPES[kind]} as {name}" for name, kind in self._fields.items())
        try:
            types = self._row(f"select {self._sql(*calls)} from (select {columns})")
        except duckdb.Error as error:
            self._fail(str(error))
        return {id(node): _KINDS.get(name, "number") for node, name in zip(nodes, types, strict=True)}

    def _set_precision(self, node: _Node) -> None:
        """Make arithmetic one in float64, and comparisons with literals one in the precision of the column."""
        if node["class"] == "CONSTANT" and node["literal"]["kind"] == "NUMERIC":
            text = node["literal"]["text"]
            if _WITH_EXPONENT.fullmatch(text) and len(digits := f"{Decimal(text):f}") <= _MAX_DIGITS:
                node["literal"]["text"] = digits
        if node["class"] == "FUNCTION" and node["function_name"] in _ARITHMETIC:
            for argument in node["arguments"]:
                if argument["expression"]["class"] == "COLUMN_REF":
                    argument["expression"] = {**self._cast, "child": argument["expression"]}

    def _select(self, *nodes: _Node) -> _Node:
        """The parse tree of a statement that selects `nodes` and does nothing else."""
        (statement,) = self._plain["statements"]
        return {**self._plain, "statements": [{**statement, "node": {**statement["node"], "select_list": [*nodes]}}]}

    def _sql(self, *nodes: _Node) -> str:
        """Nodes in canonical form, in parentheses where they need them."""
        (sql,) = self._row("select json_deserialize_sql(?)", json.dumps(self._select(*nodes)))
        return str(sql).removeprefix("SELECT ")

    def _row(self, query: str, *values: str) -> tuple[Any, ...]:
        return self._database.execute(query, values).fetchone() or ()

    def _fail(self, problem: str, place: int | None = None, *, hint: str | None = None) -> NoReturn:
        # DuckDB counts bytes; nodes that it adds have no place.
        if place is not None and len(_BEFORE) <= place < 1 << 63:
            before = f"{_BEFORE}{self._text}".encode()[:place].decode(errors="ignore")
            number = len(before) - len(_BEFORE)
            if number >= len(self._text):
                number, problem = len(self._text), "the expression ends too early"
            problem = f"character {number + 1}: {problem}"
        raise expression_error(self._text, problem, flag=self._flag, hint=hint)


def _nodes(tree: object) -> Iterator[_Node]:
    """All expressions in a part of a parse tree, the outermost first."""
    if isinstance(tree, dict):
        if "class" in tree:
            yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _nodes(part)


def _operands(node: _Node) -> list[_Node]:
    """The expressions that a node compares."""
    named = [node[name] for name in ("left", "right", "input", "lower", "upper") if name in node]
    return [*named, *node.get("children", ())]


def _names(tree: _Node) -> Iterator[str]:
    return (node["column_names"][0].lower() for node in _nodes(tree) if node["class"] == "COLUMN_REF")
