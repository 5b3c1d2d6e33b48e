"""Write captions of windows to standard output, or to JSON and SRT files, each of which is published whole.

JSON   a list of objects: video, begin_s, end_s, text, source, likelihood.
SRT    subtitles of one video. An invisible word joiner (U+2060) keeps players from interpreting markup in captions;
       windows without a caption have no subtitle.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import TEMPORARY_PREFIX, publish_atomically
from clipmill.train.data.frame_sampling import US_PER_S
from clipmill.train.tasks.caption.settings import VideoFormat
from clipmill.train.tasks.caption.videos.captioning import CaptionedWindow, VideoEnd
from clipmill.train.tasks.caption.videos.source import shown_name

Write = Callable[[CaptionedWindow], None]
Event = CaptionedWindow | VideoEnd
Take = Callable[[Event], None]
_JOINER = "\u2060"


@contextmanager
def json_writer(path: Path) -> Iterator[Write]:
    """A file of all videos; published at the end of the block."""
    with _text_file(path) as file:
        separator = "["

        def write(window: CaptionedWindow) -> None:
            nonlocal separator
            file.write(f"{separator}\n" + json.dumps(_row(window), ensure_ascii=False))
            separator = ","

        yield write
        file.write("[]\n" if separator == "[" else "\n]\n")


@contextmanager
def srt_writer(path: Path) -> Iterator[Write]:
    """The subtitles of one video; published at the end of the block."""
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


WRITERS: dict[VideoFormat, Callable[[Path], AbstractContextManager[Write]]] = {
    "json": json_writer,
    "srt": srt_writer,
}


def srt_time(time_us: int) -> str:
    """Hours, minutes, seconds and milliseconds, rounded."""
    seconds, milliseconds = divmod(round(time_us / 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d},{milliseconds:03d}"


def format_of(path: Path, wanted: VideoFormat | None) -> VideoFormat:
    """The format of --format, or of the file's suffix.

    Raises:
        UserError: there is neither, or they contradict each other.
    """
    named = next((known for known in WRITERS if path.suffix.lower() == f".{known}"), None)
    if wanted is not None and named not in (None, wanted):
        raise UserError(
            f"--out {path} ends in .{named}, and --format is {wanted}",
            hint="leave out --format, or the suffix",
            flags=("--out", "--format"),
        )
    form = wanted or named
    if form is not None:
        return form
    raise UserError(
        f"--out {path} has no known format",
        hint="end it in .json or .srt, or add --format; without --out, lines of text are printed",
        flags=("--out",),
    )


def subtitle_names(videos: Sequence[Path]) -> list[str]:
    """File names for the subtitles of each video: its own with .srt, as players expect them, made unique."""
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
    # Newlines as each format defines them, on every system.
    with publish_atomically(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        yield file
        file.flush()


def _row(window: CaptionedWindow) -> dict[str, Any]:
    return {
        "video": shown_name(window.video),
        "begin_s": window.begin_us / US_PER_S,
        "end_s": window.end_us / US_PER_S,
        "text": window.caption,
        "source": window.source,
        "likelihood": window.likelihood,
    }


def _subtitle(caption: str) -> str:
    for mark in ("<", "{", "--"):
        caption = caption.replace(mark, mark + _JOINER)
    return caption


@contextmanager
def print_windows() -> Iterator[Take]:
    """Print a line for each window."""

    def take(event: Event) -> None:
        if isinstance(event, CaptionedWindow):
            times = f"{event.begin_us / US_PER_S:.2f}-{event.end_us / US_PER_S:.2f} s"
            sys.stdout.write(f"{shown_name(event.video)}\t{times}\t{event.caption}\n")
            sys.stdout.flush()

    yield take


@contextmanager
def one_file(writer: AbstractContextManager[Write]) -> Iterator[Take]:
    """Write all windows to one file, which is published at the end of the block."""
    with _writing():
        write = writer.__enter__()

    def take(event: Event) -> None:
        if isinstance(event, CaptionedWindow):
            with _writing():
                write(event)

    try:
        yield take
    except BaseException:
        with _writing():
            writer.__exit__(*sys.exc_info())
        raise
    with _writing():  # errors of the file become FailedWork, and those of the block do not
        writer.__exit__(None, None, None)


@contextmanager
def file_per_video(paths: dict[Path, Path]) -> Iterator[Take]:
    """Write the subtitles of each video to a file of its own, published when the video is finished.

    A video of which no window could be captioned gets no file.

    Args:
        paths: video -> file.
    """
    windows: list[CaptionedWindow] = []

    def take(event: Event) -> None:
        if isinstance(event, CaptionedWindow):
            windows.append(event)
            return
        if windows or event.failure is None:
            with _writing(), srt_writer(paths[event.video]) as write:
                for window in windows:
                    write(window)
        windows.clear()

    yield take


def open_sink(out: Path, videos: Sequence[Path], *, wanted: VideoFormat | None) -> AbstractContextManager[Take]:
    """Open the output of `--out` and `--format`.

    An SRT file has the subtitles of one video: for several videos, or if `out` is a folder, there is one file each.

    Raises:
        UserError: the format is unknown, a file exists already, or cannot be written.
    """
    form = format_of(out, wanted)
    is_folder = form == "srt" and (out.is_dir() or len(videos) > 1)
    if is_folder and (out.suffix.lower() == ".srt" or (out.exists() and not out.is_dir())):
        raise UserError(
            f"--out {out} is one file, and there are {len(videos)} videos with subtitles of their own",
            hint="name a folder: --out captions --format srt",
            flags=("--out",),
        )
    if out.is_dir() and not is_folder:
        raise UserError(
            f"--out {out} is a folder", hint=f"name a file, such as {out / 'captions'}.{form}", flags=("--out",)
        )
    if out.exists() and not out.is_dir() and not out.is_file():
        # A device or a pipe, which publishing would replace by a file.
        raise UserError(
            f"--out {out} is not a regular file",
            hint="name a file, or leave --out out to print lines",
            flags=("--out",),
        )
    folder = out if is_folder else out.parent
    files = [out / name for name in subtitle_names(videos)] if is_folder else [out]
    if there := [file for file in files if file.exists()]:
        more = f", and {count_noun(len(there) - 1, 'more file')} of --out {out}" if len(there) > 1 else ""
        raise UserError(f"{there[0]} exists already{more}", hint="use another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits do not tell whether a folder is writable, so try it.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=TEMPORARY_PREFIX, suffix=f"-{out.name}"):
            pass
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be made: {error.strerror or error}",
            hint="name a place where files can be written",
            flags=("--out",),
        ) from error
    if is_folder:
        return file_per_video(dict(zip(videos, files, strict=True)))
    return one_file(WRITERS[form](out))


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FailedWork(f"captions cannot be written: {error.strerror or error}") from error
