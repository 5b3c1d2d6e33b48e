"""The `ChunkWork` of the column `captions`."""

from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.plugins import import_late, import_object
from clipmill.prep.captions.answers import ANSWER_FILE, ANSWERS_FOLDER
from clipmill.prep.captions.recipe import CaptionsSettings, local_weights, resolve, variant_name
from clipmill.prep.captions.sample import EXTENSION
from clipmill.prep.captions.table import TABLE_FILE, caption_table_problem, publish_caption_table
from clipmill.prep.core.chunk_work import ChunkWork
from clipmill.prep.core.column import data_flags
from clipmill.prep.core.work import MERGED_TABLE, ExtraFile, ExtraFolder
from clipmill.shards.columns import CAPTIONS
from clipmill.shards.format import CAPTIONS_FIELDS
from clipmill.shards.reader import Variant

if TYPE_CHECKING:
    from clipmill.prep.core.chunk_columns import ChunksPlan
    from clipmill.prep.core.request import Request


def _require(settings: CaptionsSettings) -> None:
    from clipmill.prep.captions.endpoint import require_client

    settings.with_prompt()
    if settings.endpoint is not None:
        require_client()


def _on_plan(plan: "ChunksPlan", request: "Request") -> None:
    if request.trial:
        import_object("clipmill.prep.captions.run:run_trial")(plan, request)


def _next_command(data: Path) -> list[str]:
    table = Variant.open(data, column=CAPTIONS).directory / TABLE_FILE
    return ["prep", "manifest", "captions", str(table), *data_flags(data)]


WORK = ChunkWork(
    fields=CAPTIONS_FIELDS,
    extension=EXTENSION,
    make=import_late("clipmill.prep.captions.worker:make_captions"),
    require=_require,
    resolve=resolve,
    name=variant_name,
    weights=local_weights,
    workers=import_late("clipmill.prep.captions.run:choose_workers"),
    more=import_late("clipmill.prep.captions.run:other_journals"),
    on_plan=_on_plan,
    is_function_of_plan=False,  # the text of an answer is not
    estimate=import_late("clipmill.prep.captions.report:estimate"),
    summary=import_late("clipmill.prep.captions.report:summary"),
    has_cpu_speed=False,
    # A damaged line of a journal is as if there were none.
    extra_folders=(ExtraFolder(ANSWERS_FOLDER, ANSWER_FILE, lambda path: True),),
    extra_files=(MERGED_TABLE, ExtraFile(TABLE_FILE, caption_table_problem, publish_caption_table)),
    sample_facts=import_late("clipmill.prep.captions.run:sample_facts"),
    next_command=_next_command,
)
