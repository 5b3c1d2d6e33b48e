"""The video files under a folder, and finding them by the names that annotations use.

Looking at a folder reads names and kinds, never a file. What one entry or one subfolder throws is that entry's fault.
"""

import os
import unicodedata
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path, PurePosixPath

from manifests.adapters.reasons import Reason
from manifests.errors import UserError
from manifests.quoting import on_one_line

VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".wmv"})


class Ambiguous(Exception):
    """A name fits several files, `fitting`."""

    def __init__(self, name: str, fitting: list["VideoFile"]) -> None:
        super().__init__(f"{name!r} fits {len(fitting)} files: {fitting[0].relative}, {fitting[1].relative}, ...")
        self.fitting = fitting


@dataclass(frozen=True)
class VideoFile:
    """An entry of a folder that is named like a video; whether it is a file shows when it is looked at."""

    path: Path  # absolute
    relative: str  # to the folder that was scanned, with /

    @property
    def source_id(self) -> str:
        """The relative path without its extension."""
        return PurePosixPath(self.relative).with_suffix("").as_posix()


@dataclass(frozen=True)
class Fault:
    """A folder, or an entry of one, in which nothing can be looked for."""

    path: Path
    reason: Reason
    why: str


@dataclass(frozen=True)
class Scan:
    """What lies under a folder, both sorted by relative path."""

    files: list[VideoFile]
    faults: list[Fault]


def scan_videos(directory: Path, *, skip: Path | None = None) -> Scan:
    """Entries under `directory` that are named like videos, and what could not be looked at.

    Hidden files and folders and the folder `skip` are passed over; links to folders are followed, each once.

    Raises:
        UserError: `directory` is missing, is no folder, cannot be read, or holds no entry that is named like a video.
    """
    require_directory(directory)
    root = directory.resolve()
    files: list[VideoFile] = []
    faults: list[Fault] = []
    named_like_videos: list[Path] = []
    seen = {None if skip is None else _identity(skip)}
    # Links come last, so that a folder that is there and linked too goes by its own name whatever the disk's order.
    pending = [(False, root)]
    while pending:
        _, folder = heappop(pending)
        try:
            entries = _entries(folder, seen)
        except OSError as error:
            if folder == root:
                hint = "check its permissions"
                raise UserError(f"cannot list {directory}: {error.strerror or error}", hint=hint) from error
            faults.append(Fault(folder, Reason.UNREADABLE, f"its files cannot be listed: {error.strerror or error}"))
            continue
        for entry in entries:
            path = Path(entry.path)
            is_video = path.suffix.lower() in VIDEO_SUFFIXES
            try:
                is_folder = _is_folder(entry, is_video=is_video)
            except OSError as error:
                faults.append(Fault(path, Reason.UNREADABLE, error.strerror or str(error)))
                continue
            if is_folder:
                heappush(pending, (entry.is_symlink(), path))
                named_like_videos += [path] if is_video else []
            elif is_video:
                files.append(VideoFile(path, path.relative_to(root).as_posix()))
    with_videos = {parent for file in files for parent in file.path.parents} if named_like_videos else set()
    for path in named_like_videos:
        if path not in with_videos:
            faults.append(Fault(path, Reason.NOT_A_FILE, "it is a folder, without videos in it"))
    if not files:
        named = "".join(f"; {on_one_line(str(fault.path))}: {fault.why}" for fault in faults[:3])
        raise UserError(
            f"no video files under {directory}{named}",
            hint="known endings: " + " ".join(sorted(suffix[1:] for suffix in VIDEO_SUFFIXES)),
        )
    return Scan(
        sorted(files, key=lambda file: file.relative.encode("utf-8", "surrogateescape")),
        sorted(faults, key=lambda fault: os.fsencode(fault.path)),
    )


def require_directory(directory: Path) -> None:
    """Raises UserError unless `directory` is a folder that can be looked at."""
    hint = "give the folder that holds the video files"
    try:
        is_there, is_folder = directory.exists(), directory.is_dir()
    except OSError as error:
        raise UserError(f"cannot look at {directory}: {error.strerror or error}", hint=hint) from error
    if not is_there:
        raise UserError(f"no such folder: {directory}", hint=hint)
    if not is_folder:
        raise UserError(f"{directory} is a file, not a folder", hint=hint)


class VideoLookup:
    """Finds a file by its path, by file name, or by a relative path or name without the extension.

    A name that fits none exactly is compared once more in Unicode's composed form: macOS hands out decomposed names,
    while annotations mostly have composed ones.
    """

    def __init__(self, files: list[VideoFile]) -> None:
        self._by_name: dict[str, list[VideoFile]] = {}
        self._by_composed: dict[str, list[VideoFile]] = {}
        for file in files:
            relative = PurePosixPath(file.relative)
            for key in {str(file.path), file.relative, file.source_id, relative.name, relative.stem}:
                self._by_name.setdefault(key, []).append(file)
                if not key.isascii():
                    self._by_composed.setdefault(composed(key), []).append(file)

    def find(self, name: str) -> VideoFile | None:
        """The file that `name` means, or None.

        Raises:
            Ambiguous: several files fit and none of them has exactly this relative path.
        """
        name = name.removeprefix("./")
        fitting = self._by_name.get(name) or self._by_composed.get(composed(name), [])
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        exact = [file for file in fitting if composed(file.relative) == composed(name)]
        if len(exact) > 1:
            exact = [file for file in exact if file.relative == name]
        if exact:
            return exact[0]
        raise Ambiguous(name, fitting)


def composed(name: str) -> str:
    """`name` in Unicode's composed form (NFC), in which names are compared."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _entries(folder: Path, seen: set[tuple[int, int] | None]) -> list[os.DirEntry[str]]:
    """Entries of `folder` that are not hidden; none where it is among `seen`, to which it is added."""
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in seen:
        return []
    seen.add(identity)
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is_folder(entry: os.DirEntry[str], *, is_video: bool) -> bool:
    """Whether `entry` is a folder, or leads to one.

    Raises:
        OSError: it cannot be told, and the name is not a video's: a link that leads nowhere may have led to a folder of
            videos. What is named like a video is looked at again when somebody wants it.
    """
    try:
        is_folder = entry.is_dir()
        if not is_folder and not is_video and entry.is_symlink():
            entry.stat()
        return is_folder
    except OSError:
        if is_video:
            return False
        raise


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from all others, whatever path leads to it; None where there is none."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
