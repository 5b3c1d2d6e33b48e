"""Which data a result of an evaluation is of, and the name of its file.

Results on the run's own data have the name of their evaluation; others also have that of the folder, and a hash.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

from clipmill.train.config.shards import Shards, folders_of, normalise_address

_MAX_DATA_NAME = 40
# Fields of a result that say what was evaluated, and how.
_DECISIVE = ("source", "shards", "variant", "step", "weights", "overrides")
_NUM_WORDS_BEFORE_FLAGS = 4  # train eval NAME WEIGHTS
_NUM_HASH_DIGITS = 8


def data_facts(own: Shards, shards: str | None) -> dict[str, Any]:
    """The data fields of a result: `shards`, its address, and `is_own_data`, given --shards of run and evaluation.

    Each of several data folders of a run has results of its own, with `is_part_of_own_data`.
    """
    folders = [normalise_address(one) for one in folders_of(own)]
    if shards is None:
        return {"shards": ", ".join(folders), "is_own_data": True}
    address = normalise_address(shards)
    part = {"is_part_of_own_data": True} if len(folders) > 1 and address in folders else {}
    return {"shards": address, "is_own_data": [address] == folders, **part}


def result_name(name: str, facts: dict[str, Any]) -> str:
    """File name of a result with the fields of `data_facts`: `name`, with the folder name and a hash of other data."""
    address = other_data(facts)
    if not address:
        return name
    folder = re.sub(r"[^\w.-]+", "-", address.rpartition("/")[2])[:_MAX_DATA_NAME].strip("-.") or "data"
    return f"{name}-{folder}-{hashlib.sha256(address.encode()).hexdigest()[:_NUM_HASH_DIGITS]}"


def is_same_evaluation(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results are of the same weights and data, by the same flags."""
    return all(one.get(name) == other.get(name) for name in _DECISIVE) and _flags_of(one) == _flags_of(other)


def _flags_of(result: dict[str, Any]) -> list[str]:
    """The flags of a result's command. Data and weights are compared by their fields: their paths may be relative."""
    words = shlex.split(str(result.get("command", "")))[_NUM_WORDS_BEFORE_FLAGS:]
    return [word for before, word in zip(["", *words], words, strict=False) if "--shards" not in (before, word)]


def other_data(result: dict[str, Any]) -> str:
    """Address of the data of a result; empty for the run's own data, which is assumed if the result does not say."""
    return "" if result.get("is_own_data", True) else str(result["shards"])


def suffix_of(differences: Mapping[str, Any]) -> str:
    """Part of the name of a result for what an evaluation did unlike the training, so that results stay apart."""
    forms = {"num_frames": "-{}-frames", "sampling": "-{}", "size_px": "-{}px"}
    suffix, groups = "", dict[str, list[str]]()
    for name, value in differences.items():
        group, _, inner = name.partition(".")
        if name in forms:
            suffix += forms[name].format(value)
        else:
            groups.setdefault(group, []).append(f"{inner} {value}" if inner else str(value))
    for group, texts in groups.items():
        suffix += f"-{group}-{hashlib.sha256(' '.join(texts).encode()).hexdigest()[:8]}"
    return suffix
