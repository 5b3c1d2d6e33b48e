"""Captions of windows as files: CSV, JSON and SRT, each published whole.

CSV   video, begin_s, end_s, caption. A cell that a spreadsheet would take for a formula has an apostrophe before it.
JSON  a list of objects with the same names; captions as they are.
SRT   subtitles of one video. A word joiner (U+2060), which nobody sees, keeps players from reading markup in a
      caption; windows without a caption have no subtitle.
"""

import csv
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from manifests.errors import FailedWork, UserError
from manifests.publish import TEMPORARY_PREFIX, published
from train.data.frame_sampling import US_PER_S
from train.tasks.caption.videos.captioning import CaptionedWindow, VideoEnd
from train.tasks.caption.videos.files import FORMATS, Format, shown_name

COLUMNS = ("video", "begin_s", "end_s", "caption")

Write = Callable[[CaptionedWindow], None]
# What a cell begins with where Excel and its like take it for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_JOINER = "\u2060"


@contextmanager
def csv_writer(path: Path) -> Iterator[Write]:
    """A file of all videos; it is there once the block ends well."""
    with _text_file(path) as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)

        def write(window: CaptionedWindow) -> None:
            video, begin_s, end_s, caption = _row(window)
            table.writerow((_cell(video), f"{begin_s:.3f}", f"{end_s:.3f}", _cell(caption)))

        yield write


@contextmanager
def json_writer(path: Path) -> Iterator[Write]:
    """A file of all videos; it is there once the block ends well."""
    with _text_file(path) as file:
        separator = "["

        def write(window: CaptionedWindow) -> None:
            nonlocal separator
            file.write(f"{separator}\n" + json.dumps(dict(zip(COLUMNS, _row(window), strict=True)), ensure_ascii=False))
            separator = ","

        yield write
        file.write("[]\n" if separator == "[" else "\n]\n")


@contextmanager
def srt_writer(path: Path) -> Iterator[Write]:
    """The subtitles of one video; they are there once the block ends well."""
    with _text_file(path) as file:
        number = 0

        def write(window: CaptionedWindow) -> None:
            nonlocal number
            if not window.caption:
                return
            number += 1
            times = f"{srt_time(window.begin_us)} --> {srt_time(window.end_us)}"
            file.write(f"{number}\r\n{times}\r\n{_subtitle(window.caption)}\r\n\r\n")

        yield write


WRITERS: dict[Format, Callable[[Path], AbstractContextManager[Write]]] = {
    "csv": csv_writer,
    "json": json_writer,
    "srt": srt_writer,
}


