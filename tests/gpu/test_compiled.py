"""`--compile`: the same losses; last, because torch.compile takes longest."""

import sysconfig
from functools import partial
from pathlib import Path

import pytest
import torch

from clipmill.train.models import transformer
from tests.gpu.runs import Runs
from tests.gpu.test_tasks import ALL, FIRST, Record, assert_near
from tests.train.running import losses

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

TASKS = ("dual-encoder", "mae", "classify", "caption")
SHOWN = "classify"  # the one tower of the dry run


@pytest.mark.parametrize("task", TASKS)
def test_a_compiled_task_has_the_losses_of_an_eager_one(
    task: str,
    runs: Runs,
    device: torch.device,
    is_dry_run: bool,
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_dry_run:
        if task != SHOWN:
            pytest.skip(f"not in the dry run, which runs {SHOWN} alone")
        # Traced as ever, and handed to no compiler of C++.
        compiled = partial(transformer.compile_blocks, backend="aot_eager")
        monkeypatch.setattr("clipmill.train.engine.task.compile_blocks", compiled)
    elif not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("Triton builds its launchers with Python.h, which this machine lacks")
    torch.compiler.reset()
    values = losses(runs.make(task, device, "--compile"))
    assert_near(values, losses(runs.make(task, device)), first=FIRST, every=ALL, record=record_property)
    torch.compiler.reset()
