"""Adapter for captions in a text file with lines `NAME<tab>TEXT`; its command is `prep manifest names`."""

from collections.abc import Sequence
from pathlib import Path

from clipmill.manifests.adapters.annotations import Reason
from clipmill.manifests.adapters.reading import Origin, Reading, begin_reading
from clipmill.manifests.storage.urls import Location
from clipmill.prep.commands.datasets import Adapter


def read_names(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "names", skip: Location | None = None
) -> Reading:
    """Read the videos in the lines of text files; lines of a file whose name starts with `val` are held out.

    Raises:
        UserError: There are no videos.
    """
    builder, flags = begin_reading(dataset, directory, skip=skip)
    for path in annotations:
        builder.begin_annotations(path)
        split = "val" if path.name.startswith("val") else "train"
        for row, line in enumerate(path.read_text().splitlines()):
            name, tab, text = line.partition("\t")
            if not tab:
                builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail="expected NAME<tab>TEXT")
            elif (video := flags.index_of(name, split=split, file=path, row=row)) is not None:
                builder.add_caption(video, text, Origin(path, "human", row))
    return builder.build()


NAMES = Adapter(
    name="names",
    reader="clipmill_example.names:read_names",
    takes="annotations",
    text="""Read text files with a line NAME<tab>TEXT for each caption.

    Example: prep manifest names VIDEOS --annotations train.txt val.txt

    Parameters
    ----------
    directory
        Folder of the videos.
    """,
)
