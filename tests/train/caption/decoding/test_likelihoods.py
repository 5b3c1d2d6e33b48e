"""Likelihoods of generated captions (mean log-probability per token), compared with forward passes and transformers."""

from typing import Any

import pytest
import torch

from clipmill.train.models.captioner import Captioner
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.spec import DecodingSettings
from tests.tiers import nightly_beyond
from tests.train.models.small_captioners import END, clips, for_them, ours_with_weights_of, their_captioner

NUM_CLIPS, MAX_TOKENS = 5, 4
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "longer than it likes": {"min_tokens": 2},
    "beams": {"method": "beam", "num_beams": 3, "length_penalty": 0.6},
    "nucleus": {"method": "sample", "top_p": 0.8, "temperature": 1.6},
    "few": {"method": "sample", "top_k": 3, "min_tokens": 2},
}


@pytest.fixture(scope="module")
def both_captioners(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Captioner]:
    """Captioners whose captions end at different lengths; some captions never end."""
    theirs = their_captioner(seed=3)
    with torch.no_grad():
        decoder = theirs.decoder.transformer
        decoder.wpe.weight *= 8
        for parameter in decoder.h.parameters():
            if parameter.ndim == 2:
                parameter *= 3
        decoder.wte.weight[END] += 0.5 * decoder.ln_f.bias.sign()
        for parameter in decoder.parameters():
            parameter.copy_(parameter.float().double())
    return theirs, ours_with_weights_of(theirs, tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("method", nightly_beyond(["beams", "nucleus"], METHODS))
def test_likelihoods_are_those_of_a_forward_pass_and_of_transformers(
    both_captioners: tuple[Any, Captioner], method: str
) -> None:
    theirs, ours = both_captioners
    settings = DecodingSettings(max_tokens=MAX_TOKENS, **METHODS[method])
    count = 4 if settings.method == "sample" else 1
    video = clips(NUM_CLIPS)
    numbers = range(NUM_CLIPS * count)
    generated_captions = generate_captions(ours, video, settings, end_id=END, samples=numbers, rows_per_video=count)
    assert len(generated_captions.tokens_VL) == len(generated_captions.likelihoods_V) == len(numbers)
    texts = generated_captions.tokens_VL.tolist()
    lengths = [text.index(END) + 1 if END in text else len(text) for text in texts]
    assert len(set(lengths)) > 1 and not all(END in text for text in texts)
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        clip, tokens = video[row // count][None], torch.tensor([text[:length]])
        given = torch.cat([torch.tensor([[END]]), tokens[:, :-1]], dim=1)
        log_probabilities = ours(clip, given).log_softmax(-1).gather(2, tokens[..., None])
        loss = theirs(pixel_values=for_them(clip), labels=tokens).loss
        assert generated_captions.likelihoods_V[row].item() == pytest.approx(log_probabilities.mean().item(), rel=1e-5)
        assert generated_captions.likelihoods_V[row].item() == pytest.approx(-loss.item(), rel=1e-5)


def test_captions_of_a_clip_are_those_that_it_has_alone(both_captioners: tuple[Any, Captioner]) -> None:
    _, ours = both_captioners
    settings = DecodingSettings(method="sample", top_p=0.9, max_tokens=MAX_TOKENS, seed=4)
    numbers = [7, -1, 2**62, 5, 11, 13]
    video = clips(2)
    together = generate_captions(ours, video, settings, end_id=END, samples=numbers, rows_per_video=3)
    for row, number in enumerate(numbers):
        alone = generate_captions(ours, video[row // 3][None], settings, end_id=END, samples=[number])
        tokens = together.tokens_VL[row].tolist()
        assert tokens[: alone.tokens_VL.shape[1]] == alone.tokens_VL[0].tolist()
        assert together.likelihoods_V[row].item() == pytest.approx(alone.likelihoods_V[0].item(), rel=1e-6)
    assert len({tuple(text) for text in together.tokens_VL.tolist()}) > 3
