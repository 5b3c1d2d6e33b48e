"""`prep status`, `verify`, `inspect`, `diff` and `gc`: maintenance of a shard set."""

import json as json_module
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import FailedWork, UserError, UserErrors
from clipmill.manifests.formatting import count_noun
from clipmill.prep.core.request import Data, Json
from clipmill.prep.registry import column_named, column_names, columns
from clipmill.shards.columns import VIDEO

VariantName = Annotated[
    str | None, Parameter(name="--variant", help="Variant name, as shown by prep status. Default: the current variant.")
]
if TYPE_CHECKING:
    AnyColumn = str
else:
    AnyColumn = Literal[column_names()]
ColumnName = Annotated[AnyColumn | None, Parameter(name="--column", help="Column. Default: all columns with shards.")]
_MAX_FINDINGS = 200


def status(*, data: Data = Path("data"), json: Json = False) -> None:
    """Show the videos, the variants of each column, failures, the progress of running commands, and the next step.

    Example:

        prep status
    """
    from clipmill.manifests.progress import Activity
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.upkeep.status import read_status
    from clipmill.prep.upkeep.status_text import repair_command, status_text
    from clipmill.prep.upkeep.texts import repair_text

    with Activity("reading the records"):
        found = read_status(require_data_folder(data))
    print(json_module.dumps(found.values(), indent=1) if json else status_text(found))
    if found.damaged:
        raise UserErrors(found.damaged)
    if found.num_problems:
        count = "1 shard is" if found.num_problems == 1 else f"{found.num_problems} shards are"
        messages = (why for of in found.columns.values() for _, _, why in of.problems)
        raise FailedWork(f"{count} missing or damaged; {repair_text(repair_command(found), messages)}")


