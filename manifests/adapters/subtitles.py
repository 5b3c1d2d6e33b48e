"""Read captions from files next to videos: subtitles (.srt, .vtt), and the output of speech recognition (.json).

A file belongs to the video with the same name in the same folder: `a.srt`, or `a.en.srt` with a language, belongs to
`a.mp4`. The source of the captions is `subtitles`, or `asr` for the output of speech recognition, followed by the
language, as in `subtitles-en`. Whisper writes the same words to a file of each format. If several files of a video
contain the same words, only one file is read: JSON, which contains likelihoods, is preferred to .srt and .vtt.

Existing libraries are not used, because none of them reports invalid cues. pysubs2 reads a negative time as positive,
and appends comments, cue names and cues with invalid times to the text of the previous cue. webvtt-py silently omits
such cues. srt rejects the complete file. In this module, each cue is either valid or has a fault.
"""

import codecs
import html
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import nan
from pathlib import Path, PurePosixPath
from typing import Any

from clipmill.manifests.adapters.annotations import Reason, interval_fault, log_probability, parse_seconds
from clipmill.manifests.adapters.reading import Origin, ReadingBuilder
from clipmill.manifests.adapters.video_files import VideoFile, compose_unicode
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line, quote_value
from clipmill.manifests.publish import parse_json, read_record
from clipmill.manifests.storage.objects import open_objects
from clipmill.manifests.storage.urls import Location, location_name, split_url

MAX_FILE_BYTES = 1 << 28
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
# An arrow may have one to three dashes, and a fraction may follow a comma, a point or a colon, because all of these
# occur in files that players accept.
_TIME = r"-?(?:\d{1,4}:)?\d{1,3}:\d{1,2}(?:[.,:]\d{1,9})?"
_TIMING = re.compile(rf"\s*(?P<begin>{_TIME})\s*-{{1,3}}>\s*(?P<end>{_TIME})(?:\s.*)?", re.DOTALL)
_TIMING_CANDIDATE = re.compile(r"[\s\d:.,-]*-->|[\s\d:.,-]*:[\s\d:.,-]*->|\s*-?\d+:\S*\s*-->")
_ARROW = "-->"
_WORD_TIME = re.compile(r"<\d[\d:.]*><c[.>]")  # time of a word in YouTube's automatic subtitles
_INSTANT_S = 0.02  # maximum length of a cue that only repeats lines, and of a gap between two scrolling cues
_MAX_TIMING_CHARS = 100  # maximum length of the times in a line; matching takes quadratic time
_FIELDS = re.compile(r"(?P<sign>-?)(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)(?:[.,:](?P<fraction>\d+))?")
# A tag, such as <i>, </font>, <v Name>, <c.yellow>, <00:00:01.000>, {\an8}, {y:i}, but not "I <3 you" or "{laughs}".
_TAG = re.compile(r"</?[A-Za-z][^<>]*>|</?>|<\d[\d:.,]*>|\{\\[^{}]*\}|\{[A-Za-z]:[^{}]*\}")
_INVISIBLE = dict.fromkeys((0x200E, 0x200F, 0xFEFF))  # direction marks, and byte order marks in concatenated files
_LINE_BREAK = re.compile(r"\\[Nnh]")
_ENTITY = re.compile(r"&(?:[A-Za-z]{1,32}|#\d{1,8}|#[xX][0-9a-fA-F]{1,8});")


@dataclass(frozen=True)
class Cue:
    """Timed text in a file.

    Attributes:
        index: 0-based index of the cue in the file.
        likelihood: Mean log-probability per token, if known.
        fault: Reason why the cue is unusable, with a description, or None.
    """

    index: int
    begin_s: float = 0.0
    end_s: float = 0.0
    text: object = ""
    likelihood: float | None = None
    fault: tuple[Reason, str] | None = None


class UnreadableFile(Exception):
    """A file cannot be read or does not have the expected form. The message states the reason."""


