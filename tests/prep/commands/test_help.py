"""The help of every command, word for word: `help.txt` holds what it was.

After a change that is meant: `python -m tests.prep.commands.test_help` writes it anew.
"""

from io import StringIO
from pathlib import Path

from rich.console import Console

from prep.cli import build_app

GOLDEN = Path(__file__).with_name("help.txt")
COLUMNS = ("chunk", "latents", "text", "plan", "plan latents", "plan text")
UPKEEP = ("retry", "status", "verify", "inspect", "gc", "advise")
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
    "synthetic",
)
COMMANDS = ("", *COLUMNS, *UPKEEP, "manifest", *(f"manifest {kind}" for kind in KINDS))


def help_of(command: str) -> str:
    out = StringIO()
    console = Console(file=out, width=100, color_system=None, force_terminal=False)
    build_app().help_print(command.split(), console=console)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([f"$ {' '.join(['prep', *command.split()])} --help", *lines, ""])


def all_help() -> str:
    return "\n".join(map(help_of, COMMANDS))


def test_the_help_of_every_command_is_as_it_was() -> None:
    assert all_help() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(all_help())
