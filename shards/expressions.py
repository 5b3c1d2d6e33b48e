"""A small language of conditions on the columns of a table.

    condition   NUMBER < NUMBER (also <= > >= == !=, and chains: 0.2 < motion < 2), TEXT == TEXT, TEXT != TEXT,
                NAME in (VALUE, ...), "part" in TEXT, NAME is None, a name that is true or false,
                each also with `not`; joined by `and`, `or`, `not` and parentheses
    number      a literal, a name, + - * / of numbers
    text        a literal in quotes, a name

The text is parsed by `ast` and translated node by node into functions of pyarrow.compute. A node that is not in the
grammar is an error; nothing is ever compiled or executed. An unknown value (null) makes a comparison unknown, and `not`
of it as well, as in SQL; `is None` asks for it. A comparison with a literal is made in the precision of the column:
`motion <= 0.2` holds for a stored float32 of 0.2. Arithmetic is in float64; a division by zero is unknown.
"""

import ast
import difflib
import io
import operator
import tokenize
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError

MAX_CHARS = 10_000
MAX_DEPTH = 50
MAX_NUMBER = float(1 << 64)
_SHOWN_CHARS = 200

Kind = Literal["number", "text", "condition"]
Value = Any  # an Arrow array with one entry per row, an Arrow scalar, or a Python constant
Columns = Mapping[str, pa.Array]  # values by name

_A = {"number": "a number", "text": "a text", "condition": "a condition"}
_EXAMPLE = 'conditions look like: motion > 0.2 and cuts == 0 and not duplicate, source in ("human", "narrator")'
_COMPARE: dict[type, tuple[Callable[[Any, Any], bool], Callable[[Any, Any], Any]]] = {
    ast.Lt: (operator.lt, pc.less),
    ast.LtE: (operator.le, pc.less_equal),
    ast.Gt: (operator.gt, pc.greater),
    ast.GtE: (operator.ge, pc.greater_equal),
    ast.Eq: (operator.eq, pc.equal),
    ast.NotEq: (operator.ne, pc.not_equal),
}
_MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}
_ARITHMETIC: dict[type, tuple[Callable[[Any, Any], float], Callable[[Any, Any], Any]]] = {
    ast.Add: (operator.add, pc.add),
    ast.Sub: (operator.sub, pc.subtract),
    ast.Mult: (operator.mul, pc.multiply),
    ast.Div: (operator.truediv, pc.divide),
}
_REFUSED = {
    ast.Call: "functions cannot be called",
    ast.Attribute: "attributes cannot be read",
    ast.Subscript: "there is nothing to subscript",
    ast.JoinedStr: "f-strings are not part of the language",
    ast.NamedExpr: "names cannot be assigned",
}


@dataclass(frozen=True)
class Expression:
    """A part of an expression.

    Attributes:
        text: in canonical form.
        names: the names in it.
        evaluate: its values, given those of the names.
        is_constant: whether `evaluate` gives a Python constant.
    """

    text: str
    kind: Kind
    names: frozenset[str]
    evaluate: Callable[[Columns], Value]
    is_constant: bool = False

    @property
    def constant(self) -> Any:
        """The value of a constant."""
        return self.evaluate({})


def parse_conditions(text: str, *, kinds: Mapping[str, Kind], flag: str) -> list[Expression]:
    """Parse an expression into the conditions that it joins by `and`.

    Args:
        kinds: the names that it may use.
        flag: what the text was given to, for messages.

    Raises:
        UserError: it is not a condition; the message has the position, and the nearest name for one that is unknown.
    """
    if len(text) > MAX_CHARS:
        raise UserError(f"{flag} has {len(text):,} characters", hint=f"use {MAX_CHARS:,} or fewer")
    line = text.translate({ord(white): " " for white in "\n\r\t"}).strip()
    if not line:
        raise UserError(f"{flag} is empty", hint=_EXAMPLE)
    parser = _Parser(line, kinds=kinds, flag=flag)
    tree = parser.tree()
    joined = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return [parser.condition(part, depth=0) for part in joined]


