"""EgoVLP's files on Ego4D (Lin et al. 2022): EgoClip's pairs for training, EgoMCQ's questions, videos to leave out.

`egoclip.csv`, separated by tabs, has a pair of clip and text in each row: `video_uid`, `clip_start`, `clip_end` in
seconds, `clip_text`. They are training pairs, their source is `egoclip`, and a begin before 0 becomes 0.

`egomcq.json` has a question for each key: a text (`query`), five clips (`choices`), and the key of the clip that it was
written for (`answer`):

    {"0": {"query": {"clip_text": ...}, "answer": 3, "types": 1,
           "choices": {"0": {"video_uid": ..., "clip_start": ..., "clip_end": ..., "clip_text": ...}, ...}}, ...}

Its clips are captions of the split val with the source `egomcq`, one for each span. A question is of the kind intra if
all its clips are of one video, else inter (section 4.1). `types` is not read: in the public code its comment and its
metric have opposite meanings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from clipmill.manifests.adapters.json_stream import object_items
from clipmill.manifests.adapters.reading import Origin, ReadingBuilder
from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.adapters.splits import TRAIN, VAL
from clipmill.manifests.adapters.tables import interval_fault, read_csv, seconds, text_lines
from clipmill.manifests.adapters.wanted import WantedVideos
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import quoted

EGOCLIP, EGOMCQ = "egoclip", "egomcq"
_COLUMNS = ("video_uid", "clip_start", "clip_end", "clip_text")


@dataclass(frozen=True)
class Clip:
    """A span of a video, in seconds."""

    source_id: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Question:
    """A question of EgoMCQ: which of the clips does the text describe?

    Attributes:
        texts: of the choices.
        answer: index of the right choice.
    """

    number: int
    text: str
    choices: tuple[Clip, ...]
    texts: tuple[str, ...]
    answer: int

    @property
    def is_intra(self) -> bool:
        """Whether all choices are of one video."""
        return len({one.source_id for one in self.choices}) == 1


def has_questions(path: Path) -> bool:
    """Whether a JSON file is EgoMCQ's, by its first entry."""
    first = next(object_items(path), ("", None))[1]
    return isinstance(first, dict) and "choices" in first and "query" in first


def read_questions(path: Path) -> Iterator[Question | str]:
    """Questions in the order of the file; for a malformed one, what is wrong with it.

    Raises:
        UserError: the file cannot be read, or is not a JSON object.
    """
    for number, (key, entry) in enumerate(object_items(path)):
        try:
            keys = list(entry["choices"])
            clips = [_clip(one) for one in entry["choices"].values()]
            texts = tuple(str(one["clip_text"]) for one in entry["choices"].values())
            text, answer = entry["query"]["clip_text"], keys.index(str(entry["answer"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield f"question {quoted(key)}: {error!r}"
            continue
        yield Question(number, str(text), tuple(clips), texts, answer)


def _clip(values: dict[str, Any]) -> Clip:
    begin_s, end_s = (seconds(values[name], default=nan) for name in ("clip_start", "clip_end"))
    begin_s = max(begin_s, 0.0)
    if fault := interval_fault(begin_s, end_s):
        raise ValueError(fault)
    return Clip(str(values["video_uid"]), begin_s, end_s)


def add_questions(builder: ReadingBuilder, wanted: WantedVideos, *, path: Path) -> None:
    """Add each clip of the questions of `egomcq.json` once, with its text."""
    seen: set[Clip] = set()
    for row, question in enumerate(read_questions(path)):
        if isinstance(question, str):
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=question)
            continue
        for clip, text in zip(question.choices, question.texts, strict=True):
            if clip in seen:
                continue
            seen.add(clip)
            video = wanted.number(clip.source_id, split=VAL, file=path, row=row)
            if video is not None:
                builder.add_caption(video, text, Origin(path, EGOMCQ, row), begin_s=clip.begin_s, end_s=clip.end_s)


def add_pairs(builder: ReadingBuilder, wanted: WantedVideos, *, path: Path) -> None:
    """Add the training pairs of `egoclip.csv`."""
    for row in read_csv(path, required=_COLUMNS, separator="\t"):
        if row.fault is not None:
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row.number, detail=row.fault)
            continue
        video = wanted.number(row.values["video_uid"], split=TRAIN, file=path, row=row.number)
        if video is None:
            continue
        try:
            clip = _clip(row.values)
        except ValueError as error:
            source_id = row.values["video_uid"]
            builder.reject(Reason.BAD_TIME, file=str(path), row=row.number, source_id=source_id, detail=str(error))
            continue
        origin = Origin(path, EGOCLIP, row.number, field="clip_text")
        builder.add_caption(video, row.values["clip_text"], origin, begin_s=clip.begin_s, end_s=clip.end_s)


def leave_out(builder: ReadingBuilder, wanted: WantedVideos, *, path: Path) -> None:
    """Leave out the videos of a list, an ID in each line.

    Raises:
        UserError: the file cannot be read, or is empty.
    """
    names = {line.strip() for line in text_lines(path) if line.strip()}
    if not names:
        raise UserError(f"{path} lists no video to leave out", hint="write the ID of a video in each line")
    wanted.leave_out(names, why=f"listed in {path.name}")
    builder.note(f"{len(names):,} videos are left out, as listed in {path.name}")
