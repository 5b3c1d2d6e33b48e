"""Weights that are not finite: no checkpoint is made of them, and none that holds them is gone on from or exported."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import clipmill.train.engine.loop
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.train.config.evaluation import EvaluationSettings
from clipmill.train.distributed.world import World
from clipmill.train.engine.metrics_log import not_finite
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder
from tests.train.plane import ONE, PlaneTask, settings, train_plane


class PoisonedTask(PlaneTask):
    """The step that is evaluated has NaN in a weight: nothing behind the last step would show it."""

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        next(model.parameters()).data[0, 0] = float("nan")
        return {}


def test_no_checkpoint_is_made_of_them_and_the_last_good_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = replace(settings(tmp_path / "run", steps=5, checkpoint_every=2), evaluate=EvaluationSettings(every=5))
    with pytest.raises(FailedWork, match=r"after step 5 .* not finite .*: model\.0\.weight; no checkpoint is made"):
        train_plane(chosen, PoisonedTask())
    folder = RunFolder(chosen.out).checkpoints
    assert list(all_checkpoints(folder)) == [2, 4]
    with monkeypatch.context() as patch:
        # As older versions did.
        patch.setattr(clipmill.train.engine.loop, "require_finite_state", lambda *_, **__: None)
        train_plane(chosen, PoisonedTask())
    assert max(all_checkpoints(folder)) == 5
    with pytest.raises(UserError, match=r"step_000005 holds .* not finite .* in model\.0\.weight") as caught:
        train_plane(chosen, PlaneTask())
    assert caught.value.hint == "remove it: step_000004 is used instead"


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"model.a": torch.tensor([1.0, float("inf")])}, "model.a"),
        ({"model.a": torch.tensor([1.0, float("-inf")])}, "model.a"),
        ({"optimizer.a.step": torch.full((2, 2), float("nan"), dtype=torch.bfloat16)}, "optimizer.a.step"),
        # log u before the first visit
        ({"objective.image.rows": torch.tensor([[float("-inf")], [0.5]])}, None),
        ({"objective.image.rows": torch.full((3, 1), float("-inf"))}, None),
        ({"objective.image.rows": torch.tensor([[float("-inf")], [float("nan")]])}, "objective.image.rows"),
        ({"objective.tau": torch.tensor(float("inf"))}, "objective.tau"),
        ({"model.a": torch.zeros(0), "model.n": torch.tensor([2**62]), "model.b": torch.tensor(1e38)}, None),
        ({name: torch.tensor(float("nan")) for name in "abcde"}, "a, b, c and 2 more"),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_named(tensors: Mapping[str, torch.Tensor], found: str | None) -> None:
    assert not_finite(tensors, world=ONE) == found
