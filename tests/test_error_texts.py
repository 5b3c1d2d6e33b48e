"""Control flow never depends on the words of our errors: what code has to know of a mistake, the error carries."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import PACKAGES

_CLASS = re.compile(r"^class (\w+)\(([\w, ]+)\)", re.MULTILINE)
_TEXT_OF_AN_ERROR = re.compile(r"except [^\n]* as (\w+):.*?\bstr\(\1\)", re.DOTALL)
_SEARCHES = {"search", "match", "fullmatch", "findall", "finditer", "startswith", "endswith", "find", "index", "count"}


def sources(repository: Path) -> dict[str, str]:
    paths = (path for package in PACKAGES for path in sorted((repository / package).rglob("*.py")))
    return {str(path.relative_to(repository)): path.read_text() for path in paths}


def errors_among(texts: dict[str, str]) -> set[str]:
    """Names of the classes that derive from ClipmillError."""
    classes = [(name, set(bases.split(", "))) for text in texts.values() for name, bases in _CLASS.findall(text)]
    known, size = {"ClipmillError"}, 0
    while len(known) > size:
        size = len(known)
        known |= {name for name, bases in classes if known & bases}
    return known


def searched_texts(tree: ast.Module, errors: set[str]) -> Iterator[int]:
    """Lines that look for something in the text of an error of ours, where it is caught."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.type is None or handler.name is None:
            continue
        if errors.isdisjoint(ast.unparse(node) for node in ast.walk(handler.type) if isinstance(node, ast.Name)):
            continue
        text = f"str({handler.name})"
        for node in ast.walk(handler):
            if isinstance(node, ast.Compare) and any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
                operands = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SEARCHES:
                operands = [node.func.value, *node.args]
            else:
                continue
            if any(text in ast.unparse(operand) for operand in operands):
                yield node.lineno


def test_no_module_searches_the_text_of_an_error(repository: Path) -> None:
    texts = sources(repository)
    errors = errors_among(texts)
    assert {"UserError", "UserErrors", "FailedWork", "AccessDenied"} <= errors
    trees = {path: ast.parse(text) for path, text in texts.items() if _TEXT_OF_AN_ERROR.search(text)}
    places = [f"{path}:{line}" for path, tree in trees.items() for line in searched_texts(tree, errors)]
    assert not places, "let the error carry what is looked for, such as UserError(flags=...), or a class of its own"


def test_a_search_is_seen() -> None:
    source = "try:\n    f()\nexcept (OSError, UserError) as error:\n    if 'no' in str(error):\n        raise\n"
    assert list(searched_texts(ast.parse(source), {"UserError"})) == [4]
    assert not list(searched_texts(ast.parse(source), {"FailedWork"}))
