"""Captions compared with transformers' `generate` token by token, with the same random weights."""

from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.train.models.captioner import Captioner, TextCache
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.spec import DecodingSettings
from clipmill.train.tasks.caption.stages import CaptionerPart, all_layers
from tests.tiers import nightly_beyond
from tests.train.models.small_captioners import END, PAD, clips, for_them, ours_with_weights_of, their_captioner

NUM_CLIPS, MAX_TOKENS = 6, 12


@pytest.fixture(scope="module", params=["short", pytest.param("long", marks=pytest.mark.nightly), "endless"])
def both_captioners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Captioner]:
    """Captioners whose captions vary from token to token and end early, sometimes late, or never."""
    theirs = their_captioner(seed=3)
    places, matrices, likely = {"short": (8, 3, 0.5), "long": (5, 2, 0.3), "endless": (5, 2, 0.0)}[request.param]
    with torch.no_grad():
        decoder = theirs.decoder.transformer
        decoder.wpe.weight *= places
        for parameter in decoder.h.parameters():
            if parameter.ndim == 2:
                parameter *= matrices
        # The last layer norm adds its bias to all states, so this change makes the end token likely.
        decoder.wte.weight[END] += likely * decoder.ln_f.bias.sign()
        for parameter in decoder.parameters():
            parameter.copy_(parameter.float().double())
    return theirs, ours_with_weights_of(theirs, tmp_path_factory.mktemp("weights"))


