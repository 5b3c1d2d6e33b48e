"""Arguments of the Python interface: their names in error messages, and checks of their values."""

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import ParamSpec, TypeVar, get_args

import torch
from torch.utils.data import get_worker_info

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import quote_value
from clipmill.train.config.shards import Shards
from clipmill.train.distributed.world import World

Data = str | Path | Sequence[str | Path]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ARGUMENTS = {"--shards": "data"}  # arguments whose names differ from their flags


def names_arguments(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function of the Python interface so that its errors mention arguments (`num_frames=`) instead of flags.

    Errors from lower layers mention flags of a command (`--num-frames`). A flag without a matching argument stays.
    """
    names = inspect.signature(call).parameters.keys()

    @wraps(call)
    def call_with_names(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except UserError as error:
            error.rename_flags(lambda flag: _argument(flag, names))
            raise

    return call_with_names


def _argument(flag: str, names: Collection[str]) -> str:
    """Return the argument with the name of the flag, its name within its group, or its group; otherwise the flag."""
    group, _, name = flag.removeprefix("--").replace("-", "_").partition(".")
    if (argument := _ARGUMENTS.get(flag, name or group)) in names:
        return argument
    return f"{group}.{name}" if group in names else flag


def require_whole_numbers(**arguments: object) -> None:
    """Raise a UserError if one of these arguments is not an integer."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise UserError(f"{name} is {quote_value(value)}", hint="use a whole number")


def require_texts(**arguments: object) -> None:
    """Raise a UserError if one of these arguments is neither a string nor None."""
    for name, value in arguments.items():
        if not isinstance(value, str | NoneType):
            raise UserError(f"{name} is {quote_value(value)}", hint="use a text")


def colours_of(name: str, values: Sequence[float] | None) -> tuple[float, float, float] | None:
    """Convert a list, array or tensor of three numbers to a tuple; raise UserError for other values."""
    if values is None:
        return None
    try:
        red, green, blue = map(float, values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is {quote_value(values)}", hint="pass three numbers, for R, G and B") from error
    return red, green, blue


def require_device(device: object) -> None:
    """Raise a UserError if `device` is not available on this machine. None means no device."""
    if device is None:
        return
    kind = torch.accelerator.current_accelerator(check_available=True)
    gpus = [] if kind is None else [f"{kind.type}:{number}" for number in range(torch.accelerator.device_count())]
    available = ["cpu", *gpus]
    try:
        requested = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):  # torch does not know the name
        requested = None
    if requested is None or (f"{requested.type}:{requested.index or 0}" not in available and requested.type != "cpu"):
        name = str(device) if isinstance(device, torch.device) else device
        raise UserError(f"device is {quote_value(name)}", hint=f"available here: {', '.join(available)}")


def require_process(process: int, *, what: str) -> None:
    """Raise a UserError unless this is the process with the ID `process`, because a fork does not copy threads."""
    if os.getpid() != process:
        raise UserError(
            f"{what} that process {process} opened are used in process {os.getpid()}, a fork of it",
            hint="open them in the process that uses them, and without a DataLoader: they are decoded by threads",
        )


def ranks_of(rank: int | None, world: int | None) -> World | None:
    """Return the rank and world size that the caller passed; None to use the rank in this process group.

    Raises:
        UserError: Only one of the two is given, one is out of range, or both are missing in a DataLoader worker.
    """
    if (rank is None) != (world is None):
        raise UserError(f"rank is {rank} and world is {world}", hint="give both, or neither of them")
    if rank is None or world is None:
        if get_worker_info() is not None:
            raise UserError(
                "opened in a worker of a DataLoader: each worker would load the same samples",
                hint="iterate without a DataLoader: clips are decoded by threads; or give rank= and world=",
            )
        return None
    require_whole_numbers(rank=rank, world=world)
    if not 0 <= rank < world:
        raise UserError(f"rank is {rank} of {world}", hint="ranks count from 0")
    return World(rank=rank, size=world)


def shards_of(data: Data, mix: Sequence[float] | None) -> Shards:
    """Return the value of --shards: one data folder, or several.

    Raises:
        UserError: There is no folder, an entry is not a string, or `mix` is given for a single folder.
    """
    several = [data] if isinstance(data, str | Path) or not isinstance(data, Iterable) else list(data)
    if wrong := [folder for folder in several if not isinstance(folder, str | Path)]:
        raise UserError(f"data is {quote_value(wrong[0])}", hint="name a data folder, as a string or Path, or a list")
    folders = tuple(map(str, several))
    if not folders:
        raise UserError("data is an empty list", hint="name a data folder, or several")
    weights: object = mix
    if mix is not None and (isinstance(weights, str) or not isinstance(weights, Iterable)):
        raise UserError(f"mix is {quote_value(weights)}", hint="give a list with a weight for each data folder")
    if mix is not None and len(folders) == 1:
        raise UserError(f"mix is {mix}, and there is one data folder: {folders[0]}", hint="omit it")
    return folders if len(folders) > 1 else folders[0]


def require_choice(name: str, value: object, choices: object) -> None:
    """Raise a UserError if a value is not one of a Literal's values."""
    if value not in get_args(choices):
        raise UserError(f"{name} is {value!r}", hint=f"use one of {', '.join(get_args(choices))}")
