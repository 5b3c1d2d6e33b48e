"""Checks of the NVIDIA driver: its version, the version that torch needs, and the reason why a GPU cannot be used.

torch is imported only inside functions, so that `train doctor` can report the driver even if torch cannot be imported.
"""

import ctypes
import os
import re
from functools import cache
from pathlib import Path

from clipmill.manifests.errors import first_line

_VERSION_FILE = Path("/proc/driver/nvidia/version")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
# Oldest Linux driver that supports all minor versions of each major version of CUDA (CUDA Toolkit release notes, table
# "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version Compatibility").
_OLDEST_DRIVERS = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}
# Results of cuInit on a machine without a GPU: CUDA_ERROR_STUB_LIBRARY and CUDA_ERROR_NO_DEVICE.
_NO_DEVICE = (34, 100)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, as listed in /proc; None if no driver is loaded."""
    try:
        text = _VERSION_FILE.read_text()
    except OSError:
        return None
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else None


def required_driver(cuda: str | None) -> str | None:
    """Return the oldest driver that supports a CUDA version such as 13.2.

    The result is None if `cuda` is None, or if no driver is known for its major version.
    """
    return None if cuda is None else _OLDEST_DRIVERS.get(cuda.partition(".")[0])


def is_older(driver: str, other: str) -> bool:
    """Return True if the version `driver` is lower than the version `other`."""
    return [*map(int, driver.split("."))] < [*map(int, other.split("."))]


@cache
def why_no_gpu() -> str | None:
    """Return the reason why torch cannot use the NVIDIA GPU of this machine.

    The result is None if torch can use the GPU, if the machine has no GPU, or if the user has hidden all GPUs.
    """
    import torch

    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    driver = driver_version()
    if driver is None and not _has_cuda_device() and not _has_pci_device():
        return None
    cuda, oldest_driver = torch.version.cuda, required_driver(torch.version.cuda)
    if cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if driver is not None and oldest_driver is not None and is_older(driver, oldest_driver):
        return f"the driver {driver} is older than {oldest_driver}, the oldest that torch {torch.__version__} supports"
    try:
        torch.cuda.init()
        reason = "torch finds no GPU"
    except RuntimeError as error:
        reason = first_line(error)
    return f"{reason} (torch {torch.__version__} needs driver {oldest_driver or 'for CUDA ' + cuda} or later)"


def _has_cuda_device() -> bool:
    """Return True if the driver library finds a GPU, or fails for any reason other than a missing GPU."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) not in _NO_DEVICE
    except (OSError, AttributeError):
        return False


def _has_pci_device() -> bool:
    """Return True if the kernel lists an NVIDIA display device, with or without a driver."""
    for device in _PCI_DEVICES.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False
