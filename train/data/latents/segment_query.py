"""`SegmentQuery`: which segments of latents of a data folder are opened. It is passed on whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clipmill.train.data.classes import ClassList
from clipmill.train.data.latents.segments import Tails
from clipmill.train.data.loader import LoaderSettings

if TYPE_CHECKING:
    from clipmill.train.data.remote import RemoteTars

ShownCaptions = Literal["none", "stored", "words"]


@dataclass(frozen=True, kw_only=True)
class SegmentQuery:
    """A query of segments.

    Attributes:
        data_dir: folder that prep made.
        split: of the manifest.
        segment: Length of a segment in seconds, a whole number of frames. None: the stored segments of a VAE of
            videos, and DEFAULT_SEGMENT of other latents.
        captions: what samples have of captions: nothing, stored embeddings, or words. Segments without it are excluded.
        loading: batches and this rank's share. The threads read what has to be verified, fetched or unpacked; four keep
            a disk busy, and one verifies several gigabytes per second. Memory is pinned if there is a GPU, unless
            batches that are in use are kept.
        tails: what to do with the frames after the last full segment of a chunk: "drop", or "pad" with zeros (batches
            then have `num_frames`).
        sources: weights of the captions' sources (clipmill.train.config.data).
        classes: of labels, in place of captions; segments without any of them are excluded
            (clipmill.train.data.latents.labels).
        max_segments: at most this many samples of each video, spread evenly over it.
        where: an expression that selects segments, by chunks and captions (clipmill.shards.where); None for all.
        tars: reads the tars of a remote data folder, whose small files are in `data_dir`.
    """

    data_dir: Path = field(kw_only=False)
    split: str
    segment: str | None = None
    captions: ShownCaptions = "stored"
    loading: LoaderSettings = field(default_factory=LoaderSettings)
    tails: Tails = "drop"
    sources: str | None = None
    classes: Sequence[ClassList] = ()
    max_segments: int | None = None
    where: str | None = None
    tars: "RemoteTars | None" = None

    def __post_init__(self) -> None:
        if self.classes and self.captions != "none":
            raise ValueError(f"samples with labels have no captions: {self.captions}")
