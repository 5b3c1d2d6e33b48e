"""A name for one attempt of a launch, which its ranks agree on through a store that may hold what earlier ones left.

torchrun restarts processes and keeps its store. Addresses of ranks that are gone still lie there, and whoever reads
them before the new ones are written waits for a process that does not exist. How often the processes of a machine were
restarted is no name for the attempt: each machine counts for itself.
"""

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from manifests.errors import FailedWork
from train.distributed.world import World

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
