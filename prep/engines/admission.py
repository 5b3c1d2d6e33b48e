"""Which workers may work: those that see the driver's data folder, have its clipmill and what its column needs.

The driver publishes a token in the variant's folder and hands out a `Ticket`. A worker calls the ticket before its
first task. This file imports the standard library only, and the Ray engine sends it along as source: a node answers
with its driver's questions, whatever version of clipmill it has, or none. The column is named by its import path, so
that one from outside of clipmill is found and compared like any other.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("manifests", "prep", "shards")
_TOKEN_NAME = "workers"


@dataclass(frozen=True)
class Ticket:
    """What a worker has to find; calling it says why it must not work, or None.

    Attributes:
        token_file: published by the driver in the variant's folder.
        source_sha256: of the packages that a worker runs.
        package: of the column's code.
        needs: import path, `package.module:function`, of a function that says why a machine must not work, or None; and
            its argument. None where any machine will do.
    """

    token_file: Path
    token: str
    version: str
    source_sha256: str
    package: str
    needs: tuple[str, str] | None

    def __call__(self) -> str | None:
        found = source_sha256(self.package)
        if found is None:
            missing = "clipmill" if source_sha256("prep") is None else f"the column's package {self.package}"
            return f"{missing} is not installed there"
        if found != self.source_sha256:
            return (
                f"it has clipmill {_version()} with source {found[:8]}, "
                f"this command is clipmill {self.version} with source {self.source_sha256[:8]}"
            )
        return self._why_not_the_folder() or self._why_not_the_machine()

    def _why_not_the_folder(self) -> str | None:
        folder = self.token_file.parent
        try:
            token = self.token_file.read_text()
        except FileNotFoundError:
            what = "is another folder there" if folder.is_dir() else "is missing there"
            return f"it does not share the data folder: {folder} {what}"
        except (OSError, UnicodeDecodeError) as error:
            return f"it cannot read {folder}: {getattr(error, 'strerror', None) or error}"
        if token != self.token:
            return f"it does not share the data folder: {folder} is another folder there"
        return None if os.access(folder, os.W_OK | os.X_OK) else f"it cannot write to {folder}"

    def _why_not_the_machine(self) -> str | None:
        if self.needs is None:
            return None
        path, argument = self.needs
        module, _, function = path.partition(":")
        reason: str | None = getattr(importlib.import_module(module), function)(argument)
        return reason


@contextmanager
def worker_ticket(variant_dir: Path, *, package: str, needs: tuple[str, str] | None = None) -> Iterator[Ticket]:
    """Publishes the token of a run, which goes when the block ends; call it while holding the column."""
    from manifests.publish import naming, sync, temporary_path

    # A temporary name: what a killed driver leaves goes with everything else that it left.
    token_file = temporary_path(variant_dir / _TOKEN_NAME)
    token = secrets.token_hex(16)
    try:
        with naming(token_file):
            token_file.write_text(token)
            sync(token_file)
            sync(variant_dir)
        yield Ticket(token_file, token, _version(), source_sha256(package) or "", package, needs)
    finally:
        with suppress(OSError):
            token_file.unlink(missing_ok=True)


def source_sha256(column_package: str) -> str | None:
    """Hash over the source files of the packages that a worker runs; None where one of them is not installed."""
    digest = hashlib.sha256()
    is_ours = column_package.partition(".")[0] in _PACKAGES
    for package in _PACKAGES if is_ours else (*_PACKAGES, column_package):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        if found.submodule_search_locations:
            root = Path(next(iter(found.submodule_search_locations)))
            paths = sorted(root.rglob("*.py"))
        else:
            root, paths = Path(str(found.origin)).parent, [Path(str(found.origin))]
        for path in paths:
            digest.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _version() -> str:
    try:
        return importlib.metadata.version("clipmill")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