def decode_text(content: bytes) -> tuple[str, str | None]:
    """Decode the content of a file as UTF-8, UTF-16 or Windows-1252.

    Returns:
        The text, and the name of the encoding if it was guessed, otherwise None.

    Raises:
        UnreadableFile: The content is not text.
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            return _decode_strictly(content, encoding), None
    head = content[:4096]
    for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        if head[first::2].count(0) > len(head) // 4 > head[1 - first :: 2].count(0):
            return _decode_strictly(content, encoding), "UTF-16 without a byte order mark"
    if b"\0" in content:
        raise UnreadableFile("not a text file: it contains NUL bytes")
    try:
        return content.decode("utf-8"), None
    except UnicodeDecodeError:
        pass
    try:
        return content.decode("cp1252"), "Windows-1252 (Latin-1)"
    except UnicodeDecodeError:
        return content.decode("latin-1"), "Windows-1252 (Latin-1)"


def read_cues(text: str) -> Iterator[Cue]:
    """Iterate over the cues of a SubRip or WebVTT file, in the order of the file.

    The lines of a cue are joined into one line, without markup and cue settings. YouTube's automatic subtitles scroll:
    each cue repeats the previous line, and is followed by a cue of 10 ms that only repeats lines. In such files, each
    line belongs to the cue that shows it first, and cues that only repeat lines are omitted.

    Raises:
        UnreadableFile: The file has no cues.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    is_vtt = lines[0].startswith("WEBVTT")
    previous = ["", *lines]
    timings = [row for row, line in enumerate(lines) if _is_timing(line, previous=previous[row], is_vtt=is_vtt)]
    if not timings:
        raise UnreadableFile("it has no cues: no line of the form 00:00:01,000 --> 00:00:02,000")
    cues: list[tuple[Cue, list[str]]] = []  # cues, with the text of each cue line by line
    for number, (row, next_row) in enumerate(zip(timings, [*timings[1:], len(lines)], strict=True)):
        body: Sequence[str] = lines[row + 1 : next_row]
        content = body
        if is_vtt:
            # The text ends at the first empty line, which may be followed by comments, styles, and the name of the next
            # cue. A line of spaces does not end a cue (WebVTT, section 6.3): YouTube's cues begin with such lines.
            content = body[: next((end for end, line in enumerate(body) if not line), len(body))]
        else:
            content = _srt_content(body, is_last=next_row == len(lines))
        texts = [text for text in (without_markup(line) for line in _join_tags(content)) if text]
        cues.append((_cue(number, lines[row], texts), texts))
    yield from _omit_repetition(cues, has_word_times=_WORD_TIME.search(text) is not None)


def read_segments(content: Any) -> Iterator[Cue] | None:
    """Return an iterator over the segments in the output of speech recognition, or None for any other JSON value.

    Whisper's output is {"segments": [{"start", "end", "text", "avg_logprob", ...}, ...]}, with times in seconds. A list
    of such segments is accepted as well.
    """
    segments = content.get("segments") if isinstance(content, dict) else content
    if not isinstance(segments, list):
        return None
    if isinstance(content, list):
        keys = {"start", "end", "text"}
        if not content or not all(isinstance(item, dict) and keys <= item.keys() for item in content):
            return None
    return map(_segment, range(len(segments)), segments)


def without_markup(text: str) -> str:
    """Return the text of a cue without tags, with entities replaced, on one line."""
    text = _LINE_BREAK.sub(" ", _TAG.sub("", text))
    text = _ENTITY.sub(lambda match: html.unescape(match[0]), text)
    return " ".join(text.translate(_INVISIBLE).split())


def read_bytes(path: Location) -> bytes:
    """Read a file or an object in a bucket.

    Raises:
        UnreadableFile: The file cannot be read, or is too large for subtitles.
    """
    try:
        root, key = split_url(path) if isinstance(path, str) else ("", "")
        objects = open_objects(root) if isinstance(path, str) else None
        size_bytes = objects.info(key).size_bytes if objects is not None else Path(path).stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise UnreadableFile(f"it has {size_bytes:,} bytes, more than {MAX_FILE_BYTES:,}")
        # `read_record` rejects a pipe, which would block.
        return objects.read(key) if objects is not None else read_record(Path(path))
    except OSError as error:
        raise UnreadableFile(error.strerror or str(error)) from error


def _decode_strictly(content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"not valid {encoding.removesuffix('-sig')}: {error.reason}") from error


def _is_timing(line: str, *, previous: str, is_vtt: bool) -> bool:
    """Return True if a line looks like the times of a cue, even if the times are malformed.

    In WebVTT, the text of a cue cannot contain an arrow. In SubRip, a line with an arrow is text, unless it looks like
    times, or follows an empty line or the number of a cue.
    """
    if _TIMING_CANDIDATE.match(line, 0, _MAX_TIMING_CHARS):
        return True
    if _ARROW not in line or line.startswith("WEBVTT"):
        return False
    return is_vtt or not previous.strip() or previous.strip().isdigit()


