"""Tests of `prep captions --model` with a tiny Qwen3-VL with random weights, saved and loaded like any other model."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.prep.captions.answers import Answer, decode_pictures
from clipmill.prep.captions.recipe import CaptionsSettings
from clipmill.prep.captions.vlm import open_model
from clipmill.prep.core.chunk_content import read_chunk
from clipmill.prep.core.failures import SourceFailure
from clipmill.shards.reader import Variant
from tests.prep.captions.tiny_vlm import save_tiny_vlm
from tests.prep.running import Ran, contents, prep_here
from tests.prep.sets import ShardSet

PROMPT = "what happens in the video ?"
_SETTINGS: dict[str, Any] = {"precision": "float32", "frames": 2, "size": 64, "max_tokens": 12}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-vl"
    save_tiny_vlm(folder)
    return folder


def make(data: Path, model: Path, *settings: object, status: int | None = 0) -> Ran:
    given = [word for name, value in _SETTINGS.items() for word in (f"--{name.replace('_', '-')}", value)]
    execution = ("--engine", "processes", "--num-gpus", 0, "--data", data, "--json")
    return prep_here("captions", "--model", model, *given, *execution, *settings, status=status)


def answers_of(model: Path, pictures: list[Any]) -> list[Answer | SourceFailure]:
    opened = open_model(model, name=model.name, device="cpu", precision="float32", num_threads=1)
    return opened.captions(pictures, settings=CaptionsSettings(model=str(model), **_SETTINGS), seed=0)


def test_captions_equal_those_that_transformers_generates(vlm: Path, shard_set: ShardSet) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    kind: Any = AutoModelForImageTextToText
    processor: Any = AutoProcessor
    model, processor = kind.from_pretrained(vlm, dtype=torch.float32), processor.from_pretrained(vlm)
    made = make(shard_set.data, vlm, "--prompt", PROMPT, status=None).summary
    assert made["failures"].keys() <= {"answer_truncated"} and made["num_chunks"] >= 1
    captions = {
        row["key"]: row
        for shard in Variant.open(shard_set.data, column="captions").shards()
        for row in shard.index.to_pylist()
    }
    num_equal = 0
    for shard in Variant.open(shard_set.data).shards():
        for row in range(shard.num_samples):
            pictures = decode_pictures(read_chunk(shard, row), count=2, size=64)
            content = [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": PROMPT}]
            inputs = processor.apply_chat_template(
                [{"role": "user", "content": content}],
                tokenize=True,
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            )
            answer_ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            stored = captions.get(shard.index["key"][row].as_py())
            is_ended = int(answer_ids[-1]) in model.generation_config.eos_token_id
            assert (stored is not None) == is_ended
            if stored is not None:
                text = processor.decode(answer_ids[:-1], skip_special_tokens=True)
                assert stored["caption_text"] == " ".join(text.split())
                assert (stored["tokens_in"], stored["tokens_out"]) == (inputs["input_ids"].shape[1], len(answer_ids))
                num_equal += 1
    assert num_equal == made["num_chunks"]


def test_a_batch_has_the_answers_of_its_chunks(vlm: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = [(64, 48), (48, 64), (64, 64)]
    pictures = [[rng.integers(0, 256, (*size, 3), np.uint8) for _ in range(2)] for size in sizes]
    together = answers_of(vlm, pictures)
    alone = [answer for picture in pictures for answer in answers_of(vlm, [picture])]
    for batched, other in zip(together, alone, strict=True):
        assert isinstance(batched, Answer) and isinstance(other, Answer)
        assert (batched.text, batched.finish_reason, batched.tokens_in, batched.tokens_out) == (
            other.text,
            other.finish_reason,
            other.tokens_in,
            other.tokens_out,
        )


def test_samples_do_not_depend_on_what_was_made_before(vlm: Path, shard_set: ShardSet, tmp_path: Path) -> None:
    sampling = ("--temperature", 1, "--max-tokens", 60)
    shutil.copytree(shard_set.data, tmp_path / "other")
    variant = make(shard_set.data, vlm, *sampling, status=None).summary["variant"]
    plan = prep_here(
        "plan",
        "captions",
        "--model",
        vlm,
        "--precision",
        "float32",
        "--frames",
        2,
        "--size",
        64,
        *sampling,
        "--trial",
        1,
        "--data",
        tmp_path / "other",
    )
    assert variant in plan.stdout and "1 answer: " in plan.stdout
    make(tmp_path / "other", vlm, *sampling, status=None)
    digests, other = (
        {name: digest for name, digest in contents(data / "captions").items() if "/answers/" not in name}
        for data in (shard_set.data, tmp_path / "other")
    )
    assert digests == other


def test_pictures_beyond_the_context_fail_by_name(tmp_path: Path, vlm: Path) -> None:
    import json

    short = tmp_path / "short"
    shutil.copytree(vlm, short)
    config = json.loads((short / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 150
    (short / "config.json").write_text(json.dumps(config))
    small, large = (np.zeros((side, side, 3), np.uint8) for side in (32, 64))
    fits, too_long = answers_of(short, [[small, small], [large] * 3])
    assert isinstance(fits, Answer)
    assert isinstance(too_long, SourceFailure) and too_long.code == "prompt_too_long"
    assert "exceed the context of 150 tokens" in too_long.message


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("processor_config.json", "lacks a processor"),
        ("model.safetensors", "lacks config.json or *.safetensors"),
    ],
)
def test_a_folder_without_a_part_is_refused(
    missing: str, message: str, vlm: Path, shard_set: ShardSet, tmp_path: Path
) -> None:
    folder = tmp_path / "part"
    shutil.copytree(vlm, folder)
    (folder / missing).unlink()
    assert message in make(shard_set.data, folder, status=2).error
    assert "does not exist" in make(shard_set.data, tmp_path / "nowhere", status=2).error


def test_a_model_that_cannot_be_loaded_stops_the_run(vlm: Path, shard_set: ShardSet, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(vlm, folder)
    (folder / "chat_template.jinja").unlink()
    made = make(shard_set.data, folder, status=1).summary
    assert made["failures"] == {"model_unavailable": 2}
    assert "has no chat template" in (Path(made["variant_dir"]) / "failures.jsonl").read_text()
