"""Content of a documentation page for a test: commands, programs, files and outputs, in their order.

Fenced blocks are run or compared by their language:

    sh        run, line by line
    python    run; all blocks of a page are one program
    text      output of the block before it; numbers may differ
    others    compared with a file if the line above the fence is `<!-- file: NAME -->`, otherwise ignored

The line `<!-- not run: REASON -->` above a fence omits its block. The comment `<!-- tested with ... -->` at the top of
the page names the data (`data: NAME`, a function in made.py) and the replacements in commands and outputs
(`SHOWN | RUN`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HEAD = re.compile(r"<!-- tested with\n(.*?)-->", flags=re.DOTALL)
_BLOCK = re.compile(
    r"(?:^<!-- (?P<key>not run|file): (?P<value>.*?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"(\((?:\d+, ?)+\d*\))|\d+(?:[.,:]\d+)*")  # the first group is a shape, which must match
_GAP = "..."


@dataclass(frozen=True, kw_only=True)
class Block:
    """Fenced block; `file` is the name of the file whose start it shows."""

    language: str
    text: str
    file: str | None = None
    is_run: bool = True


@dataclass(frozen=True, kw_only=True)
class Page:
    """Blocks in order, with the replacements applied; `data` is None for a page without a head."""

    data: str | None
    blocks: tuple[Block, ...]


def read_page(path: Path) -> Page:
    """Read a page; a replacement without effect is an error, because the page has changed."""
    text = path.read_text()
    head = _HEAD.search(text)
    data, replacements = None, []
    for line in head[1].splitlines() if head else ():
        if line.startswith("data: "):
            data = line.removeprefix("data: ").strip()
        else:
            shown, bar, run = line.partition(" | ")
            assert bar, f"{path.name}: {line}"
            replacements.append((shown.strip(), run.strip()))
    body = text[head.end() :] if head else text
    blocks = [
        Block(
            language=match["language"],
            text=match["text"],
            file=match["value"] if match["key"] == "file" else None,
            is_run=match["key"] != "not run",
        )
        for match in _BLOCK.finditer(body)
    ]
    for shown, _ in replacements:
        assert any(shown in block.text for block in blocks), f"{path.name} does not show {shown!r}"
    return Page(data=data, blocks=tuple(_replace(block, replacements) for block in blocks))


def _replace(block: Block, replacements: Sequence[tuple[str, str]]) -> Block:
    """Apply all replacements in one pass, so that none changes the result of another; the longest match wins."""
    run = dict(replacements)
    if not run or not block.is_run:
        return block
    pattern = "|".join(re.escape(shown) for shown in sorted(run, key=len, reverse=True))
    text = re.sub(pattern, lambda match: run[match[0]], block.text)
    return Block(language=block.language, text=text, file=block.file)


def command_lines(text: str) -> list[str]:
    """Return the commands of a shell block, without comments.

    Continued lines are joined, and here-documents stay complete.
    """
    lines = iter(text.replace("\\\n", " ").splitlines())
    blocks = []
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        here = re.search(r"<<\s*'?(\w+)'?", line)
        if here:
            whole = [line]
            for more in lines:
                whole.append(more)
                if more == here[1]:
                    break
            line = "\n".join(whole) + "\n"
        blocks.append(line)
    return blocks


def missing_lines(shown: str, real: str) -> list[str]:
    """Return the shown lines that are missing from a real output, in this order.

    Numbers and the amount of whitespace may differ, but not shapes such as (2, 128). `...` stands for any text, and on
    a separate line for any other lines.
    """
    left = [_shape(line) for line in real.splitlines()]
    missing = []
    for line in shown.splitlines():
        if not line.strip() or line.strip() == _GAP:
            continue
        pattern = re.compile(".*".join(re.escape(_shape(part)) for part in line.split(_GAP)))
        index = next((i for i, candidate in enumerate(left) if pattern.fullmatch(candidate)), None)
        if index is None:
            missing.append(line)
        else:
            left = left[index + 1 :]
    return missing


def _shape(text: str) -> str:
    return _NUMBER.sub(lambda match: match[1] or "0", " ".join(text.split()))
