"""Which data a result of `train eval` is about: the run's own, or other that --shards named.

Results on other data are kept under names of their own, and say so wherever they are shown: they never stand for those
on the data that the run was trained with.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

from train.data.remote.files import is_remote

_MAX_NAME = 40
_NUM_HASH = 8


def data_facts(own: str, shards: str | None) -> dict[str, Any]:
    """What a result says of its data: `shards`, its address, and `is_own_data`.

    Args:
        own: --shards of the run.
        shards: --shards of the evaluation; None for the run's own.
    """
    address = _whole(own if shards is None else shards)
    return {"shards": address, "is_own_data": address == _whole(own)}


def result_name(name: str, facts: dict[str, Any]) -> str:
    """The file name of a result: `name` on the run's own data, else with the data folder's name and a hash of where it
    lies.

    Args:
        facts: as `data_facts` gives them, or a result that holds them.
    """
    address = other_data(facts)
    if not address:
        return name
    folder = re.sub(r"[^\w.-]+", "-", address.rpartition("/")[2])[:_MAX_NAME].strip("-.") or "data"
    return f"{name}-{folder}-{hashlib.sha256(address.encode()).hexdigest()[:_NUM_HASH]}"


def other_data(result: dict[str, Any]) -> str:
    """Where the data of a result lies; empty where it is the run's own, as of results that do not say."""
    return "" if result.get("is_own_data", True) else str(result["shards"])


def _whole(address: str) -> str:
    """One spelling of each address."""
    return address.rstrip("/") if is_remote(address) else str(Path(address).resolve())
