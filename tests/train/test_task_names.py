"""No file outside a task's folder contains the task's name, not even in a string."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from clipmill.train.registry import task_names

TRAIN = Path(__file__).resolve().parents[2] / "train"
EXCEPTIONS = {"registry.py"}  # has a row for each task
# "caption" is also an ordinary noun, so only the name in a command counts.
THINGS = {"caption"}


@cache
def literals(path: Path) -> list[tuple[int, str]]:
    """Return the strings of a file with their lines, without docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in texts)
    return [(node.lineno, node.value) for node in strings if isinstance(node.value, str)]


def mentions(path: Path, names: re.Pattern[str]) -> Iterator[str]:
    """Yield the literals of a file that contain the name of a task."""
    for line, text in literals(path):
        if names.search(text):
            yield f"{path.relative_to(TRAIN)}:{line}: {text!r}"


def test_no_file_outside_of_a_tasks_folder_names_the_task() -> None:
    files = [path for path in TRAIN.rglob("*.py") if str(path.relative_to(TRAIN)) not in EXCEPTIONS]
    for name in task_names():
        folder = TRAIN / "tasks" / name.replace("-", "_")
        assert folder.is_dir()
        word = rf"(--task|train) {name}\b" if name in THINGS else rf"(?<![\w-])({name}|{folder.name})(?![\w-])"
        named = re.compile(word)
        result = [mention for path in files if not path.is_relative_to(folder) for mention in mentions(path, named)]
        assert result == [], f"make it a field of the task's spec: {result}"
        assert list(mentions(TRAIN / "registry.py", re.compile(rf"^{name}$")))
