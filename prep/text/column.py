"""Flags and `ColumnSpec` of the column `text`."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from clipmill.manifests.settings import Range
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.recipe import KEPT
from clipmill.prep.core.request import EXECUTION, ModelRequest
from clipmill.prep.text.recipe import TEXT, TEXT_RECIPE_SCHEMA, TextSettings, settings_of


@dataclass(frozen=True, kw_only=True)
class TextRequest(ModelRequest):
    """Flags of `prep text` that are not settings, such as the batch size."""

    batch: Annotated[
        int | None,
        EXECUTION,
        KEPT,
        Range(least=1),
        Parameter(help="Batch size of the text encoder in texts, 1 or more. Default: 32; 256 for --clip on a GPU."),
    ] = None


COLUMN = ColumnSpec(
    name=TEXT,
    package="clipmill.prep.text",
    work="clipmill.prep.text.work:WORK",
    check_sample="clipmill.prep.text.captions:check_text",
    settings=TextSettings,
    schema=TEXT_RECIPE_SCHEMA,
    request="clipmill.prep.text.column:TextRequest",
    help="""Encode each unique caption of the manifest once, with a CLIP text tower from open_clip or a T5 encoder.

    --clip stores one embedding per text; --encoder t5:NAME stores a sequence, one vector per token, without padding.
    Each run encodes only new captions. The command needs the manifest, but no chunks. A different text encoder creates
    a new variant, and the existing variant is kept.

    Example:

        prep text --clip ViT-B-32:laion2b_s34b_b79k
    """,
    plan_help="""Print what `prep text` would do with the same settings, and why (dry run).

    Example:

        prep plan text --clip ViT-B-32:laion2b_s34b_b79k
    """,
    sample="video",
    has_hours=False,
    read_settings=settings_of,
)
