from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch

from clipmill.train.data.batch import Batch
from clipmill.train.distributed.world import Step
from clipmill.train.losses.contrastive import split
from clipmill.train.losses.settings import Convention
from tests.train.losses.pairs import CASES, Towers, batch_of, objective_of, settings_of


class PartByPart(Towers):
    """Towers that embed a complete batch as microbatches do: in parts, each with its own random numbers."""

    def __init__(self, *, size: int) -> None:
        super().__init__(dropout=0.3)
        self.size, self.step = size, Step(number=1)

    def forward(self, clips: torch.Tensor, captions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all embeddings, with gradients."""
        parts = []
        for number, begin in enumerate(range(0, len(clips), self.size)):
            with self.step.seed_generators(number):
                parts.append(super().forward(clips[begin : begin + self.size], captions[begin : begin + self.size]))
        video, text = (torch.cat(side) for side in zip(*parts, strict=True))
        return video, text


@pytest.mark.parametrize(("kind", "convention"), CASES)
def test_microbatches_have_the_gradients_of_the_whole_batch(kind: str, convention: Convention) -> None:
    """The towers have dropout, the state continues over the steps, and the 6 pairs are split into 4 and 2."""
    results_by_rank = []
    for towers, microbatch in ((PartByPart(size=4), None), (Towers(dropout=0.3), 4)):
        objective = objective_of(settings_of(kind, convention))
        results = []
        for number in range(3):
            step = Step(number=number + 1, epoch=float(number), microbatch=microbatch)
            if isinstance(towers, PartByPart):
                towers.step = step
            towers.zero_grad()
            objective.zero_grad()
            numbers = objective.backward(towers, batch_of(number), step)
            results += [torch.tensor(list(numbers.values()))]
            results += [
                parameter.grad
                for parameter in (*towers.parameters(), *objective.parameters())
                if parameter.grad is not None
            ]
        results_by_rank.append((results, objective.state_dict()))
    (whole, whole_state), (cached, cached_state) = results_by_rank
    assert len(whole) >= 3 * 9
    torch.testing.assert_close(cached, whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cached_state, whole_state)


def test_dropout_differs_between_microbatches_and_steps() -> None:
    ones = torch.ones(2, 5, dtype=torch.float64)
    drawn = []
    for number, part in ((1, 0), (1, 1), (2, 0)):
        with Step(number=number).seed_generators(part):
            drawn.append(torch.nn.functional.dropout(ones, 0.5))
    assert not drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])


def test_only_the_last_microbatch_is_synced() -> None:
    asked = []

    def note_sync(is_last: bool) -> AbstractContextManager[None]:
        asked.append(is_last)
        return nullcontext()

    step = Step(number=1, microbatch=2, sync_context=note_sync)
    objective_of(settings_of("infonce")).backward(Towers(dropout=0.0), batch_of(0), step)
    assert asked == [False, False, True]


def test_a_scaled_loss_scales_all_gradients() -> None:
    """With fp16, the optimizer sees unscaled gradients of the towers and of the temperature."""
    gradients = []
    for factor in (1.0, 64.0):
        towers, objective = Towers(dropout=0.0), objective_of(settings_of("fastclip-v3"))
        step = Step(number=1, scale=partial(torch.mul, torch.tensor(factor)))
        objective.backward(towers, batch_of(0), step)
        gradients.append([parameter.grad / factor for parameter in (*towers.parameters(), *objective.parameters())])  # type: ignore[operator]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_frozen_tower_gets_no_gradient() -> None:
    towers = Towers(dropout=0.0)
    towers.text.requires_grad_(False)
    objective_of(settings_of("infonce")).backward(towers, batch_of(0), Step(number=1, microbatch=4))
    assert all(parameter.grad is None for parameter in towers.text.parameters())
    assert all(parameter.grad is not None for parameter in towers.video.parameters())


def test_parts_have_every_sample_once() -> None:
    batch = Batch(input="pixels", key=list("abcde"), caption_id=torch.arange(5))
    parts = split(batch, 2)
    assert [part["key"] for part in parts] == [["a", "b"], ["c", "d"], ["e"]]
    assert torch.cat([part["caption_id"] for part in parts]).tolist() == list(range(5))
    assert {part["input"] for part in parts} == {"pixels"}
