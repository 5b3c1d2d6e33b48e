"""Sampling of tokens: which tokens can be drawn, how often, and which values determine a draw."""

from dataclasses import replace

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from clipmill.manifests.errors import UserError
from clipmill.train.models.captioner import Captioner
from clipmill.train.tasks.caption.decoding import (
    apply_temperature,
    filter_top_k,
    filter_top_p,
    generate_captions,
    sample_tokens,
)
from clipmill.train.tasks.caption.spec import ChunkDecoding, DecodingSettings, fit_decoding, max_tokens_of
from tests.train.models.small_captioners import END, clips, ours_with_weights_of, their_captioner

NO_IDS = torch.zeros(1, 1, dtype=torch.int64)


def logits(*, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(50, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperatures_are_transformers(temperature: float) -> None:
    torch.testing.assert_close(
        apply_temperature(logits(), temperature), TemperatureLogitsWarper(temperature)(NO_IDS, logits()), atol=0, rtol=0
    )


@pytest.mark.parametrize("top_k", [1, 7, 199, 200, 5000])
def test_the_likeliest_k_are_transformers_with_ties_too(top_k: int) -> None:
    given = logits().round()
    torch.testing.assert_close(filter_top_k(given, top_k), TopKLogitsWarper(top_k)(NO_IDS, given), atol=0, rtol=0)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_the_nucleus_is_transformers(top_p: float, spread: float) -> None:
    given = logits(spread=spread)
    torch.testing.assert_close(filter_top_p(given, top_p), TopPLogitsWarper(top_p)(NO_IDS, given), atol=0, rtol=0)


def test_a_nucleus_of_all_leaves_all() -> None:
    torch.testing.assert_close(filter_top_p(logits(), 1.0), logits(), atol=0, rtol=0)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    given = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, -torch.inf]]).expand(40_000, -1)
    uniform = torch.rand(40_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = sample_tokens(given, uniform).bincount(minlength=5) / 40_000
    torch.testing.assert_close(counts, given[0].softmax(0), atol=0.01, rtol=0)
    assert counts[2] == counts[4] == 0


def test_the_ends_of_the_interval_draw_tokens_that_may_be_drawn() -> None:
    given = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf]]).expand(2, -1)
    assert sample_tokens(given, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)).tolist() == [1, 2]


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Captioner:
    return ours_with_weights_of(their_captioner(seed=3), tmp_path_factory.mktemp("weights"))


def samples_of(captioner: Captioner, rows: list[int], settings: DecodingSettings) -> list[list[int]]:
    video = clips(6)[rows]
    written = generate_captions(captioner, video, settings, end_id=END, samples=[100 + row for row in rows]).tokens_VL
    padded = torch.nn.functional.pad(written, (0, max_tokens_of(settings) - written.shape[1]), value=END)
    return [list(row) for row in padded.tolist()]


def test_what_is_drawn_depends_on_the_clip_and_the_seed_and_not_on_the_batch(captioner: Captioner) -> None:
    settings = DecodingSettings(method="sample", top_p=0.95, temperature=1.5, max_tokens=10, seed=1)
    together = samples_of(captioner, [0, 1, 2, 3, 4, 5], settings)
    assert samples_of(captioner, [4, 2, 0], settings) == [together[row] for row in (4, 2, 0)]
    assert samples_of(captioner, [3], settings) == [together[3]]
    assert len({tuple(row) for row in together}) > 1
    another = DecodingSettings(method="sample", top_p=0.95, temperature=1.5, max_tokens=10, seed=2)
    assert samples_of(captioner, [0, 1, 2, 3, 4, 5], another) != together


def test_one_likeliest_token_is_greedy(captioner: Captioner) -> None:
    greedy = samples_of(captioner, [0, 1, 2], DecodingSettings(max_tokens=8))
    assert samples_of(captioner, [0, 1, 2], DecodingSettings(method="sample", top_k=1, max_tokens=8)) == greedy


