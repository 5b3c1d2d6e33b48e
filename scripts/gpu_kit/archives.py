"""Wheels of the kit, which are zip files; one that was damaged on its way is named."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manifests.errors import UserError

# What a zip file with wrong bytes makes of reading it. RuntimeError: a compression or encryption that it does not have.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)


@contextmanager
def opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Opens a wheel to be read.

    Raises:
        UserError: the wheel is damaged; also where that shows only within the block.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except _DAMAGE as error:
        raise UserError(
            f"{wheel} is damaged: {' '.join(str(error).split()) or type(error).__name__}",
            hint="copy the kit to this machine again",
        ) from None
