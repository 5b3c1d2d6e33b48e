"""IDs of video files: the relative path without extension, or with it to tell files apart."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from clipmill.manifests.adapters.video_files import VideoFile


def file_ids(files: Sequence[VideoFile], *, known: Mapping[str, str]) -> list[str]:
    """Assign a unique source ID to each of `files`, in their order.

    The ID of `a.mp4` is `a`. If several files differ only in their extension, each ID includes it (`a.mkv`, `a.mp4`). A
    file with a known ID keeps it: `a.mp4` stays `a` when `a.mkv` is added, and `a.mkv` stays `a.mkv` when `a.mp4` is
    removed. An ID is therefore never transferred to another existing file, and does not depend on the order of files.

    Args:
        known: source ID -> file name, without folders, of this dataset's videos in the manifest.
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
            source_id += suffix  # `a.mp4.mkv` also has the ID `a.mp4`
        taken.add(source_id)
        ids[row] = source_id
    return [source_id for source_id in ids if source_id is not None]


def _kept_id(file: VideoFile, known: Mapping[str, str]) -> str | None:
    name = PurePosixPath(file.relative)
    candidates = (file.source_id, file.relative, f"{file.relative}{name.suffix}")
    return next((source_id for source_id in candidates if known.get(source_id) == name.name), None)
