"""GPU hours and energy in run.json; the driver library is replaced, because there may be no GPU."""

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from clipmill.manifests.publish import publish_json
from clipmill.train.distributed.world import World
from clipmill.train.engine.metrics import FACT, Consumption, consumption_entry
from clipmill.train.run.folder import RunFolder

GPU = torch.device("cuda", 0)


class Driver:
    """NVML's energy counter of one GPU in millijoules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted_mj: int | None = 5_000_000
        self.num_open = 0
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234-ab"))
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: self._count_open(1))
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: self._count_open(-1))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", {"GPU-1234-ab": "handle"}.__getitem__)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", self._energy)

    def _count_open(self, change: int) -> None:
        self.num_open += change

    def _energy(self, handle: str) -> int:
        assert handle == "handle" and self.num_open == 1
        if self.counted_mj is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.counted_mj


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    publish_json(run.facts, {"task": "mae"})
    return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("clipmill.train.engine.metrics.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_hours_and_energy_add_up_over_checkpoints_and_resumptions(
    run: RunFolder, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch)
    used = Consumption(run, world=World(), device=GPU)
    for hours, kwh in ((1.0, 0.5), (2.0, 1.5)):
        clock[0], driver.counted_mj = 100 + 3600 * hours, 5_000_000 + round(3.6e9 * kwh)
        used.measure()()
        assert run.read_facts() == {"task": "mae", FACT: {"gpu_hours": hours, "gpu_kwh": pytest.approx(kwh)}}
    publish_json(run.facts, {"task": "mae", **consumption_entry(run.read_facts())})
    again = Consumption(run, world=World(), device=GPU)
    clock[0] += 1800
    again.measure()()
    assert run.read_facts()[FACT] == {"gpu_hours": 2.5, "gpu_kwh": pytest.approx(1.5)}
    # Once a part of the energy is unknown, the sum is unknown.
    driver.counted_mj = None
    unknown = Consumption(run, world=World(), device=GPU)
    unknown.measure()()
    assert run.read_facts()[FACT] == {"gpu_hours": 2.5}
    driver.counted_mj = 9_000_000
    Consumption(run, world=World(), device=GPU).measure()()
    assert run.read_facts()[FACT] == {"gpu_hours": 2.5} and driver.num_open == 0


def test_without_a_gpu_or_its_library_nothing_is_claimed(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    Consumption(run, world=World(), device=torch.device("cpu")).measure()()
    assert run.read_facts() == {"task": "mae"}

    def raise_missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", raise_missing)
    Consumption(run, world=World(), device=GPU).measure()()
    assert set(run.read_facts()[FACT]) == {"gpu_hours"}
