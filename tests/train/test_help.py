"""Golden output of `--help` and `--help-all` for the training commands, stored in `help/`.

After an intended change, `python -m tests.train.test_help` writes it again.
"""

import re
from pathlib import Path

import pytest

from clipmill.train.cli import app, help_text
from clipmill.train.config.files import PRESETS_FOLDER, preset_path
from clipmill.train.registry import task_names

GOLDENS = Path(__file__).with_name("help")
WIDTH, MOST_FLAGS = 80, 35
OTHERS = (
    "",
    "bench",
    "doctor",
    "export",
    "overview",
    "caption-video",
    "caption-chunks",
    "embed",
    "search",
    "eval",
    "eval probe",
    "eval mir",
)


def help_of(command: str, *, everything: bool = False) -> str:
    return help_text(app, [*command.split(), "--help-all" if everything else "--help"]) + "\n"


def goldens() -> dict[Path, str]:
    kinds = {"": False, "-all": True}
    return {
        GOLDENS / f"{name}{suffix}.txt": help_of(name, everything=everything)
        for name in task_names()
        for suffix, everything in kinds.items()
    }


def test_the_help_of_every_task_is_as_it_was() -> None:
    help_texts = goldens()
    assert set(help_texts) == set(GOLDENS.iterdir())
    other = [path.name for path, text in help_texts.items() if path.read_text() != text]
    assert other == [], "if the change is intended: python -m tests.train.test_help"


@pytest.mark.parametrize("command", [*task_names(), "bench"])
def test_the_short_help_has_a_part_of_the_flags_and_says_how_to_see_all(command: str) -> None:
    short, full = (
        re.findall(r"^  (--\S+)", help_of(command, everything=everything), re.MULTILINE) for everything in (False, True)
    )
    assert set(short) < set(full) and len(short) <= MOST_FLAGS
    assert help_of(command).endswith(f"\n\ntrain {command} --help-all shows all {len(full)} flags.\n")


@pytest.mark.parametrize("command", [*task_names(), *OTHERS])
def test_the_help_fits_and_is_aligned(command: str) -> None:
    for everything in (False, True):
        lines = help_of(command, everything=everything).splitlines()
        for line in lines:
            assert len(line) <= WIDTH and line == line.rstrip() and "`" not in line, line
        # The first and following lines of all texts start in the same column.
        begins = [re.match(r"  \S.*?\s{2,}(?=\S)", line) for line in lines]
        more = [re.match(r" {5,}(?=\S)", line) for line in lines]
        assert len({match.end() for match in (*begins, *more) if match}) == 1


def test_each_preset_is_listed_by_the_commands_that_it_is_for_under_the_name_that_finds_it() -> None:
    listed = {}
    for name in task_names():
        text = help_of(name).partition("Presets (--preset):\n")[2].partition("\n\n")[0]
        listed[name] = re.findall(r"^  ([a-z0-9-]+)", text, re.MULTILINE)
    assert {preset_path(preset, name) for name, names in listed.items() for preset in names} == {
        *PRESETS_FOLDER.glob("*.yaml")
    }
    assert "tiny" in listed["mae"] and "tiny-mae" not in listed["mae"] and "b16-ego4d" not in listed["classify"]


def main() -> None:
    for path, text in goldens().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
