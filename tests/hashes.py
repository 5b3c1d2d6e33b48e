"""The hash of the packages' own modules, which a run and each of its workers compute: here, once in a process."""

from functools import cache

from clipmill.prep.engines.admission import source_sha256


def hash_once(column_package: str) -> str | None:
    """Return what `source_sha256` does; the packages of the repository do not change while tests run."""
    return _hash_ours() if column_package.startswith("clipmill.") else source_sha256(column_package)


@cache
def _hash_ours() -> str | None:
    return source_sha256("clipmill.prep")
