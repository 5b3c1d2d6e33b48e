"""Lookup of annotated videos among the files; each video is looked up once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from clipmill.manifests.adapters.reading import ReadingBuilder
from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.adapters.video_files import Ambiguous, NearestName, VideoFile, VideoLookup, compose_unicode
from clipmill.manifests.storage.urls import Place


def begin_reading(
    dataset: str, directory: Place, *, skip: Place | None, labels: Mapping[str, pa.DataType] | None = None
) -> tuple[ReadingBuilder, "WantedVideos"]:
    """A builder, and the videos of `directory` under the IDs of its annotations; UserError if there are no videos."""
    builder = ReadingBuilder(dataset, labels=labels)
    files = builder.find_videos(directory, skip=skip)
    return builder, WantedVideos(builder, VideoLookup(files), files)


@dataclass(frozen=True)
class _Unavailable:
    reason: Reason
    why: str


class WantedVideos:
    """Adds annotated videos to a builder, under the IDs used by the annotations."""

    def __init__(self, builder: ReadingBuilder, lookup: VideoLookup, files: Sequence[VideoFile]) -> None:
        self._builder = builder
        self._lookup = lookup
        # Numbered names such as P01_02 are not likely to be meant by P01_01, which is likely not to be there.
        self._nearest = NearestName(files, max_compared=0)
        self._found: dict[str, int | _Unavailable] = {}

    def leave_out(self, source_ids: Iterable[str], *, why: str) -> None:
        """Lose the captions of these videos; called before any of them is looked up."""
        self._found |= {compose_unicode(one): _Unavailable(Reason.LEFT_OUT, why) for one in source_ids}

    def number(
        self,
        source_id: object,
        *,
        split: str,
        file: Path,
        row: int | None,
        num_captions: int = 1,
        file_names: Sequence[str] = (),
    ) -> int | None:
        """Return the builder's index of the video of an annotation row with `num_captions` captions.

        Args:
            file_names: names under which its file is looked up, in this order; by default `source_id`.

        Returns None if the row is unusable; it has then been counted or rejected.
        """
        if not isinstance(source_id, str) or not source_id.strip():
            self._builder.reject(Reason.EMPTY_ID, file=str(file), row=row, detail="the row names no video")
            return None
        # The same name in two Unicode forms is one video; its ID has the form encountered first.
        name = compose_unicode(source_id)
        if name not in self._found:
            self._found[name] = self._find(source_id, split=split, file_names=file_names or (source_id,))
        found = self._found[name]
        if isinstance(found, _Unavailable):
            self._builder.lose_captions(
                source_id, file=file, num_captions=num_captions, reason=found.reason, why=found.why
            )
            return None
        if self._builder.split_of(found) != split:
            detail = f"split is {split}, but {self._builder.split_of(found)} in an earlier row"
            self._builder.reject(Reason.BAD_SPLIT, file=str(file), row=row, source_id=source_id, detail=detail)
            return None
        return found

    def _find(self, source_id: str, *, split: str, file_names: Sequence[str]) -> int | _Unavailable:
        try:
            file = next((file for name in file_names if (file := self._lookup.find(name)) is not None), None)
        except Ambiguous as error:
            return _Unavailable(Reason.AMBIGUOUS_VIDEO, str(error))
        if file is None:
            nearest = next((near for name in file_names if (near := self._nearest.find(name)) is not None), None)
            why = "no matching video file"
            return _Unavailable(Reason.MISSING_FILE, why if nearest is None else f"{why}, the nearest is {nearest}")
        number = self._builder.add_video(source_id, path=file.path, split=split, size_bytes=file.size_bytes)
        return _Unavailable(Reason.MISSING_FILE, "the video was rejected") if number is None else number
