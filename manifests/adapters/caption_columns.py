"""Find the columns of caption tables by their common names, and convert times to seconds.

Names may be in English, German, French or Spanish, in any case: `Video`, `file name` and `Datei` all mean `video`.
docs/datasets.md lists the names. Each difference from the documented names is noted. A table is rejected if it seems to
have times that cannot be interpreted.

Times are in seconds, milliseconds or frames, with an end or a duration. If a table has a time in several units, seconds
take precedence over milliseconds, and milliseconds over frames. Frames count from 0 and require a column `fps`, because
the videos are not opened when a table is read.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

from clipmill.manifests.adapters.annotations import Reason, Unusable, parse_seconds, require_unique_names
from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import on_one_line, quote_value

_ROUNDING_S = 0.1  # tolerance when an end is compared with a start plus a duration, because tables have rounded values
_EDGES: Mapping[str, Sequence[str]] = {
    "begin": ("start", "begintime", "starttime"),
    "end": ("stop", "endtime", "stoptime"),
    "duration": ("dur",),
}
_UNITS: Mapping[str, Sequence[str]] = {
    "ms": ("ms", "msec", "millis", "milliseconds"),
    "frame": ("frame", "frames", "frameidx", "frameindex", "framenumber"),
}
_RATIO = re.compile(r"(\d{1,9}) ?/ ?(\d{1,9})")
_UNIT_NOUNS = {"ms": "milliseconds", "frame": "frames"}
# Words in names of columns that indicate the start of a caption, the end, or both.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_BEGIN_WORDS = frozenset({"begin", "begins", "beginning", "start", "starts", "starting", "tmin"})
_END_WORDS = frozenset({"end", "ends", "ending", "stop", "stops", "finish", "tmax"})
_BOTH_WORDS = frozenset({"timestamp", "timestamps", "timecode", "timecodes", "timespan", "interval", "span", "offset"})
_BOTH_NAMES = frozenset({"time", "times", "in", "out", "frame", "frames"})
# Additional columns with their names, which are compared in the same way as in `NAMES`.
OTHER_TIMES: Mapping[str, Sequence[str]] = {
    **{
        f"{edge}_{unit}": tuple(name + ending for name in (edge, *names) for ending in endings)
        for edge, names in _EDGES.items()
        for unit, endings in _UNITS.items()
    },
    "fps": ("framerate", "framespersecond"),
}


def require_known_times(ignored: Sequence[str], *, columns: Collection[str], path: Path) -> None:
    """Raise UserError if an ignored column seems to contain times that the known columns do not contain.

    Without these times, the captions would apply to complete videos, or extend to the ends of the videos.

    Args:
        ignored: Names in the header of columns that are not known.
        columns: Documented names of the known columns.
    """
    edges = {name.partition("_")[0] for name in columns}
    has_begin, has_end = "begin" in edges, not edges.isdisjoint(("end", "duration"))
    words = (frozenset() if has_begin else _BEGIN_WORDS) | (frozenset() if has_end else _END_WORDS)
    words |= frozenset() if has_begin and has_end else _BOTH_WORDS
    names = frozenset() if has_begin and has_end else _BOTH_NAMES
    unknown = [
        on_one_line(cell)
        for cell in ignored
        if cell.strip().lower() in names or not words.isdisjoint(word.lower() for word in _WORD.findall(cell))
    ]
    if unknown:
        effect = "extend to the ends of their videos" if has_begin else "apply to complete videos"
        raise UserError(
            f"{path}: the times in {' and '.join(unknown)} are not understood, so the captions would {effect}",
            hint="name the columns begin_s and end_s or duration_s, in seconds or in clock form (begin_ms for "
            "milliseconds, begin_frame with fps for frames); remove columns that do not contain times of captions",
        )


def column_meaning(name: str) -> str:
    """Describe a column for notes, with the unit from which a time is converted."""
    edge, _, unit = name.partition("_")
    return f"{edge}_s, from {_UNIT_NOUNS[unit]}" if unit in _UNIT_NOUNS else name


def times_of(values: Mapping[str, Any]) -> tuple[float, float]:
    """Return the start and end of a row in seconds. A row without times applies to the complete video, 0 to +inf.

    Raises:
        Unusable: A time cannot be converted, end and duration contradict each other, or a frame rate is not positive.
    """
    begin_s, end_s, duration_s = (_time_s(values, edge) for edge in _EDGES)
    begin_s = 0.0 if begin_s is None else begin_s
    if duration_s is None:
        return begin_s, inf if end_s is None else end_s
    if end_s is not None and not abs(begin_s + duration_s - end_s) <= _ROUNDING_S:
        raise Unusable(
            Reason.BAD_TIME,
            f"it ends at {end_s:g} s, but according to its duration at {begin_s + duration_s:g} s; remove the duration "
            "column if it contains the duration of the video",
        )
    return begin_s, begin_s + duration_s if end_s is None else end_s


def _time_s(values: Mapping[str, Any], edge: str) -> float | None:
    for unit in ("s", *_UNITS):
        value = values.get(f"{edge}_{unit}")
        if value is None or value == "":
            continue
        try:
            if unit == "s":
                return parse_seconds(value, default=0.0)
            per_s: float | None = 1000.0
            if unit == "frame":
                rate = values.get("fps")
                ratio = _RATIO.fullmatch(rate.strip()) if isinstance(rate, str) else None  # 30000/1001
                per_s = _number(rate) if ratio is None else int(ratio[1]) / (int(ratio[2]) or inf)
            if per_s is None or per_s <= 0:
                fault = f"fps is {quote_value(values.get('fps'))}, expected a frame rate such as 25 or 30000/1001"
                raise Unusable(Reason.BAD_FPS, fault)
            number = _number(value)
            return parse_seconds(f"{value} ({_UNIT_NOUNS[unit]})" if number is None else number / per_s, default=0.0)
        except ValueError as error:
            raise Unusable(Reason.BAD_TIME, str(error)) from None
    return None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


CLASS = f"{LABEL_PREFIX}class"
# Columns with their additional names, which are compared without regard to case, spaces, punctuation and accents.
NAMES: Mapping[str, Sequence[str]] = {
    "video": ("videoid", "videoname", "videopath", "videofile", "file", "filename", "filepath", "path", "clip"),
    "text": ("caption", "captions", "sentence", "description", "narration", "transcript", "utterance"),
    "begin_s": (
        "begin",
        "start",
        "starts",
        "begintime",
        "starttime",
        "startsec",
        "startseconds",
        "tstart",
        "onset",
        "from",
    ),
    "end_s": ("end", "ends", "stop", "stops", "endtime", "stoptime", "endsec", "endseconds", "tend", "to"),
    "duration_s": ("duration", "dur", "durationsec", "durationseconds"),
    "source": (),
    "likelihood": (),
    "split": ("subset", "partition"),
    "group": ("moment",),
    "view": ("camera",),
    CLASS: ("label", "class"),
}
# Names that apply only if a table has no other column with the same meaning: German, French and Spanish names, and
# names of instructions in robot datasets.
SECONDARY_NAMES: Mapping[str, Sequence[str]] = {
    "video": ("datei", "dateiname", "dateipfad", "pfad", "fichier", "nomdufichier", "chemin", "archivo", "ruta"),
    "text": (
        *("beschreibung", "untertitel", "texte", "legende", "texto", "descripcion", "leyenda"),
        *("languageinstruction", "instruction", "task", "tasks"),
    ),
    "begin_s": ("von", "beginn", "anfang", "startzeit", "debut", "inicio", "desde"),
    "end_s": ("bis", "ende", "endzeit", "fin", "hasta"),
    "duration_s": ("dauer", "duree", "duracion"),
}
_DURATIONS = frozenset(("durations", *NAMES["duration_s"], *SECONDARY_NAMES["duration_s"]))
NUMBERS = ("begin_s", "end_s", "duration_s", "likelihood", *OTHER_TIMES)
_LABEL = re.compile(r"label[\W_]+(?=\w)(.+)", re.IGNORECASE)
_ELAN_FORMAT = re.compile(r" - (?:hh:mm:ss\.ms|ss\.msec)$")  # format of times, which ELAN adds to names of columns


def columns_of(header: Sequence[str]) -> dict[str, str]:
    """Map the names of known columns in a header to documented columns, keys of `OTHER_TIMES`, or labels.

    A time is omitted if the table also has the time in a preferred unit.
    """
    stripped = {cell: _strip_name(cell) for cell in header}
    names = {**NAMES, **OTHER_TIMES}
    columns: dict[str, str] = {}
    for tier in ({name: ("".join(name.split("_")),) for name in names}, names, SECONDARY_NAMES):
        known = {alias: name for name, aliases in tier.items() if name not in columns.values() for alias in aliases}
        columns |= {cell: known[name] for cell, name in stripped.items() if cell not in columns and name in known}
    labels = {cell: _LABEL.fullmatch(cell.strip()) for cell in header if cell not in columns}
    columns |= {
        cell: LABEL_PREFIX + re.sub(r"\W+", "_", match[1].strip().lower())
        for cell, match in labels.items()
        if match is not None
    }
    # A column is unneeded if the table has the same time in a preferred unit, if it is a frame rate but no time is in
    # frames, or if it is a duration but there is no start, so that it is the duration of the video.
    known_names = set(columns.values())
    unneeded: set[str] = set()
    for edge in _EDGES:
        present = [name for unit in ("s", *_UNITS) if (name := f"{edge}_{unit}") in known_names]
        is_video_duration = edge == "duration" and not any(name.startswith("begin_") for name in known_names)
        unneeded.update(present if is_video_duration else present[1:])
    if known_names.isdisjoint({f"{edge}_frame" for edge in _EDGES} - unneeded):
        unneeded.add("fps")
    return {cell: name for cell, name in columns.items() if name not in unneeded}


def _strip_name(cell: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFD", _ELAN_FORMAT.sub("", cell.strip()).lower()))


def take_columns(header: Sequence[str], *, path: Path, note: Callable[[str], None]) -> dict[str, str]:
    """Return `columns_of(header)`, and note the differences from the documented names.

    Raises:
        UserError: Two columns have the same name or meaning, times are in frames but there is no frame rate, or a
            column seems to contain times that cannot be interpreted.
    """
    require_unique_names([cell for cell in header if cell], path=path)
    columns = columns_of(header)
    for name in dict.fromkeys(columns.values()):
        cells = [on_one_line(cell) for cell, column in columns.items() if column == name]
        if len(cells) > 1:
            raise UserError(
                f"{path}: {' and '.join(cells)} could both be the column {name}", hint=f"rename one of them to {name}"
            )
    frames = [on_one_line(cell) for cell, name in columns.items() if name.endswith("_frame")]
    if frames and "fps" not in columns.values():
        raise UserError(
            f"{path}: {' and '.join(frames)} cannot be converted to seconds without the frame rate",
            hint="add a column fps with the frame rate of each row's video, or begin_s and end_s in seconds",
        )
    ignored = [cell for cell in header if cell.strip() and cell not in columns]
    require_known_times(ignored, columns=columns.values(), path=path)
    if unused := [on_one_line(cell) for cell in ignored if _strip_name(cell) in _DURATIONS]:
        note(f"{path.name}: {unused[0]} is not used, because no column has the start of the captions")
        ignored = [cell for cell in ignored if _strip_name(cell) not in _DURATIONS]
    differences = [
        f"{on_one_line(cell)} as {column_meaning(name)}"
        for cell, name in columns.items()
        if cell.strip().lower() != column_meaning(name)
    ]
    if differences:
        note(f"{path.name}: read {', '.join(differences)}")
    if ignored:
        more = ", ..." if len(ignored) > 10 else ""
        note(f"{path.name}: ignored {', '.join(on_one_line(cell) for cell in ignored[:10])}{more}")
    return columns


def missing_columns(names: Collection[str], required: Sequence[str]) -> list[str]:
    """Return the required columns that a table does not have. A label can replace the text."""
    has_label = any(name.startswith(LABEL_PREFIX) for name in names)
    return [name for name in required if name not in names and not (name == "text" and has_label)]
