"""Caption loss: it equals transformers' loss on the same logits, for a complete batch and in parts."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from clipmill.train.tasks.caption.task import remove_padding, shift_targets, summed_loss
from clipmill.train.tasks.caption.tokenizer import NO_TOKEN

END = 9
TARGETS = torch.tensor(
    [
        [[3, 4, END, NO_TOKEN, NO_TOKEN, NO_TOKEN], [5, END, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN]],
        [[1, 2, 3, 4, END, NO_TOKEN], [NO_TOKEN] * 6],
    ]
)


def test_the_decoder_is_given_what_transformers_give_it() -> None:
    from transformers.models.encoder_decoder.modeling_encoder_decoder import shift_tokens_right

    rows = TARGETS.flatten(0, 1)
    theirs = shift_tokens_right(rows, END, END)
    is_read = rows != NO_TOKEN  # tokens after the end of a caption are ignored
    assert torch.equal(shift_targets(TARGETS, end_id=END).flatten(0, 1)[is_read], theirs[is_read])
    assert (shift_targets(TARGETS, end_id=END) >= 0).all()


def test_the_loss_is_a_mean_over_tokens_and_no_padding_shows_in_it() -> None:
    logits = torch.randn(4, 6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), ignore_index=NO_TOKEN)
    num_tokens = int((TARGETS != NO_TOKEN).sum())
    assert num_tokens == 10
    assert summed_loss(logits, TARGETS).item() / num_tokens == pytest.approx(whole.item(), rel=1e-12)
    short = remove_padding(TARGETS)
    assert short.shape[-1] == 5
    assert summed_loss(logits[:, :5], short).item() == pytest.approx(num_tokens * whole.item(), rel=1e-12)
    parts = sum(summed_loss(logits[2 * at : 2 * at + 2], TARGETS[at : at + 1]).item() for at in range(2))
    assert parts == pytest.approx(num_tokens * whole.item(), rel=1e-12)


def test_label_smoothing_is_spread_over_the_vocabulary() -> None:
    logits = torch.randn(4, 6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    log_p = logits.flatten(0, 1).log_softmax(-1)
    expected = 0.0
    for row, target in zip(log_p, TARGETS.flatten().tolist(), strict=True):
        if target != NO_TOKEN:
            expected -= 0.9 * row[target].item() + 0.1 * row.mean().item()
    assert summed_loss(logits, TARGETS, label_smoothing=0.1).item() == pytest.approx(expected, rel=1e-12)


def test_a_batch_without_any_token_has_a_place_left() -> None:
    assert remove_padding(torch.full((2, 1, 4), NO_TOKEN)).shape == (2, 1, 1)
