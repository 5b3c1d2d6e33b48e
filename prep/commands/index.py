"""`prep index`: make the column `video` without encoding: the packets of its chunks stay in the source files."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pyarrow.compute as pc
from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.store import has_manifest, read_videos
from clipmill.prep.commands.datasets import ADAPTERS
from clipmill.prep.commands.manifest import ONE_PLACE, Target, read_captioned
from clipmill.prep.core.make import make_column
from clipmill.prep.video.column import INDEX, ChunkRequest, IndexRecipe

if TYPE_CHECKING:
    from clipmill.manifests.storage.urls import Location
else:
    Location = Path


_SETTINGS, _REQUEST = IndexRecipe(), ChunkRequest()


def index(
    videos: Annotated[
        Location | None,
        ONE_PLACE,
        Parameter(help="Folder of videos, a path or a URL, which is read into the manifest first."),
    ] = None,
    /,
    *,
    settings: Annotated[IndexRecipe, Parameter(name="*")] = _SETTINGS,
    request: Annotated[ChunkRequest, Parameter(name="*")] = _REQUEST,
) -> None:
    """Read a folder into the manifest if one is passed, and make the index."""
    if videos is not None:
        _require_new(request.data, videos)
        into = Target(request.data, "folder", videos, may_remove=False, as_json=False)
        with redirect_stdout(sys.stderr):  # standard output is for the result of this command, the index
            read_captioned(ADAPTERS["folder"], None, into=into, has_next=False)
    make_column(INDEX, settings, request)


index.__doc__ = INDEX.help


def _require_new(data: Path, videos: "Location") -> None:
    """Check that reading a folder into the manifest would not lose captions, or videos of a different dataset.

    Raises:
        UserError: The manifest lists videos of the folder with captions or in a different dataset, or the folder is a
            LeRobot dataset, which has its own command.
    """
    if not is_remote(str(videos)) and (Path(videos) / "meta" / "info.json").is_file():
        raise UserError(
            f"{videos} is a LeRobot dataset", hint=f"read it with prep manifest lerobot {videos}, then run prep index"
        )
    if not has_manifest(data):
        return
    table = read_videos(data, columns=["path", "dataset", "num_captions"])
    folder = str(videos) if is_remote(str(videos)) else str(Path(videos).resolve())
    is_inside = pc.starts_with(table["path"], f"{folder.rstrip('/')}/")
    would_be_lost = pc.or_(pc.greater(table["num_captions"], 0), pc.not_equal(table["dataset"], "folder"))
    if pc.any(pc.and_(is_inside, would_be_lost)).as_py():
        raise UserError(
            f"the manifest of {data} has the videos of {videos} already, with captions or from another dataset",
            hint="omit the folder: prep index",
        )
