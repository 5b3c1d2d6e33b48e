"""Pictures of chunks for the page of scores: single frames of the video variant that was scored."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import cv2
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.keys import chunk_key
from clipmill.prep.core.chunk_frames import decode_frames
from clipmill.prep.core.chunk_input import frame_rate, read_chunk, seconds_of
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.core.plan import is_readable
from clipmill.shards.pages.figures import data_uri
from clipmill.shards.reader import CommittedShard, Variant

_HEIGHT_PX = 108
_JPEG_QUALITY = 80


@dataclass(frozen=True)
class Thumbnail:
    """A picture as a JPEG file in a data URI, or the reason why there is none."""

    source: str | None
    width: int = 0
    height: int = 0
    problem: str | None = None


class Chunks:
    """The rows of the merged table (clipmill.shards.scores), and the chunks behind them.

    Args:
        table: the merged table.
        video: the variant of video that was scored.
    """

    def __init__(self, table: pa.Table, *, video: Variant) -> None:
        self.table = table
        self._shards = [shard for shard in video.shards() if is_readable(shard)]
        self._found: dict[int, tuple[CommittedShard, int] | None] = {}

    def key(self, row: int) -> str:
        """Return the key of a chunk."""
        return chunk_key(self.table["video_id"][row].as_py(), self.table["start_ms"][row].as_py())

    def copy_of(self, row: int) -> str | None:
        """Return the key of the chunk of an earlier video that a chunk looks like; None if there is none."""
        first = self.table["duplicate_of"][row].as_py()
        return None if first < 0 else self.key(first)

    def duration_s(self, row: int) -> float | None:
        """Return the duration of a chunk; None if it is not in the video column, or damaged."""
        found = self._find(row)
        if found is None:
            return None
        shard, number = found
        return float(seconds_of(shard.index, number))

    def thumbnails(
        self,
        middles: Collection[int],
        moments_s: Mapping[int, Sequence[float]],
        *,
        on_picture: Callable[[int, int], None],
    ) -> dict[tuple[int, float | None], Thumbnail]:
        """Return pictures by (row, seconds in the chunk), the seconds None for the middle frame.

        Args:
            middles: rows whose middle frame is wanted.
            moments_s: row -> times of further frames.
        """
        pictures: dict[tuple[int, float | None], Thumbnail] = {}
        rows = dict.fromkeys([*middles, *moments_s])
        for done, row in enumerate(rows, 1):
            wanted: list[float | None] = [*([None] if row in middles else []), *moments_s.get(row, ())]
            pictures |= {(row, moment): picture for moment, picture in self._of_chunk(row, wanted).items()}
            on_picture(done, len(rows))
        return pictures

    def _of_chunk(self, row: int, wanted: Sequence[float | None]) -> dict[float | None, Thumbnail]:
        found = self._find(row)
        if found is None:
            return dict.fromkeys(wanted, Thumbnail(None, problem="not in the video column, or damaged there"))
        shard, number = found
        index, fps = shard.index, frame_rate(shard.index, number)
        last = index["num_frames"][number].as_py() - 1
        frames = {
            moment: (last + 1) // 2 if moment is None else min(last, round(Fraction(moment) * fps)) for moment in wanted
        }
        needed = sorted(set(frames.values()))
        try:
            decoded = decode_frames(
                read_chunk(shard, number),
                needed,
                fps=fps,
                packet_frame=index["packet_frame"][number].as_py(),
                packet_flags=index["packet_flags"][number].as_py(),
            )
            pictures = {frame: _thumbnail(picture) for frame, picture in zip(needed, decoded, strict=True)}
        except SourceFailure as failure:
            return dict.fromkeys(wanted, Thumbnail(None, problem=f"cannot be shown: {failure.message}"))
        return {moment: pictures[frame] for moment, frame in frames.items()}

    def _find(self, row: int) -> tuple[CommittedShard, int] | None:
        if row not in self._found:
            key = self.key(row)
            places = ((shard, pc.index(shard.index["key"], key).as_py()) for shard in self._shards)
            self._found[row] = next(((shard, number) for shard, number in places if number >= 0), None)
        return self._found[row]


def _thumbnail(frame: Any) -> Thumbnail:
    width = max(2, round(frame.width * _HEIGHT_PX / frame.height))
    picture = frame.reformat(width=width, height=_HEIGHT_PX, format="bgr24", interpolation="AREA").to_ndarray()
    _, encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
    return Thumbnail(data_uri(encoded.tobytes(), "image/jpeg"), width, _HEIGHT_PX)