class _Parser:
    """Translates one expression on a single line."""

    def __init__(self, line: str, *, kinds: Mapping[str, Kind], flag: str) -> None:
        self._line, self._kinds, self._flag = line, kinds, flag

    def tree(self) -> ast.expr:
        line = self._line
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(line, mode="eval").body
                for token in tokenize.generate_tokens(io.StringIO(line).readline) if "#" in line else ():
                    if token.type == tokenize.COMMENT:  # Python ignores the rest of the line
                        self._fail(token.start[1], "comments are not part of the language")
        except SyntaxError as error:
            hint = "compare by ==, and join by `and`, `or`, `not`" if any(sign in line for sign in "=&|!") else None
            if error.offset == 0:  # Python has no place for what is missing at the end
                self._fail(len(line), "the expression ends too early", hint=hint)
            self._fail(max((error.offset or 1) - 1, 0), error.msg, hint=hint)
        except (MemoryError, RecursionError):
            self._fail(0, "the expression is nested too deeply", hint=f"nest at most {MAX_DEPTH} levels")
        except ValueError as error:
            self._fail(0, str(error))
        return tree

    def condition(self, node: ast.expr, *, depth: int) -> Expression:
        return self._of_kind("condition", node, depth=depth)

    def _fail(self, column: int, problem: str, *, hint: str | None = None) -> NoReturn:
        shown = self._line if len(self._line) <= _SHOWN_CHARS else f"{self._line[:_SHOWN_CHARS]} ..."
        raise UserError(f"{self._flag} '{shown}': character {column + 1}: {problem}", hint=hint or _EXAMPLE)

    def _refuse(self, node: ast.expr, problem: str, *, hint: str | None = None) -> NoReturn:
        self._fail(len(self._line.encode()[: node.col_offset].decode()), problem, hint=hint)

    def _source(self, node: ast.expr) -> str:
        return self._line.encode()[node.col_offset : node.end_col_offset].decode()[:40]

    def _of_kind(self, kind: Kind, node: ast.expr, *, depth: int) -> Expression:
        found = self._expression(node, depth=depth)
        if found.kind != kind:
            hint = f"compare it, for example {found.text} > 0" if found.kind == "number" else None
            self._refuse(node, f"{found.text} is {_A[found.kind]}, where {_A[kind]} is needed", hint=hint)
        return found

    def _expression(self, node: ast.expr, *, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            self._refuse(node, "the expression is nested too deeply", hint=f"nest at most {MAX_DEPTH} levels")
        deeper = depth + 1
        match node:
            case ast.Name(id=name):
                return self._name(node, name)
            case ast.Constant(value=value):
                return self._constant(node, value)
            case ast.BoolOp(op=op, values=values):
                return _joined(node, op, [self.condition(value, depth=deeper) for value in values])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.condition(operand, depth=deeper)
                return _made(node, "condition", [inner], lambda value: pc.invert(_as_arrow(value)))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
                number = self._of_kind("number", operand, depth=deeper)
                return self._arithmetic(node, ast.Sub() if isinstance(op, ast.USub) else ast.Add(), _ZERO, number)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                operands = [self._of_kind("number", operand, depth=deeper) for operand in (left, right)]
                return self._arithmetic(node, op, *operands)
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr()) | ast.UnaryOp(op=ast.Invert()):
                self._refuse(node, "bit operators are not part of the language", hint="use `and`, `or` and `not`")
            case ast.Compare():
                return self._comparisons(node, depth=deeper)
        self._refuse(node, _REFUSED.get(type(node), f"{self._source(node)} is not part of the language"))

    def _name(self, node: ast.expr, name: str) -> Expression:
        if (kind := self._kinds.get(name)) is not None:
            return Expression(name, kind, frozenset([name]), lambda columns: columns[name])
        nearest = difflib.get_close_matches(name, self._kinds, n=1) or [
            known for known in self._kinds if known.lower() == name.lower()
        ]
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        if name.lower() in ("true", "false", "none", "null"):
            hint = "write True, False and None, as in Python; "
        self._refuse(node, f"there is no name {name}", hint=f"{hint}names: {', '.join(self._kinds)}")

    def _constant(self, node: ast.expr, value: object) -> Expression:
        if isinstance(value, bool):
            return _constant(node, "condition", value)
        if isinstance(value, int | float):
            if not abs(value) < MAX_NUMBER:
                self._refuse(
                    node, f"{self._source(node)} is out of range", hint=f"numbers are less than {MAX_NUMBER:g}"
                )
            return _constant(node, "number", value)
        if isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value):
            return _constant(node, "text", value)
        hint = "ask for unknown values by `NAME is None`" if value is None else None
        self._refuse(node, f"{self._source(node)} is neither a number, nor a text, nor True or False", hint=hint)

    def _arithmetic(self, node: ast.expr, op: ast.operator, left: Expression, right: Expression) -> Expression:
        plain, of_arrays = _ARITHMETIC[type(op)]
        if left.is_constant and right.is_constant:
            try:
                value = plain(left.constant, right.constant)
                return self._constant(node, int(value) if float(value).is_integer() else value)
            except (ArithmeticError, ValueError) as error:
                self._refuse(node, str(error))

        def evaluate(one: Value, other: Value) -> Value:
            result = of_arrays(_as_float64(one), _as_float64(other))
            return pc.if_else(pc.is_finite(result), result, pa.scalar(None, pa.float64()))

        return _made(node, "number", [left, right], evaluate)

    def _comparisons(self, node: ast.Compare, *, depth: int) -> Expression:
        parts, left = [], node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            parts.append(self._comparison(node, left, op, right, depth=depth))
            left = right
        return parts[0] if len(parts) == 1 else _joined(node, ast.And(), parts)

    def _comparison(self, node: ast.expr, left: ast.expr, op: ast.cmpop, right: ast.expr, *, depth: int) -> Expression:
        if isinstance(op, ast.Is | ast.IsNot):
            return self._is_none(node, left, right, is_none=isinstance(op, ast.Is), depth=depth)
        one = self._expression(left, depth=depth)
        if isinstance(op, ast.In | ast.NotIn):
            found = self._membership(node, one, right, depth=depth)
            if isinstance(op, ast.In):
                return found
            return _made(node, "condition", [found], lambda value: pc.invert(_as_arrow(value)))
        other = self._expression(right, depth=depth)
        if one.kind != other.kind:
            told = f"{one.text} is {_A[one.kind]}, and {other.text} {_A[other.kind]}"
            self._refuse(node, f"{told}: they cannot be compared")
        if one.kind != "number" and not isinstance(op, ast.Eq | ast.NotEq):
            self._refuse(node, f"{one.text} is {_A[one.kind]}: it has no order", hint="compare it by == or !=")
        plain, of_arrays = _COMPARE[type(op)]
        if one.is_constant and other.is_constant:
            return _constant(node, "condition", plain(one.constant, other.constant))
        if one.is_constant:
            one, other, of_arrays = other, one, _COMPARE[_MIRRORED[type(op)]][1]
        return _made(node, "condition", [one, other], lambda a, b: of_arrays(*_comparable(a, b)))

    def _is_none(self, node: ast.expr, left: ast.expr, right: ast.expr, *, is_none: bool, depth: int) -> Expression:
        value = self._expression(left, depth=depth)
        if not (isinstance(right, ast.Constant) and right.value is None) or value.is_constant:
            self._refuse(node, "`is` compares a name with None alone", hint="compare values by ==")
        return _made(node, "condition", [value], pc.is_null if is_none else pc.is_valid)

    def _membership(self, node: ast.expr, one: Expression, right: ast.expr, *, depth: int) -> Expression:
        if not isinstance(right, ast.List | ast.Tuple | ast.Set):
            text = self._of_kind("text", right, depth=depth)
            if one.kind != "text" or not one.is_constant or text.is_constant:
                self._refuse(node, "`in` needs values in parentheses, or a text in a name of texts")
            part = one.constant
            return _made(node, "condition", [text], lambda value: pc.match_substring(value, part))
        values = [self._expression(value, depth=depth) for value in right.elts]
        if one.is_constant or not values or not all(value.is_constant and value.kind == one.kind for value in values):
            self._refuse(node, f"`in` needs a name, and literals that are {_A[one.kind]} each")
        constants = [value.constant for value in values]

        def is_in(value: pa.Array) -> pa.Array:
            if one.kind == "text":
                found = pc.is_in(value, value_set=pa.array(constants, value.type))
                return pc.if_else(pc.is_valid(value), found, pa.scalar(None, pa.bool_()))
            return reduce(pc.or_kleene, (pc.equal(*_comparable(value, constant)) for constant in constants))

        return _made(node, "condition", [one], is_in)


