"""Where captions go: to standard output, into one file, or into a file for each video."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from manifests.errors import FailedWork, UserError
from manifests.publish import TEMPORARY_PREFIX
from train.data.frame_sampling import US_PER_S
from train.tasks.caption.videos.captioning import CaptionedWindow, VideoEnd
from train.tasks.caption.videos.files import shown_name
from train.tasks.caption.videos.formats import Format
from train.tasks.caption.videos.outputs import WRITERS, Write, format_of, srt_writer, subtitle_names

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