def generate_theirs(theirs: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the tokens that transformers generates after the prompt, [B, L]; padding is replaced by end tokens."""
    tokens = theirs.generate(
        for_them(clips(NUM_CLIPS)),
        decoder_input_ids=prompt,
        decoder_attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        **options,
    )
    assert isinstance(tokens, torch.Tensor)
    return torch.where(tokens == PAD, END, tokens)[:, prompt.shape[1] :]


def prompts(num_tokens: int) -> torch.Tensor:
    """Return prompts that consist of the end token and random tokens."""
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(0, PAD, (NUM_CLIPS, num_tokens), generator=generator)
    prompt[:, 0] = END
    return prompt


def assert_same(generated_ids: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two token tensors are equal, apart from the end tokens that pad the shorter one."""
    length = max(generated_ids.shape[1], expected.shape[1])
    generated_ids, expected = (
        torch.nn.functional.pad(x, (0, length - x.shape[1]), value=END) for x in (generated_ids, expected)
    )
    assert generated_ids.tolist() == expected.tolist()


@pytest.mark.parametrize("prompt_length", [1, 4])
@pytest.mark.parametrize("min_tokens", [0, 5])
def test_greedy_captions(both_captioners: tuple[Any, Captioner], prompt_length: int, min_tokens: int) -> None:
    theirs, ours = both_captioners
    prompt = prompts(prompt_length)
    expected = generate_theirs(theirs, prompt, min_new_tokens=min_tokens)
    settings = DecodingSettings(max_tokens=MAX_TOKENS, min_tokens=min_tokens)
    written = generate_captions(
        ours, clips(NUM_CLIPS), settings, end_id=END, samples=range(NUM_CLIPS), prompt_VP=prompt
    )
    assert_same(written.tokens_VL, expected)
    # The comparison is meaningful only if the captions vary.
    assert len(expected.unique()) > 3


PENALTIES = (0.0, 1.0, 2.0, -1.0)
# Cases of `make test`: number of beams, length of the prompt and least number of tokens; penalty; early stopping.
BEAMS = [
    *product([(5, 3, 3)], PENALTIES, [False]),
    ((5, 3, 3), 1.0, True),
    ((2, 1, 0), 1.0, False),
]


@pytest.mark.parametrize(
    ("beams", "length_penalty", "early_stopping"),
    nightly_beyond(BEAMS, product([(5, 3, 3), (2, 1, 0)], PENALTIES, [False, True])),
)
def test_captions_of_a_beam_search(
    both_captioners: tuple[Any, Captioner], beams: tuple[int, int, int], length_penalty: float, early_stopping: bool
) -> None:
    theirs, ours = both_captioners
    num_beams, prompt_length, min_tokens = beams
    prompt = prompts(prompt_length)
    expected = generate_theirs(
        theirs,
        prompt,
        num_beams=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        min_new_tokens=min_tokens,
    )
    settings = DecodingSettings(
        method="beam",
        num_beams=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_tokens=MAX_TOKENS,
        min_tokens=min_tokens,
    )
    written = generate_captions(
        ours, clips(NUM_CLIPS), settings, end_id=END, samples=range(NUM_CLIPS), prompt_VP=prompt
    )
    assert_same(written.tokens_VL, expected)


def test_the_score_of_a_beam_is_that_of_its_tokens(both_captioners: tuple[Any, Captioner], tmp_path: Path) -> None:
    _, ours = both_captioners
    settings = DecodingSettings(method="beam", num_beams=3, length_penalty=0.7, max_tokens=MAX_TOKENS)
    written = generate_captions(ours, clips(NUM_CLIPS), settings, end_id=END, samples=range(NUM_CLIPS))
    assert written.scores_V is not None
    for row, tokens in enumerate(written.tokens_VL.tolist()):
        length = tokens.index(END) + 1 if END in tokens else len(tokens)
        given = torch.tensor([[END, *tokens[: length - 1]]])
        log_probabilities = ours(clips(NUM_CLIPS)[row : row + 1], given)[0].log_softmax(-1)
        total = log_probabilities[torch.arange(length), tokens[:length]].sum() / length**0.7
        assert written.scores_V[row].item() == pytest.approx(total.item(), rel=1e-5)


class InParts:
    """Captioner split into parts, as in the processes of a pipeline."""

    def __init__(self, captioner: Captioner, *cuts: int) -> None:
        borders = (0, *cuts, len(all_layers(captioner)))
        self.parts = [CaptionerPart(deepcopy(captioner), start=start, end=end) for start, end in pairwise(borders)]
        self.of_text = [part for part in self.parts if not part.layers[-1].kind.startswith("video_")]

    def start(self, video: torch.Tensor, *, num_tokens: int, rows_per_video: int = 1) -> "CachesOfParts":
        for part in self.parts:
            video = part.encode(video)
        return CachesOfParts(
            [part.start(video, num_tokens=num_tokens, rows_per_video=rows_per_video) for part in self.of_text]
        )

    def step(self, tokens: torch.Tensor, caches: "CachesOfParts") -> torch.Tensor:
        for part, cache in zip(self.of_text, caches.caches, strict=True):
            tokens = part.step(tokens, cache)
        return tokens


@dataclass
class CachesOfParts:
    caches: list[TextCache]

    def keep(self, rows_r: torch.Tensor, videos_v: torch.Tensor | None = None) -> None:
        for cache in self.caches:
            cache.keep(rows_r, videos_v)


@pytest.mark.parametrize(
    "cuts", [pytest.param((5,), marks=pytest.mark.nightly), (2, 7), pytest.param((6, 8), marks=pytest.mark.nightly)]
)
def test_parts_of_a_captioner_write_what_the_whole_writes(
    both_captioners: tuple[Any, Captioner], cuts: tuple[int, ...]
) -> None:
    _, ours = both_captioners
    for settings in (
        DecodingSettings(max_tokens=MAX_TOKENS),
        DecodingSettings(method="beam", num_beams=3, max_tokens=MAX_TOKENS),
        DecodingSettings(method="sample", top_p=0.9, max_tokens=MAX_TOKENS),
    ):
        video, samples = clips(NUM_CLIPS), range(NUM_CLIPS)
        whole = generate_captions(ours, video, settings, end_id=END, samples=samples)
        parts = generate_captions(InParts(ours, *cuts), video, settings, end_id=END, samples=samples)
        assert parts.tokens_VL.tolist() == whole.tokens_VL.tolist()
