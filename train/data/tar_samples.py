"""Expansion of tar patterns, and samples and clips from tars that are read sequentially, without an index.

A sample consists of consecutive members with the same key, as in webdataset. A sample is kept in memory, so its size is
limited; a sample that exceeds a limit is reported and skipped.

In samples from `prep chunk`, the json contains the span of the chunk in its video, and the captions of the chunk. Each
caption becomes a clip, which shows the part of the caption's span that lies in the chunk, because a stream cannot
access the next chunk. In samples from video2dataset, the complete video is one clip. Its caption is the txt member, or
`caption` in the json.

A sample that has no video or no caption, or that cannot be read, becomes a failed sample with the same key. If a tar
ends early, or contains bytes that are not a member, a failed sample follows the readable samples. A sample is omitted
and counted if its json reports that video2dataset could not download the video.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.storage.cache import CachedFile
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.objects import open_objects
from clipmill.shards.opening import DamagedTar
from clipmill.train.data.frame_sampling import US_PER_S, to_us
from clipmill.train.data.remote import hold_copy, open_cache
from clipmill.train.data.tar_members import Member, read_members
from clipmill.train.data.workers import StuckResult, map_in_order
from clipmill.train.device.random import generator

MAX_SAMPLE_BYTES = 1 << 30  # maximum total size of the members of a sample
MAX_TEXT_BYTES = 8 << 20  # maximum size of a json or txt member; a parsed json takes twenty times as much memory
NO_CAPTION_ID = -1  # ID of captions that are not in a manifest

VIDEO_EXTENSIONS = ("mp4", "webm", "mkv", "mov", "avi")
_LIMITS = dict.fromkeys(VIDEO_EXTENSIONS, MAX_SAMPLE_BYTES) | dict.fromkeys(("json", "txt"), MAX_TEXT_BYTES)
_MAX_MEMBERS = 1000  # maximum number of members per sample
_MAX_SHOWN = 20  # maximum number of members in a message
_FAILED_STATUS = "failed_to_"  # video2dataset: failed_to_download, failed_to_subsample


@dataclass(frozen=True)
class UnreadableItem:
    """Placeholder for a sample that cannot be read, or for the unreadable rest of a tar.

    Attributes:
        key: Key of the sample, or the tar.
        detail: Reason why the sample or the rest of the tar cannot be read.
    """

    key: str
    detail: str


@dataclass(frozen=True)
class MissingVideo:
    """Placeholder for a sample whose video could not be downloaded by video2dataset. The tar is intact."""

    key: str


@dataclass
class TarSample:
    """Sample with the members that have been read so far.

    Attributes:
        key: Key of the sample in its tar.
        members: Content of each member, by lower-case extension; empty if the content is not needed.
        locations: Offset in the tar (None if the tar is compressed) and size of each member, in bytes.
        problem: Reason why the sample must be skipped; None for an intact sample.
    """

    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    locations: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class StreamedClip:
    """Clip that has not been decoded.

    Attributes:
        key: Key of the sample in its tar.
        content: Bytes of the video file.
        caption_id: ID of the caption in the manifest; NO_CAPTION_ID in tars from other tools.
        text: Text of the caption.
        begin_us, end_us: Span, microseconds from the first frame of the file. If `end_us` is None, the span ends with
            the file. The span is empty if the caption's span is empty.
        is_shortened: True if the caption extends beyond the file.
    """

    key: str
    content: bytes
    caption_id: int
    text: str
    begin_us: int
    end_us: int | None
    is_shortened: bool = False


def samples_of(tar: str, path: Path, *, limits: Mapping[str, int] = _LIMITS) -> Iterator[TarSample | UnreadableItem]:
    """Yield the samples of the tar at `path` in order, with placeholders for unreadable samples and an unreadable rest.

    Args:
        tar: Name of the tar for messages.
        limits: Maximum size in bytes of the members to read, by extension. Other members are not read.

    Raises:
        OSError: The tar cannot be opened or read.
    """
    sample: TarSample | None = None
    current_key: str | None = None  # key of the member that is being read

    def limit_of(name: str) -> int:
        nonlocal current_key
        parts = _key_and_extension(name)
        current_key = None if parts is None else parts[0]
        if parts is None:
            return 0
        key, extension = parts
        is_same = sample is not None and sample.key == key
        if sample is not None and is_same and (sample.problem or extension in sample.members):
            return 0  # the sample is skipped, so its remaining members are not needed
        held_bytes = sum(map(len, sample.members.values())) if sample is not None and is_same else 0
        # The limit is at least one byte, because 0 means that the member is not needed.
        return min(limits.get(extension, 0), max(MAX_SAMPLE_BYTES - held_bytes, 1))

    try:
        for member in read_members(path, limit_of=limit_of):
            parts, current_key = _key_and_extension(member.name), None
            if parts is None and member.problem is None:
                continue
            key, extension = parts or (member.name, "")
            if sample is None or key != sample.key:
                if sample is not None:
                    yield _finish_sample(sample)
                sample = TarSample(key)
            _add(sample, extension, member)
    except DamagedTar as error:
        # The current sample is known to be complete only if the next sample has begun.
        if sample is not None and current_key not in (None, sample.key):
            yield _finish_sample(sample)
        yield UnreadableItem(tar, error.reason)
        return
    if sample is not None:
        yield _finish_sample(sample)


def _add(sample: TarSample, extension: str, member: Member) -> None:
    problem = member.problem
    if extension in sample.members:
        problem = "occurs twice"
    elif len(sample.members) >= _MAX_MEMBERS:
        problem = f"is one of more than {_MAX_MEMBERS:,} members of its sample"
    if problem is not None and sample.problem is None:
        sample.problem = f"{member.name} {problem}"
        sample.members.clear()
    if sample.problem is None:
        sample.members[extension] = member.content or b""
        sample.locations[extension] = member.offset, member.size_bytes


def _finish_sample(sample: TarSample) -> TarSample | UnreadableItem:
    return sample if sample.problem is None else UnreadableItem(sample.key, sample.problem)


def _key_and_extension(name: str) -> tuple[str, str] | None:
    """Split the name of a member into key and extension; return None if the member does not belong to a sample.

    Files without an extension, hidden files, and webdataset's metadata (`__name__`) do not belong to a sample.
    """
    folder, slash, file_name = name.rpartition("/")
    stem, dot, extension = file_name.partition(".")
    first = name.partition("/")[0]
    if not stem or not dot or (len(first) > 4 and first.startswith("__") and first.endswith("__")):
        return None
    return f"{folder}{slash}{stem}", extension.lower()


def clips_of(sample: TarSample) -> Sequence[StreamedClip | MissingVideo]:
    """Return the clips of a sample.

    Raises:
        ValueError: The sample has no video or no caption, or a member cannot be read.
    """
    key, members = sample.key, sample.members
    description = description_of(sample)
    content = next((members[extension] for extension in VIDEO_EXTENSIONS if extension in members), None)
    if content is None:
        if str(description.get("status")).startswith(_FAILED_STATUS):
            return [MissingVideo(key)]
        names = ", ".join(sorted(members)[:_MAX_SHOWN]) or "nothing"
        raise ValueError(f"no video among its members: {names}")
    if "span_fingerprint" in description:
        try:
            begin_us, end_us = (Fraction(*description[name]) * US_PER_S for name in ("begin_s", "end_s"))
            chunk = int(begin_us), int(end_us)
            return [_clip_of_caption(key, content, caption, chunk=chunk) for caption in description["captions"]]
        except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise ValueError(f"its json does not have prep's format: {type(error).__name__}: {error}") from error
    text = caption_of(sample)
    if text is None:
        raise ValueError("it has no caption in a txt member or in its json")
    return [StreamedClip(key, content, NO_CAPTION_ID, text, 0, None)]


def caption_of(sample: TarSample) -> str | None:
    """Return the caption of a sample, from its txt member or its json; None without a caption.

    Raises:
        ValueError: The txt or the json cannot be read.
    """
    # video2dataset and img2dataset write an empty txt if there is no caption.
    try:
        text = sample.members.get("txt", b"").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"its txt is not UTF-8: {error}") from error
    caption = text if text.strip() else description_of(sample).get("caption")
    return caption if isinstance(caption, str) and caption.strip() else None


def description_of(sample: TarSample) -> dict[str, Any]:
    """Return the json of a sample; {} if the sample has no json. Raise ValueError if the json cannot be read."""
    try:
        description = json.loads(sample.members.get("json") or b"{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its json cannot be read: {error}") from error
    if not isinstance(description, dict):
        raise ValueError("its json is not an object")
    return description


def _clip_of_caption(key: str, content: bytes, caption: dict[str, Any], *, chunk: tuple[int, int]) -> StreamedClip:
    begin_us, end_us = to_us(caption["begin_s"]), chunk[1]
    # An open end is stored as null.
    if caption["end_s"] is not None and math.isfinite(caption["end_s"]):
        end_us = to_us(caption["end_s"])
    first, last = max(begin_us, chunk[0]), min(end_us, chunk[1])
    return StreamedClip(
        key=key,
        content=content,
        caption_id=int(caption["caption_id"]),
        text=str(caption["text"]),
        begin_us=first - chunk[0],
        end_us=last - chunk[0],
        is_shortened=(first, last) != (begin_us, end_us),
    )


MAX_TARS = 1_000_000  # maximum number of tars that a pattern may name
PATTERN_HINT = "use a pattern such as DIR/{000000..000099}.tar, with as many digits as the file names have"

Item = StreamedClip | MissingVideo | UnreadableItem

_FETCH_TIMEOUT_S = 3600.0
_WINDOW = 256  # number of items in the shuffle window
_WINDOW_BYTES = 1 << 30  # maximum size of the shuffle window; this limit takes effect if videos are long
_MAX_DEPTH = 10  # maximum nesting depth of braces
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?\d+)?")
_NUM_LETTERS = 52
_T = TypeVar("_T")


def expand(pattern: str) -> list[str]:
    """Expand a pattern such as `DIR/{000000..000099}.tar` to paths or URLs of tars. `::` joins several patterns.

    Raises:
        UserError: The pattern is invalid or names too many tars, or a local tar or the first remote tar is missing.
    """
    if "pipe:" in pattern:
        raise UserError(f"{pattern} is a command, and commands are not run", hint=PATTERN_HINT)
    tars = _expand_names(pattern)
    missing_tars = [tar for tar in tars if not is_remote(tar) and not Path(tar).is_file()]
    if missing_tars:
        raise UserError(
            f"{len(missing_tars):,} of {count_noun(len(tars), 'tar')} cannot be found; the first is {missing_tars[0]}",
            hint=PATTERN_HINT,
        )
    first_remote = next((tar for tar in tars if is_remote(tar)), None)
    if first_remote is not None:
        # The other remote tars are checked when they are needed, because a request for each would delay the run.
        folder, _, key = first_remote.rpartition("/")
        try:
            open_objects(folder).info(key)
        except FileNotFoundError as error:
            raise UserError(f"{first_remote} does not exist", hint=PATTERN_HINT) from error
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"{first_remote} cannot be read: {error}", hint="check the URL") from error
    return tars


def _expand_names(pattern: str) -> list[str]:
    """Expand a pattern to names. The names are counted before they are generated."""
    from webdataset.shardlists import envsubst, expand_urls

    try:
        for _ in range(_MAX_DEPTH):  # webdataset replaces ${NAME} with the environment variable WDS_NAME
            previous, pattern = pattern, envsubst(pattern)
            if pattern == previous:
                break
        num_tars = sum(_num_names(part) for part in pattern.split("::"))
        if num_tars > MAX_TARS:
            number = f"{num_tars:,}" if num_tars < 10**15 else "very many"
            raise UserError(f"{_shorten(pattern)} names {number} tars, more than {MAX_TARS:,}", hint=PATTERN_HINT)
        return [str(name) for name in expand_urls(pattern)]
    # webdataset raises an AssertionError if the environment variable for a ${NAME} is missing.
    except (ValueError, AssertionError) as error:
        raise UserError(f"{_shorten(pattern)} is not a pattern: {error}", hint=PATTERN_HINT) from error


def _num_names(pattern: str, *, depth: int = 0) -> int:
    """Count the names that a pattern in braceexpand's grammar expands to. A range of letters counts as 52 names."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"its braces are nested more than {_MAX_DEPTH} deep")
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
    """Yield the indices of the opening and the closing brace of each outermost pair of braces."""
    begin = depth = 0
    for index, sign in _signs(pattern):
        if sign == "{":
            begin = begin if depth else index
            depth += 1
        elif sign == "}":
            depth -= 1
            if depth < 0:
                break
            if not depth:
                yield begin, index
    if depth:
        raise ValueError("its braces are not balanced")


