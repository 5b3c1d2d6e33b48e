"""Packed captions compared with padded captions."""

import pytest
import torch

from clipmill.train.config.model import Towers
from clipmill.train.models.attention import Attend, attend_naively, attend_with_sdpa
from clipmill.train.models.text import TextTower
from tests.train.models.small_towers import END, captions, gradients, small_encoder


def text_tower(*, is_packed: bool, attend: Attend = attend_with_sdpa) -> TextTower:
    tower = small_encoder(Towers(packed_text=is_packed), attend=attend).text
    assert isinstance(tower, TextTower)
    return tower


@pytest.mark.parametrize("attend", [attend_with_sdpa, attend_naively])
@pytest.mark.parametrize("lengths", [(2, 5, 12, 5, 3), (12, 12), (2,), (4, 4, 4)])
def test_packed_is_padded_in_values_and_gradients(lengths: tuple[int, ...], attend: Attend) -> None:
    tokens = captions(*lengths)
    packed, padded = text_tower(is_packed=True, attend=attend), text_tower(is_packed=False, attend=attend)
    embeddings, expected = packed(tokens), padded(tokens)
    torch.testing.assert_close(embeddings, expected, atol=1e-12, rtol=0)
    weights = torch.randn(embeddings.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found_gradients = gradients(packed, (embeddings * weights).sum())
    expected_gradients = gradients(padded, (expected * weights).sum())
    torch.testing.assert_close(found_gradients, expected_gradients, atol=1e-11, rtol=0)


@pytest.mark.parametrize("is_packed", [True, False])
def test_what_follows_the_end_of_a_text_does_not_matter(is_packed: bool) -> None:
    tower = text_tower(is_packed=is_packed)
    tokens = captions(3, 5)
    noisy = tokens.clone()
    noisy[0, 3:] = torch.tensor([7, 3, END, 4, END, 1, 2, 3, 4])
    noisy[1, 5:] = 4
    torch.testing.assert_close(tower(tokens), tower(noisy), atol=1e-12, rtol=0)
    alone = torch.cat([tower(row[None]) for row in tokens])
    torch.testing.assert_close(tower(tokens), alone, atol=1e-12, rtol=0)


def test_captions_do_not_see_one_another_in_another_order() -> None:
    tower = text_tower(is_packed=True)
    tokens = captions(2, 5, 12, 5)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(tower(tokens[order]), tower(tokens)[order], atol=1e-12, rtol=0)


def test_a_caption_that_was_cut_has_its_end_in_the_last_place() -> None:
    tokens = captions(12, 4)
    assert tokens[0, -1] == END
    packed, padded = text_tower(is_packed=True), text_tower(is_packed=False)
    torch.testing.assert_close(packed(tokens), padded(tokens), atol=1e-12, rtol=0)


def test_positions_get_the_same_gradient_from_any_number_of_threads() -> None:
    """The rows of many captions are added to the gradient of each position in a fixed order."""
    tokens, before = captions(*[12] * 1000), torch.get_num_threads()
    outputs = []
    try:
        for num_threads in (1, 2, 2, 2):
            torch.set_num_threads(num_threads)
            tower = text_tower(is_packed=True).float()
            # Blocks are omitted, because the rounding of their products depends on the number of threads.
            tower.transformer.forward = lambda x, **_: x  # type: ignore[method-assign]
            rows: list[torch.Tensor] = []
            tower.ln_final.register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(inputs[0]))
            tower(tokens)
            weights = torch.randn(rows[0].shape, generator=torch.Generator().manual_seed(0))
            (gradient,) = torch.autograd.grad((rows[0] * weights).sum(), [tower.positional_embedding])
            outputs.append(gradient)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
