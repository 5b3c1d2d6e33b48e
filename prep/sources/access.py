"""Reaching a source file: what it is known by, and why it cannot be reached."""

import errno
import hashlib
import stat
from pathlib import Path

from prep.core.failures import FailureCode, SourceFailure

_FINGERPRINT_BYTES = 1 << 20


def source_fingerprint(path: Path) -> str:
    """SHA-256 (hex) over size, first and last MiB of a file: cheap for hours of video, and blind to its name.

    Raises:
        SourceFailure: source_missing, source_unreadable or io_error.
    """
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):  # opening a pipe would wait for somebody to write into it
            raise SourceFailure(FailureCode.SOURCE_UNREADABLE, "it is not a file")
        digest = hashlib.sha256(str(state.st_size).encode())
        with path.open("rb") as file:
            digest.update(file.read(_FINGERPRINT_BYTES))
            if state.st_size > _FINGERPRINT_BYTES:
                file.seek(max(_FINGERPRINT_BYTES, state.st_size - _FINGERPRINT_BYTES))
                digest.update(file.read(_FINGERPRINT_BYTES))
    except (OSError, ValueError) as error:
        raise access_failure(error) from None
    return digest.hexdigest()


def access_failure(error: OSError | ValueError) -> SourceFailure:
    """Why a source cannot be reached, from what looking at it or opening it raised."""
    if isinstance(error, ValueError) or error.errno in (errno.ENOENT, errno.ENOTDIR):
        return SourceFailure(FailureCode.SOURCE_MISSING, "there is no such file", is_lasting=False)
    code = FailureCode.IO_ERROR if error.errno == errno.EIO else FailureCode.SOURCE_UNREADABLE
    return SourceFailure(code, error.strerror or str(error), is_lasting=False)