def _join_tags(lines: Sequence[str]) -> list[str]:
    """Join lines if a tag extends over several lines, such as `<v Name` and `of a speaker>`."""
    joined_lines: list[str] = []
    for line in lines:
        if joined_lines and joined_lines[-1].rfind("<") > joined_lines[-1].rfind(">"):
            joined_lines[-1] += f"\n{line}"
        else:
            joined_lines.append(line)
    return joined_lines


def _omit_repetition(cues: Sequence[tuple[Cue, list[str]]], *, has_word_times: bool) -> Iterator[Cue]:
    """Iterate over cues. If the cues scroll, omit all lines that the previous cue has already shown.

    Cues scroll if their words have times, or if one of them lasts only an instant and only repeats lines. (Converters
    to SubRip remove the times of words, but keep the repetition.)
    """
    counts = [0, *(_count_repeated_lines(first, second) for first, second in pairwise(cues))]
    does_scroll = has_word_times or any(
        count == len(texts) > 0 and cue.end_s - cue.begin_s <= _INSTANT_S
        for count, (cue, texts) in zip(counts, cues, strict=True)
    )
    for count, (cue, texts) in zip(counts, cues, strict=True):
        if not does_scroll or not count:
            yield cue
        elif count < len(texts):
            yield replace(cue, text=" ".join(texts[count:]))


def _count_repeated_lines(first: tuple[Cue, list[str]], second: tuple[Cue, list[str]]) -> int:
    """Count how many of the first lines of a cue repeat the last lines of the previous cue; 0 after a gap."""
    (first_cue, first_texts), (second_cue, second_texts) = first, second
    if first_cue.fault or second_cue.fault or abs(second_cue.begin_s - first_cue.end_s) > _INSTANT_S:
        return 0
    counts = range(min(len(first_texts), len(second_texts)), 0, -1)
    return next((count for count in counts if first_texts[-count:] == second_texts[:count]), 0)


def _cue(number: int, timing: str, texts: Sequence[str]) -> Cue:
    times = _TIMING.fullmatch(timing)
    if times is None:
        return Cue(number, fault=(Reason.BAD_TIME, f"the times are {quote_value(timing.strip())}"))
    begin_s, end_s = _seconds(times["begin"]), _seconds(times["end"])
    if begin_s is None or end_s is None:
        return Cue(
            number,
            fault=(
                Reason.BAD_TIME,
                f"the times are {quote_value(timing.strip())}, but minutes and seconds must be below 60",
            ),
        )
    return _check_cue(Cue(number, begin_s, end_s, " ".join(texts)))


def _check_cue(cue: Cue) -> Cue:
    fault = interval_fault(cue.begin_s, cue.end_s)
    return cue if fault is None else Cue(cue.index, text=cue.text, fault=(Reason.BAD_TIME, fault))


def _seconds(time: str) -> float | None:
    """Convert a time to seconds, or return None if its minutes or seconds are 60 or more."""
    match = _FIELDS.fullmatch(time)
    assert match is not None, time
    hours, minutes, whole_s = (int(match[name] or 0) for name in ("hours", "minutes", "seconds"))
    if whole_s >= 60 or (match["hours"] is not None and minutes >= 60):
        return None
    # The parts are combined as text, so that 00:00:00.1 becomes the float 0.1.
    total = float(f"{(hours * 60 + minutes) * 60 + whole_s}.{match['fraction'] or 0}")
    return -total if match["sign"] and total else total


def _srt_content(lines: Sequence[str], *, is_last: bool) -> Sequence[str]:
    """Return the lines of text between two lines with times, without the number of the next cue.

    Args:
        lines: All lines between the two lines with times, or after the last one.
        is_last: True for the last cue of the file.
    """
    end = len(lines)
    while not is_last and end and not lines[end - 1].strip():
        end -= 1
    # The number of the next cue is on the line before the times. A number that is followed by empty lines belongs to
    # the text of this cue, unless an empty line also precedes it.
    is_adjacent, is_separate = end == len(lines), end > 1 and not lines[end - 2].strip()
    if not is_last and end and lines[end - 1].strip().isdigit() and (is_adjacent or is_separate):
        end -= 1
    return lines[:end]