def srt_time(time_us: int) -> str:
    """Hours, minutes, seconds and milliseconds, to the nearest."""
    seconds, milliseconds = divmod(round(time_us / 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d},{milliseconds:03d}"


def format_of(path: Path, wanted: Format | None) -> Format:
    """The format that is wanted, or that the suffix of a file names.

    Raises:
        UserError: neither says, or they contradict each other.
    """
    named = next((known for known in FORMATS if path.suffix.lower() == f".{known}"), None)
    if wanted is not None and named not in (None, wanted):
        raise UserError(
            f"--out {path} is called {named}, and --format says {wanted}", hint="leave out --format, or the suffix"
        )
    form = wanted or named
    if form is not None:
        return form
    raise UserError(f"--out {path} does not say in which format", hint="end it in .csv, .json or .srt, or add --format")


def subtitle_names(videos: Sequence[Path]) -> list[str]:
    """A file name for the subtitles of each video: its own with .srt, as players look for them, and no two alike."""
    stems = Counter(video.stem.casefold() for video in videos)
    wanted = [video.stem if stems[video.stem.casefold()] == 1 else video.name for video in videos]
    taken = Counter(name.casefold() for name in wanted)
    names: list[str] = []
    used: set[str] = set()
    for name in wanted:
        numbered, number = name, 1
        while (number == 1 and taken[name.casefold()] > 1) or numbered.casefold() in used:
            numbered, number = f"{name}-{number}", number + 1
        used.add(numbered.casefold())
        names.append(f"{numbered}.srt")
    return names


@contextmanager
def _text_file(path: Path) -> Iterator[TextIO]:
    # Lines end as each format has it, on every system.
    with published(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        yield file
        file.flush()


def _row(window: CaptionedWindow) -> tuple[str, float, float, str]:
    return shown_name(window.video), window.begin_us / US_PER_S, window.end_us / US_PER_S, window.caption


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text


def _subtitle(caption: str) -> str:
    for mark in ("<", "{", "--"):
        caption = caption.replace(mark, mark + _JOINER)
    return caption


# Where captions go: to standard output, into one file, or into a file for each video.


Event = CaptionedWindow | VideoEnd


class Printed:
    """Prints a line for each window."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def take(self, event: Event) -> None:
        """Prints a window."""
        if isinstance(event, CaptionedWindow):
            times = f"{event.begin_us / US_PER_S:.2f}-{event.end_us / US_PER_S:.2f} s"
            sys.stdout.write(f"{shown_name(event.video)}\t{times}\t{event.caption}\n")
            sys.stdout.flush()


class OneFile:
    """Writes all windows into one file, which is published when the block ends well."""

    def __init__(self, writer: AbstractContextManager[Write]) -> None:
        self._writer = writer

    def __enter__(self) -> Self:
        with _writing():
            self._write = self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _writing():
            self._writer.__exit__(kind, error, trace)

    def take(self, event: Event) -> None:
        """Writes a window."""
        if isinstance(event, CaptionedWindow):
            with _writing():
                self._write(event)


class FilePerVideo:
    """Subtitles of each video in a file of their own, which is published when the video is done.

    A video of which nothing could be captioned gets none.

    Args:
        paths: of the subtitles of each video.
    """

    def __init__(self, paths: dict[Path, Path]) -> None:
        self._paths = paths
        self._windows: list[CaptionedWindow] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def take(self, event: Event) -> None:
        """Keeps a window, or publishes those of a video that is done."""
        if isinstance(event, CaptionedWindow):
            self._windows.append(event)
            return
        if self._windows or event.failure is None:
            with _writing(), srt_writer(self._paths[event.video]) as write:
                for window in self._windows:
                    write(window)
        self._windows = []


def open_sink(out: Path, videos: Sequence[Path], *, wanted: Format | None) -> OneFile | FilePerVideo:
    """What writes the captions of videos as `out` and the format that is wanted say.

    SRT has the subtitles of one video in a file: for several, or where `out` is a folder, one file each.

    Raises:
        UserError: they do not say how, a file is there already, or it cannot be written there.
    """
    form = format_of(out, wanted)
    is_folder = form == "srt" and (out.is_dir() or len(videos) > 1)
    if is_folder and (out.suffix.lower() == ".srt" or (out.exists() and not out.is_dir())):
        raise UserError(
            f"--out {out} is one file, and there are {len(videos)} videos with subtitles of their own",
            hint="name a folder: --out captions --format srt",
        )
    if out.is_dir() and not is_folder:
        raise UserError(f"--out {out} is a folder", hint=f"name a file, such as {out / 'captions'}.{form}")
    if out.exists() and not out.is_dir() and not out.is_file():
        # A device or a pipe, which a file would take the place of.
        raise UserError(f"--out {out} is no file", hint="name a file, or leave --out out to print lines")
    folder = out if is_folder else out.parent
    files = [out / name for name in subtitle_names(videos)] if is_folder else [out]
    if there := [file for file in files if file.exists()]:
        more = f", and {len(there) - 1:,} more files of --out {out}" if len(there) > 1 else ""
        raise UserError(f"{there[0]} exists already{more}", hint="use another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions do not tell of folders that the system keeps for itself.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=TEMPORARY_PREFIX, suffix=f"-{out.name}"):
            pass
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be made: {error.strerror or error}", hint="name a place where files can be written"
        ) from error
    if is_folder:
        return FilePerVideo(dict(zip(videos, files, strict=True)))
    return OneFile(WRITERS[form](out))


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FailedWork(f"captions cannot be written: {error.strerror or error}") from error
