"""`SegmentQuery`: which segments of latents of a data folder are opened. It is passed on whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clipmill.train.data.classes import ClassList
from clipmill.train.data.latents.segments import Tails
from clipmill.train.data.remote import RemoteTars

Captions = Literal["none", "stored", "words"]


@dataclass(frozen=True, kw_only=True)
class SegmentQuery:
    """A question to the latents of a data folder; for the attributes see `LatentLoader`.

    Attributes:
        captions: what samples have of captions: nothing, stored embeddings, or words.
    """

    data_dir: Path
    split: str
    segment: str
    captions: Captions
    tails: Tails = "drop"
    sources: str | None = None
    classes: Sequence[ClassList] = ()
    max_segments: int | None = None
    where: str | None = None
    tars: RemoteTars | None = None
