"""`ClipQuery`: which clips of a data folder are opened, and how they are shown and loaded. It is passed on whole."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.shards.columns import VIDEO
from clipmill.train.config.clips import ClipSettings
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.decoding.clip import ClipShape, Views
from clipmill.train.data.decoding.reading import DecodeRule
from clipmill.train.data.folders import DataFolder
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.query import DataQuery, clip_shape

if TYPE_CHECKING:
    from clipmill.train.data.remote import RemoteTars


@dataclass(frozen=True)
class ClipQuery:
    """A question to a data folder.

    Attributes:
        data_dir: the folder, or the local copy of its small files if its tars are elsewhere.
        split: split of the videos.
        shape: how clips are sampled, cropped and resized.
        loading: batches, threads and this rank's share.
        decode: how frames are decoded.
        tars: reads the tars, if they are not in `data_dir`.
        where: an expression that selects samples (`clipmill.shards.where`); None for all.
    """

    data_dir: Path
    split: str
    shape: ClipShape
    loading: LoaderSettings
    decode: DecodeRule = "packets"
    tars: "RemoteTars | None" = None
    where: str | None = None

    def open_chunks(self, *, has_captions: bool = False) -> ChunkSet:
        """Open the chunks of the split.

        Args:
            has_captions: whether these have captions, which conditions may be about.

        Raises:
            UserError: see `ChunkSet`.
        """
        return ChunkSet(
            self.data_dir,
            split=self.split,
            rule=self.decode,
            tars=self.tars,
            where=self.where,
            has_captions=has_captions,
        )

    def nothing(self, chunks: ChunkSet) -> tuple[str, str]:
        """Message and hint of the error if none of the clips can be shown."""
        hint = (
            "see prep status; captions and labels come from prep manifest"
            if not chunks.selection.text
            else "use a weaker condition: it must hold for all chunks that a clip touches, and a caption without times "
            "touches all chunks of its video"
        )
        return f"no clip of split {self.split!r} can be shown", hint


def clip_query(settings: ClipSettings, folder: DataFolder, *, split: str, loading: LoaderSettings) -> ClipQuery:
    """The clips of a folder that settings ask for, as training shows them."""
    return ClipQuery(
        folder.path,
        split=split,
        shape=clip_shape(settings, views=Views()),
        loading=loading,
        decode=settings.decode,
        tars=folder.tars,
        where=settings.selection,
    )


def query_clips(query: DataQuery) -> ClipQuery:
    """The clips of the data folder that a task asks for; raises UserError if the folder cannot be read."""
    folder = query.open_folder(column=VIDEO)
    clips = clip_query(query.settings, folder, split=query.split, loading=query.loading)
    return replace(clips, shape=query.shape)
