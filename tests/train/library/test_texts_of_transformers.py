"""Text towers from transformers embed a text as transformers does without padding, for any padding of the tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import DualEncoderTowers
from clipmill.train.models.library_towers import context_length_of, library_of, text_tower, tokenizer_of
from clipmill.train.weights.library import library_format
from clipmill.train.weights.sources import Init, open_weights
from tests.tiers import nightly_beyond
from tests.train.library.small_library import save_hf

TEXTS = ("a dog catches a frisbee", "two people talk", "a", "a dog a cat a dog a cat a dog a cat a dog a cat")
WORDS = ("[PAD]", "[BOS]", "[UNK]", "[EOS]", "a", "dog", "catches", "frisbee", "two", "people", "talk", "cat")
_SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT: dict[str, Any] = {**_SIZE, "vocab_size": 40, "max_position_embeddings": 40}
_CAUSAL: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
CONFIGS: dict[str, Callable[[Any], Any]] = {
    "bert": lambda pad: transformers.BertConfig(**_TEXT, pad_token_id=pad),
    "roberta": lambda pad: transformers.RobertaConfig(**_TEXT, pad_token_id=pad or 0),
    "xlm_roberta": lambda pad: transformers.XLMRobertaConfig(**_TEXT, pad_token_id=1),
    "mpnet": lambda pad: transformers.MPNetConfig(**_TEXT, pad_token_id=pad or 0),
    "deberta": lambda pad: transformers.DebertaV2Config(**_TEXT, pad_token_id=pad or 0, relative_attention=True),
    "modernbert": lambda pad: transformers.ModernBertConfig(**_TEXT, pad_token_id=pad or 0),
    "t5": lambda pad: transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=pad or 0
    ),
    "clip": lambda pad: transformers.CLIPTextConfig(**_TEXT, projection_dim=32, eos_token_id=3, pad_token_id=pad),
    "qwen2": lambda pad: transformers.Qwen2Config(**_CAUSAL, pad_token_id=pad),
    "qwen3": lambda pad: transformers.Qwen3Config(**_CAUSAL, head_dim=8, pad_token_id=pad),
    "llama": lambda pad: transformers.LlamaConfig(**_CAUSAL, pad_token_id=pad),
    "gemma": lambda pad: transformers.GemmaConfig(**_CAUSAL, head_dim=8, pad_token_id=pad),
    "gpt2": lambda pad: transformers.GPT2Config(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=3, eos_token_id=3, pad_token_id=pad
    ),
}
# Padding side of the tokenizer, its padding token, and the padding id in the model's configuration.
PADDINGS = (("right", "[PAD]", 0), ("left", "[EOS]", None), ("left", None, 0))


def save_tokenizer(folder: Path, *, side: str, pad: str | None) -> Any:
    """Save a tokenizer of a few words that ends texts with [EOS]; without `pad`, it cannot pad."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [EOS]", special_tokens=[("[EOS]", 3)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side=side, pad_token=pad, eos_token="[EOS]", unk_token="[UNK]"
    )
    fast.save_pretrained(folder)
    return fast


