"""Which id each file of a folder has: its relative path without the ending, as long as no other file claims that."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from manifests.adapters.video_files import VideoFile


def file_ids(files: Sequence[VideoFile], *, known: Mapping[str, str]) -> list[str]:
    """Source ids of `files`, in their order; no two are equal.

    `a.mp4` is `a`. Of files that differ in their ending only, each has its ending in its id (`a.mkv`, `a.mp4`). A file
    that has an id already keeps it: `a.mp4` stays `a` when `a.mkv` joins it, and `a.mkv` stays `a.mkv` when `a.mp4`
    goes. So an id never passes from one file to another that is there too, and does not depend on the order of files.

    Args:
        known: source id -> file name, without folders, of the videos that the manifest has of this data set.
    """
    ids: list[str | None] = [_kept_id(file, known) if known else None for file in files]
    taken = {source_id for source_id in ids if source_id is not None}
    claims = Counter(file.source_id for file in files)
    for row, file in enumerate(files):
        source_id, suffix = file.source_id, PurePosixPath(file.relative).suffix
        if ids[row] is not None:
            continue
        if claims[source_id] > 1:
            source_id += suffix
        while source_id in taken:
            source_id += suffix  # `a.mp4.mkv`, too, has the id `a.mp4`
        taken.add(source_id)
        ids[row] = source_id
    return [source_id for source_id in ids if source_id is not None]


def _kept_id(file: VideoFile, known: Mapping[str, str]) -> str | None:
    name = PurePosixPath(file.relative)
    candidates = (file.source_id, file.relative, f"{file.relative}{name.suffix}")
    return next((source_id for source_id in candidates if known.get(source_id) == name.name), None)
