"""Asks a process of its own about the accelerator, and waits so long and no longer."""

import json
import os
import signal
import subprocess
import sys

from train.doctor.accelerator import Accelerator, accelerator_of, driver_version

_PATIENCE_S = 180.0
_TO_DIE_S = 5.0


def ask_child(*, patience_s: float = _PATIENCE_S, module: str = "train.doctor.accelerator") -> Accelerator:
    """What `train.doctor.accelerator` prints; where it hangs or dies, that is what is known."""
    command = [sys.executable, "-m", module]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        printed, complaints = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            process.communicate(timeout=_TO_DIE_S)
        except subprocess.TimeoutExpired:
            pass  # it waits in the kernel, for a driver that does not answer; nobody can end it
        reason = f"torch and the GPU gave no answer within {patience_s:.0f} s"
        return Accelerator(torch_error=reason, driver=driver_version())
    try:
        return accelerator_of(json.loads(printed))
    except (ValueError, KeyError, TypeError):
        lines = complaints.decode(errors="replace").strip().splitlines()
        what = lines[-1] if lines else "it said nothing"
        return Accelerator(
            torch_error=f"a process that tried torch and attention ended with {process.returncode}: {what}",
            driver=driver_version(),
        )
