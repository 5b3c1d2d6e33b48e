"""Make the command-line reference: a page for each command, with all of its flags."""

import html
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from clipmill.manifests.help_text import CommandHelp, command_help

if TYPE_CHECKING:
    from cyclopts import App


def reference_pages() -> Mapping[str, Mapping[str, str]]:
    """Return the pages in Markdown, by program and command."""
    from clipmill.prep.cli import app as prep
    from clipmill.train.cli import app as train
    from clipmill.train.cli import command_help as train_help

    def prep_help(command: "App", name: str) -> CommandHelp:
        return command_help(command, name, shows_all=True)

    return {"prep": dict(_pages(prep, "prep", help_of=prep_help)), "train": dict(_pages(train, "train", train_help))}


def _pages(
    app: "App", program: str, help_of: Callable[["App", str], CommandHelp], *, words: str = ""
) -> Iterator[tuple[str, str]]:
    for name in app:
        if name.startswith("-"):
            continue
        command, path = app[name], f"{words} {name}".strip()
        if command.default_command is not None:
            yield path, _page(help_of(command, f"{program} {path}"), f"{program} {path}")
        yield from _pages(command, program, help_of, words=path)


def _page(found: CommandHelp, name: str) -> str:
    lines = [f"# {name}", ""]
    for paragraph in found.paragraphs:
        is_code = "    " in paragraph
        lines += (
            ["```sh", *(line.strip() for line in paragraph.splitlines()), "```", ""] if is_code else [paragraph, ""]
        )
    lines += ["```", found.usage.removeprefix("Usage: "), "```", ""]
    for title, rows in found.tables.items():
        lines += [f"## {title}", "", "| | |", "|---|---|"]
        lines += [f"| `{label.replace('|', chr(92) + '|')}` | {_cell(text)} |" for label, text in rows]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    escaped = html.escape(text.replace("\N{NO-BREAK SPACE}", " "), quote=False)
    return escaped.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
