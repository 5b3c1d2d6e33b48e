"""Tests of `prep text --encoder t5:FOLDER`: sequences are stored without padding, and padded by readers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from clipmill import open_latents
from clipmill.manifests.errors import UserError
from clipmill.prep.core.plan import folder_bytes
from clipmill.prep.text.captions import check_text
from clipmill.prep.text.plan import make_text_plan
from clipmill.prep.text.recipe import TextSettings
from clipmill.prep.text.t5 import resolve_t5
from clipmill.prep.text.work import text_report
from clipmill.shards.dataset import variant_dir
from clipmill.shards.reader import Variant
from tests.prep.running import Ran, contents
from tests.prep.text.sets import CAPTIONS, SPLITS, Encoding, samples, texts_of_captions, write_captions
from tests.prep.text.t5_models import encode, saved_t5
from tests.train.latents.written import Chunk, Written, write_latents
from tests.train.running import train

Prep = Callable[..., Ran]
LONG = "a dog " * 30
T5: Any = transformers


@pytest.fixture(scope="module", params=["T5", "UMT5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_t5(tmp_path_factory.mktemp("models") / f"small-{request.param.lower()}", request.param)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_captions(tmp_path / "data", {**CAPTIONS, "long": [*CAPTIONS["long"], LONG]}, splits=SPLITS)
    return tmp_path / "data"


@cache
def opened_by_transformers(model: Path) -> tuple[Any, Any]:
    encoder = getattr(T5, "UMT5EncoderModel" if "umt5" in model.name else "T5EncoderModel")
    return T5.AutoTokenizer.from_pretrained(model), encoder.from_pretrained(model).eval()


def by_transformers(model: Path, text: str) -> np.ndarray:
    """Encode a single text without padding; float32 [tokens, width]."""
    tokenizer, encoder = opened_by_transformers(model)
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=20).input_ids
    with torch.no_grad():
        states: np.ndarray = encoder(input_ids=ids).last_hidden_state[0].numpy()
    return states


def test_plan_announces_at_least_the_disk_that_sequences_take(data: Path, model: Path) -> None:
    plan = make_text_plan(data, resolve_t5(TextSettings(encoder=f"t5:{model}", max_tokens=20)))
    max_bytes = text_report(plan).values["disk"]["added_bytes_range"][1]
    assert max_bytes >= 2 * plan.num_captions * 20 * 16 * np.float16().nbytes
    summary = encode(data, model)
    assert folder_bytes(variant_dir(data, "text", summary.variant)) <= max_bytes


def test_sequences_are_those_of_transformers_and_made_once(data: Path, model: Path) -> None:
    engine = Encoding()
    first = encode(data, model, engine)
    texts = texts_of_captions(data)
    assert sorted(engine.texts) == sorted(set(texts.values())) and first.added.values["num_cut"] == 1
    before = contents(data / "text")
    variant = Variant.open(data, column="text")
    assert variant.recipe["encoder"] == f"t5:{model.name}" and variant.recipe["max_tokens"] == 20
    stored = samples(variant.directory)
    rows = {row["key"]: row for shard in variant.shards() for row in shard.index.to_pylist()}
    expected = {text: by_transformers(model, text) for text in set(texts.values())}
    for key, sample in stored.items():
        told, array = sample["json"], sample["text.npy"]
        assert array.dtype == np.float16 and rows[key]["row_tokens"] == told["row_tokens"]
        for text, sequence in zip(told["texts"], np.split(array, np.cumsum(told["row_tokens"])[:-1]), strict=True):
            assert len(sequence) == len(expected[text]) <= 20
            np.testing.assert_allclose(sequence.astype(np.float32), expected[text], rtol=2e-3, atol=1e-3)
    engine = Encoding()
    assert encode(data, model, engine).num_shards_made == 0
    assert not engine.texts
    next(variant.directory.glob("*.tar")).unlink()
    encode(data, model, engine)
    assert contents(data / "text") == before and len(engine.texts) < len(expected), (
        "texts of other shards must be copied"
    )


def test_readers_pad_and_give_masks(data: Path, model: Path, prep: Prep, tmp_path: Path) -> None:
    encode(data, model)
    prep("verify", "--deep", "--column", "text", "--data", data)
    chunks = [[Chunk(name, 0, 8, frame=(2, 4, 4)) for name in ("long", "short", "other")]]
    write_latents(Written(data), chunks)
    texts = texts_of_captions(data)
    with open_latents(data, split="train", segment="1s", batch=4, captions="embedding", shuffle=False) as opened:
        batches = list(opened)
    for batch in batches:
        mask, text = batch["text_mask"], batch["text"]
        assert mask.dtype == torch.bool and text.shape == (*mask.shape, 16) and int(mask.sum(1).max()) == mask.shape[1]
        assert not text[~mask].any() and "num_tokens" not in batch
        for number, row, is_token in zip(batch["caption_id"].tolist(), text, mask, strict=True):
            expected = by_transformers(model, texts[number])
            np.testing.assert_allclose(row[is_token].float().numpy(), expected, rtol=2e-3, atol=1e-3)
    flags = ("--shards", data, "--input", "latents", "--text-tower", "frozen", "--segment", "1s", "--model", "tiny")
    assert train("dual-encoder", *flags, "--num-frames", 4, "--steps", 1, "--batch", 2, "--out", tmp_path / "run") == 2


def test_a_sample_is_compared_with_its_lengths(data: Path, model: Path) -> None:
    encode(data, model)
    shard = Variant.open(data, column="text").shards()[0]
    row = shard.index.to_pylist()[0]
    members = {name: shard.read(0, name) for name in ("text.npy", "json")}
    assert not check_text(row, members, "train").differences
    [(_, message), *_] = check_text({**row, "row_tokens": [*row["row_tokens"][1:], 99]}, members, "train").differences
    assert "the index requires" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "no text encoder is selected"),
        (("--clip", "tiny", "--encoder", "t5:x"), "cannot be used together"),
        (("--encoder", "bert:x"), "is not a T5 encoder"),
        (("--encoder", "t5:/nowhere"), "the folder /nowhere (requested by --encoder t5:/nowhere) does not exist"),
        (("--encoder", "t5:/nowhere", "--max-tokens", 1), "--max-tokens is 1"),
    ],
)
def test_mistakes_are_named(prep: Prep, data: Path, flags: tuple[object, ...], words: str) -> None:
    assert words in prep("text", *flags, "--data", data, status=2).stderr


def test_what_is_no_t5_is_named(model: Path, tmp_path: Path) -> None:
    mistakes = (
        ("config.json", '{"model_type": "bert", "d_model": 8}', "configures a model of type bert"),
        ("config.json", "{}", "is not the configuration of a T5"),
        ("tokenizer.json", None, "lacks the files of a tokenizer"),
        ("model.safetensors", "", "not a valid safetensors file"),
    )
    for number, (name, content, words) in enumerate(mistakes):
        folder = tmp_path / str(number)  # a path that does not contain the words
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        if content is None:
            for file in folder.glob("*token*"):
                file.unlink()
        else:
            (folder / name).write_text(content)
        with pytest.raises(UserError, match=words):
            resolve_t5(TextSettings(encoder=f"t5:{folder}"))
