import math
from dataclasses import fields
from typing import Any

import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.train.config.fields import unknown_parts
from clipmill.train.config.training import OptimizerSettings
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.world import Step, World
from clipmill.train.losses.contrastive import DatasetSize, build_contrast
from clipmill.train.losses.global_losses import GlobalContrast
from clipmill.train.losses.settings import LOSSES, Convention, Loss
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask
from tests.train.losses.pairs import Table, batch_of, objective_of, settings_of


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"temperature": 0.0}, "--loss.temperature is 0.0"),
        ({"temperature": 0.001}, "--loss.temperature 0.001 is lower than"),
        ({"temperature": math.nan}, "--loss.temperature is nan"),
        ({"kind": "max-margin", "temperature": 0.1}, "max-margin does not use it"),
        ({"margin": 0.2}, "--loss.margin is 0.2, but infonce does not use it"),
        ({"gamma": 0.2}, "infonce does not use it"),
        ({"kind": "fastclip-v3", "gamma": 1.5}, "--loss.gamma is 1.5"),
        ({"kind": "fastclip-v3", "gamma_epochs": 0}, "--loss.gamma-epochs is 0"),
        ({"kind": "fastclip-v3", "freeze_temperature": True}, "--loss.freeze-temperature is True"),
        ({"kind": "fastclip-v1", "temperature_lr": 1e-4}, "--loss.temperature-lr is 0.0001"),
        ({"kind": "fastclip-v0", "rho": 1.0}, "--loss.rho is 1.0"),
        ({"use_relevancy": True}, "--loss.use-relevancy is True"),
        ({"epsilon": -1.0}, "--loss.epsilon is -1.0"),
        ({"min_temperature": 0.0}, "--loss.min-temperature is 0.0"),
    ],
)
def test_settings_that_cannot_work_are_named(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        Loss(**numbers)
    assert message in str(error.value)
    assert error.value.hint


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(UserError) as error:
        Loss(kind="sogclr", gamma=2.0, epsilon=-1.0, rho=1.0, temperature=0.001)
    for flag in ("--loss.gamma is 2.0", "--loss.epsilon is -1.0", "--loss.rho is 1.0", "--loss.temperature 0.001"):
        assert flag in str(error.value)
        assert flag.partition(" ")[0] in (error.value.hint or "")


def test_numbers_that_are_left_out_are_the_published_ones() -> None:
    assert Loss(kind="fastclip-v3").number("temperature") == 0.07
    assert Loss(kind="fastclip-v3").effective_temperature_lr == 2e-4
    assert Loss(kind="infonce").effective_temperature_lr is None
    assert Loss(kind="sogclr").effective_gamma_schedule == "constant"
    assert Loss(kind="fastclip-v1").effective_gamma_schedule == "cosine"
    assert Loss(kind="max-margin").number("margin") == 0.2
    assert Loss(kind="max-margin", use_relevancy=True).number("margin") == 0.4


def test_every_kind_has_its_loss_and_no_other_name_has_one() -> None:
    for spec in LOSSES.values():
        loss = spec.load()
        assert callable(loss)
        assert (isinstance(loss, type) and issubclass(loss, GlobalContrast)) == spec.is_global
        assert set(spec.settings) <= {field.name for field in fields(Loss)}
    unknown = Loss(kind="clip")  # as in a run whose package is not installed
    with pytest.raises(KeyError, match="clip"):
        build_contrast(unknown, inputs=lambda batch: (batch["latents"], batch["text"]), dataset=None, world=World())
    [error] = unknown_parts(unknown)
    assert (
        str(error) == "--loss.kind is clip, which is unknown" and error.hint is not None and "fastclip-v3" in error.hint
    )


@pytest.mark.parametrize("kind", sorted(name for name, spec in LOSSES.items() if spec.is_global))
@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        (
            "clip_id",
            [0, 1, 2, 3, 4, 7],
            "clip IDs 7 are out of range: the loss keeps averages for 7 clips, with IDs 0 to 6",
        ),
        ("caption_id", [0, 1, -3, 3, 4, 99], "caption IDs -3, 99"),
    ],
)
def test_ids_out_of_range_are_named(kind: Any, name: str, ids: list[int], message: str) -> None:
    batch = batch_of(0)
    batch[name] = torch.tensor(ids)  # type: ignore[literal-required]
    objective = objective_of(settings_of(kind), table=True)
    before = {key: value.clone() for key, value in objective.state_dict().items()}
    with pytest.raises(UserError) as error:
        objective.backward(Table(6), batch, Step(number=1))
    assert message in str(error.value)
    torch.testing.assert_close(objective.state_dict(), before)