def verify(
    *,
    column: ColumnName = None,
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
    from clipmill.prep.upkeep.records import check_folder_records, check_variant_records
    from clipmill.prep.upkeep.texts import failure_text, records_text, repairs_text, verified_text
    from clipmill.prep.upkeep.verify import verify_variant
    from clipmill.shards.dataset import DamagedDataset, current_variant
    from clipmill.shards.reader import Variant

    data_dir = require_data_folder(data)
    reading = "reading the records"
    with Activity(reading):
        if (mirror := mirror_of(data_dir)) is not None:
            mirror.drop_content()  # a copy of before says nothing about the bucket
        records = check_folder_records(data_dir)
    if column is not None or variant is not None:
        selected = [column_named(column or VIDEO)]
    else:
        try:
            selected = [known for known in columns() if current_variant(data_dir, known.name) is not None]
        except DamagedDataset:
            selected = []  # reported below as one of the damaged records
        if not selected and not records:
            selected = [column_named(VIDEO)]
    with Activity(reading):
        opened = {known.name: Variant.open(data_dir, column=known.name, variant=variant) for known in selected}
        for known in selected:
            records += check_variant_records(opened[known.name], column=known, data_dir=data_dir)
    found = {}
    for known in selected:
        with Activity(f"verifying {known.name} shards") as now:
            found[known.name] = verify_variant(
                opened[known.name],
                column=known,
                deep=deep,
                num_workers=len(os.sched_getaffinity(0)),
                on_shard=now.counter(f"verifying {known.name} shards"),
                on_deep_shard=now.counter(f"checking samples of {known.name} shards"),
            )
    if json:
        values = {name: asdict(verified) for name, verified in found.items()}
        print(json_module.dumps({**values, "records": [asdict(record) for record in records]}, indent=1))
    else:
        for line in records_text(records):
            print(line)
        for known in selected:
            print(verified_text(found[known.name], column=known, max_findings=_MAX_FINDINGS))
    damaged = [known for known in selected if found[known.name].num_problems]
    if damaged or records:
        texts = [failure_text(found[of.name], opened[of.name], column=of, data_dir=data_dir) for of in damaged]
        raise FailedWork("\n".join([*repairs_text(records), *texts]))


def inspect(
    key: Annotated[
        str | None,
        Parameter(
            help="Key of a sample, such as bikes_000015000, or a file name or the beginning of a key that only one "
            "sample matches. Default: show all shards."
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
        Parameter(help="Expression such as 'motion > 0.2 and cuts = 0', which selects what the page of --html shows."),
    ] = None,
    chunks: Annotated[
        int | None,
        Parameter(
            help="Number of chunks to show, drawn evenly over splits and videos, 150 on each page; 1 or more. Default: "
            "150."
        ),
    ] = None,
    column: Annotated[AnyColumn, Parameter(name="--column", help="Column to show.")] = VIDEO,
    variant: VariantName = None,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Show the shards of a variant or the details of one sample, or write a page of chunks or of scores.

    Examples:

        prep inspect
        prep inspect bikes_000015000
        prep inspect --html chunks.html
        prep inspect --html val.html --chunks 1000 --where "split = 'val'"
        prep inspect --column scores --html scores.html --where "cuts = 0"
    """
    from clipmill.manifests.progress import Activity
    from clipmill.prep.core.bucket_tars import tars_of
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.core.report import show
    from clipmill.prep.upkeep.inspection import sample_report, set_report
    from clipmill.shards.reader import Variant

    data_dir, known = require_data_folder(data), column_named(column)
    opened = Variant.open(data_dir, column=column, variant=variant, tars=tars_of(data_dir))
    if html is not None:
        from clipmill.prep.core.pages import PageRequest
        from clipmill.prep.core.work import work_of

        if key is not None:
            is_column = key in {each.name for each in columns()}
            raise UserError(
                f"--html shows all chunks and cannot be combined with the key {key}",
                hint=f"use --column {key}" if is_column else "omit the key, or omit --html",
            )
        write_page = work_of(known).write_page
        if write_page is None:
            with_page = " or ".join(column.name for column in columns() if column.page)
            raise UserError(
                f"--html does not support column {column}", hint=f"omit --html, or use --column {with_page}"
            )
        if chunks is not None and chunks < 1:
            raise UserError(f"--chunks is {chunks}", hint="give a number of 1 or more")
        writing = f"writing {html}"
        with Activity(writing) as now:
            request = PageRequest(html, where, chunks, now.counter(f"{writing}, reading chunks"))
            report = write_page(opened, request)
        show(report, json=json)
        return
    for flag, value in (("--where", where), ("--chunks", chunks)):
        if value is not None:
            raise UserError(f"{flag} has no effect without a page", hint=f"add --html PAGE, or omit {flag}")
    with Activity(f"reading the indexes of {opened.directory.name}"):
        if key is None:
            report = set_report(opened, column=known)
        else:
            report = sample_report(opened, key, column=known, data_dir=data_dir)
    show(report, json=json)


def diff(
    first: Annotated[str, Parameter(help="Variant, by the name of its folder.")],
    second: Annotated[str, Parameter(help="Another variant of the same column.")],
    *,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Show what differs between two variants of a column: settings, samples, bytes, and values of 16 arrays.

    Example:

        prep diff b32-laion2b_s34b_b79k-0a1b2c3d tiny-4e5f6a7b
    """
    from clipmill.manifests.progress import Activity
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.core.report import show
    from clipmill.prep.upkeep.differences import variants_report

    with Activity("comparing the variants"):
        report = variants_report(require_data_folder(data), first, second)
    show(report, json=json)


def gc(
    *,
    dry_run: Annotated[bool, Parameter(help="List what would be removed, without removing it.", negative="")] = False,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Remove variants that are not current, unreferenced shards, and temporary files of killed commands.

    Files that do not belong to the format are never removed. Variants and shards of a column are kept while its current
    variant is incomplete, damaged or stale. A variant is also kept while its run has not finished, and while it has
    samples that the current one lacks because of failures that may pass.

    Example:

        prep gc --dry-run
    """
    from contextlib import ExitStack

    from clipmill.manifests.locks import folder_lock
    from clipmill.manifests.progress import Activity
    from clipmill.prep.core.data_folder import column_lock, require_data_folder
    from clipmill.prep.upkeep.bucket_garbage import abort, find_in_bucket
    from clipmill.prep.upkeep.garbage import find_garbage, remove
    from clipmill.prep.upkeep.texts import garbage_text, garbage_values

    data_dir = require_data_folder(data)
    with ExitStack() as held:
        for column in columns():
            held.enter_context(column_lock(data_dir, column=column.name))
        held.enter_context(folder_lock(data_dir))
        with Activity("looking for files that are no longer needed"):
            garbage, in_bucket = find_garbage(data_dir), find_in_bucket(data_dir)
        removing = f"removing {count_noun(len(garbage.items), 'file')}"
        with Activity(removing) as now:
            removed = None if dry_run else remove(garbage, on_item=now.counter(removing))
            abort([] if dry_run else in_bucket.uploads, data_dir)
    if json:
        print(json_module.dumps(garbage_values(garbage, in_bucket, removed), indent=1))
    else:
        print(garbage_text(garbage, in_bucket, removed, data_dir=data_dir))
    if removed is not None and removed.failed:
        path, why = removed.failed[0]
        raise FailedWork(f"{count_noun(len(removed.failed), 'file')} could not be removed; the first: {path}: {why}")
    sys.stdout.flush()
