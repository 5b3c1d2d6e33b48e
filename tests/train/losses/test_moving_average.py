import math

import pytest
import torch

from clipmill.train.distributed.world import Step
from clipmill.train.losses.global_losses import UNSEEN, average_logs, group_means, groups, inner_rate, log_group_means
from clipmill.train.losses.settings import Convention
from tests.train.losses.pairs import Table, batch_of, objective_of, settings_of


def test_equal_ids_are_one_group_wherever_they_lie() -> None:
    group = groups(torch.tensor([7, 3, 7, 900, 3, 7]))
    assert len(set(group.tolist())) == 3
    assert group[0] == group[2] == group[5]
    assert group[1] == group[4]


def test_an_id_that_occurs_twice_has_the_mean_of_both() -> None:
    values = torch.tensor([1.0, 5.0, 3.0, 2.0])
    group = groups(torch.tensor([4, 9, 4, 1]))
    assert group_means(values, group).tolist() == [2.0, 5.0, 2.0, 2.0]
    torch.testing.assert_close(log_group_means(values, group).exp(), group_means(values.exp(), group))


def test_the_order_of_a_batch_does_not_matter() -> None:
    ids, log_g = torch.tensor([2, 5, 2, 2, 5, 1]), torch.randn(6, dtype=torch.float64)
    log_u = torch.randn(9, dtype=torch.float64)[ids]
    order = torch.tensor([3, 0, 5, 4, 2, 1])
    plain = average_logs(log_u, log_g, groups(ids), gamma=0.3)
    shuffled = average_logs(log_u[order], log_g[order], groups(ids[order]), gamma=0.3)
    torch.testing.assert_close(shuffled, plain[order])


def test_over_many_steps_it_is_the_plain_moving_average() -> None:
    torch.manual_seed(0)
    log_u, u = torch.full((4,), UNSEEN), None
    group = torch.arange(4)
    for _ in range(500):
        g = torch.rand(4, dtype=torch.float64) * 3
        u = g if u is None else 0.8 * u + 0.2 * g
        log_u = average_logs(log_u, g.log().float(), group, gamma=0.2)
    assert u is not None
    torch.testing.assert_close(log_u.exp().double(), u, rtol=1e-5, atol=0)


def test_what_single_precision_cannot_hold_stays_a_moving_average() -> None:
    """exp(200) overflows float32 to inf, and exp(-200) underflows to 0."""
    log_u = average_logs(torch.tensor([200.0, -200.0]), torch.tensor([200.0, -200.0]), torch.arange(2), gamma=0.5)
    torch.testing.assert_close(log_u, torch.tensor([200.0, -200.0]))


@pytest.mark.parametrize("kind", ["sogclr", "isogclr", "fastclip-v0", "fastclip-v1", "fastclip-v2", "fastclip-v3"])
def test_a_bad_pair_at_the_least_temperature_does_no_harm(kind: str) -> None:
    """One clip is opposite to its own caption and equal to another one, and exp(2 / 0.01) overflows float32."""
    model = Table(6).float()
    with torch.no_grad():
        model.text[0] = -model.video[0]
        model.text[1] = model.video[0]
    similarity = model.video.detach() @ model.text.detach().T
    plain = ((similarity - similarity.diagonal()[:, None]) / 0.01).exp().sum(dim=1) / 5
    assert plain.isinf().any()
    objective = objective_of(settings_of(kind, temperature=0.01), table=True).float()
    for number in range(3):
        numbers = objective.backward(model, batch_of(number), Step(number=number + 1, epoch=float(number)))
        assert all(math.isfinite(number) for number in numbers.values())
    assert numbers["log_u"] > 30
    assert all(
        parameter.grad is None or bool(parameter.grad.isfinite().all())
        for parameter in (*model.parameters(), *objective.parameters())
    )


@pytest.mark.parametrize("convention", ["paper", "fast_clip"])
def test_the_inner_rate_falls_along_a_cosine_epoch_by_epoch(convention: Convention) -> None:
    rates = [
        inner_rate(epoch, minimum=0.2, schedule="cosine", num_epochs=4, convention=convention) for epoch in range(7)
    ]
    expected = [0.5 * (1 + math.cos(math.pi * epoch / 4)) * 0.8 + 0.2 for epoch in range(4)] + [0.2] * 3
    assert rates == pytest.approx(expected)
    constant = [
        inner_rate(epoch, minimum=0.6, schedule="constant", num_epochs=4, convention=convention) for epoch in (0, 1)
    ]
    assert constant == [1.0 if convention == "fast_clip" else 0.6, 0.6]


def test_gamma_stays_within_an_epoch() -> None:
    objective = objective_of(settings_of("fastclip-v1"), table=True)
    gammas = [
        objective.backward(Table(6), batch_of(0), Step(number=1, epoch=epoch))["gamma"] for epoch in (1.0, 1.99, 2.0)
    ]
    assert gammas[0] == gammas[1] > gammas[2]
