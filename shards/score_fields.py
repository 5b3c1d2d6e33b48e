"""The scores of a chunk: the type, meaning and presentation of each score (docs/columns.md).

Each score is a field of the index and of the member. A score that is a number is also a name in `--where`, and `prep
verify --deep` checks its range. A score with a title has a section in the page that `prep inspect --column scores
--html` writes. `score_chunk` in `prep/scores/score.py` computes the values.
"""

from dataclasses import dataclass
from math import inf

import pyarrow as pa

from clipmill.shards.format import chunk_fields


@dataclass(frozen=True)
class Score:
    """A score. Its value may be unknown (null) for some chunks.

    Attributes:
        name: Name of the field.
        arrow_type: Arrow type: a number, or a list of numbers. `--where` cannot use lists.
        meaning: Meaning of the value, with its unit.
        title: Heading of the distribution of the values; empty if a distribution would be meaningless.
        upper_bound: Highest possible value. The lowest possible value of every number is 0.
        is_brief: True to show the value on the card of a chunk.
        sort_label: Label for sorting cards by this value. If empty, cards cannot be sorted by this value, and the page
            of the cards does not show its distribution.
    """

    name: str
    arrow_type: pa.DataType
    meaning: str
    title: str = ""
    upper_bound: float = inf
    is_brief: bool = False
    sort_label: str = ""

    @property
    def is_number(self) -> bool:
        """True if the value is a single number, not a list."""
        return not pa.types.is_list(self.arrow_type)

    @property
    def is_count(self) -> bool:
        """True if the values are integers."""
        return pa.types.is_integer(self.arrow_type)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Range of the values; None if they have no upper bound."""
        return None if self.upper_bound == inf else (0.0, self.upper_bound)


SCORES = (
    Score(
        "motion",
        pa.float32(),
        "mean displacement in frame heights per second",
        "Motion",
        is_brief=True,
        sort_label="most motion first",
    ),
    Score("camera_motion", pa.float32(), "part of the motion that one similarity transform explains", "Camera motion"),
    Score("object_motion", pa.float32(), "the remaining motion", "Object motion"),
    Score("sharpness", pa.float32(), "variance of the Laplacian of the luma", "Sharpness", is_brief=True),
    Score("brightness", pa.float32(), "mean luma, 0 to 1", "Brightness", upper_bound=1.0, is_brief=True),
    Score("black", pa.float32(), "fraction of the time", "Black", upper_bound=1.0),
    Score("frozen", pa.float32(), "fraction of the time", "Frozen", upper_bound=1.0),
    Score("letterbox", pa.float32(), "fraction of the frame that black bars cover", "Letterbox", upper_bound=1.0),
    Score("cuts", pa.int32(), "number of shot cuts", "Cuts", is_brief=True),
    Score("cut_times_s", pa.list_(pa.float32()), "time in the chunk of the first frame of each new shot"),
    Score(
        "speech", pa.float32(), "fraction of the time, in chunks with audio", "Speech", upper_bound=1.0, is_brief=True
    ),
    Score("phash", pa.uint64(), "perceptual hash of the middle frame, identical to ImageHash's phash"),
)
NUMBERS = tuple(score.name for score in SCORES if score.is_number)

# Fields of a `scores` index row, in addition to the key and the columns of the member.
SCORES_FIELDS = chunk_fields(*(pa.field(score.name, score.arrow_type) for score in SCORES))
