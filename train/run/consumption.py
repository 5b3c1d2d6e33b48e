"""GPU hours and energy of a run, kept in its run.json; without a GPU there is nothing to keep.

All ranks meet at each checkpoint and add up what they have used since the run was started or resumed. What was used
after the last checkpoint of a process that was killed is not known. Energy is that of the GPUs alone, by the counter of
NVIDIA's driver (NVML), as long as every GPU of the run has one.
"""

import time
from typing import Any

import torch

from clipmill.manifests.publish import publish_json
from clipmill.train.distributed.world import World
from clipmill.train.run.folder import RunFolder

FACT = "consumption"
_JOULES_PER_KWH = 3.6e6


class Consumption:
    """What a run has used: `gpu_hours`, and `gpu_kwh` where it is known. All ranks call its methods."""

    def __init__(self, run: RunFolder, *, world: World, device: torch.device) -> None:
        self._run, self._world, self._device = run, world, device
        self._before = world.first(lambda: dict(run.read_facts().get(FACT, {})))
        self._began_s, self._began_j = time.monotonic(), _energy_j(device)

    def record(self) -> None:
        """Write the sums of all ranks to run.json."""
        if self._device.type != "cuda":
            return
        now_j = _energy_j(self._device)
        used_j = None if now_j is None or self._began_j is None else now_j - self._began_j
        ranks = self._world.gather_objects((time.monotonic() - self._began_s, used_j))
        if not self._world.is_first:
            return
        found = {"gpu_hours": self._before.get("gpu_hours", 0.0) + sum(used_s for used_s, _ in ranks) / 3600}
        joules = [used_j for _, used_j in ranks if used_j is not None]
        if len(joules) == len(ranks) and ("gpu_kwh" in self._before or not self._before):
            found["gpu_kwh"] = self._before.get("gpu_kwh", 0.0) + sum(joules) / _JOULES_PER_KWH
        publish_json(self._run.facts, {**self._run.read_facts(), FACT: found})


def _energy_j(device: torch.device) -> float | None:
    """Energy that a GPU has used since its driver was loaded; None without a GPU that counts it."""
    if device.type != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def consumption_entry(facts: dict[str, Any]) -> dict[str, Any]:
    """The entry of run.json, for a run that is resumed."""
    return {FACT: facts[FACT]} if FACT in facts else {}
