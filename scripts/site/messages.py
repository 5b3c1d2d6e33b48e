"""Make the page of all error messages, which are found in the source, with a hint for each message."""

import ast
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.site.stories import what_to_do

_PACKAGES = {
    "manifests": "Videos, captions and commands",
    "shards": "Shards and data folders",
    "prep": "prep",
    "train": "train",
}
_ERRORS = frozenset({"UserError", "FailedWork", "AccessRefused", "AccessDenied", "NoCaptions"})
_GAP = "…"
_INTRO = """# Error messages

Every error of both programs says what is wrong, with which value, and what to do. Exit code 2 means that the command
cannot run as it was entered, and exit code 1 that some of the work failed. This page lists all messages, so that you
can search for them; `…` stands for a value. [Troubleshooting](troubleshooting.md) explains the most frequent messages,
[chunks.md](chunks.md#failures) the failure codes of videos and chunks, and [reliability.md](reliability.md) the
behaviour with damaged data and after killed commands.
"""


@dataclass(frozen=True)
class Message:
    """Error message in the source, with its hint. `hint` is empty if the hint is not where the error is raised."""

    text: str
    hint: str


def messages_page(root: Path) -> str:
    """Return the page of the errors in the packages of a repository, in Markdown."""
    parts = [_INTRO]
    for package, title in _PACKAGES.items():
        found = {
            message for path in sorted((root / package).rglob("*.py")) for message in messages_of(path.read_text())
        }
        parts += [f"## {title}\n", "| what happened | what to do |", "|---|---|"]
        parts += [
            f"| {_cell(one.text)} | {_cell(one.hint) or what_to_do(one.text) or ''} |"
            for one in sorted(found, key=lambda one: one.text.lower())
        ]
        parts.append("")
    return "\n".join(parts)


def messages_of(source: str) -> Iterator[Message]:
    """Yield the errors in a module's source whose message is a literal or an f-string."""
    module = ast.parse(source)
    constants = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ERRORS and node.args:
            hint = next((keyword.value for keyword in node.keywords if keyword.arg == "hint"), None)
            if isinstance(hint, ast.Name):
                hint = constants.get(hint.id, hint)
            for text in _texts(node.args[0]):
                if re.search(r"[A-Za-z]{3}", text):  # other messages consist only of values
                    hints = [""] if hint is None else list(_texts(hint)) or [""]
                    yield Message(text, " / ".join(dict.fromkeys(one for one in hints if one != _GAP)))


def _texts(node: ast.expr) -> Sequence[str]:
    """Return the strings that an expression can have, with `…` in place of values."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        pieces = (str(part.value) if isinstance(part, ast.Constant) else _GAP for part in node.values)
        return [re.sub(f"{_GAP}+", _GAP, "".join(pieces))]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [a + b for a in _texts(node.left) or [_GAP] for b in _texts(node.right) or [_GAP]]
    return []


def _cell(text: str) -> str:
    escaped = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([|*_`])", r"\\\1", escaped)
