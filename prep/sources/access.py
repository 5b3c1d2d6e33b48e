"""Access to a source file: its fingerprint, and the failure if it is inaccessible."""

import errno
import hashlib
import stat
from pathlib import Path

from prep.core.failures import FailureCode, SourceFailure

_FINGERPRINT_BYTES = 1 << 20


def source_fingerprint(path: Path) -> str:
    """Return the SHA-256 (hex) over a file's size and its first and last MiB.

    This is cheap even for hours of video, and independent of the file's name.

    Raises:
        SourceFailure: source_missing, source_unreadable or io_error.
    """
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):  # opening a named pipe would block until something writes to it
            raise SourceFailure(FailureCode.SOURCE_UNREADABLE, "not a regular file")
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
    """Return the failure for an error raised while looking up or opening a source."""
    if isinstance(error, ValueError) or error.errno in (errno.ENOENT, errno.ENOTDIR):
        return SourceFailure(FailureCode.SOURCE_MISSING, "no such file", is_lasting=False)
    code = FailureCode.IO_ERROR if error.errno == errno.EIO else FailureCode.SOURCE_UNREADABLE
    return SourceFailure(code, error.strerror or str(error), is_lasting=False)
