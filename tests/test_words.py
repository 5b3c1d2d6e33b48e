"""The words of the four packages: names, sentences, and how many ideas there are. The limits only go down."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

IRREGULAR = frozenset(
    [
        "begun",
        "bought",
        "bound",
        "broken",
        "brought",
        "built",
        "caught",
        "chosen",
        "done",
        "drawn",
        "fed",
        "found",
        "frozen",
        "given",
        "gone",
        "grown",
        "held",
        "hidden",
        "kept",
        "known",
        "laid",
        "led",
        "lent",
        "lost",
        "made",
        "met",
        "meant",
        "paid",
        "said",
        "seen",
        "sent",
        "shown",
        "shut",
        "slept",
        "sold",
        "spent",
        "spoken",
        "stolen",
        "sworn",
        "taken",
        "taught",
        "thought",
        "thrown",
        "told",
        "torn",
        "understood",
        "undone",
        "unread",
        "unseen",
        "won",
        "wound",
        "worn",
        "written",
    ]
)
ADJECTIVES = frozenset(
    [
        "absolute",
        "alike",
        "both",
        "comparable",
        "constant",
        "current",
        "differing",
        "distinct",
        "effective",
        "empty",
        "encodable",
        "even",
        "existing",
        "flat",
        "following",
        "free",
        "fresh",
        "greedy",
        "half",
        "highest",
        "incomplete",
        "largest",
        "last",
        "late",
        "left",
        "local",
        "longest",
        "lowest",
        "marginal",
        "missing",
        "ordinary",
        "plain",
        "previous",
        "printable",
        "private",
        "quiet",
        "random",
        "ready",
        "relative",
        "relevant",
        "short",
        "silent",
        "smallest",
        "sound",
        "special",
        "superfluous",
        "undecodable",
        "uniform",
        "unknown",
        "unreadable",
        "unusable",
        "upright",
        "usable",
        "visible",
        "whole",
        "working",
    ]
)
NOUNS_AND_VERBS = frozenset(["bed", "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"])
# Names that Python's file objects and protocols give.
GIVEN_NAMES = frozenset({"closed", "readable", "seekable", "writable"})
VAGUE_VARIABLES = frozenset({"one", "found", "wanted", "own", "there", "said"})
PACKAGES = ("manifests", "shards", "train", "prep")
# Functions and fixtures of the tests that are still named by a participle or an adjective; it only goes down.
MAX_PARTICIPLES_IN_TESTS = 10
# Limits that only go down: files, functions, classes, and lines of imports in percent of all lines.
IDEAS = {
    "manifests": (51, 786, 109, 5.7),
    "shards": (35, 443, 71, 6.0),
    "train": (206, 2829, 490, 7.0),
    "prep": (122, 1305, 265, 8.1),
}
# Patterns of a translated sentence; CONTRIBUTING says what to write instead.
FOREIGN = re.compile(
    r"\b(those of|that of|of which|of those|anew|shall|for want of)\b|(?<![Tt]here )\bis no (?!longer\b|need\b)\w"
)
# A docstring begins with a noun phrase or an imperative.
BEGINS_BADLY = re.compile(
    r"(What|Whether|Which|Whose|Where|How|That|Those|Of|For|In|By|With|Without|From|To|On|At|As|Beside)\b"
)


@cache  # several tests ask for them
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file, its module first."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _forget_nodes() -> Iterator[None]:
    yield
    nodes_of.cache_clear()


def is_participle_or_adjective(name: str) -> bool:
    """Return True if a name is one word that says what something is like: `sent`, `_checked`, `late`."""
    word = name.strip("_")
    if name in GIVEN_NAMES or word in NOUNS_AND_VERBS:
        return False
    return word in IRREGULAR or word in ADJECTIVES or re.fullmatch(r"[a-z]+ed", word) is not None


def bound_outside_comprehensions(tree: ast.AST) -> Iterator[str]:
    """Yield the names that assignments, loops and arguments bind, without the loops of comprehensions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, ast.comprehension):
            yield from bound_outside_comprehensions(node)


def module_names(tree: ast.Module) -> set[str]:
    """Return the names of a module's functions and imports."""
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def counts(package: Path) -> dict[str, int]:
    """Count the functions, variables and hidden names of a package that break the rules."""
    totals: Counter[str] = Counter(functions=0, variables=0, hidden=0)
    for path in sorted(package.rglob("*.py")):
        tree, *_ = nodes = nodes_of(path)
        assert isinstance(tree, ast.Module)
        at_top = module_names(tree)
        for node in nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            totals["functions"] += is_participle_or_adjective(node.name)
        for function in outermost_functions(tree):
            names = list(bound_outside_comprehensions(function))
            totals["variables"] += sum(name in VAGUE_VARIABLES for name in names)
            totals["hidden"] += len(at_top & set(names))
    return dict(totals)


def outermost_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the functions that are in no other function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from outermost_functions(node)


def texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the docstrings and all other strings of a module."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_breaks_the_rules(repository: Path, package: str) -> None:
    assert counts(repository / package) == {"functions": 0, "variables": 0, "hidden": 0}


def test_names_in_the_tests(repository: Path) -> None:
    """Variables name the thing, also in comprehensions; nearly all functions are verbs or nouns."""
    variables, functions = [], []
    for path in sorted((repository / "tests").rglob("*.py")):
        for function in outermost_functions(ast.parse(path.read_text())):
            for node in ast.walk(function):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle_or_adjective(node.name):
                    functions.append(f"{path.relative_to(repository)}: {node.name}")
                name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
                if name in VAGUE_VARIABLES:
                    variables.append(f"{path.relative_to(repository)}:{getattr(node, 'lineno', 0)}: {name}")
    assert not variables
    assert len(functions) <= MAX_PARTICIPLES_IN_TESTS, functions


@pytest.mark.parametrize("package", PACKAGES)
def test_sentences_are_plain(repository: Path, package: str) -> None:
    for path in sorted((repository / package).rglob("*.py")):
        for text in texts(nodes_of(path)):
            match = FOREIGN.search(text)
            assert match is None, f"{path.relative_to(repository)}: {text[max(0, match.start() - 40) :][:100]!r}"


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_a_noun_or_an_imperative(repository: Path, package: str) -> None:
    for path in sorted((repository / package).rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                assert not BEGINS_BADLY.match(first), f"{path.relative_to(repository)}: {first!r}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_more_ideas(repository: Path, package: str) -> None:
    """A change that lowers a count lowers its limit, too."""
    totals: Counter[str] = Counter()
    for path in sorted((repository / package).rglob("*.py")):
        source = path.read_text()
        totals["files"] += 1
        totals["lines"] += len(source.splitlines())
        for node in nodes_of(path):
            totals["functions"] += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            totals["classes"] += isinstance(node, ast.ClassDef)
            if isinstance(node, ast.Import | ast.ImportFrom):
                totals["imports"] += (node.end_lineno or node.lineno) - node.lineno + 1
    files, functions, classes, imports_percent = IDEAS[package]
    assert totals["files"] <= files, totals
    assert totals["functions"] <= functions, totals
    assert totals["classes"] <= classes, totals
    assert 100 * totals["imports"] <= imports_percent * totals["lines"], totals


@pytest.mark.parametrize("name", ["sent", "_checked", "late", "_kept", "shared"])
def test_participles_and_adjectives_are_recognised(name: str) -> None:
    assert is_participle_or_adjective(name)


@pytest.mark.parametrize("name", ["send", "embed", "read", "closed", "shared_rows", "is_kept", "count_noun"])
def test_verbs_and_nouns_are_allowed(name: str) -> None:
    assert not is_participle_or_adjective(name)