def test_a_batch_without_relevancy_or_clip_ids_is_refused() -> None:
    batch = batch_of(0)
    del batch["relevancy"], batch["clip_id"]  # type: ignore[typeddict-item]
    with pytest.raises(UserError, match="relevancy"):
        objective_of(Loss(kind="max-margin", use_relevancy=True), table=True).backward(Table(6), batch, Step(number=1))
    with pytest.raises(UserError, match="fastclip-v3 needs clip IDs"):
        objective_of(settings_of("fastclip-v3"), table=True).backward(Table(6), batch, Step(number=1))


@pytest.mark.parametrize("kind", ["infonce", "siglip", "mbcl"])
def test_a_frozen_temperature_stays(kind: Any) -> None:
    objective = objective_of(Loss(kind=kind, freeze_temperature=True), table=True)
    objective.backward(Table(6), batch_of(0), Step(number=1))
    assert [name for name, parameter in objective.named_parameters() if parameter.grad is not None] in (
        [],
        ["logit_bias"],
    )


@pytest.mark.parametrize("kind", ["infonce", "siglip", "mbcl", "fastclip-v0", "fastclip-v3"])
@pytest.mark.parametrize("convention", ["paper", "fast_clip"])
def test_a_trained_temperature_keeps_its_limits(kind: Any, convention: Convention) -> None:
    objective = objective_of(Loss(kind=kind, convention=convention, min_temperature=0.02), table=True)
    parameter = dict(objective.named_parameters()).get("logit_scale")
    with torch.no_grad():
        if parameter is not None:
            parameter.fill_(50.0)
        else:
            objective.get_parameter("temperature").fill_(-1.0)
    objective.after_step(Step(number=1))
    log_scale = objective.log_scale()
    assert log_scale is not None
    assert (-log_scale).exp().item() == pytest.approx(0.02)


@pytest.mark.parametrize(("convention", "after"), [("paper", 3), ("fast_clip", 1)])
def test_the_temperature_of_v3_learns_slower_below_its_threshold(convention: Convention, after: int) -> None:
    """The paper lowers the rate once the temperature has been below 0.03, the code while it is at most 0.03."""
    objective = objective_of(Loss(kind="fastclip-v3", convention=convention, temperature_lr=3e-4))
    assert objective.learning_rate(1.0) == 3e-4

    def move_to(temperature: float) -> Scalar:
        with torch.no_grad():
            for name, parameter in objective.named_parameters():
                parameter.fill_(temperature if name == "temperature" else -math.log(temperature))
        objective.after_step(Step(number=1))
        return objective.learning_rate(1.0)

    assert move_to(0.029) == pytest.approx(1e-4)
    assert move_to(0.031) == pytest.approx(3e-4 / after)


def test_a_rate_of_its_own_or_the_models() -> None:
    assert objective_of(Loss(kind="infonce")).learning_rate(0.5) == 0.5
    assert objective_of(Loss(kind="infonce", temperature_lr=0.1)).learning_rate(0.5) == 0.1
    assert objective_of(Loss(kind="fastclip-v0")).learning_rate(0.5) == 0.5


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_state_comes_back(kind: Any) -> None:
    first, second = (objective_of(settings_of(kind), table=True) for _ in range(2))
    first.backward(Table(6), batch_of(0), Step(number=1))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second.state_dict(), first.state_dict())


def test_state_of_another_set_is_refused() -> None:
    first = objective_of(settings_of("fastclip-v3"))
    other = build_contrast(
        settings_of("fastclip-v3"),
        inputs=lambda batch: (batch["latents"], batch["text"]),
        dataset=DatasetSize(num_clips=8, num_captions=11, num_epochs=1),
        world=Step(number=1).world,
    )
    with pytest.raises(RuntimeError, match=r"clips\.rows"):
        other.load_state_dict(first.state_dict())


def test_the_temperatures_rate_is_scaled_with_the_batch_as_the_models_is() -> None:
    """In FastCLIP, appendix B, both rates are proportional to the batch size. Other losses have no separate rate."""
    scale = OptimizerSettings(lr_batch=1024).lr_scale(512)
    assert Loss(kind="fastclip-v3").with_scaled_lr(scale).effective_temperature_lr == 1e-4
    assert objective_of(Loss(kind="fastclip-v3", temperature_lr=4e-4).with_scaled_lr(scale)).learning_rate(1.0) == 2e-4
    for kind in ("infonce", "fastclip-v0", "fastclip-v1", "max-margin"):
        assert Loss(kind=kind).with_scaled_lr(scale) == Loss(kind=kind)
    unscaled = OptimizerSettings().lr_scale(512)
    assert Loss(kind="fastclip-v2").with_scaled_lr(unscaled) == Loss(kind="fastclip-v2")
    settings = DualEncoderSettings(
        loss=Loss(kind="infonce", temperature_lr=0.1), batch=512, optimizer=OptimizerSettings(lr_batch=1024)
    )
    task = DualEncoderTask(settings, attention=NotImplemented, device=torch.device("cpu"))
    assert task.build_objective(NotImplemented, World()).learning_rate(1.0) == 0.05
