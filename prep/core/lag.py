"""Waiting for files that workers on other machines have published and this machine does not see yet.

Shared disks may lag behind: an NFS client caches the attributes and entries of a folder for up to a minute.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.shards.commits import commit_path, read_commit
from clipmill.shards.opening import Damaged

LIMIT_S = 60.0
_INTERVAL_S = 0.5


def wait_until_seen(what: str, is_seen: Callable[[], bool], *, limit_s: float = LIMIT_S) -> bool:
    """Wait until `is_seen` returns True, and say so; return False if it does not within `limit_s` seconds."""
    if is_seen():
        return True
    sys.stderr.write(f"waiting up to {limit_s:g} s for {what}, written by workers and not visible here yet\n")
    sys.stderr.flush()
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        time.sleep(_INTERVAL_S)
        if is_seen():
            return True
    return False


def is_committed(variant_dir: Path, fingerprints: Iterable[tuple[int, str]]) -> bool:
    """Return True if the commits of all shards, given as (shard id, plan fingerprint), and their files are visible."""
    return all(_is_committed(variant_dir, *one) for one in fingerprints)


def _is_committed(variant_dir: Path, shard_id: int, fingerprint: str) -> bool:
    path = commit_path(variant_dir, shard_id)
    with suppress(OSError):  # opening a folder makes NFS compare it with the server's
        os.close(os.open(path.parent, os.O_RDONLY))
    try:
        commit = read_commit(path)
    except (FileNotFoundError, Damaged, UserError):
        return False
    files = [] if commit.files is None else [commit.files.tar, commit.files.index]
    return commit.plan_fingerprint == fingerprint and all((variant_dir / name).exists() for name in files)
