"""From names of tars to what is in them: brace patterns, whole tars in the cache, samples by webdataset."""

import math
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from shards.damage import DamagedTar
from shards.format import BLOCK_BYTES
from train.data.remote.address import is_remote, open_file_system
from train.data.remote.copies import local_copy
from train.data.remote.patience import patiently
from train.data.streams.clips import StreamedClip, WithoutVideo, clips_of
from train.data.workers import Stuck, in_order

_FETCH_TIMEOUT_S = 3600.0
_MAX_TARS = 1_000_000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_PATTERN_HINT = "patterns look like DIR/{000000..000099}.tar, with as many digits as the names have"


@dataclass(frozen=True)
class Unreadable:
    """Stands for a sample, or the rest of a tar, that cannot be read."""

    key: str
    detail: str


Item = StreamedClip | WithoutVideo | Unreadable


def names_tars(shards: str) -> bool:
    """Whether `--shards` names tars, in place of a data folder."""
    return shards.endswith(".tar") or "{" in shards


def expand(pattern: str) -> list[str]:
    """The tars that a pattern such as `DIR/{000000..000099}.tar` names, in its order; `::` joins several patterns.

    Raises:
        UserError: a tar on this machine is not there, or the first of those elsewhere is not; or they are too many.
    """
    import webdataset as wds

    if "pipe:" in pattern:
        raise UserError(f"{pattern} is a command, and none is run", hint="name tars: DIR/{000000..000099}.tar")
    num_named = math.prod(abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(pattern))
    if num_named > _MAX_TARS:
        raise UserError(f"{pattern} names {num_named:,} tars, more than {_MAX_TARS:,}", hint=_PATTERN_HINT)
    try:
        tars = [str(tar) for tar in wds.shardlists.expand_urls(pattern)]
    except ValueError as error:
        raise UserError(f"{pattern} is not a pattern: {error}", hint=_PATTERN_HINT) from error
    missing = [tar for tar in tars if not is_remote(tar) and not Path(tar).is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(tars)} tars are not there; the first: {missing[0]}", hint=_PATTERN_HINT
        )
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
        for sample in _samples(path):
            try:
                yield from clips_of(sample)
            except ValueError as error:
                yield Unreadable(str(sample["__key__"]), str(error))
        _require_end(path)
    except (OSError, tarfile.TarError, ValueError, EOFError) as error:
        # webdataset adds where it stood to what the error says.
        yield Unreadable(tar, f"the tar cannot be read from here on: {error.args[0] if error.args else error}")
    except DamagedTar as error:
        yield Unreadable(tar, error.why)


def _samples(path: Path) -> Iterator[dict[str, Any]]:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    # It is given the open file: some names of files it would hand to a command.
    with path.open("rb") as file:
        yield from group_by_keys(tar_file_expander([{"url": str(path), "stream": file}]))


def _require_end(path: Path) -> None:
    """Raises DamagedTar where members end without the mark of an end: readers of tars take that for an end too."""
    with tarfile.open(path, "r:") as tar:
        tar.getmembers()
        end = tar.offset
    with path.open("rb") as file:
        file.seek(end)
        mark = file.read(BLOCK_BYTES)
    if mark != bytes(BLOCK_BYTES):
        why = "what follows is no member" if len(mark) == BLOCK_BYTES else "it was cut short"
        raise DamagedTar(path, f"the tar cannot be read from byte {end} on: {why}")


def _require_remote(tar: str) -> None:
    files, path = open_file_system(tar)
    try:
        patiently(lambda: files.info(path), what=tar)
    except FileNotFoundError as error:
        raise UserError(f"there is no {tar}", hint=_PATTERN_HINT) from error
    except OSError as error:
        raise UserError(f"{tar} cannot be read: {error}", hint="see whether the address is right") from error
