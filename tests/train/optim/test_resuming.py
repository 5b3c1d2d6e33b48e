"""Every optimizer, precision and average goes on from a checkpoint as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.manifests.errors import FailedWork
from clipmill.train.config.optim import OptimizerSettings
from clipmill.train.config.training import TrainingSettings
from clipmill.train.engine.loop import train
from clipmill.train.run.checkpoint import latest_checkpoint, read_weights
from clipmill.train.run.folder import RunFolder, create_run, read_lines
from clipmill.train.run.tracking import Progress
from tests.train.plane import ONE, LoadedPoints, PlaneTask, Points, settings


def train_plane(run: RunFolder, chosen: TrainingSettings, *, samples: Points | None = None) -> None:
    points = LoadedPoints(samples or Points(), chosen)
    train(PlaneTask(), points, chosen, run=run, world=ONE, device=torch.device("cpu"), progress=Progress())


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(run.checkpoints)
    assert path is not None
    return read_weights(path)


@pytest.mark.parametrize(
    ("name", "precision"), [("adamw", "fp16"), ("lamb", "bf16"), ("lion", "fp32"), ("sgd", "fp16")]
)
def test_a_run_goes_on_with_moments_averages_and_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, precision: str
) -> None:
    # Too large at first, so that steps are left out; soon doubled again.
    monkeypatch.setattr("clipmill.train.device.precision._FIRST_SCALE", 2.0**22)
    monkeypatch.setattr("clipmill.train.device.precision._STEPS_TO_DOUBLE", 3)
    chosen = {"optimizer": OptimizerSettings(name=name, ema=0.8, layer_decay=0.9), "precision": precision, "lr": 0.01}
    whole, broken = (create_run(settings(tmp_path / one, **chosen)) for one in ("whole", "broken"))
    train_plane(whole, settings(whole.path, **chosen))

    def stop(self: Any, line: dict[str, Any]) -> None:
        if line["step"] == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "log", stop)
        with pytest.raises(KeyboardInterrupt, match=r"train --resume --out .*broken continues from"):
            train_plane(broken, settings(broken.path, **chosen))
    train_plane(broken, settings(broken.path, **chosen))
    expected = weights(whole)
    assert all(torch.equal(value, expected[key]) for key, value in weights(broken).items())
    lines, again = (read_lines(run.metrics) for run in (whole, broken))
    for key in ("loss", "lr", "grad_norm", "loss_scale", "num_skipped"):
        assert [line.get(key) for line in again] == [line.get(key) for line in lines], key
    if precision == "fp16":
        assert 1 <= lines[-1]["num_skipped"] < 12
        assert [line["grad_norm"] for line in lines].count(None) == lines[-1]["num_skipped"]
    else:
        assert "loss_scale" not in lines[-1]


def test_the_weights_to_evaluate_are_the_averages(tmp_path: Path) -> None:
    plain, averaged = (create_run(settings(tmp_path / one)) for one in ("plain", "averaged"))
    train_plane(plain, settings(plain.path))
    train_plane(averaged, settings(averaged.path, optimizer=OptimizerSettings(ema=0.99)))
    # Training does not know of them.
    assert [line["loss"] for line in read_lines(plain.metrics)] == [
        line["loss"] for line in read_lines(averaged.metrics)
    ]
    assert not any(torch.equal(one, weights(plain)[key]) for key, one in weights(averaged).items())


def test_a_gradient_that_is_no_number_stops_the_run_with_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(settings(tmp_path / "run"))
    monkeypatch.setattr("clipmill.train.engine.loop.clip_gradients", lambda parameters, **_: float("nan"))
    with pytest.raises(FailedWork, match="the norm of the gradients is nan at step 1"):
        train_plane(run, settings(run.path))
    assert "point_" in (run.path / "bad_batch.json").read_text()
