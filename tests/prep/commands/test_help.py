"""Tests of the help of every command, which is compared word for word with `help.txt`.

After an intended change, run `python -m tests.prep.commands.test_help` to write the file again.
"""

import re
from pathlib import Path

import pytest

from clipmill.manifests.help_text import help_text
from clipmill.prep.cli import build_app
from clipmill.prep.exports.kinds import KINDS as EXPORTS

GOLDEN = Path(__file__).with_name("help.txt")
MADE = ("latents", "text", "scores", "captions")
COLUMNS = ("chunk", *MADE, "plan", *(f"plan {column}" for column in MADE))
UPKEEP = ("retry", "status", "verify", "inspect", "diff", "use", "gc", "advise")
KINDS = (
    "folder",
    "vatex",
    "msrvtt",
    "didemo",
    "activitynet",
    "ssv2",
    "ego4d",
    "epic-kitchens",
    "kinetics",
    "lerobot",
    "synthetic",
    "captions",
)
WIDTH, MOST_FLAGS = 80, 15
EXPORT = ("export", *(f"export {kind.name}" for kind in EXPORTS))
COMMANDS = ("", *COLUMNS, *EXPORT, *UPKEEP, "manifest", *(f"manifest {kind}" for kind in KINDS))


def help_of(command: str, *, everything: bool = False) -> str:
    words = [*command.split(), "--help-all" if everything else "--help"]
    return f"$ {' '.join(['prep', *words])}\n{help_text(build_app(), words)}\n"


def all_help() -> str:
    texts = []
    for command in COMMANDS:
        short, full = help_of(command), help_of(command, everything=True)
        texts += [short, full] if short.splitlines()[1:] != full.splitlines()[1:] else [short]
    return "\n".join(texts)


def test_the_help_of_every_command_is_as_it_was() -> None:
    assert all_help() == GOLDEN.read_text()


def test_the_list_of_commands_has_the_first_line_of_the_help_of_each() -> None:
    app = build_app()
    listed = help_text(app, ["--help"])
    app.resolved_commands()  # from here on, typer uses these commands in place of the rows
    assert help_text(app, ["--help"]) == listed


def test_the_short_help_of_long_commands_shows_a_part_of_the_flags_and_how_to_see_all() -> None:
    for command in ("chunk", "latents", "plan"):
        short, full = (
            re.findall(r"^  (--\S+)", help_of(command, everything=everything), re.MULTILINE)
            for everything in (False, True)
        )
        assert {"--data"} < set(short) < set(full) and len(short) <= MOST_FLAGS
        assert help_of(command).endswith(f"\n\nprep {command} --help-all shows all {len(full)} flags.\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_fits_the_width_and_is_aligned(command: str) -> None:
    for everything in (False, True):
        lines = help_of(command, everything=everything).splitlines()[1:]
        for line in lines:
            assert len(line) <= WIDTH and line == line.rstrip() and "`" not in line, line
        begins = [re.match(r"  \S.*?\s{2,}(?=\S)", line) for line in lines]
        more = [re.match(r" {5,}(?=\S)", line) for line in lines]
        assert len({match.end() for match in (*begins, *more) if match}) == 1


if __name__ == "__main__":
    GOLDEN.write_text(all_help())
