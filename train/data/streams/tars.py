"""From names of tars to the clips in them: brace patterns, whole tars in the cache, samples by webdataset."""

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from train.data.remote.address import is_remote
from train.data.remote.copies import local_copy
from train.data.streams.clips import StreamedClip, clips_of


def names_tars(shards: str) -> bool:
    """Whether `--shards` names tars, in place of a data folder."""
    return shards.endswith(".tar") or "{" in shards


def expand(pattern: str) -> list[str]:
    """The tars that a pattern such as `DIR/{000000..000099}.tar` names, in its order; `::` joins several patterns.

    Raises:
        UserError: a tar on this machine is not there.
    """
    import webdataset as wds

    # webdataset would run what follows `pipe:` as a command.
    if pattern.startswith("pipe:") or "::pipe:" in pattern:
        raise UserError(f"{pattern} is a command, and none is run", hint="name tars: DIR/{000000..000099}.tar")
    tars = [str(tar) for tar in wds.shardlists.expand_urls(pattern)]
    missing = [tar for tar in tars if not is_remote(tar) and not Path(tar).is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(tars)} tars are not there; the first: {missing[0]}",
            hint="patterns look like DIR/{000000..000099}.tar, with as many digits as the names have",
        )
    return tars


def clips_in(tar: str, *, cache: Path | None) -> Iterator[StreamedClip | tuple[str, str]]:
    """The clips of a tar in its order; (key, what is wrong) for a sample, or a rest of the tar, that has none."""
    try:
        yield from _clips_in(local_copy(tar, cache=cache))
    except (OSError, tarfile.TarError, ValueError, EOFError) as error:
        yield tar, f"the tar cannot be read from here on: {error}"


def _clips_in(path: Path) -> Iterator[StreamedClip | tuple[str, str]]:
    for sample in _samples([str(path)]):
        try:
            yield from clips_of(sample)
        except ValueError as error:
            yield str(sample["__key__"]), str(error)


def _samples(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    import webdataset as wds

    # No node splitter: webdataset would give whole tars to ranks, some more than others.
    return iter(wds.WebDataset(paths, shardshuffle=False, nodesplitter=None, empty_check=False))
