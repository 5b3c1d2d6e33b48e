"""Resuming from a checkpoint is exact for every optimizer, precision and average."""

from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.manifests.errors import FailedWork
from clipmill.train.config.training import OptimizerSettings
from clipmill.train.run.folder import read_lines
from clipmill.train.run.tracking import Progress
from tests.tiers import nightly_beyond
from tests.train.plane import assert_same, settings, train_plane
from tests.train.running import losses, weights_of


@pytest.mark.parametrize(
    ("name", "precision"),
    nightly_beyond(
        [("adamw", "fp16"), ("lamb", "bf16")], [("adamw", "fp16"), ("lamb", "bf16"), ("lion", "fp32"), ("sgd", "fp16")]
    ),
)
def test_a_run_goes_on_with_moments_averages_and_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, precision: str
) -> None:
    # The scale is too large at first, so steps are skipped, and it is soon doubled again.
    monkeypatch.setattr("clipmill.train.device.precision._INITIAL_SCALE", 2.0**22)
    monkeypatch.setattr("clipmill.train.device.precision._STEPS_TO_DOUBLE", 3)
    chosen = {"optimizer": OptimizerSettings(name=name, ema=0.8, layer_decay=0.9), "precision": precision, "lr": 0.01}
    whole = train_plane(settings(tmp_path / "whole", **chosen))

    def stop(self: Any, line: dict[str, Any]) -> None:
        if line["step"] == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "log", stop)
        with pytest.raises(KeyboardInterrupt, match=r"train --resume --out .*broken continues from"):
            train_plane(settings(tmp_path / "broken", **chosen))
    assert_same(train_plane(settings(tmp_path / "broken", **chosen)), whole)
    lines = read_lines(whole.metrics)
    if precision == "fp16":
        assert 1 <= lines[-1]["num_skipped"] < 12
        assert [line["grad_norm"] for line in lines].count(None) == lines[-1]["num_skipped"]
    else:
        assert "loss_scale" not in lines[-1]


def test_the_weights_to_evaluate_are_the_averages(tmp_path: Path) -> None:
    plain, averaged = tmp_path / "plain", tmp_path / "averaged"
    train_plane(settings(plain))
    train_plane(settings(averaged, optimizer=OptimizerSettings(ema=0.99)))
    assert losses(plain) == losses(averaged), "averages must not affect training"
    assert not any(torch.equal(tensor, weights_of(plain)[key]) for key, tensor in weights_of(averaged).items())


def test_a_gradient_that_is_no_number_stops_the_run_with_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipmill.train.engine.loop.clip_gradients", lambda parameters, **_: float("nan"))
    with pytest.raises(FailedWork, match="the norm of the gradients is nan at step 1"):
        train_plane(settings(tmp_path / "run"))
    assert "point_" in (tmp_path / "run" / "bad_batch.json").read_text()
