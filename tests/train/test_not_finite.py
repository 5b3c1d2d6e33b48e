"""Non-finite weights: no checkpoint stores them, and no run or export starts from such a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import clipmill.train.engine.loop
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.train.config.evaluation import EvaluationSettings
from clipmill.train.data.batch import Batch
from clipmill.train.data.loader import TrainingSet
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.world import Step, World
from clipmill.train.engine.metrics import find_non_finite
from clipmill.train.losses.objective import Objective
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder, read_lines
from tests.train.plane import ONE, Distance, PlaneTask, settings, train_plane


class PoisonedTask(PlaneTask):
    """Plane task whose evaluation puts NaN into a weight; after the last step, no loss would reveal it."""

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        next(model.parameters()).data[0, 0] = float("nan")
        return {}


def test_no_checkpoint_is_made_of_them_and_the_last_good_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = replace(settings(tmp_path / "run", steps=5, checkpoint_every=2), evaluate=EvaluationSettings(every=5))
    with pytest.raises(FailedWork, match=r"after step 5 .* not finite .*: model\.0\.weight; no checkpoint was saved"):
        train_plane(chosen, PoisonedTask())
    folder = RunFolder(chosen.out).checkpoints
    assert list(all_checkpoints(folder)) == [2, 4]
    with monkeypatch.context() as patch:
        # Older versions did not check this.
        patch.setattr(clipmill.train.engine.loop, "require_finite_state", lambda *_, **__: None)
        train_plane(chosen, PoisonedTask())
    assert max(all_checkpoints(folder)) == 5
    with pytest.raises(UserError, match=r"step_000005 contains .* not finite .* in model\.0\.weight") as caught:
        train_plane(chosen, PlaneTask())
    assert caught.value.hint == "remove this checkpoint; step_000004 is then used instead"


class IdleTask(PlaneTask):
    """Plane task whose loss is 0 for any model output, up to a step."""

    def __init__(self, *, until: int) -> None:
        super().__init__()
        self._until = until

    def build_objective(self, samples: TrainingSet, world: World) -> Objective:
        until = self._until

        class Idle(Distance):
            def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
                if step.number > until:
                    return super().backward(model, batch, step)
                (0 * model(batch["video"].view(torch.float32)).sum()).backward()
                return {"loss": torch.zeros(())}

        return Idle()


@pytest.mark.parametrize(("num_steps", "ended_at"), [(12, 10), (4, 4)])
def test_first_steps_without_gradients_end_a_run(tmp_path: Path, num_steps: int, ended_at: int) -> None:
    chosen = settings(tmp_path / "run", steps=num_steps, checkpoint_every=100)
    with pytest.raises(FailedWork, match=rf"loss is 0.0000, and the gradients of the first {ended_at} steps are exac"):
        train_plane(chosen, IdleTask(until=100))
    run = RunFolder(chosen.out)
    assert len(read_lines(run.metrics)) == ended_at and not all_checkpoints(run.checkpoints)


def test_a_run_that_has_a_gradient_before_goes_on(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run", steps=12, checkpoint_every=100)
    assert list(all_checkpoints(train_plane(chosen, IdleTask(until=9)).checkpoints)) == [12]


@pytest.mark.parametrize(
    ("tensors", "names"),
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
def test_what_is_not_finite_is_named(tensors: Mapping[str, torch.Tensor], names: str | None) -> None:
    assert find_non_finite(tensors, world=ONE) == names
