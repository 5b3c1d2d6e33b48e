"""Captions in files beside the videos: subtitles (.srt, .vtt), and the output of speech recognition (.json).

A file belongs to the video of the same name in its folder: `a.srt`, or with a language `a.en.srt`, for `a.mp4`.
Its captions have the source `subtitles`, or `asr` for the output of speech recognition, followed by the language:
`subtitles-en`.

Whisper writes the same words in all formats at once. Of several files of a video with the same words only one is read:
JSON, which has likelihoods, before .srt and .vtt.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import PurePosixPath

from clipmill.manifests.adapters.reading import Origin, ReadingBuilder
from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.adapters.subtitles import (
    Cue,
    Unreadable,
    decode_text,
    read_bytes,
    read_cues,
    read_json,
    read_segments,
)
from clipmill.manifests.adapters.video_files import VideoFile, compose_unicode
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import count_noun, on_one_line
from clipmill.manifests.storage.urls import Place, place_name

SUBTITLES, ASR = "subtitles", "asr"
_SUBTITLE_SUFFIXES = frozenset({".srt", ".vtt"})
_ASR_SUFFIX = ".json"
SUFFIXES = _SUBTITLE_SUFFIXES | {_ASR_SUFFIX}
_ORDER = (_ASR_SUFFIX, ".srt", ".vtt")
# A language (en, pt-BR), or what players know beside it; `hi` is Hindi, and "hearing impaired".
_PART = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*|default|forced")
_MAX_PARTS = 2
_MAX_NAMED = 3
_HEAD_BYTES = 1 << 20  # Whisper writes the text of all segments first


def note_unread(builder: ReadingBuilder, files: Sequence[VideoFile], *, numbers: Collection[str]) -> None:
    """Note that there are files among `files` that `add_files_beside` would read.

    Args:
        numbers: relative path of each video.
    """
    stems = {_stem(name) for name in numbers}
    num_subtitles = sum(_suffix(file) in _SUBTITLE_SUFFIXES for file in files)
    num_asr = sum(
        _suffix(file) == _ASR_SUFFIX
        and _video_stem(_stem(file.relative), known=stems)[0] in stems
        and _looks_like_asr(file.path)
        for file in files
    )
    subtitles = f"{count_noun(num_subtitles, 'subtitle file')} (.srt, .vtt)" if num_subtitles else ""
    asr = f"{count_noun(num_asr, 'file')} of speech recognition (.json)" if num_asr else ""
    if subtitles or asr:
        builder.note(f"{' and '.join(filter(None, (subtitles, asr)))} not read; --subtitles reads them")


def _looks_like_asr(path: Place) -> bool:
    """Return True if the first bytes of a file contain the keys of segments. Parsing whole files for a note would take
    long.

    Objects are not read for a note.
    """
    if isinstance(path, str):
        return False
    try:
        if not path.is_file():
            return False  # a pipe would block
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    is_list = head.lstrip().startswith(b"[") and b'"text"' in head
    return b'"start"' in head and (b'"segments"' in head or is_list)


def add_files_beside(
    builder: ReadingBuilder, directory: Place, files: Sequence[VideoFile], *, numbers: Mapping[str, int | None]
) -> None:
    """Add the captions in `files`, those with SUFFIXES in a folder of videos.

    Args:
        directory: the folder; it counts as the annotation file.
        numbers: relative path of each video -> index in `builder`; None if the video was rejected.

    Raises:
        UserError: there are no subtitles, and no output of speech recognition.
    """
    videos: dict[str, list[str]] = defaultdict(list)
    for name in numbers:
        videos[_stem(name)].append(name)
    of_video: dict[str, list[tuple[VideoFile, str]]] = defaultdict(list)
    builder.begin_annotations(directory)
    for file in sorted(files, key=lambda file: _ORDER.index(_suffix(file))):
        stem, language = _video_stem(_stem(file.relative), known=videos.keys())
        names = videos.get(stem, [])
        if len(names) == 1:
            of_video[names[0]].append((file, language))
        elif names:
            detail = f"{len(names)} videos have this name: {', '.join(names[:_MAX_NAMED])}"
            builder.reject(Reason.AMBIGUOUS_VIDEO, file=str(file.path), detail=detail)
        elif _suffix(file) in _SUBTITLE_SUFFIXES:
            builder.reject(Reason.MISSING_FILE, file=str(file.path), detail="no video of this name in its folder")
    reader = _Reader(builder, directory)
    for name, video in numbers.items():
        if video is not None:
            reader.add(video, of_video[name])
        for file, _ in of_video[name] if video is None else ():
            builder.reject(Reason.MISSING_FILE, file=str(file.path), detail="its video was rejected")
    reader.note()
    is_subtitle = (_suffix(file) in _SUBTITLE_SUFFIXES for file in files)
    if not reader.num_read and not any(is_subtitle):
        raise UserError(
            f"no subtitles beside the videos in {directory}",
            hint="for a video NAME.mp4, name them NAME.srt, NAME.en.srt, NAME.vtt, or NAME.json (output of Whisper)",
        )


class _Reader:
    """Reads the files of one video after another."""

    def __init__(self, builder: ReadingBuilder, directory: Place) -> None:
        self._builder, self._directory = builder, directory
        self._notes: dict[str, list[Place]] = defaultdict(list)
        self.num_read = 0  # files that are subtitles or the output of speech recognition, even damaged

    def add(self, video: int, files: Sequence[tuple[VideoFile, str]]) -> None:
        seen: set[str] = set()
        for file, language in files:
            try:
                cues = self._cues(file.path)
            except Unreadable as error:
                source_id = self._builder.source_id_of(video)
                self._builder.reject(Reason.UNREADABLE, file=str(file.path), source_id=source_id, detail=str(error))
                self.num_read += 1
                continue
            if cues is None:
                self._notes["not the output of speech recognition, ignored"].append(file.path)
                continue
            self.num_read += 1
            words = "".join("".join(str(cue.text).split()) for cue in cues)
            if words in seen:
                self._notes["same words as another file of the video, ignored"].append(file.path)
                continue
            seen.add(words)
            kind = ASR if _suffix(file) == _ASR_SUFFIX else SUBTITLES
            self._add_cues(video, cues, source=f"{kind}-{language}" if language else kind, file=file.path)

    def note(self) -> None:
        """Add the notes to the builder, each with the number of files and the first few names."""
        for text, paths in self._notes.items():
            more = ", ..." if len(paths) > _MAX_NAMED else ""
            names = ", ".join(on_one_line(place_name(path).name, max_chars=80) for path in paths[:_MAX_NAMED])
            self._builder.note(f"{text}: {count_noun(len(paths), 'file')} ({names}{more})")

    def _cues(self, path: Place) -> list[Cue] | None:
        text, guessed = decode_text(read_bytes(path))
        if place_name(path).suffix.lower() == _ASR_SUFFIX:
            segments = read_segments(read_json(text))
            cues = None if segments is None else list(segments)
            if cues is not None and not cues:
                raise Unreadable("it has no segments")
        else:
            cues = list(read_cues(text))
        if guessed is not None and cues is not None:
            self._notes[f"not UTF-8, read as {guessed}"].append(path)
        return cues

    def _add_cues(self, video: int, cues: Sequence[Cue], *, source: str, file: Place) -> None:
        for cue in cues:
            if cue.fault is not None:
                reason, detail = cue.fault
                source_id = self._builder.source_id_of(video)
                self._builder.reject(reason, file=str(file), row=cue.number, source_id=source_id, detail=detail)
            elif self._builder.add_caption(
                video,
                cue.text,
                Origin(file, source, cue.number),
                begin_s=cue.begin_s,
                end_s=cue.end_s,
                likelihood=cue.likelihood,
            ):
                self._builder.use_row(self._directory)


def _suffix(file: VideoFile) -> str:
    return PurePosixPath(file.relative).suffix.lower()


def _stem(relative: str) -> str:
    return compose_unicode(PurePosixPath(relative).with_suffix("").as_posix())


def _video_stem(stem: str, *, known: Container[str]) -> tuple[str, str]:
    """Return the name of the video that a file belongs to, and the language in its own name; the name if unknown."""
    found, parts = stem, list[str]()
    for _ in range(_MAX_PARTS + 1):
        if found in known:
            return found, ".".join(parts)
        head, dot, part = found.rpartition(".")
        if not (dot and _PART.fullmatch(part)):
            break
        found, parts = head, [part, *parts]
    return stem, ""
