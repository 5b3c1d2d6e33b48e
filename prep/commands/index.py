"""`prep index`: the column `video` with packets that stay in the source files, of a folder or of the manifest."""

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from clipmill.prep.commands.datasets import ADAPTERS
from clipmill.prep.commands.manifest import ONE_PLACE, Target, read_captioned
from clipmill.prep.core.make import make_column
from clipmill.prep.video.column import INDEX, ChunkRequest, IndexRecipe

if TYPE_CHECKING:
    from clipmill.manifests.storage.urls import Place
else:
    from pathlib import Path as Place


_SETTINGS, _REQUEST = IndexRecipe(), ChunkRequest()


def index(
    videos: Annotated[
        Place | None,
        ONE_PLACE,
        Parameter(help="Folder of videos, a path or a URL, which is read into the manifest first."),
    ] = None,
    /,
    *,
    settings: Annotated[IndexRecipe, Parameter(name="*")] = _SETTINGS,
    request: Annotated[ChunkRequest, Parameter(name="*")] = _REQUEST,
) -> None:
    """Read a folder into the manifest if there is one, and make the index."""
    if videos is not None:
        into = Target(request.data, "folder", videos, may_remove=False, as_json=False)
        with redirect_stdout(sys.stderr):  # the result of this command is the index
            read_captioned(ADAPTERS["folder"], None, into=into, has_next=False)
    make_column(INDEX, settings, request)


index.__doc__ = INDEX.help
