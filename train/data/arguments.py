"""Checks of what users of the Python interface give: whole numbers, devices, and the process that iterates."""

import os
from numbers import Integral

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import quoted


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
