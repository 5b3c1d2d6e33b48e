import math

import pytest
import torch

from train.losses.infonce import info_nce


def test_it_is_the_closed_form() -> None:
    torch.manual_seed(0)
    video = torch.nn.functional.normalize(torch.randn(5, 8, dtype=torch.float64), dim=1)
    text = torch.nn.functional.normalize(torch.randn(5, 8, dtype=torch.float64), dim=1)
    temperature = 0.1
    total = 0.0
    for i in range(5):
        own = math.exp(video[i] @ text[i] / temperature)
        total -= math.log(own / sum(math.exp(video[i] @ text[j] / temperature) for j in range(5)))
        total -= math.log(own / sum(math.exp(video[j] @ text[i] / temperature) for j in range(5)))
    loss = info_nce(video, text, log_scale=torch.tensor(-math.log(temperature), dtype=torch.float64))
    assert loss.item() == pytest.approx(total / 10, abs=1e-12)


def test_blind_embeddings_cost_the_log_of_the_batch() -> None:
    same = torch.ones(7, 4, dtype=torch.float64) / 2
    assert info_nce(same, same, log_scale=torch.tensor(2.0)).item() == pytest.approx(math.log(7))


def test_equal_captions_cost_the_log_of_their_number_and_no_more() -> None:
    """Two clips with one caption: at best each takes half, log 2, however sharp the temperature."""
    eye = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 2]]
    loss = info_nce(eye, eye, log_scale=torch.tensor(math.log(100.0)))
    assert loss.item() == pytest.approx(math.log(2) / 2, abs=1e-9)  # two of four rows pay log 2


def test_half_precision_embeddings_are_compared_in_single() -> None:
    torch.manual_seed(0)
    video = torch.nn.functional.normalize(torch.randn(16, 64), dim=1).bfloat16()
    loss = info_nce(video, video, log_scale=torch.tensor(math.log(100.0)))
    assert loss.dtype == torch.float32
    expected = info_nce(video.float(), video.float(), log_scale=torch.tensor(math.log(100.0)))
    torch.testing.assert_close(loss, expected)
