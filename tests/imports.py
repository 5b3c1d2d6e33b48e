"""Reads what a Python file imports, wherever in the file it does so."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path

_CALLS_THAT_IMPORT = {"import_module", "__import__", "importorskip"}


@cache  # every contract asks about every file
def imported_names(path: Path) -> set[str]:
    """Dotted names that `path` imports: at the top, in functions, by `importlib`, or as attributes of a package.

    `from a import b` gives both `a` and `a.b`, because b may be a module; `import a` followed by `a.b.c` gives `a.b`
    and `a.b.c`, because a package may load its parts by itself.
    """
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))
    names = set(_statements(nodes)) | set(_calls(nodes))
    return names | set(_attributes(nodes, roots={name.partition(".")[0] for name in names}))


def count_statements(paths: Iterable[Path]) -> int:
    """Return the number of statements in files. Docstrings and comments do not count."""
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in nodes)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def reaches(names: set[str], module: str) -> bool:
    """Whether any of `names` is `module` or lies in it."""
    return any(name == module or name.startswith(f"{module}.") for name in names)


def circles(imports: Mapping[str, Set[str]]) -> Iterator[list[str]]:
    """Groups of files of which each imports every other, directly or not (Tarjan's algorithm)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_files: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        numbers[name] = lowest[name] = len(numbers)
        open_files.append(name)
        for other in imports[name]:
            if other not in numbers:
                yield from visit(other)
            if other in open_files:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == numbers[name]:
            group = open_files[open_files.index(name) :]
            del open_files[open_files.index(name) :]
            if len(group) > 1:
                yield group

    for name in imports:
        if name not in numbers:
            yield from visit(name)


def _statements(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"line {node.lineno}: a relative import cannot be checked; write it in full")
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _calls(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in _CALLS_THAT_IMPORT:
                yield str(node.args[0].value)


def _attributes(nodes: Iterable[ast.AST], *, roots: set[str]) -> Iterator[str]:
    for node in nodes:
        parts: list[str] = []
        value: ast.AST = node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if parts and isinstance(value, ast.Name) and value.id in roots:
            yield ".".join([value.id, *reversed(parts)])
