"""Every flag that the help listed before is still accepted, with its type and default, and at least its choices.

`flags_before.json` was read from the help of 45e639a by `flags_of`: type, default and choices of each flag, by command.
There may be new flags, and new choices of an old one.
"""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from train.cli import app
from train.losses.registry import LOSSES

# A flag whose values are the names of a registry, to which other packages add theirs; the help lists them as text.
REGISTERED = {"--loss.kind": LOSSES}
BEFORE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("flags_before.json").read_bytes())
_PANEL = "│"


def flags_of(printed: str) -> dict[str, dict[str, Any]]:
    """Type, default and choices of each flag that a help lists, by its name; a help as wide as its longest line."""
    found = {}
    for line in printed.splitlines():
        if not line.startswith(_PANEL):
            continue
        left, _, words = line.strip(f"{_PANEL}* ").partition("  ")
        default = re.search(r"\[default: (.*?)\]", words)
        choices = re.search(r"\[choices: (.*?)\]", words)
        names = re.findall(r"(?<!\S)--\S+", left)
        for name in names:
            found[name] = {
                "type": left.rpartition(names[-1])[2].strip(),
                "default": "required" if "[required]" in words else default and default[1],
                "choices": choices[1].split(", ") if choices else [],
                "words": words,
            }
    return found


@pytest.mark.parametrize("command", BEFORE)
def test_every_flag_of_before_is_still_accepted(command: str) -> None:
    # The parser's own help, one line a flag.
    printed = StringIO()
    app.help_print(command.split(), console=Console(file=printed, width=1000, color_system=None))
    now = flags_of(printed.getvalue())
    before = BEFORE[command]
    assert before.keys() <= now.keys(), sorted(before.keys() - now.keys())
    for name, its in before.items():
        if name in REGISTERED:
            assert now[name]["default"] == its["default"] and set(its["choices"]) <= set(REGISTERED[name])
            continue
        found = now[name]
        # What a program may add to (losses, formats), or a number be part of (--freeze), is a word for cyclopts; the
        # help lists it all the same.
        is_open = bool(its["choices"]) and found["type"] in ("STR", "STR...")
        # A value may be given once or, by now, several times (--shards).
        assert is_open or found["type"] in (its["type"], f"{its['type']}|{its['type']}..."), name
        assert found["default"] == its["default"], name
        assert set(its["choices"]) <= set(re.findall(r"[\w-]+", found["words"]) if is_open else found["choices"]), name
