"""From names of tars to what is in them: patterns, whole tars in the cache, clips of their samples."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from manifests.errors import UserError
from train.data.remote.address import is_remote, open_file_system
from train.data.remote.files import local_copy
from train.data.remote.patience import patiently
from train.data.streams.clips import VIDEO_EXTENSIONS, StreamedClip, WithoutVideo, clips_of
from train.data.streams.samples import MAX_SAMPLE_BYTES, MAX_TEXT_BYTES, Unreadable, samples_of
from train.data.streams.tars import PATTERN_HINT, names_of
from train.data.workers import Stuck, in_order

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
