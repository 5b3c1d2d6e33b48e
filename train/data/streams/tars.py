"""The tars of a stream: from a pattern to names, from names to clips, and the order of tars and clips in an epoch."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.storage.cache import CachedFile
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.objects import open_objects
from clipmill.train.data.order import permute
from clipmill.train.data.remote import held_copy, open_cache
from clipmill.train.data.streams.samples import StreamedClip, Unreadable, WithoutVideo, clips_of, samples_of
from clipmill.train.data.workers import Stuck, in_order
from clipmill.train.device.random import generator

MAX_TARS = 1_000_000
PATTERN_HINT = "patterns look like DIR/{000000..000099}.tar, with as many digits as the names have"

Item = StreamedClip | WithoutVideo | Unreadable

_FETCH_TIMEOUT_S = 3600.0
_WINDOW = 256
_WINDOW_BYTES = 1 << 30  # limits the window of long videos
_MAX_DEPTH = 10  # of nested braces
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?\d+)?")
_NUM_LETTERS = 52
_T = TypeVar("_T")


def expand(pattern: str) -> list[str]:
    """The tars that a pattern such as `DIR/{000000..000099}.tar` names, in its order; `::` joins several patterns.

    Raises:
        UserError: it is not a pattern, it names too many tars, or a local one or the first remote one is missing.
    """
    if "pipe:" in pattern:
        raise UserError(f"{pattern} is a command, and none is run", hint="name tars: DIR/{000000..000099}.tar")
    tars = _names_of(pattern)
    missing = [tar for tar in tars if not is_remote(tar) and not Path(tar).is_file()]
    if missing:
        raise UserError(
            f"of {count_noun(len(tars), 'tar')}, {len(missing):,} cannot be found; the first: {missing[0]}",
            hint=PATTERN_HINT,
        )
    first = next((tar for tar in tars if is_remote(tar)), None)
    if first is not None:
        # The others are checked when their turn comes: a request for each would delay the run.
        folder, _, key = first.rpartition("/")
        try:
            open_objects(folder).info(key)
        except FileNotFoundError as error:
            raise UserError(f"there is no {first}", hint=PATTERN_HINT) from error
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"{first} cannot be read: {error}", hint="check the address") from error
    return tars


def _names_of(pattern: str) -> list[str]:
    """The names that a pattern stands for, counted before any of them is made."""
    from webdataset.shardlists import envsubst, expand_urls

    try:
        for _ in range(_MAX_DEPTH):  # webdataset replaces ${NAME} by the environment variable WDS_NAME
            before, pattern = pattern, envsubst(pattern)
            if pattern == before:
                break
        num_named = sum(_num_names(part) for part in pattern.split("::"))
        if num_named > MAX_TARS:
            named = f"{num_named:,}" if num_named < 10**15 else "very many"
            raise UserError(f"{_shorten(pattern)} names {named} tars, more than {MAX_TARS:,}", hint=PATTERN_HINT)
        return [str(name) for name in expand_urls(pattern)]
    except (ValueError, AssertionError) as error:  # the second for a ${NAME} that is not in the environment
        raise UserError(f"{_shorten(pattern)} is not a pattern: {error}", hint=PATTERN_HINT) from error


def _num_names(pattern: str, *, depth: int = 0) -> int:
    """How many names braces expand to, with letters counted as all letters; the grammar is that of braceexpand."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"braces within braces, more than {_MAX_DEPTH} deep")
    num = 1
    for begin, end in _outermost_braces(pattern):
        inner = pattern[begin + 1 : end]
        if numbers := _RANGE.fullmatch(inner):
            first, last, step = (int(number or 1) for number in numbers.groups())
            num *= abs(last - first) // (step or 1) + 1
        elif _LETTERS.fullmatch(inner):
            num *= _NUM_LETTERS
        else:
            num *= sum(_num_names(part, depth=depth + 1) for part in _parts(inner))
    return num


def _outermost_braces(pattern: str) -> Iterator[tuple[int, int]]:
    """Where each outermost pair of braces begins and ends."""
    begin = depth = 0
    for at, sign in _signs(pattern):
        if sign == "{":
            begin = begin if depth else at
            depth += 1
        elif sign == "}":
            depth -= 1
            if depth < 0:
                break
            if not depth:
                yield begin, at
    if depth:
        raise ValueError("its braces are not balanced")


def _parts(inner: str) -> Iterator[str]:
    """The parts between the commas of a pair of braces."""
    begin = depth = 0
    for at, sign in _signs(inner):
        depth += {"{": 1, "}": -1, ",": 0}[sign]
        if sign == "," and not depth:
            yield inner[begin:at]
            begin = at + 1
    yield inner[begin:]


def _signs(pattern: str) -> Iterator[tuple[int, str]]:
    """Braces and commas that are not escaped by a backslash, with their positions."""
    return ((found.start(), found[0]) for found in re.finditer(r"\\.|[{},]", pattern, re.DOTALL) if found[0] in "{},")


def _shorten(pattern: str) -> str:
    return pattern if len(pattern) <= 200 else f"{pattern[:200]}..."


def items_in(tars: Iterable[str], *, cache: Path | None, cache_size: str | None = None) -> Iterator[Item]:
    """The clips in `tars`, in order, and what cannot be read. While a remote tar is read, the next ones are fetched.

    Raises:
        UserError: the cache cannot be written, or is too small for the tars that are read and fetched together.
    """

    def fetch(tar: str) -> Path | CachedFile | OSError:
        if not is_remote(tar):
            return Path(tar)
        try:
            return held_copy(tar, open_cache(cache, size=cache_size))
        except UserError:
            raise
        except OSError as error:
            return error

    fetched = in_order(fetch, tars, num_threads=1, num_ahead=2, stuck_after_s=_FETCH_TIMEOUT_S)
    for tar, found in fetched:
        if isinstance(found, Path):
            yield from _items_of(tar, found)
        elif isinstance(found, CachedFile):
            with found:
                yield from _items_of(tar, found.path)
        elif isinstance(found, Stuck):
            yield Unreadable(tar, str(found))
        else:
            yield Unreadable(tar, f"the tar cannot be read: {found}")


def _items_of(tar: str, path: Path) -> Iterator[Item]:
    try:
        for sample in samples_of(tar, path):
            if isinstance(sample, Unreadable):
                yield sample
                continue
            try:
                yield from clips_of(sample)
            except ValueError as error:
                yield Unreadable(sample.key, str(error))
    except OSError as error:
        yield Unreadable(tar, f"the tar cannot be read: {error}")


def tars_of_epoch(tars: Sequence[str], *, seed: int, epoch: int) -> list[str]:
    """All of `tars` in the order of an epoch."""
    return [tars[number] for number in permute(np.arange(len(tars)), len(tars), seed=seed, epoch=epoch).tolist()]


def shuffle_items(items: Iterable[_T], *, size_of: Callable[[_T], int], seed: int, epoch: int) -> Iterator[_T]:
    """Shuffle `items` within a window of `_WINDOW` items that hold at most `_WINDOW_BYTES`, by (seed, epoch).

    Args:
        size_of: size of an item in bytes.
    """
    rng = generator(epoch, seed=seed, purpose="window of a stream")
    window: list[_T] = []
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


def _take(window: list[_T], rng: np.random.Generator) -> _T:
    chosen = int(rng.integers(len(window)))
    window[chosen], window[-1] = window[-1], window[chosen]
    return window.pop()
