"""The columns of caption tables, found by the names that are common for them.

Names count in English, German, French and Spanish and in any case: `Video`, `file name` and `Datei` are all `video`.
docs/datasets.md lists them. Every difference from the documented form is reported, and a table is refused if it says
more about times than was understood.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from clipmill.manifests.adapters.tables import require_once
from clipmill.manifests.adapters.time_columns import (
    OTHER_TIMES,
    column_meaning,
    require_frame_rate,
    require_known_times,
    superfluous_columns,
)
from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import on_one_line

CLASS = f"{LABEL_PREFIX}class"
# Names of a column besides its own, compared without case, spaces, punctuation and accents.
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
    CLASS: ("label", "class"),
}
# Names that count only where a table has none of the others for the column: German, French and Spanish names, and those
# of instructions in data sets of robots.
SECONDARY_NAMES: Mapping[str, Sequence[str]] = {
    "video": ("datei", "dateiname", "dateipfad", "pfad", "fichier", "nomdufichier", "chemin", "archivo", "ruta"),
    "text": (
        *("beschreibung", "untertitel", "texte", "legende", "texto", "descripcion", "leyenda"),
        *("languageinstruction", "instruction", "task"),
    ),
    "begin_s": ("von", "beginn", "anfang", "startzeit", "debut", "inicio", "desde"),
    "end_s": ("bis", "ende", "endzeit", "fin", "hasta"),
    "duration_s": ("dauer", "duree", "duracion"),
}
_DURATIONS = frozenset(("durations", *NAMES["duration_s"], *SECONDARY_NAMES["duration_s"]))
NUMBERS = ("begin_s", "end_s", "duration_s", "likelihood", *OTHER_TIMES)
_LABEL = re.compile(r"label[\W_]+(?=\w)(.+)", re.IGNORECASE)
_ELAN_FORMAT = re.compile(r" - (?:hh:mm:ss\.ms|ss\.msec)$")  # of a time, in the headers that ELAN exports


def columns_of(header: Sequence[str]) -> dict[str, str]:
    """Return the name in the header -> the documented column, one of `OTHER_TIMES` or a label, for known columns.

    Times in other units than those that are taken are left out.
    """
    plain = {cell: _strip_name(cell) for cell in header}
    names = {**NAMES, **OTHER_TIMES}
    found: dict[str, str] = {}
    for tier in ({name: ("".join(name.split("_")),) for name in names}, names, SECONDARY_NAMES):
        known = {alias: name for name, aliases in tier.items() if name not in found.values() for alias in aliases}
        found |= {cell: known[name] for cell, name in plain.items() if cell not in found and name in known}
    labels = {cell: _LABEL.fullmatch(cell.strip()) for cell in header if cell not in found}
    found |= {
        cell: LABEL_PREFIX + re.sub(r"\W+", "_", match[1].strip().lower())
        for cell, match in labels.items()
        if match is not None
    }
    return {cell: name for cell, name in found.items() if name not in superfluous_columns(set(found.values()))}


def _strip_name(cell: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFD", _ELAN_FORMAT.sub("", cell.strip()).lower()))


def take_columns(header: Sequence[str], *, path: Path, note: Callable[[str], None]) -> dict[str, str]:
    """Return `columns_of(header)`, and note what differs from the documented names.

    Raises:
        UserError: two columns have the same name, or could both be the same; times are in frames of unknown length, or
            in columns that are not understood.
    """
    require_once([cell for cell in header if cell], path=path)
    columns = columns_of(header)
    for name in dict.fromkeys(columns.values()):
        cells = [on_one_line(cell) for cell, column in columns.items() if column == name]
        if len(cells) > 1:
            raise UserError(
                f"{path}: {' and '.join(cells)} could both be the column {name}", hint=f"rename one of them to {name}"
            )
    require_frame_rate(columns, path=path)
    ignored = [cell for cell in header if cell.strip() and cell not in columns]
    require_known_times(ignored, columns=columns.values(), path=path)
    if unused := [on_one_line(cell) for cell in ignored if _strip_name(cell) in _DURATIONS]:
        note(f"{path.name}: {unused[0]} is not used, because no column has the start of the captions")
        ignored = [cell for cell in ignored if _strip_name(cell) not in _DURATIONS]
    taken = [
        f"{on_one_line(cell)} as {column_meaning(name)}"
        for cell, name in columns.items()
        if cell.strip().lower() != column_meaning(name)
    ]
    if taken:
        note(f"{path.name}: read {', '.join(taken)}")
    if ignored:
        more = ", ..." if len(ignored) > 10 else ""
        note(f"{path.name}: ignored {', '.join(on_one_line(cell) for cell in ignored[:10])}{more}")
    return columns


def missing_columns(names: Collection[str], required: Sequence[str]) -> list[str]:
    """Return the required columns that a table lacks; labels stand in for a text."""
    has_label = any(name.startswith(LABEL_PREFIX) for name in names)
    return [name for name in required if name not in names and not (name == "text" and has_label)]
