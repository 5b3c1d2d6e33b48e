"""EgoVLP's files on Ego4D (Lin et al. 2022): EgoClip's pairs for training, EgoMCQ's questions, videos to leave out.

`egoclip.csv`, separated by tabs, has a pair of clip and text in each row: `video_uid`, `clip_start`, `clip_end` in
seconds, `clip_text`. They are training pairs, their source is `egoclip`, and a begin before 0 becomes 0.

The clips of `egomcq.json` (clipmill.manifests.adapters.egomcq) are captions of the split val with the source `egomcq`,
one for each span.
"""

from pathlib import Path

from clipmill.manifests.adapters.egomcq import EGOMCQ, Clip, clip_of, read_questions
from clipmill.manifests.adapters.reading import Origin, ReadingBuilder
from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.adapters.splits import TRAIN, VAL
from clipmill.manifests.adapters.tables import read_csv, text_lines
from clipmill.manifests.adapters.wanted import WantedVideos
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import count_noun

EGOCLIP = "egoclip"
_COLUMNS = ("video_uid", "clip_start", "clip_end", "clip_text")


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
            clip = clip_of(row.values)
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
    builder.note(f"{count_noun(len(names), 'video')} to leave out, listed in {path.name}")