def _parts(inner: str) -> Iterator[str]:
    """Yield the comma-separated parts of the text inside a pair of braces."""
    begin = depth = 0
    for index, sign in _signs(inner):
        depth += {"{": 1, "}": -1, ",": 0}[sign]
        if sign == "," and not depth:
            yield inner[begin:index]
            begin = index + 1
    yield inner[begin:]


def _signs(pattern: str) -> Iterator[tuple[int, str]]:
    """Return the braces and commas that are not escaped by a backslash, with their indices."""
    return ((sign.start(), sign[0]) for sign in re.finditer(r"\\.|[{},]", pattern, re.DOTALL) if sign[0] in "{},")


def _shorten(pattern: str) -> str:
    return pattern if len(pattern) <= 200 else f"{pattern[:200]}..."


def items_in(tars: Iterable[str], *, cache: Path | None, cache_size: str | None = None) -> Iterator[Item]:
    """Yield the clips and unreadable items in tars, in order. Remote tars are downloaded in advance.

    Raises:
        UserError: The cache cannot be written, or is too small for the tars that are used at the same time.
    """

    def fetch(tar: str) -> Path | CachedFile | OSError:
        if not is_remote(tar):
            return Path(tar)
        try:
            return hold_copy(tar, open_cache(cache, size=cache_size))
        except UserError:
            raise
        except OSError as error:
            return error

    copies = map_in_order(fetch, tars, num_threads=1, num_ahead=2, stuck_after_s=_FETCH_TIMEOUT_S)
    for tar, outcome in copies:
        if isinstance(outcome, Path):
            yield from _items_of(tar, outcome)
        elif isinstance(outcome, CachedFile):
            with outcome:
                yield from _items_of(tar, outcome.path)
        elif isinstance(outcome, StuckResult):
            yield UnreadableItem(tar, str(outcome))
        else:
            yield UnreadableItem(tar, f"the tar cannot be read: {outcome}")