def test_one_beam_is_greedy(captioner: Captioner) -> None:
    greedy = samples_of(captioner, [0, 1, 2], DecodingSettings(max_tokens=8))
    one_beam = DecodingSettings(method="beam", num_beams=1, early_stopping=True, max_tokens=8)
    assert samples_of(captioner, [0, 1, 2], one_beam) == greedy


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"top_k": 3}, "--decoding.top-k 3 has no effect with --decoding.method greedy"),
        ({"method": "beam", "temperature": 0.5}, "--decoding.temperature 0.5 has no effect"),
        ({"method": "sample", "num_beams": 2}, "--decoding.num-beams 2 has no effect"),
        ({"method": "sample", "temperature": 0.0}, "--decoding.temperature is 0.0"),
        ({"method": "sample", "top_k": 0}, "--decoding.top-k is 0"),
        ({"method": "sample", "top_p": 1.5}, "--decoding.top-p is 1.5"),
        ({"method": "beam", "num_beams": 0}, "--decoding.num-beams is 0"),
        ({"method": "beam", "length_penalty": float("nan")}, "--decoding.length-penalty is nan"),
        ({"max_tokens": 0}, "--decoding.max-tokens is 0"),
        ({"min_tokens": -1}, "--decoding.min-tokens is -1"),
        ({"min_tokens": 24, "max_tokens": 24}, "--decoding.min-tokens is 24"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, float], flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        DecodingSettings(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expected", "context_length", "is_stored", "result"),
    [
        (None, 12, False, 12),
        (None, 40, False, 30),
        (12, 12, False, 12),
        (30, 40, True, 30),
        (30, 12, True, 12),  # as older versions saved runs
        (30, 12, False, None),
        (13, 12, True, None),
    ],
)
def test_the_default_length_gives_way_to_the_context_and_a_length_that_was_asked_for_does_not(
    expected: int | None, context_length: int, is_stored: bool, result: int | None
) -> None:
    settings = DecodingSettings(max_tokens=expected)
    if result is None:
        with pytest.raises(
            UserError, match=f"--decoding.max-tokens is {expected}, but the decoder's context has 12 tok"
        ):
            fit_decoding(settings, context_length, is_stored=is_stored)
    else:
        assert fit_decoding(settings, context_length, is_stored=is_stored).max_tokens == result


@pytest.mark.parametrize(
    ("settings", "spelled_out"),
    [
        (DecodingSettings(), DecodingSettings(max_tokens=30, seed=5)),
        (ChunkDecoding(), ChunkDecoding(method="sample", temperature=1, top_p=0.9, num_samples=5)),
        (ChunkDecoding(top_p=1), ChunkDecoding(top_p=1.0, temperature=1.0)),
        (ChunkDecoding(method="beam"), ChunkDecoding(method="beam", num_beams=4, early_stopping=False, seed=1)),
    ],
)
def test_settings_that_spell_out_what_takes_effect_are_equal(
    settings: DecodingSettings, spelled_out: DecodingSettings
) -> None:
    effective, other = (
        fit_decoding(
            settings_of_task.with_defaults() if isinstance(settings_of_task, ChunkDecoding) else settings_of_task, 64
        )
        for settings_of_task in (settings, spelled_out)
    )
    assert effective == other and effective.max_tokens == 30
    assert fit_decoding(replace(effective, max_tokens=29), 64) != effective


@pytest.mark.parametrize(
    ("least", "context_length", "message", "hint"),
    [
        (50, 24, "--decoding.min-tokens is 50, but the decoder's context has 24 tokens", "use at most 23"),
        (50, 64, "--decoding.min-tokens is 50, but captions have at most 30 tokens", "a larger --decoding.max-tokens"),
    ],
)
def test_captions_that_must_be_too_long_are_refused_by_the_limit_that_there_is(
    least: int, context_length: int, message: str, hint: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        fit_decoding(DecodingSettings(min_tokens=least), context_length)
    assert hint in (caught.value.hint or "")
    assert fit_decoding(DecodingSettings(min_tokens=least, max_tokens=64), 64).min_tokens == least
