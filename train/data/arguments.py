"""Arguments of the Python interface: their names in errors; checks of numbers, devices, and the iterating process."""

import inspect
import os
import re
from collections.abc import Callable, Collection
from functools import wraps
from numbers import Integral
from typing import ParamSpec, TypeVar

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import quoted
from clipmill.train.config.fields import FLAG

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Command lines, whose flags stay flags; a flag, with what follows it: a verb, a value, or a name at the end.
_FOLLOWS = r"( (?=is\b|must\b))| (?=['\"/.\dA-Z])| ([a-z]\w*$)"
_FLAGS = re.compile(rf"\b(?:prep|train) [a-z][^;:,]*|({FLAG.pattern})(?:{_FOLLOWS})?")
_ARGUMENTS = {"--shards": "data"}  # of other names than their flags


def names_arguments(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of the Python interface, whose errors name its arguments (`num_frames=`) in place of flags.

    What is refused below it is a setting of a command (`--num-frames`). Flags that it has no argument for stay.
    """
    names = inspect.signature(call).parameters.keys()

    def say(text: str) -> str:
        return _FLAGS.sub(lambda found: _argument(found, names), text)

    @wraps(call)
    def named(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except UserError as error:
            error.reword(say)
            raise

    return named


def _argument(found: re.Match[str], names: Collection[str]) -> str:
    flag = found[1]
    if flag is None:
        return found[0]
    first, _, rest = flag[2:].replace("-", "_").partition(".")
    written = [name for name in (first, rest, _ARGUMENTS.get(flag, "")) if name in names]
    if not written:
        return found[0]
    name = f"{first}.{rest}" if written[-1] == first and rest else written[-1]
    return f"{name}={found[3]!r}" if found[3] else name + (found[2] or "=")


def require_whole_numbers(**arguments: object) -> None:
    """Refuse arguments, given by their names, that are not whole numbers."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise UserError(f"{name} is {quoted(value)}", hint="use a whole number")


def require_device(device: object) -> None:
    """Refuse a device that this machine does not have; None means no device."""
    if device is None:
        return
    there = _devices()
    try:
        asked = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):  # not a name that torch knows
        asked = None
    if asked is None or (f"{asked.type}:{asked.index or 0}" not in there and asked.type != "cpu"):
        given = str(device) if isinstance(device, torch.device) else device
        raise UserError(f"device is {quoted(given)}", hint=f"available here: {', '.join(there)}")


def require_process(process: int, *, what: str) -> None:
    """Refuse to continue in a fork of the process that started: its threads were not copied."""
    if os.getpid() != process:
        raise UserError(
            f"{what} that process {process} opened are used in process {os.getpid()}, a fork of it",
            hint="open them in the process that uses them, and without a DataLoader: they are decoded by threads",
        )


def _devices() -> list[str]:
    """The CPU and each GPU that torch finds."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    gpus = [] if kind is None else [f"{kind.type}:{number}" for number in range(torch.accelerator.device_count())]
    return ["cpu", *gpus]
