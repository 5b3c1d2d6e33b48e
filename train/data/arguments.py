"""Checks of the Python interface's arguments, and error messages that mention arguments instead of flags."""

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from torch.utils.data import get_worker_info

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import quote_value
from clipmill.train.config.clips import Augment, CaptionSettings
from clipmill.train.config.shards import Shards
from clipmill.train.distributed.world import World

Data = str | Path | Sequence[str | Path]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ARGUMENTS = {"--shards": "data"}  # arguments by flag, where the names differ


def name_arguments_in_errors(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function of the Python interface so that errors mention arguments (`num_frames=`) instead of flags.

    Lower layers are shared with the commands, so their errors mention flags (`--num-frames`). A flag that does not
    match an argument is left unchanged.
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
    """Return the argument that corresponds to a flag such as --batch or --captions.sources; the flag if none does."""
    group, _, name = flag.removeprefix("--").replace("-", "_").partition(".")
    if (argument := _ARGUMENTS.get(flag, name or group)) in names:
        return argument
    return f"{group}.{name}" if group in names else flag


def require_whole_numbers(**arguments: object) -> None:
    """Raise a UserError if an argument is not an integer."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise UserError(f"{name} is {quote_value(value)}, not a whole number", hint="pass a whole number")


def require_strings(**arguments: object) -> None:
    """Raise a UserError if an argument is neither a string nor None."""
    for name, value in arguments.items():
        if not isinstance(value, str | NoneType):
            raise UserError(f"{name} is {quote_value(value)}, not a string", hint="pass a string")


def rgb_values(name: str, values: Sequence[float] | None) -> tuple[float, float, float] | None:
    """Convert a list, array or tensor of three numbers (R, G, B) to a tuple. None stays None.

    Raises:
        UserError: `values` is anything else.
    """
    if values is None:
        return None
    try:
        red, green, blue = map(float, values)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} is {quote_value(values)}, not three numbers", hint="pass one number each for R, G and B"
        ) from error
    return red, green, blue


def require_device(device: object) -> None:
    """Raise a UserError if `device` is not available on this machine. None, which stands for NumPy arrays, is valid."""
    if device is None:
        return
    kind = torch.accelerator.current_accelerator(check_available=True)
    gpus = [] if kind is None else [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]
    available = ["cpu", *gpus]
    try:
        requested = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):  # torch does not know the name
        requested = None
    if requested is None or (f"{requested.type}:{requested.index or 0}" not in available and requested.type != "cpu"):
        name = str(device) if isinstance(device, torch.device) else device
        raise UserError(
            f"device is {quote_value(name)}, which this machine does not have",
            hint=f"use a device of this machine: {', '.join(available)}",
        )


def require_process(process: int, *, what: str) -> None:
    """Raise a UserError unless the ID of this process is `process`, because a fork does not copy threads.

    Args:
        process: ID of the process that opened the data.
        what: Plural noun for the data, for the message.
    """
    if os.getpid() != process:
        raise UserError(
            f"{what} opened in process {process} are used in its fork, process {os.getpid()}",
            hint="open them in the process that uses them; omit the DataLoader, because threads decode in parallel",
        )


def explicit_world(rank: int | None, world: int | None) -> World | None:
    """Return the rank and world size that the caller passed; None if the caller passed neither.

    Raises:
        UserError: Only one of the two is given, `rank` is out of range, or both are missing in a DataLoader worker.
    """
    if (rank is None) != (world is None):
        raise UserError(f"rank is {rank} and world is {world}", hint="pass both or neither")
    if rank is None or world is None:
        if get_worker_info() is not None:
            raise UserError(
                "the data are opened in a DataLoader worker, and each worker would load the same samples",
                hint="iterate without a DataLoader, because threads decode in parallel; or pass rank= and world=",
            )
        return None
    require_whole_numbers(rank=rank, world=world)
    if not 0 <= rank < world:
        raise UserError(f"rank is {rank} of {world}, which is out of range", hint="pass a rank from 0 to world - 1")
    return World(rank=rank, size=world)


def shards_value(data: Data, mix: Sequence[float] | None) -> Shards:
    """Return the value of --shards for `data`: one address, or a tuple of several.

    Raises:
        UserError: `data` is an empty list; an address is neither a string nor a path; `mix` is not a list; or `mix` is
            given for a single address.
    """
    addresses = [data] if isinstance(data, str | Path) or not isinstance(data, Iterable) else list(data)
    if invalid := [address for address in addresses if not isinstance(address, str | Path)]:
        raise UserError(
            f"data is {quote_value(invalid[0])}, not a data folder",
            hint="pass a string, a Path, or a list of strings or Paths",
        )
    folders = tuple(map(str, addresses))
    if not folders:
        raise UserError("data is an empty list", hint="pass one or more data folders")
    weights: object = mix
    if mix is not None and (isinstance(weights, str) or not isinstance(weights, Iterable)):
        raise UserError(f"mix is {quote_value(weights)}, not a list", hint="pass one weight for each data folder")
    if mix is not None and len(folders) == 1:
        raise UserError(f"mix is {mix}, but there is only one data folder: {folders[0]}", hint="omit mix=")
    return folders if len(folders) > 1 else folders[0]


def require_choice(name: str, value: object, choices: object) -> None:
    """Raise a UserError unless `value` is one of the values of `choices`, a Literal type."""
    if value not in get_args(choices):
        raise UserError(
            f"{name} is {value!r}, which is not supported", hint=f"use one of {', '.join(get_args(choices))}"
        )


def caption_settings(sources: Mapping[str, float] | None, min_relevancy: float | None) -> CaptionSettings:
    """Return the settings for these arguments; raise UserError if `sources` is not a mapping."""
    if sources is not None and not isinstance(sources, Mapping):
        raise UserError(
            f"sources is {quote_value(sources)}, not a mapping",
            hint='pass a weight for each name: {"human": 1, "*rephraser*": 2}',
        )
    text = None if sources is None else ",".join(f"{name}={weight}" for name, weight in sources.items())
    return CaptionSettings(sources=text, min_relevancy=min_relevancy)


def augment_settings(values: Mapping[str, float] | None) -> Augment:
    """Return augmentation settings with these values; raise UserError for unknown names and invalid values."""
    defaults = vars(Augment())
    if values is not None and (not isinstance(values, Mapping) or values.keys() - defaults.keys()):
        raise UserError(
            f"augment is {quote_value(values)}, not a dictionary of augmentation settings",
            hint=f"pass values for some of {', '.join(defaults)}",
        )
    overrides: Mapping[str, Any] = values or {}
    numbers: dict[str, Any] = {}
    for name, value in overrides.items():
        is_integer = isinstance(defaults[name], int)
        if isinstance(value, bool) or not isinstance(value, Real) or (is_integer and not float(value).is_integer()):
            noun = "whole number" if is_integer else "number"
            raise UserError(f"augment.{name} is {quote_value(value)}, not a {noun}", hint=f"pass a {noun}")
        numbers[name] = type(defaults[name])(value)
    return Augment(**numbers)


def mean_and_std(
    pixel_mean: Sequence[float] | None, pixel_std: Sequence[float] | None, *, augment: Mapping[str, float] | None = None
) -> tuple[tuple[float, float, float] | None, tuple[float, float, float] | None]:
    """Return the mean and standard deviation as tuples, or None for both; raise UserError if only one is given."""
    mean, std = rgb_values("pixel_mean", pixel_mean), rgb_values("pixel_std", pixel_std)
    if (mean is None) != (std is None) or (augment is not None and mean is None):
        raise UserError(
            f"pixel_mean is {mean}, pixel_std is {std} and augment is {augment}",
            hint="pass both pixel_mean and pixel_std, or neither; augment needs both",
        )
    return mean, std


def views_setting(views: Sequence[str] | None) -> str | None:
    """Return the value of --views; raise UserError unless `views` is a sequence of names."""
    if views is None:
        return None
    if isinstance(views, str) or not isinstance(views, Sequence) or not all(isinstance(name, str) for name in views):
        raise UserError(
            f"views is {quote_value(views)}, not a list of camera names", hint='pass names such as ("top", "wrist")'
        )
    return ",".join(views)
