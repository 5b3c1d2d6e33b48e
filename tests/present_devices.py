"""Seeds of torch for the devices that this machine has.

For all other kinds of devices, `torch.manual_seed` keeps the stack of its caller, in case they are initialized later:
below pytest that takes longer than a step of a tiny model.
"""

import torch


def seed_present_devices() -> None:
    """From now on, in this process, `torch.manual_seed` omits kinds of devices that are missing."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _ignore_seed


def _ignore_seed(seed: int) -> None:
    pass