def save_model(folder: Path, config: Any, *, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    auto = transformers.CLIPTextModelWithProjection if config.model_type == "clip_text_model" else None
    auto = transformers.T5EncoderModel if config.model_type == "t5" else auto
    model = transformers.AutoModel.from_config(config) if auto is None else auto(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    return model.to(torch.float32).eval()


def tower(folder: Path, **settings: Any) -> torch.nn.Module:
    """Return the tower of a folder with its weights, in float64."""
    towers = DualEncoderTowers(text=f"hf:{folder}", **settings)
    source, form = open_weights(Init(weights=str(folder)), towers), library_format(towers)
    assert source is not None and form is not None and not source.converted.unknown
    built = text_tower(towers, embedding_width=32)
    ours = {name.removeprefix("text."): tensor for name, tensor in source.converted.tensors.items()}
    # With a shorter context, a CLIP uses only its first positions.
    shapes = {name: tensor.shape for name, tensor in built.state_dict().items()}
    left = built.load_state_dict({name: tensor[: shapes[name][0]] for name, tensor in ours.items()}, strict=False)
    assert not left.unexpected_keys and not [name for name in left.missing_keys if "position_ids" not in name]
    return built.double().eval()


def pool(output: Any, pooling: str) -> torch.Tensor:
    """Return the embedding of one text from the output of transformers for this text without padding."""
    x_LD = output.last_hidden_state[0]
    if pooling == "own":
        embedding = getattr(output, "text_embeds", None)
        embedding = getattr(output, "pooler_output", None) if embedding is None else embedding
        return x_LD.mean(0) if embedding is None else embedding[0]
    return {"mean": x_LD.mean(0), "first": x_LD[0], "last": x_LD[-1]}[pooling]


# Poolings and numbers of tokens. Every family is tested with its own pooling, and with one other pooling per padding.
POOLINGS = (("mean", 24), ("last", 16), ("last", 24), ("first", 24))


def poolings_of(kind: str, *, padding: int) -> list[tuple[str, int]]:
    number = list(CONFIGS).index(kind)
    return [("own", 16), POOLINGS[(number + padding) % len(POOLINGS)]]


@pytest.mark.parametrize("is_complete", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"])
@pytest.mark.parametrize("kind", nightly_beyond(["t5", "clip"], CONFIGS))
def test_a_text_is_embedded_as_alone_by_every_pooling_and_padding(tmp_path: Path, kind: str, is_complete: bool) -> None:
    for number, (side, pad, config_pad) in enumerate(PADDINGS):
        folder = tmp_path / str(number)
        save_tokenizer(folder, side=side, pad=pad)
        theirs = save_model(folder, CONFIGS[kind](config_pad)).double()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)  # the tokenizer class of the model
        for pooling, length in [("own", 16), *POOLINGS] if is_complete else poolings_of(kind, padding=number):
            ours = tower(folder, text_pooling=pooling, context_length=length)
            tokenize = tokenizer_of(f"hf:{folder}", length)
            with torch.no_grad():
                embedded = ours(torch.from_numpy(np.stack([tokenize(text) for text in TEXTS])))
                given = [tokenizer(text, truncation=True, max_length=length, return_tensors="pt") for text in TEXTS]
                alone = [pool(theirs(**inputs), pooling) for inputs in given]
            torch.testing.assert_close(embedded, torch.stack(alone), rtol=0, atol=1e-9)


def test_the_recipe_of_a_qwen3_embedding_with_left_padding(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, side="left", pad="[EOS]")
    theirs = save_model(tmp_path, CONFIGS["qwen3"](None)).double()
    given = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
    tokenize = tokenizer_of(f"hf:{tmp_path}", 32)
    with torch.no_grad():
        recipe = theirs(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).last_hidden_state[:, -1]
        ours = tower(tmp_path, text_pooling="last")(torch.from_numpy(np.stack([tokenize(text) for text in TEXTS])))
    torch.testing.assert_close(ours, recipe, rtol=0, atol=1e-5)  # rotations are computed in float32


def test_a_siglip_pads_to_its_own_length_whatever_the_context(tmp_path: Path) -> None:
    theirs: Any = save_hf(tmp_path, "siglip").double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    given = tokenizer(list(TEXTS[:3]), padding="max_length", max_length=16, return_tensors="pt")["input_ids"]
    for length in (8, 16):
        tokenize = tokenizer_of(f"hf:{tmp_path}", length)
        ids = torch.from_numpy(np.stack([tokenize(text) for text in TEXTS[:3]]))
        assert torch.equal(ids, given)
    with torch.no_grad():
        library = library_of(f"hf:{tmp_path}")[0]
        ours = library.embed_text(theirs.text_model, ids, "own")
        torch.testing.assert_close(ours, theirs.get_text_features(given).pooler_output, rtol=0, atol=1e-12)


def test_an_empty_text_has_an_embedding_and_a_context_that_is_too_long_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, side="left", pad=None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.save_pretrained(tmp_path)
    save_model(tmp_path, CONFIGS["roberta"](1))
    assert context_length_of(f"hf:{tmp_path}") == 38  # positions start after the padding index
    tokenize = tokenizer_of(f"hf:{tmp_path}", 38)
    for pooling in ("mean", "last"):
        embeddings = tower(tmp_path, text_pooling=pooling)(torch.from_numpy(tokenize(""))[None])
        assert embeddings.isfinite().all()
    with pytest.raises(UserError, match=r"--towers.context-length 39 is larger than the 38 tokens that"):
        tokenizer_of(f"hf:{tmp_path}", 39)


def test_a_model_without_a_mask_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, side="right", pad="[PAD]")
    config = transformers.FNetConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=40)
    save_model(tmp_path, config)
    with pytest.raises(UserError, match="is a fnet model, which takes no attention mask"):
        text_tower(DualEncoderTowers(text=f"hf:{tmp_path}"), embedding_width=32)


@pytest.mark.parametrize("dtype", nightly_beyond([torch.bfloat16], [torch.bfloat16, torch.float16, torch.float64]))
@pytest.mark.parametrize("kind", ["bert", "t5", "clip", "qwen3"])
def test_modules_are_float32_whatever_the_type_of_the_folder(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    save_tokenizer(tmp_path, side="right", pad="[PAD]")
    theirs = save_model(tmp_path, CONFIGS[kind](0), dtype=dtype)
    library, name = library_of(f"hf:{tmp_path}")
    assert {parameter.dtype for parameter in library.text(name, None).parameters()} == {torch.float32}
    towers = DualEncoderTowers(text=f"hf:{tmp_path}")
    source = open_weights(Init(weights=str(tmp_path)), towers)
    assert source is not None and not source.converted.unknown
    known = theirs.state_dict()
    for name, tensor in source.converted.tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, known[source.converted.origins[name]]), name
