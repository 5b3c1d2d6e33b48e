"""Commands for an existing data folder: `prep status`, `verify`, `inspect`, `diff`, `gc`, `use` and `retry`."""

import json as json_module
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import FailedWork, UserError, UserErrors
from clipmill.manifests.formatting import count_noun, parse_age
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.prep.core.column import ENGINE_FLAGS
from clipmill.prep.core.make import retry_column
from clipmill.prep.core.request import EXECUTION, Data, Json, Request, ScratchSize
from clipmill.prep.registry import column_named, column_names, columns
from clipmill.shards.columns import VIDEO

VariantName = Annotated[
    str | None,
    Parameter(name="--variant", help="Name of a variant, as shown by prep status. Default: the current variant."),
]
if TYPE_CHECKING:
    AnyColumn = str
else:
    AnyColumn = Literal[column_names()]
_MAX_FINDINGS = 200


def status(*, data: Data = Path("data"), json: Json = False) -> None:
    """Show the videos, the variants of each column, failures, the progress of running commands, and the next step.

    Example:

        prep status
    """
    from clipmill.manifests.progress import Activity
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.upkeep.status import read_status, repair_command, status_text
    from clipmill.prep.upkeep.verify import repair_text

    with Activity("reading the records"):
        state = read_status(require_data_folder(data))
    print(json_module.dumps(state.values(), indent=1) if json else status_text(state))
    if state.damaged:
        raise UserErrors(state.damaged)
    if state.num_problems:
        count = "1 shard is" if state.num_problems == 1 else f"{state.num_problems} shards are"
        messages = (why for column in state.columns.values() for _, _, why in column.problems)
        raise FailedWork(f"{count} missing or damaged; {repair_text(repair_command(state), messages)}")
    if state.videos is not None and state.videos.is_indexed and state.videos.lost:
        count = count_noun(sum(state.videos.lost.values()), "source")
        raise FailedWork(f"{count} of the index can no longer be read; restore the files that are listed as lost")


