"""Captioner with a language model: loss, gradients and captions match transformers in float64."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.train.config.model import Towers
from clipmill.train.data.batch import Batch
from clipmill.train.distributed.world import Step
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.language import LanguageCaptioner, open_language
from clipmill.train.tasks.caption.model import build_captioner
from clipmill.train.tasks.caption.spec import CaptionerSettings, DecoderSettings, DecodingSettings, Reducer
from clipmill.train.tasks.caption.task import CaptionLoss
from clipmill.train.tasks.caption.tokenizer import NO_TOKEN
from tests.train.caption.language.tiny_models import KINDS

NUM_VISUAL, MAX_TOKENS = 5, 12


@dataclass(frozen=True)
class Opened:
    captioner: LanguageCaptioner
    end_id: int
    num_before: int


@pytest.fixture(scope="module", params=[*((kind, "pool") for kind in KINDS), ("qwen3", "attention")])
def model_and_sizes(request: pytest.FixtureRequest, language_models: dict[str, Path]) -> Opened:
    kind, reducer = request.param
    return open_captioner(language_models[kind], reducer)


def open_captioner(folder: Path, reducer: Reducer) -> Opened:
    settings = DecoderSettings(
        lm=str(folder), visual_tokens=NUM_VISUAL, reducer=reducer, prompt="it {video} of\n", max_tokens=MAX_TOKENS
    )
    decoder = open_language(folder, settings, tokenizer_folder=folder)
    torch.manual_seed(1)
    captioner = build_captioner(
        CaptionerSettings(model="tiny", num_frames=2, size_px=32, decoder=settings, towers=Towers(kind="clip")),
        decoder,
        attend=attend_with_sdpa,
    )
    assert isinstance(captioner, LanguageCaptioner)
    with torch.no_grad():
        # Larger weights make captions vary from token to token and sometimes end.
        for name, parameter in captioner.decoder.named_parameters():
            parameter.mul_(6 if ".layers." in name or ".h." in name else 1)
    assert len(decoder.before) == len(decoder.after) == 2  # "it" and " ", " of" and the line break
    return Opened(captioner.double().eval(), decoder.tokenizer.end_id, decoder.prefix_length - 1)


def clips(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 2, 32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def targets(*lengths: int, num_words: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.full((len(lengths), MAX_TOKENS), NO_TOKEN)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(0, num_words, (length,), generator=generator)
    return tokens


def inputs_of(model_and_sizes: Opened, videos: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the inputs of the library's model: the prefix, followed by the caption tokens."""
    captioner = model_and_sizes.captioner
    given = words.masked_fill(words == NO_TOKEN, model_and_sizes.end_id)
    return torch.cat([captioner.encode(videos), captioner.decoder.get_input_embeddings()(given)], dim=1)


def test_the_loss_is_the_librarys_for_labels_of_the_caption_alone(model_and_sizes: Opened) -> None:
    model, lengths = model_and_sizes.captioner, (3, 12, 1, 7, 4, 9, 2, 5, 11)
    videos = clips(len(lengths))
    words = targets(*lengths, num_words=model.decoder.config.vocab_size)
    prefix = torch.full((len(lengths), model_and_sizes.num_before + 1), NO_TOKEN)
    theirs = model.decoder(
        inputs_embeds=inputs_of(model_and_sizes, videos, words), labels=torch.cat([prefix, words], dim=1)
    )
    labels = torch.cat([prefix, words], dim=1)[:, 1:]
    exactly = torch.nn.functional.cross_entropy(theirs.logits[:, :-1].flatten(0, 1), labels.flatten())
    assert exactly.item() == pytest.approx(theirs.loss.item(), rel=1e-6)  # the library computes its loss in float32
    exactly.backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    batch = Batch(targets=words[:, None], length=torch.tensor(lengths), position=torch.arange(len(lengths)))
    batch["video"] = videos
    objective = CaptionLoss(
        lambda batch_part, rows: batch_part["video"][rows],
        end_id=model_and_sizes.end_id,
        label_smoothing=0,
        num_prefix_tokens=model_and_sizes.num_before,
    )
    metrics: dict[str, Any] = objective.backward(model, batch, Step(number=1, microbatch=3))
    assert float(metrics["loss"]) == pytest.approx(exactly.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        expected = gradients.get(name, torch.zeros_like(parameter))
        torch.testing.assert_close(
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, expected, rtol=1e-9, atol=1e-12
        )
    # After sorting, the three microbatches hold captions of 1, 2, 3; 4, 5, 7; and 9, 11, 12 tokens.
    num_computed = 3 * (3 + 7 + 12 + 3 * model_and_sizes.num_before)
    assert float(metrics["padding"]) == pytest.approx(
        1 - (sum(lengths) + 9 * model_and_sizes.num_before) / num_computed
    )
    model.zero_grad()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (DecodingSettings(min_tokens=3), {"min_new_tokens": 3}),
        (DecodingSettings(method="beam", num_beams=3), {"num_beams": 3}),
        (
            DecodingSettings(method="beam", num_beams=4, length_penalty=-1.0, early_stopping=True),
            {"num_beams": 4, "length_penalty": -1.0, "early_stopping": True},
        ),
    ],
    ids=["greedy", "beams", "beams-that-stop-early"],
)
def test_captions_are_those_of_generate(
    model_and_sizes: Opened, ours: DecodingSettings, theirs: dict[str, Any]
) -> None:
    videos = clips(5)
    with torch.no_grad():
        expected = model_and_sizes.captioner.decoder.generate(
            inputs_embeds=model_and_sizes.captioner.encode(videos),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=model_and_sizes.end_id,
            pad_token_id=model_and_sizes.end_id,
            **theirs,
        )
    settings = DecodingSettings(**{**vars(ours), "max_tokens": MAX_TOKENS})
    tokens = generate_captions(
        model_and_sizes.captioner, videos, settings, end_id=model_and_sizes.end_id, samples=range(5)
    ).tokens_VL
    length = max(tokens.shape[1], expected.shape[1])
    tokens, expected = (
        torch.nn.functional.pad(token_ids, (0, length - token_ids.shape[1]), value=model_and_sizes.end_id)
        for token_ids in (tokens, expected)
    )
    assert tokens.tolist() == expected.tolist() and len(expected.unique()) > 3


def test_a_sampled_caption_depends_on_neither_the_batch_nor_the_other_captions_of_its_clip(
    model_and_sizes: Opened,
) -> None:
    settings = DecodingSettings(method="sample", temperature=0.5, max_tokens=MAX_TOKENS, seed=4)
    videos, model = clips(3), model_and_sizes.captioner
    several = generate_captions(
        model, videos, settings, end_id=model_and_sizes.end_id, samples=range(6), rows_per_video=2
    ).tokens_VL
    for number in range(6):
        alone = generate_captions(
            model, videos[number // 2, None], settings, end_id=model_and_sizes.end_id, samples=[number]
        ).tokens_VL
        assert alone[0].tolist() == several[number, : alone.shape[1]].tolist()
    assert len(several.unique(dim=0)) > 3
