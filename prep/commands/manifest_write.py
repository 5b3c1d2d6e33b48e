"""What all `prep manifest KIND` commands do with the videos and captions that they have read."""

import json as json_module
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import on_one_line
from clipmill.manifests.store import check_data_dir

if TYPE_CHECKING:
    from clipmill.manifests.adapters.reading import Reading
    from clipmill.manifests.storage.urls import Place


@dataclass(frozen=True)
class Target:
    """Where a dataset is written, and how.

    Attributes:
        dataset: its name in the manifest.
        videos: folder of its videos, or None if the tables name them.
        may_remove: `--yes`.
    """

    data: Path
    dataset: str
    videos: "Place | None"
    may_remove: bool
    as_json: bool


def write_dataset(read: "Callable[[list[Path]], Reading]", tables: "Sequence[Place]" = (), *, into: Target) -> None:
    """Read a dataset and write it to the manifest.

    Args:
        read: receives local copies of the tables.
        tables: annotation files.
    """
    from clipmill.manifests.adapters.reading import is_encodable, read_with_local_tables
    from clipmill.manifests.errors import DISK_ERRORS
    from clipmill.manifests.formatting import quote_value
    from clipmill.manifests.progress import Activity
    from clipmill.manifests.store import read_rejected_rows
    from clipmill.manifests.write import write_manifest
    from clipmill.prep.commands import manifest_text
    from clipmill.prep.core.data_folder import writing
    from clipmill.prep.core.failure_list import first_rejected

    data, dataset = into.data, into.dataset
    check_data_dir(data, videos=into.videos)
    _check_existing(data)
    if not is_encodable(dataset):
        raise UserError(f"--dataset {quote_value(dataset)} is not valid Unicode", hint="give another name")
    with Activity(f"reading dataset {on_one_line(dataset)}"):
        reading = read_with_local_tables(tables, read)
    if not reading.videos.num_rows:
        message, hint = manifest_text.no_video_text(reading, dataset)
        raise UserError(message, hint=hint)
    if manifest_text.unused_files(reading):
        # If it were written, it would replace the existing captions, and their ids would be lost for good.
        raise FailedWork(manifest_text.unused_text(reading))
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise
        why = error.strerror or str(error)
        raise UserError(
            f"cannot create the data folder {data}: {why}", hint="give another folder with --data"
        ) from error
    with writing(data), Activity("writing the manifest"):
        written = write_manifest(
            data,
            dataset,
            reading.videos,
            reading.captions,
            reading.rejected,
            num_captions_lost=reading.num_captions_lost,
            may_remove=into.may_remove,
        )
        rejected = (
            first_rejected(manifest_text.rejected_of(read_rejected_rows(data), dataset)) if written.num_rejected else []
        )
    if into.as_json:
        values = manifest_text.written_values(written, rejected=rejected, notes=reading.notes)
        print(json_module.dumps(values, indent=1, sort_keys=True))
    else:
        print(manifest_text.written_text(written, rejected=rejected, notes=reading.notes))
        print(f"next: {manifest_text.chunk_command(data)}")


def _check_existing(data: Path) -> None:
    """Raise an error for a manifest of another format before the work begins rather than at its end."""
    from clipmill.manifests.store import DamagedManifest, read_manifest

    if (data / "manifest" / "manifest.json").exists():
        with suppress(DamagedManifest):  # writing the manifest repairs it, or fails with the reason
            read_manifest(data)
