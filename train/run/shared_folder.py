"""Check that the processes of several nodes share one run folder, and wait until all of them see its files.

All processes write their parts of checkpoints into the folder. If each node had a separate folder, every checkpoint
would lack the parts of the other nodes. A new file is not visible on other nodes immediately, because NFS caches the
attributes of folders for up to 60 s (acdirmax, nfs(5)). Listing a folder makes NFS query the server, so the functions
in this module list the folder while they wait.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import TEMPORARY_PREFIX
from clipmill.manifests.storage.mirrors import mirror_of, refresh
from clipmill.train.distributed.world import World
from clipmill.train.run.folder import PROBE

VISIBLE_S = 75.0  # maximum time until a file is visible on all nodes; longer than acdirmax
_POLL_S = 0.1


def require_shared(folder: Path, *, world: World) -> None:
    """Create `folder` on rank 0, and check that it is the same writable folder for all ranks.

    All ranks must call this function. Rank 0 writes a file, the first rank of each other node writes a reply next to
    it, and rank 0 looks for the replies. If the check fails, a folder that rank 0 created is removed. In a bucket, the
    ranks look for the lock, which rank 0 must hold.

    Raises:
        UserError: A rank cannot see a file of another rank within `VISIBLE_S`, or cannot write. The error is raised on
            all ranks.
    """
    if world.size == 1:
        return
    if (mirror := mirror_of(folder)) is not None:
        from clipmill.train.run.bucket import share_lock

        share_lock(mirror, world=world)
        return
    name = world.first(_new_name)
    is_new = world.first(lambda: _create_probe(folder, name))
    names, is_shared = [name], False
    try:
        hosts = world.gather_objects(socket.gethostname())
        reply = _new_name() if world.local_rank == 0 and not world.is_first else None
        world.each(lambda: _write_reply(folder, name, reply, world=world, writer=hosts[0]))
        replies = world.gather_objects(reply)
        names += [probe for probe in replies if probe is not None]
        world.first(lambda: _find_replies(folder, replies, hosts))
        is_shared = True
    finally:
        if world.is_first:
            for probe in names:
                (folder / probe).unlink(missing_ok=True)
            if is_new and not is_shared and not any(folder.iterdir()):
                folder.rmdir()
    world.gather_objects(None)  # no rank uses the folder before the files have been removed


def wait_for_files(folder: Path, *, world: World) -> None:
    """Wait for at most `VISIBLE_S` until every rank sees the same files in `folder` as rank 0.

    All ranks must call this function. A file that is still missing is reported by the code that reads it.
    """
    if world.size == 1:
        return
    if mirror_of(folder) is not None:
        refresh(folder.parent.parent)  # the complete run, because other nodes may have written since this process began
        return
    expected_sizes = world.first(lambda: _sizes(folder))
    _wait_until(lambda: _sizes(folder) == expected_sizes)
    world.gather_objects(None)  # no rank reads or removes files before every rank has seen them


def _create_probe(folder: Path, name: str) -> bool:
    """Create the folder and the file of rank 0; return True if the folder is new."""
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch(exist_ok=False)
    except OSError as error:
        raise UserError(f"cannot create the run folder {folder}: {error.strerror}", hint="use another --out") from error
    return is_new


def _write_reply(folder: Path, name: str, reply: str | None, *, world: World, writer: str) -> None:
    rank = f"rank {world.rank} on {socket.gethostname()}"
    if not _wait_until(lambda: name in _sizes(folder)):
        raise UserError(
            f"--out {folder} is not shared by all nodes: {rank} cannot see a file that rank 0 on {writer} wrote there "
            f"{VISIBLE_S:g} s ago",
            hint="use a folder on a disk that all nodes share; each process writes its part of checkpoints there",
            flags=("--out",),
        )
    if reply is None:
        return
    try:
        (folder / reply).touch(exist_ok=False)
    except OSError as error:
        raise UserError(
            f"{rank} cannot write into --out {folder}: {error.strerror}",
            hint="make the folder writable on all nodes: each process writes its part of checkpoints there",
            flags=("--out",),
        ) from error


def _find_replies(folder: Path, replies: list[str | None], hosts: list[str]) -> None:
    expected_names = {name for name in replies if name is not None}
    if _wait_until(lambda: expected_names <= _sizes(folder).keys()):
        return
    rank = next(rank for rank, name in enumerate(replies) if name is not None and name not in _sizes(folder))
    raise UserError(
        f"--out {folder} is not shared by all nodes: rank 0 on {hosts[0]} cannot see a file that rank {rank} on "
        f"{hosts[rank]} wrote there {VISIBLE_S:g} s ago",
        hint="use a folder on a disk that all nodes share; each process writes its part of checkpoints there",
        flags=("--out",),
    )


def _new_name() -> str:
    return f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{PROBE}"


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in a folder, keyed by name; {} if the folder cannot be read."""
    sizes = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # listed, but not yet or no longer present
                    sizes[entry.name] = entry.stat().st_size
    except OSError:
        return {}
    return sizes


def _wait_until(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + VISIBLE_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