def _segment(number: int, segment: Any) -> Cue:
    if not isinstance(segment, dict):
        return Cue(number, fault=(Reason.MALFORMED_ROW, f"a segment is {quote_value(segment)}, expected an object"))
    text = segment.get("text")
    text = " ".join(text.split()) if isinstance(text, str) else text
    times = [segment.get(name) for name in ("start", "end")]
    try:
        begin_s, end_s = (parse_seconds(time, default=nan) for time in times)
    except ValueError as error:
        return Cue(number, text=text, fault=(Reason.BAD_TIME, str(error)))
    try:
        likelihood = log_probability(segment.get("avg_logprob"))
    except ValueError as error:
        return Cue(number, text=text, fault=(Reason.BAD_LIKELIHOOD, f"avg_logprob is {error}"))
    return _check_cue(Cue(number, begin_s, end_s, text, likelihood))


SUBTITLES, ASR = "subtitles", "asr"
_SUBTITLE_SUFFIXES = frozenset({".srt", ".vtt"})
_ASR_SUFFIX = ".json"
SUFFIXES = _SUBTITLE_SUFFIXES | {_ASR_SUFFIX}
_ORDER = (_ASR_SUFFIX, ".srt", ".vtt")
# A language (en, pt-BR), or a word that players recognize. `hi` may mean Hindi or "hearing impaired".
_NAME_WORD = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*|default|forced")
_MAX_NAME_WORDS = 2
_MAX_LISTED = 3
_HEAD_BYTES = 1 << 20  # number of bytes to examine; large, because Whisper writes the full text before the segments


def note_companion_files(builder: ReadingBuilder, files: Sequence[VideoFile], *, video_paths: Collection[str]) -> None:
    """Add a note about the files that `add_companion_files` would read, if there are any.

    Args:
        files: Files with SUFFIXES in the folder of the videos.
        video_paths: Relative paths of the videos.
    """
    stems = {_stem(path) for path in video_paths}
    num_subtitles = sum(_suffix(file) in _SUBTITLE_SUFFIXES for file in files)
    num_asr = sum(
        _suffix(file) == _ASR_SUFFIX
        and _video_stem(_stem(file.relative), video_stems=stems)[0] in stems
        and _looks_like_asr(file.path)
        for file in files
    )
    subtitles = f"{count_noun(num_subtitles, 'subtitle file')} (.srt, .vtt)" if num_subtitles else ""
    asr = f"{count_noun(num_asr, 'file')} from speech recognition (.json)" if num_asr else ""
    if subtitles or asr:
        builder.note(f"ignored {' and '.join(filter(None, (subtitles, asr)))}; --subtitles reads such files")


