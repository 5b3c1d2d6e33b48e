"""The folder that an export makes: whole, or not there."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from manifests.errors import UserError
from manifests.publish import TEMPORARY_PREFIX, sync


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export writes.

    Attributes:
        write: fills a folder.
        remarks: what the user should hear of it.
    """

    write: Callable[[Path], None]
    remarks: tuple[str, ...] = ()


def require_format(form: str, known: Sequence[str], *, what: str) -> None:
    """Raises a UserError where a format is none that a model can be written in."""
    if form not in known:
        raise UserError(f"--format is {form}, which has no place for {what}", hint=f"use --format {' or '.join(known)}")


def publish_folder(out: Path, write: Callable[[Path], None]) -> None:
    """Fills a folder under a temporary name and renames it: `out` is whole or not there.

    Raises:
        UserError: it cannot be written.
    """
    temporary = out.parent / f"{TEMPORARY_PREFIX}{out.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        temporary.replace(out)
        sync(out.parent)
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: of torch.save on a full disk
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot write {out}: {reason}", hint="use another --out") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_json(path: Path, value: Any) -> None:
    """Writes a configuration file."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
