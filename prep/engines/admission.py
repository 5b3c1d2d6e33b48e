"""The check that each worker must pass before its first task.

A worker must see the driver's data folder, run the same version of clipmill as the driver, and meet the requirements
of the column. The driver publishes a token in the variant's folder, and sends a `Ticket` to the workers. Each worker
calls the ticket before its first task.

Loading this file requires only the standard library, and the Ray engine sends its code to the workers. A node therefore
runs the driver's version of the check, even if clipmill is missing or has a different version there. The column's code
is identified by its import path, so the code of plug-in columns is compared in the same way.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("clipmill.manifests", "clipmill.prep", "clipmill.shards")
_TOKEN_NAME = "workers"
_PACKAGE_HINT = "install the package, or correct `package`, its import name, in the ColumnSpec"
_LAG_LIMIT_S = 5.0  # time limit for the token to become visible on other machines; shared disks may lag


@dataclass(frozen=True)
class Ticket:
    """Requirements for a worker. Calling the ticket returns the reason why the worker does not meet them, or None.

    Attributes:
        host: Name of the driver's machine.
        token_file: File that the driver published in the variant's folder.
        token: Content of the token file.
        version: Version of clipmill on the driver's machine.
        source_sha256: SHA-256 (hex) of the source code that a worker runs.
        package: Package that contains the column's code.
        needs: Import path `package.module:function` of a function that checks the machine, and its argument. The
            function returns the reason why the machine is unsuitable, or None. The attribute is None if the column has
            no requirements.
        bucket: `Mirror.access` of the driver, used by workers to mount a data folder in a bucket; () for a local data
            folder.
    """

    host: str
    token_file: Path
    token: str
    version: str
    source_sha256: str
    package: str
    needs: tuple[str, str] | None
    bucket: tuple[str, ...] = ()

    def __call__(self) -> str | None:
        digest = source_sha256(self.package)
        if digest is None:
            package = "clipmill" if source_sha256("clipmill.prep") is None else f"the column's package {self.package}"
            return f"{package} is not installed"
        if digest != self.source_sha256:
            return (
                f"clipmill {_version()} (source {digest[:8]}) differs from this command's clipmill {self.version} "
                f"(source {self.source_sha256[:8]})"
            )
        if (problem := self._folder_problem()) is not None or self.needs is None:
            return problem
        path, argument = self.needs
        module, _, name = path.partition(":")
        reason: str | None = getattr(importlib.import_module(module), name)(argument)
        return reason

    def _folder_problem(self) -> str | None:
        folder = self.token_file.parent
        if self.bucket:
            from clipmill.manifests.storage.mounting import mount_problem

            return mount_problem(self.bucket, self.token_file, self.token)
        deadline_s = time.monotonic() + (_LAG_LIMIT_S if os.uname().nodename != self.host else 0.0)
        while not self.token_file.exists() and time.monotonic() < deadline_s:
            time.sleep(_LAG_LIMIT_S / 10)
        try:
            token = self.token_file.read_text()
        except FileNotFoundError:
            problem = "is a different folder" if folder.is_dir() else "does not exist"
            return f"the data folder is not shared: on this machine, {folder} {problem}"
        except (OSError, UnicodeDecodeError) as error:
            return f"cannot read {folder}: {getattr(error, 'strerror', None) or error}"
        if token != self.token:
            return f"the data folder is not shared: on this machine, {folder} is a different folder"
        return None if os.access(folder, os.W_OK | os.X_OK) else f"cannot write to {folder}"


@contextmanager
def worker_ticket(variant_dir: Path, *, package: str, needs: tuple[str, str] | None = None) -> Iterator[Ticket]:
    """Publish the token of a run, and remove it when the block ends. The caller must hold the lock of the column.

    Raises:
        UserError: The package of the column is not installed on this machine.
    """
    from clipmill.manifests.errors import UserError
    from clipmill.manifests.publish import remove, sync, tag_errors, temporary_path
    from clipmill.manifests.storage.mirrors import mirror_of

    if (digest := source_sha256(package)) is None:
        raise UserError(f"the package {package} of the column is not installed on this machine", hint=_PACKAGE_HINT)
    # The token has a temporary name, so if the driver is killed, the next command removes it with its temporary files.
    token_file = temporary_path(variant_dir / _TOKEN_NAME)
    token = secrets.token_hex(16)
    try:
        with tag_errors(token_file):
            token_file.write_text(token)
            sync(token_file)
            sync(variant_dir)
        mirror = mirror_of(variant_dir)
        if mirror is not None:
            mirror.publish_token(token_file)
        bucket = () if mirror is None else mirror.access
        yield Ticket(os.uname().nodename, token_file, token, _version(), digest, package, needs, bucket)
    finally:
        with suppress(OSError):
            remove(token_file)


def source_sha256(column_package: str) -> str | None:
    """Return the SHA-256 (hex) of the source files that a worker runs; None if a required package is missing."""
    digest = hashlib.sha256()
    is_builtin = column_package.startswith("clipmill.")
    for package in _PACKAGES if is_builtin else (*_PACKAGES, column_package):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            return None
        if spec is None:
            return None
        if spec.submodule_search_locations:
            root = Path(next(iter(spec.submodule_search_locations)))
            paths = sorted(root.rglob("*.py"))
            if not paths:  # an empty folder with the name of the package
                return None
        else:
            root, paths = Path(str(spec.origin)).parent, [Path(str(spec.origin))]
        for path in paths:
            digest.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _version() -> str:
    try:
        return importlib.metadata.version("clipmill")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
