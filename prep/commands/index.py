"""`prep index`: make the column `video` without encoding. The packets of the chunks stay in the source files."""

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
from clipmill.prep.commands.manifest import ONE_LOCATION, Target, read_captioned
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
        ONE_LOCATION,
        Parameter(help="Folder of videos (path or URL) to read into the manifest first."),
    ] = None,
    /,
    *,
    settings: Annotated[IndexRecipe, Parameter(name="*")] = _SETTINGS,
    request: Annotated[ChunkRequest, Parameter(name="*")] = _REQUEST,
) -> None:
    """Read the folder into the manifest, if one is passed, and make the index."""
    if videos is not None:
        _require_no_loss(request.data, videos)
        into = Target(request.data, "folder", videos, allows_removal=False, as_json=False)
        with redirect_stdout(sys.stderr):  # standard output is for the report on the index
            read_captioned(ADAPTERS["folder"], None, into=into, has_next=False)
    make_column(INDEX, settings, request)


index.__doc__ = INDEX.help


def _require_no_loss(data: Path, videos: "Location") -> None:
    """Check that reading a folder into the manifest does not remove captions, or videos from a different dataset.

    Raises:
        UserError: The folder is a LeRobot dataset, which requires a different command; or the manifest already contains
            videos of the folder that have captions or belong to a different dataset.
    """
    if not is_remote(str(videos)) and (Path(videos) / "meta" / "info.json").is_file():
        raise UserError(
            f"{videos} is a LeRobot dataset, which prep index cannot read",
            hint=f"run prep manifest lerobot {videos}, then prep index without the folder",
        )
    if not has_manifest(data):
        return
    table = read_videos(data, columns=["path", "dataset", "num_captions"])
    folder = str(videos) if is_remote(str(videos)) else str(Path(videos).resolve())
    is_inside = pc.starts_with(table["path"], f"{folder.rstrip('/')}/")
    is_at_risk = pc.or_(pc.greater(table["num_captions"], 0), pc.not_equal(table["dataset"], "folder"))
    if pc.any(pc.and_(is_inside, is_at_risk)).as_py():
        raise UserError(
            f"the manifest of {data} already contains videos of {videos} with captions or in a different dataset",
            hint="run prep index without the folder",
        )
