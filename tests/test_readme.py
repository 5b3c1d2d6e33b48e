"""The commands that the README and the Makefile show are understood by the programs."""

import importlib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError

from clipmill.manifests.errors import UserError

ROOT = Path(__file__).parent.parent
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
PROGRAMS = ("prep", "train")
DOCUMENTS = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


def commands_of_markdown(text: str) -> list[list[str]]:
    """Words of every command line in the `sh` blocks of a document; comments and continuations are understood."""
    blocks = "".join(SHELL_BLOCK.findall(text)).replace("\\\n", " ")
    return [words for line in blocks.splitlines() if (words := shlex.split(line, comments=True))]


def commands_of_makefile(text: str) -> list[list[str]]:
    commands = re.sub(r"\s*(?:\|\||&&|;)\s*", "\n\t", text.replace("\\\n", " "))  # those of one line, each by itself
    recipes = re.findall(r"^\t\$\(BIN\)/((?:prep|train) .*)$", commands, flags=re.MULTILINE)
    return [shlex.split(recipe.replace("$(", "").replace(")", "")) for recipe in recipes]


def own_commands() -> list[list[str]]:
    commands = [words for document in DOCUMENTS for words in commands_of_markdown((ROOT / document).read_text())]
    commands += commands_of_makefile((ROOT / "Makefile").read_text())
    commands = [launched_words(words) if "--no-python" in words else words for words in commands]
    unique = {tuple(words): words for words in commands if words[0] in PROGRAMS}
    return list(unique.values())


def launched_words(words: list[str]) -> list[str]:
    """What a torchrun command runs in each process: an installed program, whatever files the current folder holds."""
    return words[words.index("train") :]


@pytest.mark.parametrize("words", own_commands(), ids=shlex.join)
def test_a_documented_command_is_understood(words: list[str]) -> None:
    app: App = importlib.import_module(f"clipmill.{words[0]}.cli").app
    # Sub-commands, flags and their values are read as when the command runs; nothing is run.
    command, values, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    assert command.__module__.startswith("clipmill."), "the help of all commands would be shown"
    assert values.signature.parameters.keys() >= values.arguments.keys()


@pytest.mark.parametrize("path", [*DOCUMENTS, "scripts/slurm_train.sh"], ids=str)
def test_nothing_launches_a_train_py_of_the_user(path: str) -> None:
    text = (ROOT / path).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if re.search(r"torchrun\b.*\btrain (\w|\"\$@)", line):
            assert "--no-python" in line, line


def test_a_command_that_does_not_exist_is_noticed() -> None:
    for words in (["manifest", "folders", "videos"], ["chunk", "--length", "15s"], ["chunk", "--len", "15"]):
        with pytest.raises((CycloptsError, UserError)):
            test_a_documented_command_is_understood(["prep", *words])


def test_the_readme_shows_commands_of_both_programs() -> None:
    shown = {words[0] for words in commands_of_markdown((ROOT / "README.md").read_text())}
    assert {"prep", "train", "make"} <= shown


def test_every_documented_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for words in commands_of_markdown(document.read_text()):
            if words[0] == "make":
                assert words[1] in targets, f"{document.name}: {shlex.join(words)}"


@pytest.mark.parametrize(
    ("status", "ran", "expected"),
    [
        (0, ["manifest", "chunk", "status", "inspect"], 0),
        (1, ["manifest", "chunk", "status", "inspect"], 2),
        (2, ["manifest", "chunk"], 2),
    ],
)
def test_the_demo_of_own_videos_has_a_page_although_one_failed(
    tmp_path: Path, status: int, ran: list[str], expected: int
) -> None:
    (tmp_path / "prep").write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/log\ncase $1 in chunk) exit {status};; esac\n', encoding="utf-8"
    )
    (tmp_path / "prep").chmod(0o755)
    words = ["make", "--silent", "--old-file=setup", "demo", "VIDEOS=~/my videos", f"BIN={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "HOME": "/mine"}, capture_output=True, check=False)
    log = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[0] for line in log] == ran and log[0].startswith("manifest folder /mine/my videos --data")
    assert done.returncode == expected and (b"Your videos as chunks" in done.stdout) == (status < 2)
    assert (b"Some videos failed" in done.stderr) == (status == 1)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert ["make", "test"] in commands_of_markdown((ROOT / "README.md").read_text())
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test"
