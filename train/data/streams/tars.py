"""From a pattern to the names of tars that it stands for, counted before any of them is made."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from manifests.errors import UserError
from train.data.order import permute
from train.data.remote.files import is_remote, local_copy, open_file_system, patiently
from train.data.streams.clips import VIDEO_EXTENSIONS, StreamedClip, WithoutVideo, clips_of
from train.data.streams.samples import MAX_SAMPLE_BYTES, MAX_TEXT_BYTES, Unreadable, samples_of
from train.data.workers import Stuck, in_order

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


# From names of tars to what is in them: patterns, whole tars in the cache, clips of their samples.


_FETCH_TIMEOUT_S = 3600.0
_LIMITS = dict.fromkeys(VIDEO_EXTENSIONS, MAX_SAMPLE_BYTES) | dict.fromkeys(("json", "txt"), MAX_TEXT_BYTES)

Item = StreamedClip | WithoutVideo | Unreadable


def names_tars(shards: str) -> bool:
    """Whether `--shards` names tars, in place of a data folder."""
    return shards.endswith(".tar") or "{" in shards


def expand(pattern: str) -> list[str]:
    """The tars that a pattern such as `DIR/{000000..000099}.tar` names, in its order; `::` joins several patterns.

    Raises:
        UserError: a tar on this machine is not there, or the first of those elsewhere is not; or they are too many.
    """
    if "pipe:" in pattern:
        raise UserError(f"{pattern} is a command, and none is run", hint="name tars: DIR/{000000..000099}.tar")
    tars = names_of(pattern)
    missing = [tar for tar in tars if not is_remote(tar) and not Path(tar).is_file()]
    if missing:
        raise UserError(f"{len(missing)} of {len(tars)} tars are not there; the first: {missing[0]}", hint=PATTERN_HINT)
    first = next((tar for tar in tars if is_remote(tar)), None)
    if first is not None:
        # The others are asked for when their turn comes: one request for each would keep the run waiting.
        _require_remote(first)
    return tars


def items_in(tars: Iterable[str], *, cache: Path | None) -> Iterator[Item]:
    """What is in `tars`, in order. Of remote ones the next is fetched while one is read.

    Raises:
        UserError: the cache cannot be written.
    """

    def fetch(tar: str) -> Path | OSError:
        try:
            return local_copy(tar, cache=cache)
        except OSError as error:
            return error

    fetched = in_order(fetch, tars, num_threads=1, num_ahead=2, stuck_after_s=_FETCH_TIMEOUT_S)
    for tar, found in fetched:
        if isinstance(found, Path):
            yield from _items_of(tar, found)
        elif isinstance(found, Stuck):
            yield Unreadable(tar, f"it was not there after {found.after_s:g} s, and nobody waits for it any more")
        else:
            yield Unreadable(tar, f"the tar cannot be read: {found}")


def _items_of(tar: str, path: Path) -> Iterator[Item]:
    try:
        for sample in samples_of(tar, path, limits=_LIMITS):
            if isinstance(sample, Unreadable):
                yield sample
                continue
            try:
                yield from clips_of(sample)
            except ValueError as error:
                yield Unreadable(sample.key, str(error))
    except OSError as error:
        yield Unreadable(tar, f"the tar cannot be read: {error}")


def _require_remote(tar: str) -> None:
    files, path = open_file_system(tar)
    try:
        patiently(lambda: files.info(path), what=tar)
    except FileNotFoundError as error:
        raise UserError(f"there is no {tar}", hint=PATTERN_HINT) from error
    except OSError as error:
        raise UserError(f"{tar} cannot be read: {error}", hint="see whether the address is right") from error


# The order in which clips of many tars come: tars shuffled, then clips within a window, by (seed, epoch).


_WINDOW = 256
_WINDOW_BYTES = 1 << 30  # of whole long videos, fewer
_Item = TypeVar("_Item")


def tars_of_epoch(tars: Sequence[str], *, seed: int, epoch: int) -> list[str]:
    """All of `tars` in the order of one epoch."""
    return [tars[number] for number in permute(np.arange(len(tars)), len(tars), seed=seed, epoch=epoch).tolist()]


def shuffled(items: Iterable[_Item], *, size_of: Callable[[_Item], int], seed: int, epoch: int) -> Iterator[_Item]:
    """All of `items`, once: each leaves a window of `_WINDOW` items, `_WINDOW_BYTES` at most, at a random moment.

    Args:
        size_of: bytes of an item.
    """
    rng = np.random.default_rng((seed, epoch))
    window: list[_Item] = []
    held_bytes = 0
    for item in items:
        window.append(item)
        held_bytes += size_of(item)
        while len(window) > _WINDOW or held_bytes > _WINDOW_BYTES:
            taken = _take(window, rng)
            held_bytes -= size_of(taken)
            yield taken
    while window:
        yield _take(window, rng)


def _take(window: list[_Item], rng: np.random.Generator) -> _Item:
    chosen = int(rng.integers(len(window)))
    window[chosen], window[-1] = window[-1], window[chosen]
    return window.pop()
