"""The hash of the packages' own modules, which a run and each of its workers compute: here, once in a process."""

import importlib.util
from functools import cache
from pathlib import Path

from clipmill.prep.engines.admission import source_sha256

_ROOT = Path(__file__).parent.parent


def hash_once(column_package: str) -> str | None:
    """Return what `source_sha256` does; the packages of the repository do not change while tests run."""
    if column_package.startswith("clipmill."):
        return _hash_package("clipmill.prep")
    return (_hash_package if _is_of_the_repository(column_package) else source_sha256)(column_package)


def _is_of_the_repository(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return False
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return bool(folders) and all(_ROOT in Path(folder).parents for folder in folders)


@cache
def _hash_package(column_package: str) -> str | None:
    return source_sha256(column_package)
