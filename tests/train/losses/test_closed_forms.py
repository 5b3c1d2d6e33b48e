"""Each loss compared with its formula, written out pair by pair and differentiated by autograd."""

import math

import pytest
import torch

from clipmill.train.distributed.world import Step
from clipmill.train.losses.global_losses import GlobalContrast, inner_rate
from clipmill.train.losses.settings import LOSSES, Convention
from tests.train.losses.naive import Memory, Moments, adamw_without_decay, global_step, in_batch_loss
from tests.train.losses.pairs import (
    CAPTION_IDS,
    CASES,
    CLIP_IDS,
    NUM_CAPTIONS,
    NUM_CLIPS,
    NUM_EPOCHS,
    Table,
    batch_of,
    defined_infonce,
    objective_of,
    settings_of,
)

IN_BATCH = [(*case, False) for case in CASES if not LOSSES[case[0]].is_global]
OF_THE_SET = [case for case in CASES if LOSSES[case[0]].is_global]


@pytest.mark.parametrize(("kind", "convention", "uses_relevancy"), [*IN_BATCH, ("max-margin", "paper", True)])
def test_a_loss_of_the_batch_is_its_formula(kind: str, convention: Convention, uses_relevancy: bool) -> None:
    settings = settings_of(kind, convention, use_relevancy=uses_relevancy)
    batch, model, own_gradients = batch_of(0), Table(6), {}
    video, text = (tensor.detach().clone().requires_grad_() for tensor in (model.video, model.text))
    if kind != "max-margin":
        own_gradients["logit_scale"] = torch.tensor(-math.log(0.125), dtype=torch.float64, requires_grad=True)
    if kind == "siglip":
        own_gradients["logit_bias"] = torch.tensor(-10.0, dtype=torch.float64, requires_grad=True)
    margins = [0.4 * relevancy for relevancy in batch["relevancy"].tolist()] if uses_relevancy else [0.2] * 6  # type: ignore[typeddict-item]
    nothing = torch.zeros(())
    expected = in_batch_loss(
        kind,
        video,
        text,
        temperature=(-own_gradients["logit_scale"]).exp() if own_gradients else nothing,
        bias=own_gradients.get("logit_bias", nothing),
        margins=margins,
    )
    if (kind, convention) == ("mbcl", "fast_clip"):
        expected = expected / 2
    expected.backward()

    objective = objective_of(settings, table=True)
    numbers = objective.backward(model, batch, Step(number=1))
    assert numbers["loss"] == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(model.video.grad, video.grad)
    torch.testing.assert_close(model.text.grad, text.grad)
    assert set(own_gradients) == {name for name, _ in objective.named_parameters()}
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(parameter.grad, own_gradients[name].grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infonce_in_closed_form_is_its_definition_by_autograd(dtype: torch.dtype) -> None:
    """Compare the loss, metrics, and gradients of embeddings and temperature. `test_ranks` compares two ranks."""
    results = []
    for objective in (objective_of(settings_of("infonce"), table=True), defined_infonce(table=True)):
        model = Table(6).to(dtype)
        metrics = objective.to(dtype).backward(model, batch_of(0), Step(number=1))
        gradients = {
            name: parameter.grad for name, parameter in [*model.named_parameters(), *objective.named_parameters()]
        }
        assert None not in gradients.values() and gradients["video"].dtype == dtype  # type: ignore[union-attr]
        results.append((metrics, gradients))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize(("kind", "convention"), OF_THE_SET)
@pytest.mark.parametrize("epsilon", [1e-14, 0.05])
def test_a_loss_of_the_set_is_its_formula_over_steps(kind: str, convention: Convention, epsilon: float) -> None:
    """Averages are updated, and ids return and occur twice. For v2 and iSogCLR, the temperatures are updated too."""
    settings = settings_of(kind, convention, epsilon=epsilon)
    objective = objective_of(settings, table=True)
    memories = (Memory(), Memory())
    rho = settings.number("rho") if "rho" in LOSSES[kind].settings else 0.0
    for number, ids in enumerate(zip(CLIP_IDS, CAPTION_IDS, strict=True)):
        model = Table(6, seed=number)
        objective.zero_grad()
        numbers = objective.backward(model, batch_of(number), Step(number=number + 1, epoch=number + 0.9))
        gamma = inner_rate(
            number,
            minimum=settings.number("gamma"),
            schedule="constant" if kind in ("sogclr", "isogclr") else "cosine",
            num_epochs=NUM_EPOCHS // 2,
            convention=convention,
        )
        assert numbers["gamma"] == pytest.approx(gamma)
        expected = global_step(
            kind,
            convention,
            model.video.detach(),
            model.text.detach(),
            ids,
            memories,
            gamma=gamma,
            tau=0.125,
            rho=rho,
            epsilon=epsilon,
            sizes=(NUM_CLIPS, NUM_CAPTIONS),
            lr=settings.effective_temperature_lr or 0.0,
            epoch=number,
        )
        assert numbers["loss"] == pytest.approx(expected.loss, rel=1e-8)
        torch.testing.assert_close(model.video.grad, expected.video_grad, rtol=1e-7, atol=1e-12)
        torch.testing.assert_close(model.text.grad, expected.text_grad, rtol=1e-7, atol=1e-12)
        trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        assert len(trained) == (expected.tau_grad is not None)
        for parameter in trained:
            assert parameter.grad is not None
            assert parameter.grad.item() == pytest.approx(expected.tau_grad, rel=1e-8)
    assert isinstance(objective, GlobalContrast)
    for table, memory in zip((objective.clips, objective.captions), memories, strict=True):
        for sample_id, u in memory.u.items():
            row = table.read(torch.tensor([sample_id]))[0]
            assert row[0].item() == pytest.approx(math.log(u), rel=1e-8)
            if memory.tau:
                assert row[1].item() == pytest.approx(memory.tau[sample_id], rel=1e-8)


def test_the_formulas_own_optimizer_is_adamw_as_torch_has_it() -> None:
    weight = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    torchs = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
    moments, average = Moments(), 0.5
    for t, gradient in enumerate((3.0, -0.2, 0.04, 7.0)):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        torchs.step()
        moments, direction = adamw_without_decay(moments, gradient, t=t)
        average -= 0.01 * direction
        assert average == pytest.approx(weight.item(), rel=1e-12)


def test_temperatures_of_their_own_go_on_moving_in_later_epochs_as_in_the_public_code() -> None:
    """With the published numbers, 0.03 falls by 0.01 in epoch 0. Later steps do not have the size of the gradient."""
    objective = objective_of(settings_of("fastclip-v2", "fast_clip", temperature=0.03), table=True)
    assert isinstance(objective, GlobalContrast)
    model = Table(6)
    averages = []
    for epoch in range(6):
        objective.backward(model, batch_of(0), Step(number=epoch + 1, epoch=epoch + 0.5))
        averages.append(objective.clips.read(torch.tensor(CLIP_IDS[0]))[:, 1])
    taus = torch.stack(averages)
    torch.testing.assert_close((taus[0] - 0.03).abs(), torch.full((6,), 0.01, dtype=taus.dtype))
    assert ((taus[1:] - taus[:-1]).abs().amax(dim=1) > 1e-3).all()


def test_what_a_pair_does_to_the_others_is_not_left_out() -> None:
    """Without G_b (FastCLIP, eq. 3), a caption would not be pushed away by the clips for which it is a negative."""
    objective = objective_of(settings_of("fastclip-v1"), table=True)
    model = Table(6)
    objective.backward(model, batch_of(0), Step(number=1))
    both = model.text.grad
    # Pairs as anchors only: captions that only occur in the losses of other pairs are held constant.
    similarity = model.video.detach() @ model.text.T
    diagonal = similarity.diagonal()
    inner = (((similarity - diagonal[:, None]) / 0.125).exp().sum(1) - 1) / 5
    anchors_only = torch.autograd.grad((0.125 * inner.log()).mean(), [model.text])[0]
    assert both is not None
    assert (both - anchors_only).norm() > 0.1 * both.norm()
