"""Reading the kit's wheels, which are zip files, with errors that name a damaged one."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manifests.errors import UserError

# Exceptions raised for a corrupt zip file. RuntimeError: unsupported compression or encryption.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)


@contextmanager
def opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Open a wheel for reading.

    Raises:
        UserError: the wheel is damaged, even if this is detected only within the block.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except _DAMAGE as error:
        raise UserError(
            f"{wheel} is damaged: {' '.join(str(error).split()) or type(error).__name__}",
            hint="copy the kit to this machine again",
        ) from None