def verify(
    *,
    column: Annotated[
        AnyColumn | None,
        Parameter(
            name="--column",
            help="Column to verify. Default: all columns with a current variant; with --variant, the column video.",
        ),
    ] = None,
    deep: Annotated[
        bool, Parameter(help="Also decode every frame of every chunk, and load every array.", negative="")
    ] = False,
    variant: VariantName = None,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Verify the checksums of all shards and records by reading every byte.

    Example:

        prep verify --deep
    """
    from clipmill.manifests.progress import Activity
    from clipmill.manifests.storage.mirrors import mirror_of
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.upkeep.verify import (
        check_folder_records,
        check_variant_records,
        failure_text,
        repairs_text,
        verified_text,
        verify_variant,
    )
    from clipmill.shards.dataset import DamagedDataset, current_variant
    from clipmill.shards.reader import Variant

    data_dir = require_data_folder(data)
    activity_text = "reading the records"
    with Activity(activity_text):
        if (mirror := mirror_of(data_dir)) is not None:
            mirror.drop_content()  # verify the content of the bucket rather than local copies
        records = check_folder_records(data_dir)
    if column is not None or variant is not None:
        selected_columns = [column_named(column or VIDEO)]
    else:
        try:
            selected_columns = [spec for spec in columns() if current_variant(data_dir, spec.name) is not None]
        except DamagedDataset:
            selected_columns = []  # the damage is in `records`
        if not selected_columns and not records:
            selected_columns = [column_named(VIDEO)]
    with Activity(activity_text):
        variants = {spec.name: Variant.open(data_dir, column=spec.name, variant=variant) for spec in selected_columns}
        for spec in selected_columns:
            records += check_variant_records(variants[spec.name], column=spec, data_dir=data_dir)
    results = {}
    for spec in selected_columns:
        with Activity(f"verifying {spec.name} shards") as activity:
            results[spec.name] = verify_variant(
                variants[spec.name],
                column=spec,
                deep=deep,
                num_workers=len(os.sched_getaffinity(0)),
                on_shard=activity.counter(f"verifying {spec.name} shards"),
                on_deep_shard=activity.counter(f"checking samples of {spec.name} shards"),
            )
    if json:
        values = {name: asdict(result) for name, result in results.items()}
        print(json_module.dumps({**values, "records": [asdict(record) for record in records]}, indent=1))
    else:
        for record in records:
            name = "" if record.path in record.message else f"{record.path}: "
            print(f"record  {name}{record.message}")
        for spec in selected_columns:
            print(verified_text(results[spec.name], column=spec, max_findings=_MAX_FINDINGS))
    damaged_columns = [spec for spec in selected_columns if results[spec.name].num_problems]
    if damaged_columns or records:
        texts = [
            failure_text(results[spec.name], variants[spec.name], column=spec, data_dir=data_dir)
            for spec in damaged_columns
        ]
        raise FailedWork("\n".join([*repairs_text(records), *texts]))


def inspect(
    key: Annotated[
        str | None,
        Parameter(
            help="Key of a sample, such as bikes_000015000. The beginning of a key or a file name is enough if only "
            "one sample matches. Default: show all shards."
        ),
    ] = None,
    *,
    html: Annotated[
        Path | None,
        Parameter(
            help="HTML file to write. "
            + " ".join(f"{column.name}: {column.page}." for column in columns() if column.page)
        ),
    ] = None,
    where: Annotated[
        str | None,
        Parameter(
            help="Expression that selects the samples on the page of --html, such as 'motion > 0.2 and cuts = 0'."
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        Parameter(
            help="Number of chunks on the page of --html, 1 or more, sampled evenly from splits and videos. "
            "More than 150 chunks are divided into several files. Default: 150."
        ),
    ] = None,
    column: Annotated[AnyColumn, Parameter(name="--column", help="Column to show.")] = VIDEO,
    variant: VariantName = None,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Show the shards of a variant or the details of a sample, or write an HTML page of chunks or scores.

    Examples:

        prep inspect
        prep inspect bikes_000015000
        prep inspect --html chunks.html
        prep inspect --html val.html --chunks 1000 --where "split = 'val'"
        prep inspect --column scores --html scores.html --where "cuts = 0"
    """
    from clipmill.manifests.progress import Activity
    from clipmill.prep.core.column_arrays import bucket_tars
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.core.report import show
    from clipmill.prep.upkeep.inspection import sample_report, variant_report
    from clipmill.shards.reader import Variant

    data_dir, spec = require_data_folder(data), column_named(column)
    opened_variant = Variant.open(data_dir, column=column, variant=variant, tars=bucket_tars(data_dir))
    if html is not None:
        from clipmill.prep.core.work import PageRequest, work_of

        if key is not None:
            is_column = key in {entry.name for entry in columns()}
            raise UserError(
                f"--html shows many chunks, and cannot be used with the key {key}",
                hint=f"use --column {key}" if is_column else "omit the key, or omit --html",
            )
        write_page = work_of(spec).write_page
        if write_page is None:
            with_page = " or ".join(column.name for column in columns() if column.page)
            raise UserError(
                f"--html does not support column {column}", hint=f"omit --html, or use --column {with_page}"
            )
        if chunks is not None and chunks < 1:
            raise UserError(f"--chunks {chunks} is below 1", hint="use a number of 1 or more")
        activity_text = f"writing {html}"
        with Activity(activity_text) as activity:
            request = PageRequest(html, where, chunks, activity.counter(f"{activity_text}, reading chunks"))
            report = write_page(opened_variant, request)
        show(report, json=json)
        return
    for flag, value in (("--where", where), ("--chunks", chunks)):
        if value is not None:
            raise UserError(f"{flag} has no effect without a page", hint=f"add --html PAGE, or omit {flag}")
    with Activity(f"reading the indexes of {opened_variant.directory.name}"):
        if key is None:
            report = variant_report(opened_variant, column=spec)
        else:
            report = sample_report(opened_variant, key, column=spec, data_dir=data_dir)
    show(report, json=json)


def diff(
    first: Annotated[str, Parameter(help="Name of a variant, as shown by prep status.")],
    second: Annotated[str, Parameter(help="Name of a different variant of the same column.")],
    *,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Compare two variants of a column: settings, samples, sizes, and the values of up to 16 arrays.

    Example:

        prep diff b32-laion2b_s34b_b79k-0a1b2c3d tiny-4e5f6a7b
    """
    from clipmill.manifests.progress import Activity
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.core.report import show
    from clipmill.prep.upkeep.inspection import variants_report

    with Activity("comparing the variants"):
        report = variants_report(require_data_folder(data), first, second)
    show(report, json=json)


def gc(
    *,
    dry_run: Annotated[
        bool,
        Parameter(
            help="Only list the files that would be removed, and the reason why each variant is kept.",
            negative="",
        ),
    ] = False,
    keep: Annotated[tuple[str, ...], Parameter(help="Name of a variant to keep. May be repeated.", negative="")] = (),
    older_than: Annotated[
        str | None,
        Parameter(
            help="Remove only variants that have not changed for at least this long, such as 7d or 12h. Default: no "
            "limit."
        ),
    ] = None,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Remove variants that are not current, unreferenced shards, and temporary files left by killed commands.

    Files that are not part of clipmill's data format are never removed. All variants and shards of a column are kept
    while the current variant of the column is incomplete, damaged or stale. A variant is also kept while its run is
    unfinished, while it has samples that the current variant lacks because of temporary failures, and while a process
    or an unfinished training run reads it.

    Examples:

        prep gc --dry-run
        prep gc --older-than 7d
    """
    from contextlib import ExitStack

    from clipmill.manifests.locks import folder_lock
    from clipmill.manifests.progress import Activity
    from clipmill.prep.core.data_folder import column_lock, require_data_folder
    from clipmill.prep.upkeep.garbage import (
        KeepRules,
        abort_uploads,
        find_bucket_garbage,
        find_garbage,
        garbage_text,
        garbage_values,
        remove,
    )
    from clipmill.shards.marks import exclude_new_readers

    min_age_s = 0.0 if older_than is None else parse_age(older_than, flag="--older-than")
    data_dir = require_data_folder(data)
    # Lock all columns, because the uncommitted files of a running command would be mistaken for garbage.
    with ExitStack() as locks:
        for column in columns():
            locks.enter_context(column_lock(data_dir, column=column.name))
        locks.enter_context(folder_lock(data_dir))
        rules = KeepRules(locks.enter_context(exclude_new_readers(data_dir)), keep, min_age_s)
        with Activity("looking for files that are no longer needed"):
            garbage, bucket_garbage = find_garbage(data_dir, rules), find_bucket_garbage(data_dir)
        activity_text = f"removing {count_noun(len(garbage.items), 'file')}"
        with Activity(activity_text) as activity:
            removal = None if dry_run else remove(garbage, on_item=activity.counter(activity_text))
            abort_uploads([] if dry_run else bucket_garbage.uploads, data_dir)
    if json:
        print(json_module.dumps(garbage_values(garbage, bucket_garbage, removal), indent=1))
    else:
        print(garbage_text(garbage, bucket_garbage, removal, data_dir=data_dir))
    if removal is not None and removal.failed:
        path, why = removal.failed[0]
        raise FailedWork(f"{count_noun(len(removal.failed), 'file')} could not be removed; the first: {path}: {why}")
    sys.stdout.flush()


def use(
    variant: Annotated[str, Parameter(help="Name of a variant, as shown by prep status.")],
    /,
    *,
    column: Annotated[
        AnyColumn | None,
        Parameter(
            name="--column",
            help="Column of the variant. Required only if several columns have a variant with this name.",
        ),
    ] = None,
    data: Data = Path("data"),
) -> None:
    """Make a variant the current variant of its column, so that training reads it. No file is removed.

    A training process that is already running keeps reading its variant. When the column's command runs again, it makes
    the variant with its settings current.

    Example:

        prep use h264-288p30-crf24-comb90-15s-dae13104
    """
    from clipmill.prep.core.data_folder import column_lock, require_data_folder
    from clipmill.prep.core.plan import problems_of
    from clipmill.shards.dataset import current_variant, list_variants, set_current_variant, variant_dir
    from clipmill.shards.reader import Variant

    data_dir = require_data_folder(data)
    specs = [spec for spec in columns() if column in (None, spec.name)]
    owners = [spec for spec in specs if variant in list_variants(data_dir, spec.name)]
    if not owners:
        raise UserError(f"there is no variant {variant} in {data_dir}", hint="run `prep status` to see the variants")
    if len(owners) > 1:
        names = ", ".join(spec.name for spec in owners)
        raise UserError(f"{variant} is a variant of several columns: {names}", hint="choose one with --column")
    name = owners[0].name
    with column_lock(data_dir, column=name):
        new_variant, former_name = Variant(variant_dir(data_dir, name, variant)), current_variant(data_dir, name)
        problems = problems_of(new_variant)
        if problems or not new_variant.shards():
            shards = ", ".join(f"shard {shard_id:06d} is {state}" for shard_id, (state, _) in problems.items())
            raise UserError(
                f"{variant} of {name} cannot be read: {shards or 'it has no shards'}",
                hint=f"first run prep {owners[0].command} with the settings of the variant, which `prep status` shows",
            )
        set_current_variant(data_dir, name, variant, keeps_unfinished=True)
    print(f"current {name}: {variant}" + (f" (previously {former_name})" if former_name not in (None, variant) else ""))


ColumnOfFailures = Annotated[AnyColumn, FIRST_RUN, Parameter(help="Column whose failures to retry.")]


@dataclass(frozen=True, kw_only=True)
class RetryRequest(Request):
    """Flags of `prep retry`. A column ignores flags that it does not support."""

    scratch_size: ScratchSize = None
    in_flight: Annotated[
        int | None,
        EXECUTION,
        FIRST_RUN,
        Parameter(help="Maximum number of parallel requests to a server, 1 to 4096. Default: as in the last run."),
    ] = None
    max_tokens_total: Annotated[
        int | None,
        EXECUTION,
        FIRST_RUN,
        Parameter(
            help="Maximum number of input and output tokens for the variant, including earlier runs. Default: as in "
            "the last run."
        ),
    ] = None


def retry(
    *,
    column: ColumnOfFailures = VIDEO,
    only: Annotated[
        list[str] | None,
        FIRST_RUN,
        Parameter(help="Failure codes to retry, as shown by prep status. Default: all.", negative=""),
    ] = None,
    variant: Annotated[
        str | None,
        FIRST_RUN,
        Parameter(
            help="Variant whose failures to retry. Default: the unfinished variant of the last run if it has "
            "failures, otherwise the current variant."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        FIRST_RUN,
        Parameter(
            help="Local folder or file of the model weights. Columns without a model ignore this flag. Default: as in "
            "the last run."
        ),
    ] = None,
    request: Annotated[RetryRequest, Parameter(name="*")] = RetryRequest(),
) -> None:
    """Retry the failures of a column, for example after repairing a source video.

    If the last run left a variant unfinished because of failures, these failures are retried, and the variant then
    becomes current. Otherwise, the failures of the current variant are retried. --variant selects a different variant.

    Example:

        prep retry --only timeout
    """
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.core.failure_list import FAILURES_FILE
    from clipmill.prep.core.failures import FailureCode
    from clipmill.prep.core.variants import stored_request
    from clipmill.shards.dataset import unfinished_variant, variant_dir
    from clipmill.shards.reader import Variant

    codes = frozenset(only or FailureCode)
    if unknown_codes := sorted(codes - set(FailureCode)):
        raise UserError(
            f"unknown failure code: {', '.join(unknown_codes)}", hint=f"use one of {', '.join(FailureCode)}"
        )
    data_dir = require_data_folder(request.data)
    unfinished = unfinished_variant(data_dir, column)
    # A killed run has not written its list of failures, and its variant may no longer be needed.
    has_failed = unfinished is not None and (variant_dir(data_dir, column, unfinished) / FAILURES_FILE).exists()
    if variant is None and has_failed:
        variant = unfinished
        sys.stderr.write(f"note: retrying {variant}, which is not the current variant\n")
    opened_variant = Variant.open(data_dir, column=column, variant=variant)
    stored = stored_request(opened_variant)
    if request.engine is None and request.address is None:  # use the engine of the run that failed
        request = replace(request, **{name: stored[name] for name in ENGINE_FLAGS if name in stored})
    request = replace(request, retry_codes=codes, only_variant=opened_variant.directory.name)
    retry_column(column_named(column), stored, weights=weights, request=request)
