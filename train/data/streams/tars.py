"""From a pattern to the names of tars that it stands for, counted before any of them is made."""

import re
from collections.abc import Iterator

from manifests.errors import UserError

MAX_TARS = 1_000_000
PATTERN_HINT = "patterns look like DIR/{000000..000099}.tar, with as many digits as the names have"
_MAX_DEPTH = 10  # of braces within braces
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?\d+)?")
_NUM_LETTERS = 52


def names_of(pattern: str) -> list[str]:
    """The names that a pattern such as `DIR/{000000..000099}.tar` stands for, in its order; `::` joins several.

    Raises:
        UserError: it is no pattern, or stands for more than `MAX_TARS` names.
    """
    import webdataset as wds

    try:
        pattern = _substituted(pattern)
        num_named = sum(_num_names(part) for part in pattern.split("::"))
        if num_named > MAX_TARS:
            named = f"{num_named:,}" if num_named < 10**15 else "very many"
            raise UserError(f"{_short(pattern)} names {named} tars, more than {MAX_TARS:,}", hint=PATTERN_HINT)
        return [str(name) for name in wds.shardlists.expand_urls(pattern)]
    except (ValueError, AssertionError) as error:  # the second for ${NAME} that is not in the environment
        raise UserError(f"{_short(pattern)} is not a pattern: {error}", hint=PATTERN_HINT) from error


def _substituted(pattern: str) -> str:
    """The pattern with what webdataset reads from the environment: WDS_NAME for ${NAME}."""
    from webdataset.shardlists import envsubst

    for _ in range(_MAX_DEPTH):
        before, pattern = pattern, envsubst(pattern)
        if pattern == before:
            break
    return pattern


def _num_names(pattern: str, *, depth: int = 0) -> int:
    """How many names braces expand to, letters counted as all there are; the grammar is that of braceexpand."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"braces within braces, more than {_MAX_DEPTH} deep")
    num = 1
    for begin, end in _outermost(pattern):
        inner = pattern[begin + 1 : end]
        if numbers := _RANGE.fullmatch(inner):
            first, last, step = (int(number or 1) for number in numbers.groups())
            num *= abs(last - first) // (step or 1) + 1
        elif _LETTERS.fullmatch(inner):
            num *= _NUM_LETTERS
        else:
            num *= sum(_num_names(part, depth=depth + 1) for part in _parts(inner))
    return num


def _outermost(pattern: str) -> Iterator[tuple[int, int]]:
    """Where each outermost pair of braces begins and ends."""
    begin = depth = 0
    for place, sign in _signs(pattern):
        if sign == "{":
            begin = begin if depth else place
            depth += 1
        elif sign == "}":
            depth -= 1
            if depth < 0:
                break
            if not depth:
                yield begin, place
    if depth:
        raise ValueError("its braces are not balanced")


def _parts(inner: str) -> Iterator[str]:
    """What stands between the commas of a pair of braces."""
    begin = depth = 0
    for place, sign in _signs(inner):
        depth += {"{": 1, "}": -1, ",": 0}[sign]
        if sign == "," and not depth:
            yield inner[begin:place]
            begin = place + 1
    yield inner[begin:]


def _signs(pattern: str) -> Iterator[tuple[int, str]]:
    """Braces and commas with their places, but for those behind a backslash."""
    return ((found.start(), found[0]) for found in re.finditer(r"\\.|[{},]", pattern, re.DOTALL) if found[0] in "{},")


def _short(pattern: str) -> str:
    return pattern if len(pattern) <= 200 else f"{pattern[:200]}..."
