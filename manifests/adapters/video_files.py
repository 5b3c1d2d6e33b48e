"""The video files under a folder, and finding them by the names that annotations use."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from manifests.errors import UserError

VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".wmv"})


class Ambiguous(Exception):
    """A name fits several files."""


@dataclass(frozen=True)
class VideoFile:
    """A file that is named like a video."""

    path: Path  # absolute
    relative: str  # to the folder that was scanned, with /

    @property
    def source_id(self) -> str:
        """The relative path without its extension."""
        return PurePosixPath(self.relative).with_suffix("").as_posix()


def find_video_files(directory: Path, *, skip: Path | None = None) -> list[VideoFile]:
    """Video files under `directory`, sorted by relative path.

    Hidden files and folders and the folder `skip` are passed over; links to folders are followed, each once.

    Raises:
        UserError: `directory` is missing, is no folder, cannot be read, or holds no video file.
    """
    require_directory(directory)
    root = directory.resolve()
    skipped = None if skip is None else skip.resolve()
    found: list[VideoFile] = []
    seen: set[tuple[int, int]] = set()
    pending = [root]
    while pending:
        folder = pending.pop()
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen or folder.resolve() == skipped:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in _entries(folder):
            if entry.name.startswith("."):
                continue
            path = Path(entry.path)
            if entry.is_dir():
                pending.append(path)
            elif path.suffix.lower() in VIDEO_SUFFIXES:
                found.append(VideoFile(path, path.relative_to(root).as_posix()))
    if not found:
        raise UserError(
            f"no video files under {directory}",
            hint="known endings: " + " ".join(sorted(suffix[1:] for suffix in VIDEO_SUFFIXES)),
        )
    return sorted(found, key=lambda file: file.relative.encode("utf-8", "surrogateescape"))


def require_directory(directory: Path) -> None:
    """Raises UserError unless `directory` is a folder."""
    if not directory.exists():
        raise UserError(f"no such folder: {directory}", hint="give the folder that holds the video files")
    if not directory.is_dir():
        raise UserError(f"{directory} is a file, not a folder", hint="give the folder that holds the video files")


class VideoLookup:
    """Finds a file by its path, by file name, or by a relative path or name without the extension."""

    def __init__(self, files: list[VideoFile]) -> None:
        self._by_name: dict[str, list[VideoFile]] = {}
        for file in files:
            relative = PurePosixPath(file.relative)
            for key in {str(file.path), file.relative, file.source_id, relative.name, relative.stem}:
                self._by_name.setdefault(key, []).append(file)

    def find(self, name: str) -> VideoFile | None:
        """The file that `name` means, or None.

        Raises:
            Ambiguous: several files fit and none of them has exactly this relative path.
        """
        name = name.removeprefix("./")
        fitting = self._by_name.get(name, [])
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        exact = [file for file in fitting if file.relative == name]
        if exact:
            return exact[0]
        raise Ambiguous(f"{name!r} fits {len(fitting)} files: {fitting[0].relative}, {fitting[1].relative}, ...")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}", hint="check its permissions") from error
