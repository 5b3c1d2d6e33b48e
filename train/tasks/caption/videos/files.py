"""Which videos the arguments of a command name."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from manifests.errors import UserError

# What counts as a video in a folder; a file that is named itself is tried whatever it is called.
SUFFIXES = frozenset(
    (
        *(".3gp", ".asf", ".avi", ".flv", ".gif", ".ivf", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg"),
        *(".mts", ".mxf", ".ogv", ".rm", ".rmvb", ".ts", ".vob", ".webm", ".wmv", ".wtv"),
    )
)


def find_videos(paths: Iterable[Path]) -> list[Path]:
    """Files as they are named, and those of folders and their folders by name; each file once.

    Raises:
        UserError: there is no such file or folder, or a folder holds no videos.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no {shown_name(path)}", hint="name videos, or folders of videos")
        videos = _in_folder(path) if path.is_dir() else [path]
        if not videos:
            raise UserError(
                f"the folder {shown_name(path)} holds no videos",
                hint=f"they are known by their suffixes: {' '.join(sorted(SUFFIXES))}",
            )
        for video in videos:
            found.setdefault(video.resolve(), video)
    if not found:
        raise UserError("no video is named", hint="name videos, or folders of videos")
    return list(found.values())


def shown_name(path: Path) -> str:
    """A path in characters that can be written anywhere: names on a disk may be any bytes."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


def _in_folder(folder: Path) -> list[Path]:
    videos = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        folders[:] = [name for name in folders if not name.startswith(".")]
        kept = (name for name in sorted(names) if not name.startswith("."))
        videos += [Path(place, name) for name in kept if Path(name).suffix.lower() in SUFFIXES]
    return videos


# The formats that captions are written in, by name; loads nothing, for the command line.


Format = Literal["csv", "json", "srt"]
FORMATS: tuple[Format, ...] = ("csv", "json", "srt")
