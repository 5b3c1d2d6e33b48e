"""Join and leave the process group under torchrun, and check that all ranks were started in the same way.

Ranks that were started with different arguments or data would hang or abort in the first collective, or silently train
with different learning rates.
"""

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from clipmill.manifests.errors import FailedWork, UserError, first_line
from clipmill.train.distributed.world import World

# Start of a rank: values that must be the same on all ranks, keyed by flag or by the name of another property.
Start = Mapping[str, object]
COMMAND = "command"

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_MAX_SHOWN = 6
_POLL_S = 0.02
_JOIN_TIMEOUT = timedelta(minutes=10)  # torchrun's default; a machine may first have to load all code over a network
_TIMEOUT = timedelta(minutes=30)  # torch's default for a process group; heartbeats detect a lost rank earlier
_REMIND_S = 60.0
# If rank 0 hosts the store, rank 0 leaves last. Its wait is limited to this time, because other ranks may have exited.
_LEAVE_TIMEOUT = timedelta(seconds=10)
# Fragments of the errors that gloo and NCCL raise when another process or the connection to it is lost.
_LOST = ("closed by peer", "connection reset", "connection refused", "broken pipe", "timed out", "nccl", "gloo")


@contextmanager
def open_world(*, device_type: str, start: Start | None = None, hint: str = "") -> Iterator[World]:
    """Join torchrun's process group within the block. Without a launcher, yield a world of size 1.

    Args:
        start: Start of this rank. The ranks compare their starts before any other communication.
        hint: Hint for the error that is raised if the starts differ.

    Raises:
        UserError: The environment is incomplete, this machine has fewer GPUs than processes, or the ranks were started
            in different ways.
        FailedWork: Another rank was lost, or did not join in time.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World()
        return
    world = _read_environment()
    if device_type == "cuda":
        num_gpus = torch.cuda.device_count()
        if world.local_rank >= num_gpus:
            raise UserError(
                f"process {world.local_rank} of this machine has no GPU: the machine has only {num_gpus}",
                hint=(f"launch with --nproc-per-node {num_gpus}, or " if num_gpus else "") + "train with --device cpu",
            )
        torch.cuda.set_device(world.local_rank)
    # torchrun hosts the store. Under other launchers, rank 0 hosts it.
    try:
        with _remind_of_wait(world, lambda: "the other ranks"):
            store, _, _ = next(dist.rendezvous("env://", timeout=_JOIN_TIMEOUT))
        attempt = name_attempt(store, world)
    except RuntimeError as error:
        raise FailedWork(
            f"rank {world.rank} of {world.size} cannot reach the other ranks at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({first_line(error)}); see their logs"
        ) from error
    store = dist.PrefixStore(attempt, store)
    from clipmill.train.distributed.heartbeat import Heartbeat

    heartbeat = Heartbeat(world, host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]), attempt=attempt)
    try:
        if start is not None and world.size > 1:
            require_same_start(start, store=store, world=world, hint=hint)
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        store = dist.PrefixStore("clipmill", store)
        store.set_timeout(_TIMEOUT)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
        yield world
        # No rank leaves before all have finished, because one of the processes may host the store.
        world.gather(torch.zeros(1))
        heartbeat.end()
        dist.destroy_process_group()
    except RuntimeError as error:
        heartbeat.end(error=error)
        if world.size == 1 or not any(word in str(error).lower() for word in _LOST):
            raise
        raise FailedWork(
            f"rank {world.rank} of {world.size} has lost another rank ({first_line(error)}); "
            "its last messages are above or in the log of that rank; resume from the latest checkpoint with --resume"
        ) from error
    except BaseException as error:
        # Do not destroy the process group: that could block, because other ranks wait for this rank.
        heartbeat.end(error=error)
        raise


def _read_environment() -> World:
    missing_variables = [name for name in _VARIABLES if name not in os.environ]
    if missing_variables:
        raise UserError(
            f"RANK is set, but {', '.join(missing_variables)} {'is' if len(missing_variables) == 1 else 'are'} not",
            hint="launch with torchrun, which sets all of them; or unset RANK and WORLD_SIZE to run one process",
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        try:
            numbers[name] = int(os.environ[name])
        except ValueError:
            message = f"the environment variable {name} is {os.environ[name]!r}, which is not a number"
            raise UserError(message, hint="launch with torchrun, which sets this variable") from None
    return World(rank=numbers["RANK"], size=numbers["WORLD_SIZE"], local_rank=numbers["LOCAL_RANK"])


def name_attempt(store: dist.Store, world: World) -> str:
    """Agree on a new name for this launch attempt. All ranks must call this function.

    torchrun restarts processes but keeps its store, which may still contain addresses of ranks that no longer exist.
    (The number of restarts cannot serve as a name, because each machine counts its own restarts.) Each rank sends a
    request with a random key, so that no earlier process can have responded to it. Rank 0 responds until all ranks have
    acknowledged the name, or raises FailedWork after a timeout.
    """
    key = secrets.token_hex(8)  # on rank 0, this is the name of the attempt
    if not world.is_first:
        store.set(f"asks/{world.rank}", key)
        response = f"answer/{key}"
        with _remind_of_wait(world, lambda: "rank 0"):
            store.wait([response], _JOIN_TIMEOUT)
        name = str(store.get(response).decode())
        store.set(f"knows/{name}/{world.rank}", "")
        return name
    missing_ranks, response_keys = set(range(1, world.size)), dict[int, str]()
    deadline_s = time.monotonic() + _JOIN_TIMEOUT.total_seconds()
    with _remind_of_wait(world, lambda: _name_ranks(sorted(missing_ranks))):
        while missing_ranks:
            for rank in sorted(missing_ranks):
                if store.check([f"knows/{key}/{rank}"]):
                    missing_ranks.remove(rank)
                elif not store.check([f"asks/{rank}"]):
                    continue
                elif (request_key := store.get(f"asks/{rank}").decode()) != response_keys.get(rank):
                    store.set(f"answer/{request_key}", key)
                    response_keys[rank] = request_key
            if missing_ranks and time.monotonic() > deadline_s:
                raise FailedWork(
                    f"rank {min(missing_ranks)} of {world.size} did not join within {_JOIN_TIMEOUT}; see its log"
                )
            time.sleep(_POLL_S if missing_ranks else 0)
    return key


@contextmanager
def _remind_of_wait(world: World, describe_missing: Callable[[], str]) -> Iterator[None]:
    """While the block runs, print once a minute on every machine which ranks this rank is waiting for.

    A rank that fails before it joins, for example because of an invalid flag, cannot tell the other ranks.
    """
    is_over = threading.Event()

    def remind() -> None:
        while not is_over.wait(_REMIND_S):
            sys.stderr.write(
                f"rank {world.rank} of {world.size} is waiting for {describe_missing()} to start; see their logs\n"
            )
            sys.stderr.flush()

    if world.local_rank == 0 and world.size > 1:
        threading.Thread(target=remind, name="reminder", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def require_same_start(start: Start, *, store: dist.Store, world: World, hint: str) -> None:
    """Compare the starts of all ranks through the store.

    Raises:
        UserError: The starts differ. All ranks raise the same error.
        FailedWork: Another rank did not start in time.
    """
    store = dist.PrefixStore("start", store)
    try:
        store.set(str(world.rank), json.dumps(start))
        if world.is_first:
            differences = difference([json.loads(store.get(str(rank))) for rank in range(world.size)])
            store.set("found", differences or "")
        else:
            differences = store.get("found").decode()
    except RuntimeError as error:
        raise FailedWork(
            f"rank {world.rank} of {world.size} gave up waiting for another rank to start "
            f"({first_line(error)}); see the log of that rank"
        ) from error
    if differences:
        # All ranks must read the result before the process that hosts the store ends.
        store.set(f"left-{world.rank}", "")
        if world.is_first:
            with suppress(RuntimeError):
                store.wait([f"left-{rank}" for rank in range(world.size)], _LEAVE_TIMEOUT)
        raise UserError(f"the ranks were started differently: {differences}", hint=hint)


def difference(ranks: Sequence[Start]) -> str | None:
    """Describe the values that differ between ranks; None if all ranks have the same values."""
    names = list(dict.fromkeys(name for start in ranks for name in start))
    values = {name: [_value_text(start, name) for start in ranks] for name in names}
    differing_values = {name: rank_values for name, rank_values in values.items() if len(set(rank_values)) > 1}
    if COMMAND in differing_values:
        # Different commands have different flags, so a list of the flags would not help.
        differing_values = {COMMAND: differing_values[COMMAND]}
    if not differing_values:
        return None
    parts = []
    for name, rank_values in differing_values.items():
        ranks_by_value: dict[str, list[int]] = {}
        for rank, value in enumerate(rank_values):
            ranks_by_value.setdefault(value, []).append(rank)
        values_text = " and ".join(
            f"{value} on {_name_ranks(value_ranks)}" for value, value_ranks in ranks_by_value.items()
        )
        parts.append(f"{name} is {values_text}")
    suffix = f"; and {len(parts) - _MAX_SHOWN} more" if len(parts) > _MAX_SHOWN else ""
    return "; ".join(parts[:_MAX_SHOWN]) + suffix


def _value_text(start: Start, name: str) -> str:
    value = start.get(name, "missing")
    return value if isinstance(value, str) else json.dumps(value)


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    rank_list = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    return f"ranks {rank_list}" + (f" and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else "")
