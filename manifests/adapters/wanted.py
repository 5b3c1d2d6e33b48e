"""The videos that annotations speak of, found among the files; each is looked for once."""

from dataclasses import dataclass
from pathlib import Path

from manifests.adapters.reading import ReadingBuilder
from manifests.adapters.reasons import Reason
from manifests.adapters.video_files import Ambiguous, VideoLookup, composed


@dataclass(frozen=True)
class _Unavailable:
    reason: Reason
    why: str


class WantedVideos:
    """Adds the videos that annotations speak of to a builder, under the ids that the annotations use."""

    def __init__(self, builder: ReadingBuilder, lookup: VideoLookup) -> None:
        self._builder = builder
        self._lookup = lookup
        self._found: dict[str, int | _Unavailable] = {}

    def number(
        self, source_id: object, *, split: str, file: Path, row: int | None, num_captions: int = 1
    ) -> int | None:
        """The builder's number of a video, for a row of annotations that brings `num_captions`.

        None where the row cannot be used; it is counted or rejected then.
        """
        if not isinstance(source_id, str) or not source_id.strip():
            self._builder.reject(Reason.EMPTY_ID, file=str(file), row=row, detail="it names no video")
            return None
        # One name in two Unicode forms is one video, whose id has the form that came first.
        name = composed(source_id)
        if name not in self._found:
            self._found[name] = self._find(source_id, split=split)
        found = self._found[name]
        if isinstance(found, _Unavailable):
            self._builder.lose_captions(
                source_id, file=file, num_captions=num_captions, reason=found.reason, why=found.why
            )
            return None
        if self._builder.split_of(found) != split:
            detail = f"it is in {split} here, and in {self._builder.split_of(found)} before"
            self._builder.reject(Reason.BAD_SPLIT, file=str(file), row=row, source_id=source_id, detail=detail)
            return None
        return found

    def _find(self, source_id: str, *, split: str) -> int | _Unavailable:
        try:
            file = self._lookup.find(source_id)
        except Ambiguous as error:
            return _Unavailable(Reason.AMBIGUOUS_VIDEO, str(error))
        if file is None:
            return _Unavailable(Reason.MISSING_FILE, "no video file for it")
        number = self._builder.add_video(source_id, path=file.path, split=split)
        return _Unavailable(Reason.MISSING_FILE, "its video was rejected") if number is None else number