def _looks_like_asr(path: Location) -> bool:
    """Return True if the start of a file contains the keys of segments.

    Parsing the complete file would take too long for a note. Objects in a bucket are not read.
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


def add_companion_files(
    builder: ReadingBuilder, directory: Location, files: Sequence[VideoFile], *, video_indices: Mapping[str, int | None]
) -> None:
    """Add the captions in files next to videos.

    Args:
        directory: Folder of the videos. It is recorded as the annotation file.
        files: Files with SUFFIXES in this folder.
        video_indices: Index of each video in the builder, by relative path; None if the video was rejected.

    Raises:
        UserError: There are neither subtitles nor files from speech recognition.
    """
    videos: dict[str, list[str]] = defaultdict(list)
    for name in video_indices:
        videos[_stem(name)].append(name)
    files_of_video: dict[str, list[tuple[VideoFile, str]]] = defaultdict(list)
    builder.begin_annotations(directory)
    for file in sorted(files, key=lambda file: _ORDER.index(_suffix(file))):
        stem, language = _video_stem(_stem(file.relative), video_stems=videos.keys())
        names = videos.get(stem, [])
        if len(names) == 1:
            files_of_video[names[0]].append((file, language))
        elif names:
            detail = f"it matches {len(names)} videos: {', '.join(names[:_MAX_LISTED])}"
            builder.reject(Reason.AMBIGUOUS_VIDEO, file=str(file.path), detail=detail)
        elif _suffix(file) in _SUBTITLE_SUFFIXES:
            builder.reject(Reason.MISSING_FILE, file=str(file.path), detail="no video with this name in its folder")
    reader = _Reader(builder, directory)
    for name, video in video_indices.items():
        if video is not None:
            reader.add(video, files_of_video[name])
        for file, _ in files_of_video[name] if video is None else ():
            builder.reject(Reason.MISSING_FILE, file=str(file.path), detail="its video was rejected")
    reader.note()
    is_subtitle = (_suffix(file) in _SUBTITLE_SUFFIXES for file in files)
    if not reader.num_read and not any(is_subtitle):
        raise UserError(
            f"no subtitles next to the videos in {directory}",
            hint="name them NAME.srt, NAME.en.srt, NAME.vtt or NAME.json (output of Whisper) for a video NAME.mp4",
        )


class _Reader:
    """Reader that adds the captions of each video to the builder, and collects notes about the files."""

    def __init__(self, builder: ReadingBuilder, directory: Location) -> None:
        self._builder, self._directory = builder, directory
        self._notes: dict[str, list[Location]] = defaultdict(list)  # files by note, with {} for their number
        self.num_read = 0  # number of files that are subtitles or output of speech recognition, including damaged files

    def add(self, video: int, files: Sequence[tuple[VideoFile, str]]) -> None:
        seen_words: set[str] = set()
        for file, language in files:
            try:
                cues = self._cues(file.path)
            except UnreadableFile as error:
                source_id = self._builder.source_id_of(video)
                self._builder.reject(Reason.UNREADABLE, file=str(file.path), source_id=source_id, detail=str(error))
                self.num_read += 1
                continue
            if cues is None:
                self._notes["ignored {} without output of speech recognition"].append(file.path)
                continue
            self.num_read += 1
            words = "".join("".join(str(cue.text).split()) for cue in cues)
            if words in seen_words:
                self._notes["ignored {} with the same words as a previous file of the video"].append(file.path)
                continue
            seen_words.add(words)
            kind = ASR if _suffix(file) == _ASR_SUFFIX else SUBTITLES
            source = f"{kind}-{language}" if language else kind
            for cue in cues:
                if cue.fault is not None:
                    reason, detail = cue.fault
                    source_id = self._builder.source_id_of(video)
                    self._builder.reject(reason, file=str(file.path), row=cue.index, source_id=source_id, detail=detail)
                    continue
                origin = Origin(file.path, source, cue.index)
                if self._builder.add_caption(
                    video, cue.text, origin, begin_s=cue.begin_s, end_s=cue.end_s, likelihood=cue.likelihood
                ):
                    self._builder.count_row(self._directory)

    def note(self) -> None:
        """Add the notes to the builder, each with the number of files and the names of the first few files."""
        for text, paths in self._notes.items():
            more = ", ..." if len(paths) > _MAX_LISTED else ""
            names = ", ".join(on_one_line(location_name(path).name, max_chars=80) for path in paths[:_MAX_LISTED])
            self._builder.note(f"{text.format(count_noun(len(paths), 'file'))}: {names}{more}")

    def _cues(self, path: Location) -> list[Cue] | None:
        text, encoding = decode_text(read_bytes(path))
        if location_name(path).suffix.lower() == _ASR_SUFFIX:
            try:
                content = parse_json(text)
            except ValueError as error:
                raise UnreadableFile(f"not JSON: {error}") from error
            segments = read_segments(content)
            cues = None if segments is None else list(segments)
            if cues is not None and not cues:
                raise UnreadableFile("it has no segments")
        else:
            cues = list(read_cues(text))
        if encoding is not None and cues is not None:
            self._notes[f"read {{}} as {encoding} instead of UTF-8"].append(path)
        return cues


def _suffix(file: VideoFile) -> str:
    return PurePosixPath(file.relative).suffix.lower()


def _stem(relative: str) -> str:
    return compose_unicode(PurePosixPath(relative).with_suffix("").as_posix())


def _video_stem(stem: str, *, video_stems: Container[str]) -> tuple[str, str]:
    """Split the stem of a file into the stem of its video and the language.

    Args:
        video_stems: Stems of the videos.

    Returns:
        The stem of the video, and the language, which may be empty. If no video matches, the result is (stem, "").
    """
    name, words = stem, list[str]()
    for _ in range(_MAX_NAME_WORDS + 1):
        if name in video_stems:
            return name, ".".join(words)
        head, dot, word = name.rpartition(".")
        if not (dot and _NAME_WORD.fullmatch(word)):
            break
        name, words = head, [word, *words]
    return stem, ""