def _constant(node: ast.expr, kind: Kind, value: bool | float | str) -> Expression:
    return Expression(ast.unparse(node), kind, frozenset(), lambda columns: value, is_constant=True)


_ZERO = _constant(ast.Constant(0), "number", 0)


def _made(node: ast.expr, kind: Kind, parts: list[Expression], evaluate: Callable[..., Value]) -> Expression:
    names = frozenset[str]().union(*(part.names for part in parts))
    return Expression(
        ast.unparse(node), kind, names, lambda columns: evaluate(*(part.evaluate(columns) for part in parts))
    )


def _joined(node: ast.expr, op: ast.boolop, parts: list[Expression]) -> Expression:
    join = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
    return _made(node, "condition", parts, lambda *values: reduce(join, map(_as_arrow, values)))


def _as_arrow(value: Value) -> Value:
    return pa.scalar(value) if isinstance(value, bool) else value


def _as_float64(value: Value) -> Value:
    return pa.scalar(float(value)) if isinstance(value, int | float) else value.cast(pa.float64(), safe=False)


def _comparable(array: Value, other: Value) -> tuple[Value, Value]:
    """An array and what it is compared with, in one type."""
    if not isinstance(other, bool | int | float | str):
        return (array, other) if array.type == other.type else (_as_float64(array), _as_float64(other))
    if pa.types.is_floating(array.type):  # of whole numbers, Arrow takes only those that the type has exactly
        return array, pa.scalar(float(other), array.type)
    if isinstance(array, pa.Scalar) or not pa.types.is_integer(array.type):
        return array, pa.scalar(other, array.type)
    try:
        if other == int(other):  # Arrow would truncate a fraction
            return array, pa.scalar(int(other), array.type)
    except (pa.ArrowException, OverflowError):  # out of the range of the type
        pass
    return _as_float64(array), _as_float64(other)
