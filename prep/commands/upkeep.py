"""`prep status`, `verify`, `inspect` and `gc`: looking after a shard set."""

import json as json_module
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from manifests.errors import FailedWork, UserError
from prep.core.options import Data, Json

VariantName = Annotated[
    str | None, Parameter(name="--variant", help="Variant to look at, as `prep status` names it; else the current one.")
]
ColumnName = Annotated[
    Literal["video", "latents", "text"] | None,
    Parameter(name="--column", help="Column to look at; else all there are."),
]
_MAX_FINDINGS = 200


def status(*, data: Data = Path("data"), json: Json = False) -> None:
    """Say what is there, what failed, how far a running `prep chunk` is, and what to do next.

    Example: prep status
    """
    from prep.core.data_folder import require_data_folder
    from prep.upkeep.status import read_status
    from prep.upkeep.status_text import repair_command, status_text

    found = read_status(require_data_folder(data))
    print(json_module.dumps(found.values(), indent=1) if json else status_text(found))
    if found.num_problems:
        count = f"{found.num_problems} shards are" if found.num_problems > 1 else "1 shard is"
        raise FailedWork(f"{count} missing or damaged; made again by: {repair_command(found)}")


def verify(
    *,
    column: ColumnName = None,
    deep: Annotated[bool, Parameter(help="Also decode every frame, and load every array.", negative="")] = False,
    variant: VariantName = None,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Read every byte of every shard and every record, and compare it with its checksum.

    Example: prep verify --deep
    """
    from prep.core.data_folder import COLUMNS, VIDEO, require_data_folder
    from prep.core.progress import CountProgress
    from prep.upkeep.records import check_folder_records, check_variant_records
    from prep.upkeep.verify import verify_variant
    from prep.upkeep.verify_text import failure_text, records_text, repairs_text, verified_text
    from shards.dataset import DamagedDataset, current_variant
    from shards.reader import Variant

    data_dir = require_data_folder(data)
    records = check_folder_records(data_dir)
    if variant is not None:
        columns = [column or VIDEO]
    elif column is not None:
        columns = [column]
    else:
        try:
            columns = [name for name in COLUMNS if current_variant(data_dir, name) is not None]
        except DamagedDataset:
            columns = []  # among the records
        if not columns and not records:
            columns = [VIDEO]
    opened = {name: Variant.open(data_dir, column=name, variant=variant) for name in columns}
    for name, of in opened.items():
        records += check_variant_records(of, column=name, data_dir=data_dir)
    found = {
        name: verify_variant(
            of,
            deep=deep,
            num_workers=len(os.sched_getaffinity(0)),
            on_shard=CountProgress(f"reading shards of {name}"),
            on_deep_shard=CountProgress(f"looking into shards of {name}"),
        )
        for name, of in opened.items()
    }
    if json:
        values = {name: asdict(verified) for name, verified in found.items()}
        print(json_module.dumps({**values, "records": [asdict(record) for record in records]}, indent=1))
    else:
        for line in records_text(records):
            print(line)
        for name, verified in found.items():
            print(verified_text(verified, column=name, max_findings=_MAX_FINDINGS))
    damaged = [name for name, verified in found.items() if verified.num_problems]
    if damaged or records:
        texts = [failure_text(found[name], opened[name], column=name, data_dir=data_dir) for name in damaged]
        raise FailedWork("\n".join([*repairs_text(records), *texts]))


def inspect(
    key: str | None = None,
    *,
    html: Annotated[Path | None, Parameter(help="Write a contact sheet of the set into this file.")] = None,
    variant: VariantName = None,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Show the shards of the set, or one chunk, or write a page with pictures of chunks.

    Example: prep inspect --html sheet.html

    Parameters
    ----------
    key
        Key of a chunk, such as bikes_000015000.
    """
    from prep.core.data_folder import VIDEO, require_data_folder
    from prep.video.inspection import chunk_report, set_report
    from shards.reader import Variant

    data_dir = require_data_folder(data)
    opened = Variant.open(data_dir, column=VIDEO, variant=variant)
    if html is not None:
        from prep.core.progress import CountProgress
        from prep.video.contact_sheet import write_contact_sheet

        if key is not None:
            raise UserError(f"--html shows the set, not one chunk ({key})", hint="leave out the key, or --html")
        num_chunks = write_contact_sheet(html, opened, on_chunk=CountProgress("decoding chunks"))
        page = {"html": os.fspath(html), "num_chunks": num_chunks}
        print(json_module.dumps(page, indent=1) if json else f"{html}: {num_chunks} chunks")
        return
    report = set_report(opened) if key is None else chunk_report(opened, key, data_dir=data_dir)
    print(json_module.dumps(report.values, indent=1, ensure_ascii=True) if json else report.text)


def gc(
    *,
    dry_run: Annotated[bool, Parameter(help="Only say what would be removed.", negative="")] = False,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Remove variants that are not current, shards that no commit names, and what killed commands left.

    Nothing else is touched, and nothing is removed while the current variant is not whole.

    Example: prep gc --dry-run
    """
    from contextlib import ExitStack

    from manifests.publish import folder_lock
    from prep.core.data_folder import COLUMNS, holding, require_data_folder
    from prep.upkeep.garbage import find_garbage, remove
    from prep.upkeep.garbage_text import garbage_text, garbage_values

    data_dir = require_data_folder(data)
    with ExitStack() as held:
        for column in COLUMNS:
            held.enter_context(holding(data_dir, column=column))
        held.enter_context(folder_lock(data_dir))
        garbage = find_garbage(data_dir)
        removed = None if dry_run else remove(garbage)
    if json:
        print(json_module.dumps(garbage_values(garbage, removed), indent=1))
    else:
        print(garbage_text(garbage, removed, data_dir=data_dir))
    if removed is not None and removed.failed:
        path, why = removed.failed[0]
        raise FailedWork(f"{len(removed.failed)} files could not be removed; the first: {path}: {why}")
    sys.stdout.flush()
