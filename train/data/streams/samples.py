"""Members of a tar put together to samples, as webdataset does: those that follow each other under one key.

A sample is held in memory whole; what it may take is bounded, and one that asks for more is named and passed over.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shards.damage import DamagedTar
from train.data.streams.members import Member, members_of

MAX_SAMPLE_BYTES = 1 << 30
MAX_TEXT_BYTES = 8 << 20  # of a json or txt: parsed, they take twenty times as much
_MAX_MEMBERS = 1000  # of one sample


@dataclass(frozen=True)
class Unreadable:
    """Stands for a sample, or the rest of a tar, that cannot be read."""

    key: str
    detail: str


@dataclass
class TarSample:
    """A sample, as far as it has been read.

    Attributes:
        members: by extension in lower case; empty where nobody wanted them.
        problem: why it must be passed over.
    """

    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    problem: str | None = None


def samples_of(tar: str, path: Path, *, limits: Mapping[str, int]) -> Iterator[TarSample | Unreadable]:
    """The samples of the tar at `path`, in its order, and what cannot be read of it.

    Args:
        tar: what it is called.
        limits: bytes that a member may have, by the extensions that are wanted.

    Raises:
        OSError: the tar cannot be opened or read.
    """
    sample: TarSample | None = None
    begun: str | None = None  # key of the member that is being read

    def limit_of(name: str) -> int:
        nonlocal begun
        place = _place(name)
        begun = None if place is None else place[0]
        if place is None:
            return 0
        key, extension = place
        is_same = sample is not None and sample.key == key
        if sample is not None and is_same and (sample.problem or extension in sample.members):
            return 0  # it is passed over: nothing more is kept of it
        held_bytes = sum(map(len, sample.members.values())) if sample is not None and is_same else 0
        limit_bytes = limits.get(extension, 0)
        # One byte at the least: 0 would say that nobody wants it.
        return min(limit_bytes, max(MAX_SAMPLE_BYTES - held_bytes, 1))

    try:
        for member in members_of(path, limit_of=limit_of):
            place, begun = _place(member.name), None
            if place is None and member.problem is None:
                continue
            key, extension = place or (member.name, "")
            if sample is None or key != sample.key:
                if sample is not None:
                    yield _finished(sample)
                sample = TarSample(key)
            _add(sample, extension, member)
    except DamagedTar as error:
        # Whole is only a sample whose successor has begun.
        if sample is not None and begun not in (None, sample.key):
            yield _finished(sample)
        yield Unreadable(tar, error.why)
        return
    if sample is not None:
        yield _finished(sample)


def _add(sample: TarSample, extension: str, member: Member) -> None:
    problem = member.problem
    if extension in sample.members:
        problem = "is there twice"
    elif len(sample.members) >= _MAX_MEMBERS:
        problem = f"is one of more than {_MAX_MEMBERS:,} members of its sample"
    if problem is not None and sample.problem is None:
        sample.problem = f"{member.name} {problem}"
        sample.members.clear()
    if sample.problem is None:
        sample.members[extension] = member.content or b""


def _finished(sample: TarSample) -> TarSample | Unreadable:
    return sample if sample.problem is None else Unreadable(sample.key, sample.problem)


def _place(name: str) -> tuple[str, str] | None:
    """Key and extension in a member's name; None for one that belongs to no sample.

    Those are names without an extension, hidden files, and webdataset's own files (`__name__`).
    """
    folder, slash, file_name = name.rpartition("/")
    stem, dot, extension = file_name.partition(".")
    first = name.partition("/")[0]
    if not stem or not dot or (len(first) > 4 and first.startswith("__") and first.endswith("__")):
        return None
    return f"{folder}{slash}{stem}", extension.lower()
