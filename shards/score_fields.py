"""The scores of a chunk, one row each: type, meaning and presentation (docs/columns.md).

A score added here becomes a field of the index and of the member, a name for `--where`, a section of the page that
`prep inspect --column scores --html` writes, and a range that `prep verify --deep` checks. `score_chunk` in
`prep/scores/score.py` computes its value.
"""

from dataclasses import dataclass
from math import inf

import pyarrow as pa

from clipmill.shards.format import chunk_fields


@dataclass(frozen=True)
class Score:
    """A score, whose value is known for most chunks; null where unknown.

    Attributes:
        name: Name of the field.
        kind: Arrow type: a number, or a list of numbers. Lists are details that expressions cannot use.
        meaning: Meaning of the value, with its unit.
        title: Heading of the value's distribution; empty if a distribution would be meaningless.
        most: Upper bound; the lower bound of every number is 0.
        is_brief: Show the value on the card of a chunk.
        order: Label of the sort order of cards by this value. If empty, cards are not sorted by the value, and their
            page does not show its distribution.
    """

    name: str
    kind: pa.DataType
    meaning: str
    title: str = ""
    most: float = inf
    is_brief: bool = False
    order: str = ""

    @property
    def is_number(self) -> bool:
        """True if a chunk has a single value, not a list."""
        return not pa.types.is_list(self.kind)

    @property
    def is_count(self) -> bool:
        """True if the values are integers."""
        return pa.types.is_integer(self.kind)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Range of the values, or None if they have no upper bound."""
        return None if self.most == inf else (0.0, self.most)


SCORES = (
    Score(
        "motion",
        pa.float32(),
        "mean displacement in frame heights per second",
        "Motion",
        is_brief=True,
        order="most motion first",
    ),
    Score("camera_motion", pa.float32(), "part of the motion that one similarity transform explains", "Camera motion"),
    Score("object_motion", pa.float32(), "the remaining motion", "Object motion"),
    Score("sharpness", pa.float32(), "variance of the Laplacian of the luma", "Sharpness", is_brief=True),
    Score("brightness", pa.float32(), "mean luma, 0 to 1", "Brightness", most=1.0, is_brief=True),
    Score("black", pa.float32(), "fraction of the time", "Black", most=1.0),
    Score("frozen", pa.float32(), "fraction of the time", "Frozen", most=1.0),
    Score("letterbox", pa.float32(), "fraction of the frame that black bars cover", "Letterbox", most=1.0),
    Score("cuts", pa.int32(), "number of shot cuts", "Cuts", is_brief=True),
    Score("cut_times_s", pa.list_(pa.float32()), "time in the chunk of the first frame of each new shot"),
    Score("speech", pa.float32(), "fraction of the time, in chunks with audio", "Speech", most=1.0, is_brief=True),
    Score("phash", pa.uint64(), "perceptual hash of the middle frame, identical to ImageHash's phash"),
)
NUMBERS = tuple(score.name for score in SCORES if score.is_number)

# Fields of a `scores` index row in addition to key and member.
SCORES_FIELDS = chunk_fields(*(pa.field(score.name, score.kind) for score in SCORES))
