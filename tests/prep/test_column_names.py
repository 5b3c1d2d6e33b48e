"""Tests that only a column's own folder names it by a string; other code uses the rows in shards/columns.py."""

import ast
import re
from pathlib import Path

from clipmill.prep.registry import columns
from clipmill.shards.columns import COLUMNS
from tests.conftest import ROOT

NAMES = frozenset(COLUMNS)
# A line with one of these words means the name of a column; elsewhere, video, text and scores may be ordinary words.
MEANS_A_COLUMN = re.compile(r"column|variant", re.IGNORECASE)
EXCEPTIONS = {
    "shards/columns.py",  # the rows
    "prep/cli.py",  # the commands of a first run
    "train/data/batch.py",  # arrays of a batch; in the other files, columns of tables
    "prep/video/worker.py",
    "train/tasks/dual_encoder/protocols.py",
    "train/data/producers/captioned_clips.py",  # captions of the manifest
}


def named_in(path: Path, names: frozenset[str]) -> list[str]:
    """Return the literals of a file that name one of these columns, its command, or its `--column`.

    Docstrings are ignored.
    """
    commands = "|".join(f"{COLUMNS[name].command}|{name}" for name in sorted(names))
    told = re.compile(rf"(\bprep ({commands})|--column ({'|'.join(sorted(names))}))(?![\w-])")
    source = path.read_text()
    tree, lines = ast.parse(source), source.splitlines()
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if told.search(node.value) or (node.value in names and MEANS_A_COLUMN.search(lines[node.lineno - 1]))
    ]


def test_no_file_outside_of_a_columns_folder_names_the_column() -> None:
    commands = {column.name: column.command for column in columns()}
    assert {name: commands[name] for name in COLUMNS} == {name: row.command for name, row in COLUMNS.items()}
    files = [path for folder in ("prep", "shards", "train") for path in (ROOT / folder).rglob("*.py")]
    uses = []
    for path in files:
        if str(path.relative_to(ROOT)) in EXCEPTIONS:
            continue
        allowed = {name for name in NAMES if path.is_relative_to(ROOT / "prep" / name)}
        uses += named_in(path, NAMES - allowed)
    assert uses == [], f"take the name, the command or the hint from shards/columns.py: {uses}"
    assert named_in(ROOT / "prep/latents/recipe.py", frozenset({"latents"}))
