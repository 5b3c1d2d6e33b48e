"""Annotation files by URL: copied to a temporary folder while an adapter reads them, and named by their URLs again."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.objects import open_objects
from clipmill.manifests.storage.urls import Place, mask_secrets, place_name, split_url


def read_with_local_tables(tables: Sequence[Place], read: Callable[[list[Path]], Reading]) -> Reading:
    """Return `read(local files)` with the names of the tables in place of those of their copies.

    Raises:
        UserError: a table cannot be fetched; and whatever `read` raises.
    """
    if not any(isinstance(table, str) for table in tables):
        return read([Path(table) for table in tables])
    with tempfile.TemporaryDirectory(prefix="clipmill-tables-") as folder:
        local, names = [], {}
        for number, table in enumerate(tables):
            if isinstance(table, Path):
                local.append(table)
                continue
            if not place_name(table).name or table.endswith("/"):
                raise UserError(f"{mask_secrets(table)} is a folder, not a table", hint="give the URL of a file")
            copy = Path(folder) / str(number) / place_name(table).name
            copy.parent.mkdir()
            _fetch(table, copy)
            local.append(copy)
            names[str(copy)] = table
        try:
            reading = read(local)
        except UserError as error:
            raise UserError(
                _replace_names(str(error), names),
                hint=None if error.hint is None else _replace_names(error.hint, names),
            ) from error
    rejected = reading.rejected
    for column in ("file", "detail"):
        texts = [_replace_names(text, names) for text in rejected[column].to_pylist()]
        place = rejected.schema.get_field_index(column)
        rejected = rejected.set_column(place, rejected.schema.field(column), pa.array(texts, pa.string()))
    return replace(
        reading,
        rejected=rejected,
        num_rows_used={_replace_names(file, names): count for file, count in reading.num_rows_used.items()},
        notes=tuple(_replace_names(note, names) for note in reading.notes),
    )


def _fetch(url: str, copy: Path) -> None:
    root, key = split_url(url)
    try:
        open_objects(root).fetch(key, copy)
    except UserError:
        raise
    except OSError as error:
        if error.filename == str(copy):
            raise
        raise UserError(
            f"cannot read {mask_secrets(url)}: {error.strerror or error}", hint="check the URL of the annotation file"
        ) from error


def _replace_names(text: str, names: dict[str, str]) -> str:
    for copy, url in names.items():
        text = text.replace(copy, url)
    return text
