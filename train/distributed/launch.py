"""Where a world begins and ends: from the environment that torchrun makes to a process group, and out of it again."""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from manifests.errors import FailedWork, UserError
from train.distributed.comparing import Start, require_same_start
from train.distributed.heartbeat import Heartbeat
from train.distributed.world import World

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# How gloo and NCCL say that another process, or the way to it, is gone.
_LOST = ("closed by peer", "connection reset", "connection refused", "broken pipe", "timed out", "nccl", "gloo")


@contextmanager
def open_world(*, device_type: str, start: Start | None = None, hint: str = "") -> Iterator[World]:
    """The world that torchrun launched this process into; one of size 1 where nothing launched it.

    Args:
        start: how this rank was started; the ranks compare it before there is anything else between them.
        hint: what to do where they were started differently.

    Raises:
        UserError: the environment is half there, this machine has fewer GPUs than processes, or the ranks were not
            started alike.
        FailedWork: another rank is gone; this one cannot go on without it.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World()
        return
    world = _from_environment()
    if device_type == "cuda":
        _take_gpu(world)
    # The ranks find one another through a store that torchrun keeps, or rank 0 where something else launched them.
    try:
        store, _, _ = next(dist.rendezvous("env://"))
        attempt = name_attempt(store, world)
    except RuntimeError as error:
        raise FailedWork(
            f"rank {world.rank} of {world.size} finds no other ranks at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({_first_line(error)}); what they said stands in their own logs"
        ) from error
    store = dist.PrefixStore(attempt, store)
    if start is not None and world.size > 1:
        require_same_start(start, store=store, world=world, hint=hint)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("clipmill", store), rank=world.rank, world_size=world.size)
    heartbeat = Heartbeat(world, host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]), attempt=attempt)
    try:
        yield world
        # Nobody leaves before all are done: the store may be in one of the processes.
        world.gather(torch.zeros(1))
        heartbeat.end()
        dist.destroy_process_group()
    except RuntimeError as error:
        heartbeat.end(error=error)
        if world.size == 1 or not any(word in str(error).lower() for word in _LOST):
            raise
        raise FailedWork(
            f"rank {world.rank} of {world.size} has lost another rank ({_first_line(error)}); "
            "what that one said last stands above or in its own log; go on from the latest checkpoint with --resume"
        ) from error
    except BaseException as error:
        # The group is left as it is: to take it down may mean to wait for those who wait for this rank.
        heartbeat.end(error=error)
        raise


def _from_environment() -> World:
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise UserError(
            f"RANK is set, and {', '.join(missing)} is not" if len(missing) == 1 else f"not set: {', '.join(missing)}",
            hint="launch with torchrun, which sets them all; or unset RANK and WORLD_SIZE for one process",
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        try:
            numbers[name] = int(os.environ[name])
        except ValueError:
            raise UserError(f"{name} is {os.environ[name]!r}", hint="launch with torchrun, which sets it") from None
    return World(rank=numbers["RANK"], size=numbers["WORLD_SIZE"], local_rank=numbers["LOCAL_RANK"])


def _take_gpu(world: World) -> None:
    there = torch.cuda.device_count()
    if world.local_rank >= there:
        raise UserError(
            f"process {world.local_rank} of this machine has no GPU: there are {there}",
            hint=f"launch with --nproc-per-node {there}, or train with --device cpu",
        )
    torch.cuda.set_device(world.local_rank)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# A name for one attempt of a launch, which its ranks agree on through a store that may hold what earlier ones left.
#
# torchrun restarts processes and keeps its store. Addresses of ranks that are gone still lie there, and whoever reads
# them before the new ones are written waits for a process that does not exist. How often the processes of a machine
# were restarted is no name for the attempt: each machine counts for itself.


_POLL_S = 0.02
_PATIENCE = timedelta(minutes=30)  # as torch's own for a process group


def name_attempt(store: dist.Store, world: World) -> str:
    """A new name, the same on all ranks; all ranks call it.

    Each rank asks under a random key of its own, which no earlier process can have answered. Rank 0 answers until all
    have said that they know the name.

    Raises:
        FailedWork: a rank did not come.
    """
    own = secrets.token_hex(8)
    if not world.is_first:
        store.set(f"asks/{world.rank}", own)
        answer = f"answer/{own}"
        store.wait([answer], _PATIENCE)
        name = str(store.get(answer).decode())
        store.set(f"knows/{name}/{world.rank}", "")
        return name
    missing, answered = set(range(1, world.size)), dict[int, str]()
    latest_s = time.monotonic() + _PATIENCE.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([f"knows/{own}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"asks/{rank}"]) and (asked := store.get(f"asks/{rank}").decode()) != answered.get(rank):
                store.set(f"answer/{asked}", own)
                answered[rank] = asked
        if missing and time.monotonic() > latest_s:
            raise FailedWork(f"rank {min(missing)} of {world.size} did not come within {_PATIENCE}")
        time.sleep(_POLL_S if missing else 0)
    return own
