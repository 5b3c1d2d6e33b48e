"""Nothing outside of a task's folder names it, by strings either."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from clipmill.train.registry import task_names

TRAIN = Path(__file__).resolve().parents[2] / "train"
EXCEPTIONS = {"registry.py"}  # a row for each task
# A caption is a thing, too; the task of that name is meant where a command is.
THINGS = {"caption"}


def mentions(path: Path, names: re.Pattern[str]) -> Iterator[str]:
    """The literals of a file, without docstrings, that name a task."""
    tree = ast.parse(path.read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in texts:
            continue
        if names.search(node.value):
            yield f"{path.relative_to(TRAIN)}:{node.lineno}: {node.value!r}"


def test_no_file_outside_of_a_tasks_folder_names_the_task() -> None:
    files = [path for path in TRAIN.rglob("*.py") if str(path.relative_to(TRAIN)) not in EXCEPTIONS]
    for name in task_names():
        folder = TRAIN / "tasks" / name.replace("-", "_")
        assert folder.is_dir()
        word = rf"(--task|train) {name}\b" if name in THINGS else rf"(?<![\w-])({name}|{folder.name})(?![\w-])"
        named = re.compile(word)
        found = [one for path in files if not path.is_relative_to(folder) for one in mentions(path, named)]
        assert found == [], f"make it a field of the task's spec: {found}"
        assert list(mentions(TRAIN / "registry.py", re.compile(rf"^{name}$")))
