"""The commands that the README and the Makefile show are commands that exist."""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
PROGRAMS = ("prep", "train")
WORD = re.compile(r"[a-z][a-z0-9-]*")


def commands_of_markdown(text: str) -> list[list[str]]:
    """Words of every command line in the `sh` blocks of a document; comments and continuations are understood."""
    blocks = "".join(SHELL_BLOCK.findall(text)).replace("\\\n", " ")
    return [words for line in blocks.splitlines() if (words := shlex.split(line, comments=True))]


def commands_of_makefile(text: str) -> list[list[str]]:
    recipes = re.findall(r"^\t\$\(BIN\)/((?:prep|train) .*)$", text, flags=re.MULTILINE)
    return [shlex.split(recipe.replace("$(", "").replace(")", "")) for recipe in recipes]


def own_commands() -> list[list[str]]:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [words for document in documents for words in commands_of_markdown(document.read_text())]
    found += commands_of_makefile((ROOT / "Makefile").read_text())
    unique = {tuple(words): words for words in found if words[0] in PROGRAMS}
    return list(unique.values())


@cache
def help_of(*words: str) -> str | None:
    """What `<program> <sub-command> --help` prints, or None where there is no such sub-command."""
    script = f"from {words[0]}.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", script, *words[1:], "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"COLUMNS": "200", "NO_COLOR": "1", "PATH": "", "TERM": "dumb"},
    )
    return ran.stdout if ran.returncode == 0 and "Usage:" in ran.stdout else None


def sub_command(words: list[str]) -> tuple[str, ...]:
    """The program and its sub-commands at the front of a command line."""
    path = [words[0]]
    for word in words[1:3]:
        shown = help_of(*path) or ""
        if not WORD.fullmatch(word) or not re.search(rf"^[│\s]*{re.escape(word)}\b", shown, flags=re.MULTILINE):
            break
        path.append(word)
    return tuple(path)


@pytest.mark.parametrize("words", own_commands(), ids=shlex.join)
def test_a_documented_command_exists_with_its_flags(words: list[str]) -> None:
    path = sub_command(words)
    assert len(path) > 1 or any(word.startswith("--") for word in words[1:2]), f"{words[0]} has no {words[1]!r}"
    shown = help_of(*path)
    assert shown is not None
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", shown), f"{' '.join(path)} has no {flag}"


def test_the_readme_shows_commands_of_both_programs() -> None:
    shown = {words[0] for words in commands_of_markdown((ROOT / "README.md").read_text())}
    assert {"prep", "train", "make"} <= shown


def test_every_documented_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for words in commands_of_markdown(document.read_text()):
            if words[0] == "make":
                assert words[1] in targets, f"{document.name}: {shlex.join(words)}"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert ["make", "test"] in commands_of_markdown((ROOT / "README.md").read_text())
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test"
