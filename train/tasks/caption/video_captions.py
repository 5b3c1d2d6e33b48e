"""Implementation of `train caption-video`: caption the windows of video files, and write the captions.

Files are published only when they are complete: at the end of the command or, if each video has a separate file, at the
end of the video.
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity
from clipmill.manifests.publish import TEMPORARY_PREFIX, publish_atomically
from clipmill.train.config.clips import AS_TRAINED, OpenOptions, Overrides
from clipmill.train.config.training import Device
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.frame_sampling import US_PER_S, Sampling
from clipmill.train.engine.trained_run import TrainedRun
from clipmill.train.evaluation.identity import identity_of
from clipmill.train.evaluation.opening import open_weights_as
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.model import AnyCaptioner
from clipmill.train.tasks.caption.spec import TASK, CaptionerSettings, DecodingSettings, VideoFormat
from clipmill.train.tasks.caption.task import CaptionTask
from clipmill.train.tasks.caption.video_windows import (
    Caption,
    CaptionClips,
    CaptionedWindow,
    VideoEnd,
    VideoProgress,
    WindowClip,
    caption_videos,
    find_videos,
    parse_length_us,
    shown_name,
)
from clipmill.train.weights.source import Say

_MAX_LISTED = 5


@dataclass(frozen=True)
class TrainedCaptioner:
    """A captioner in evaluation mode, with the latest checkpoint of a run or with other weights.

    Attributes:
        name: Name of the run or of the weights.
    """

    name: str
    trained: TrainedRun[CaptionerSettings]
    task: CaptionTask
    model: AnyCaptioner

    @cached_property
    def weights_sha256(self) -> str:
        """Hash of the weights, which is the same for a run and its exports."""
        return identity_of(self.model, self.trained.settings, task=self.task.name)

    @property
    def source(self) -> str:
        """Name of the model as a source of captions: `name`, with hyphens for special characters, and a hash."""
        name = re.sub(r"[^\w.-]+", "-", self.name)
        return f"{name}@{self.weights_sha256[:8]}"

    @torch.no_grad()
    def captions(
        self, batch: Batch, decoding: DecodingSettings, *, samples: Sequence[int], rows_per_video: int = 1
    ) -> tuple[list[str], NDArray[np.float32]]:
        """Generate captions for the clips of a batch.

        Args:
            samples: Numbers that identify the captions. Sampling depends on these numbers.
            rows_per_video: Number of captions per clip. Captions of the same clip are adjacent.

        Returns:
            Captions, and their likelihoods, float32 (clipmill.train.tasks.caption.decoding).
        """
        tokenizer = self.task.decoder.tokenizer
        batch = to_device(batch, self.trained.device)
        with self.trained.precision.autocast():
            clips = self.task.inputs(batch)
            generated = generate_captions(  # type: ignore[misc] # the type of the cache depends on the decoder
                self.model,
                clips,
                decoding,
                end_id=tokenizer.end_id,
                samples=samples,
                rows_per_video=rows_per_video,
            )
        texts = [tokenizer.text(ids) for ids in generated.tokens_VL.tolist()]
        return texts, generated.likelihoods_V.cpu().numpy()


def caption_files(
    weights: str,
    paths: Sequence[Path],
    *,
    length: str,
    out: Path | None,
    file_format: VideoFormat | None,
    batch: int,
    overrides: Overrides,
    decoding: DecodingSettings | None,
) -> None:
    """Caption videos, and write or print the captions of all windows.

    Raises:
        UserError: A flag, the weights or a path is invalid.
        FailedWork: Some videos could not be read to the end (all other videos were captioned), or captions could not be
            written.
    """
    if batch < 1:
        raise UserError(f"--batch {batch} is less than 1", hint="use 1 or more", flags=("--batch",))
    if file_format is not None and out is None:
        raise UserError(
            f"--format {file_format} applies only to files, but there is no --out",
            hint="add --out, or omit --format to print lines",
            flags=("--format",),
        )
    window_us, videos = parse_length_us(length), find_videos(paths)
    if out is not None:  # use absolute paths, because the file may be read in another working directory
        videos = [video.parent.resolve() / video.name for video in videos]
    sink = print_windows() if out is None else open_sink(out, videos, file_format=file_format)
    with Activity(f"loading {weights}"):
        captioner = open_captioner(weights, overrides=overrides, say=partial(print, file=sys.stderr))
    settings, decoding = captioner.trained.settings, captioner.task.decoding(decoding)
    sampling = Sampling(num_frames=settings.num_frames, rule=settings.sampling, stride=settings.stride)
    failures = []
    with sink as emit, VideoProgress(num_videos=len(videos)) as progress:
        for event in caption_videos(
            videos,
            caption_by(captioner, decoding, source="" if out is None else captioner.source),
            sampling=sampling,
            size_px=settings.size_px,
            length_us=window_us,
            batch=batch,
        ):
            emit(event)
            progress.show(event)
            if isinstance(event, VideoEnd) and event.failure is not None:
                failures.append(event)
    progress.say_done("" if out is None else f" in {out}")
    if failures:
        names = ", ".join(shown_name(end.video) for end in failures[:_MAX_LISTED])
        remark = f" and {len(failures) - _MAX_LISTED} more" if len(failures) > _MAX_LISTED else ""
        raise FailedWork(
            f"{len(failures)} of {count_noun(len(videos), 'video')} could not be read to the end: {names}{remark}"
        )


def caption_by(captioner: TrainedCaptioner, decoding: DecodingSettings, *, source: str) -> CaptionClips:
    """Return a function that captions clips with a captioner. Sampling depends on the start of the window."""

    def caption(clips: list[WindowClip]) -> list[Caption]:
        batch = Batch(
            input="pixels",
            position=torch.zeros(len(clips), dtype=torch.int64),
            video=torch.from_numpy(np.stack([clip.video for clip in clips])),
            colour=torch.tensor([clip.colour for clip in clips], dtype=torch.uint8),
        )
        samples = [clip.window.begin_us for clip in clips]
        texts, likelihoods = captioner.captions(batch, decoding, samples=samples)
        return [Caption(text, source, value) for text, value in zip(texts, likelihoods.tolist(), strict=True)]

    return caption


def open_captioner(
    weights: str, *, overrides: Overrides = AS_TRAINED, device: Device | None = None, say: Say = print
) -> TrainedCaptioner:
    """Open the latest checkpoint of a run, or other weights of a captioner. No data are needed.

    Args:
        device: Device that replaces the device of the run.

    Raises:
        UserError: The weights do not exist, belong to a different task, or are damaged.
    """
    opened = open_weights_as(
        {TASK.name: lambda: TASK}, weights, OpenOptions(overrides=overrides, device=device), say=say
    )
    name = opened.name if opened.run is not None else Path(opened.title).name
    return TrainedCaptioner(name, opened.trained, opened.task, opened.trained.fill(opened.task.build_model()))


Write = Callable[[CaptionedWindow], None]  # function that writes a window to a file
Event = CaptionedWindow | VideoEnd
Emit = Callable[[Event], None]  # function that outputs the captions of an event
_JOINER = "\u2060"  # invisible character that breaks up markup


@contextmanager
def json_writer(path: Path) -> Iterator[Write]:
    """Write a JSON file for all videos, and publish it at the end of the block."""
    with _text_file(path) as file:
        separator = "["

        def write(window: CaptionedWindow) -> None:
            nonlocal separator
            row = {
                "video": shown_name(window.video),
                "begin_s": window.begin_us / US_PER_S,
                "end_s": window.end_us / US_PER_S,
                "text": window.caption,
                "source": window.source,
                "likelihood": window.likelihood,
            }
            file.write(f"{separator}\n" + json.dumps(row, ensure_ascii=False))
            separator = ","

        yield write
        file.write("[]\n" if separator == "[" else "\n]\n")


@contextmanager
def srt_writer(path: Path) -> Iterator[Write]:
    """Write the subtitles of one video, and publish them at the end of the block."""
    with _text_file(path) as file:
        number = 0

        def write(window: CaptionedWindow) -> None:
            nonlocal number
            if not window.caption:
                return
            number += 1
            times = f"{srt_time(window.begin_us)} --> {srt_time(window.end_us)}"
            caption = window.caption
            for mark in ("<", "{", "--"):  # players treat these as markup, and "-->" as a line with times
                caption = caption.replace(mark, mark + _JOINER)
            file.write(f"{number}\r\n{times}\r\n{caption}\r\n\r\n")

        yield write


WRITERS: dict[VideoFormat, Callable[[Path], AbstractContextManager[Write]]] = {
    "json": json_writer,
    "srt": srt_writer,
}


def srt_time(time_us: int) -> str:
    """Format a time as hours, minutes, seconds and rounded milliseconds."""
    seconds, milliseconds = divmod(round(time_us / 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d},{milliseconds:03d}"


def format_of(path: Path, file_format: VideoFormat | None) -> VideoFormat:
    """Return the format of an output file, from --format or the file's suffix.

    Raises:
        UserError: Neither --format nor the suffix selects a format, or the two contradict each other.
    """
    suffix = next((name for name in WRITERS if path.suffix.lower() == f".{name}"), None)
    if file_format is not None and suffix not in (None, file_format):
        raise UserError(
            f"--out {path} ends in .{suffix}, but --format is {file_format}",
            hint="omit --format, or the suffix",
            flags=("--out", "--format"),
        )
    if (file_format := file_format or suffix) is not None:
        return file_format
    raise UserError(
        f"--out {path} has no known format",
        hint="use the suffix .json or .srt, or add --format; without --out, lines of text are printed",
        flags=("--out",),
    )


def subtitle_names(videos: Sequence[Path]) -> list[str]:
    """Return a unique subtitle file name for each video: the name of the video with .srt, as players expect."""
    stem_counts = Counter(video.stem.casefold() for video in videos)
    stems = [video.stem if stem_counts[video.stem.casefold()] == 1 else video.name for video in videos]
    counts = Counter(stem.casefold() for stem in stems)
    names: list[str] = []
    used_stems: set[str] = set()
    for stem in stems:
        candidate, number = stem, 1
        while (number == 1 and counts[stem.casefold()] > 1) or candidate.casefold() in used_stems:
            candidate, number = f"{stem}-{number}", number + 1
        used_stems.add(candidate.casefold())
        names.append(f"{candidate}.srt")
    return names


@contextmanager
def _text_file(path: Path) -> Iterator[TextIO]:
    # Use newline="", because the format defines the line endings, regardless of the operating system.
    with publish_atomically(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        yield file
        file.flush()


@contextmanager
def print_windows() -> Iterator[Emit]:
    """Print a line for each window."""

    def emit(event: Event) -> None:
        if isinstance(event, CaptionedWindow):
            times = f"{event.begin_us / US_PER_S:.2f}-{event.end_us / US_PER_S:.2f} s"
            sys.stdout.write(f"{shown_name(event.video)}\t{times}\t{event.caption}\n")
            sys.stdout.flush()

    yield emit


@contextmanager
def write_one_file(writer: AbstractContextManager[Write]) -> Iterator[Emit]:
    """Write all windows to one file, and publish it at the end of the block."""
    with _explain_write_errors():
        write = writer.__enter__()

    def emit(event: Event) -> None:
        if isinstance(event, CaptionedWindow):
            with _explain_write_errors():
                write(event)

    try:
        yield emit
    except BaseException:
        with _explain_write_errors():
            writer.__exit__(*sys.exc_info())
        raise
    with _explain_write_errors():  # convert only errors of the file, not errors of the block
        writer.__exit__(None, None, None)


@contextmanager
def write_file_per_video(paths: dict[Path, Path]) -> Iterator[Emit]:
    """Write the subtitles of each video to a separate file, which is published at the end of the video.

    A failed video without captioned windows gets no file.

    Args:
        paths: Path of the subtitle file for each video.
    """
    windows: list[CaptionedWindow] = []

    def emit(event: Event) -> None:
        if isinstance(event, CaptionedWindow):
            windows.append(event)
            return
        if windows or event.failure is None:
            with _explain_write_errors(), srt_writer(paths[event.video]) as write:
                for window in windows:
                    write(window)
        windows.clear()

    yield emit


def open_sink(out: Path, videos: Sequence[Path], *, file_format: VideoFormat | None) -> AbstractContextManager[Emit]:
    """Open the output that `--out` and `--format` select.

    An SRT file contains the subtitles of one video. For several videos, or if `out` is a folder, each video gets a
    separate file.

    Raises:
        UserError: The format is unknown, `out` does not fit the format or the number of videos, or a file exists
            already or cannot be written.
    """
    file_format = format_of(out, file_format)
    is_folder = file_format == "srt" and (out.is_dir() or len(videos) > 1)
    if is_folder and (out.suffix.lower() == ".srt" or (out.exists() and not out.is_dir())):
        raise UserError(
            f"--out {out} is one file, but {len(videos)} videos need separate subtitle files",
            hint="use a folder: --out captions --format srt",
            flags=("--out",),
        )
    if out.is_dir() and not is_folder:
        raise UserError(
            f"--out {out} is a folder", hint=f"use a file, such as {out / 'captions'}.{file_format}", flags=("--out",)
        )
    if out.exists() and not out.is_dir() and not out.is_file():
        # Publishing would replace a device or a pipe with a file.
        raise UserError(
            f"--out {out} is not a regular file",
            hint="use a file, or omit --out to print lines",
            flags=("--out",),
        )
    folder = out if is_folder else out.parent
    files = [out / name for name in subtitle_names(videos)] if is_folder else [out]
    if existing_files := [file for file in files if file.exists()]:
        num_more = len(existing_files) - 1
        note = f", as do {count_noun(num_more, 'more file')} in --out {out}" if num_more else ""
        raise UserError(f"{existing_files[0]} exists already{note}", hint="use a different --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Write a temporary file, because permission bits do not show whether a folder is writable.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=TEMPORARY_PREFIX, suffix=f"-{out.name}"):
            pass
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be created: {error.strerror or error}",
            hint="use a writable folder",
            flags=("--out",),
        ) from error
    if is_folder:
        return write_file_per_video(dict(zip(videos, files, strict=True)))
    return write_one_file(WRITERS[file_format](out))


@contextmanager
def _explain_write_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FailedWork(f"captions cannot be written: {error.strerror or error}") from error