def _items_of(tar: str, path: Path) -> Iterator[Item]:
    try:
        for sample in samples_of(tar, path):
            if isinstance(sample, UnreadableItem):
                yield sample
                continue
            try:
                yield from clips_of(sample)
            except ValueError as error:
                yield UnreadableItem(sample.key, str(error))
    except OSError as error:
        yield UnreadableItem(tar, f"the tar cannot be read: {error}")


def shuffle_items(items: Iterable[_T], *, size_of: Callable[[_T], int], seed: int, epoch: int) -> Iterator[_T]:
    """Shuffle items within a window of at most `_WINDOW` items and `_WINDOW_BYTES` bytes.

    The result depends only on the items, the seed and the epoch.

    Args:
        size_of: Function that returns the size of an item in bytes.
    """
    rng = generator(epoch, seed=seed, purpose="window of a stream")
    window: list[_T] = []
    window_bytes = 0
    for item in items:
        window.append(item)
        window_bytes += size_of(item)
        while len(window) > _WINDOW or window_bytes > _WINDOW_BYTES:
            drawn_item = _take(window, rng)
            window_bytes -= size_of(drawn_item)
            yield drawn_item
    while window:
        yield _take(window, rng)


def _take(window: list[_T], rng: np.random.Generator) -> _T:
    index = int(rng.integers(len(window)))
    window[index], window[-1] = window[-1], window[index]
    return window.pop()
