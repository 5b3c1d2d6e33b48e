"""Tests of bad input: a user's error takes two lines; a text with a fault is reported and counted, but not stored."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file

from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.plan import ShardState
from clipmill.prep.engines import Check, Outcome, R, T
from clipmill.prep.text.bank import Block, TextEncoderOptions
from clipmill.prep.text.column import COLUMN
from clipmill.prep.text.plan import make_text_plan
from clipmill.prep.text.recipe import TextSettings, local_weights, text_recipe
from clipmill.prep.text.tower import resolve
from clipmill.prep.text.work import run_text
from clipmill.shards.commit_table import read_commits
from tests.prep.running import Ran, messages
from tests.prep.text.conftest import Checkpoints
from tests.prep.text.sets import (
    CAPTIONS,
    SPLITS,
    Encoding,
    embedding_of_captions,
    encode,
    plan_of,
    samples,
    texts_of_captions,
    write_captions,
)

Command = Callable[..., Ran]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_captions(folder, CAPTIONS, splits=SPLITS)
    return folder


def test_a_manifest_without_captions_makes_no_variant(prep: Command, tmp_path: Path) -> None:
    write_captions(tmp_path, {"video": []}, splits={"video": "train"})
    error, hint = messages(prep("text", "--clip", "tiny", "--data", tmp_path, status=2).stderr)
    assert error == f"error: the manifest in {tmp_path} has no captions" and "prep manifest" in hint
    assert not (tmp_path / "text").exists() and not (tmp_path / "dataset.json").exists()


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ("ViT-B-32", 'error: --clip "ViT-B-32" does not name a text encoder'),
        ("ViT-B-32:", 'error: --clip "ViT-B-32:" does not name a text encoder'),
        ("ViT-Q-32:openai", 'open_clip has no model "ViT-Q-32"'),
        ("ViT-B-32:no_such_tag", '"no_such_tag" is neither a file nor a tag of ViT-B-32'),
        ("ViT-B-32:/nowhere/clip.pt", '"/nowhere/clip.pt" is neither a file nor a tag'),
        ("ViT-B-32:openai", "the weights openai require a different activation function than ViT-B-32 uses"),
    ],
)
def test_a_tower_that_is_not_there_is_named(prep: Command, data: Path, clip: str, message: str) -> None:
    ran = prep("text", "--clip", clip, "--data", data, status=2)
    error, hint = messages(ran.stderr)
    assert error.startswith("error: ") and message in error and hint.startswith("hint: ")
    assert not (data / "text").exists()


def test_files_that_are_no_weights_of_the_model_are_named(
    prep: Command, data: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    text_file, cut, other = tmp_path / "a.pt", tmp_path / "cut.safetensors", tmp_path / "other.safetensors"
    text_file.write_text("not weights")
    cut.write_bytes(checkpoints.safetensors.read_bytes()[:-100])
    state = load_file(checkpoints.safetensors)
    save_file({name: value for name, value in state.items() if "ln_final" not in name}, other)
    for path, message in (
        (text_file, "is not a PyTorch checkpoint that can be loaded safely"),
        (cut, "is not a valid safetensors file: truncated at "),
        (other, f"is not a checkpoint of {checkpoints.model}: "),
    ):
        error, _ = messages(prep("text", "--clip", f"{checkpoints.model}:{path}", "--data", data, status=2).stderr)
        assert error.startswith(f"error: {path} {message}")
    clip = f"ViT-B-32:{checkpoints.safetensors}"
    error, _ = messages(prep("text", "--clip", clip, "--data", data, status=2).stderr)
    assert "is not a checkpoint of ViT-B-32: " in error and "expected [77, 512]" in error


def test_a_checkpoint_that_would_run_a_program_is_refused(
    prep: Command, data: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    class Program:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"state_dict": Program()}, tmp_path / "clip.pt")
    clip = f"{checkpoints.model}:{tmp_path / 'clip.pt'}"
    assert "loaded safely" in prep("text", "--clip", clip, "--data", data, status=2).stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("flags", [("--batch", 0), ("--workers", 0), ("--num-gpus", -1.0)])
def test_flags_that_make_nothing_are_named(prep: Command, data: Path, flags: tuple[str, float]) -> None:
    ran = prep("text", "--clip", "tiny", "--data", data, *flags, status=2)
    assert ran.stderr.startswith(f"error: {flags[0]} is {flags[1]}, which is out of range\n")


def test_a_recipe_is_what_it_was_after_it_was_stored(checkpoints: Checkpoints) -> None:
    recipe = resolve(TextSettings(clip=f"{checkpoints.model}:{checkpoints.torch_file}"))
    path = str(checkpoints.torch_file.resolve())
    assert COLUMN.stored_settings(recipe.values, path) == recipe.settings and local_weights(recipe) == path
    assert path not in recipe.values.values()  # a path is not part of a recipe
    named = COLUMN.stored_settings(recipe.values)
    assert named.clip == recipe.values["encoder"] == f"{checkpoints.model}:{checkpoints.model}.pt"
    other = text_recipe(named, encoder=str(named.clip), sha256="0" * 64, width=recipe.values["width"])
    assert recipe.values["width"] == 48 and other.variant != recipe.variant
    assert "tiny" in resolve(TextSettings(clip="tiny")).variant


def test_empty_and_endless_captions_are_encoded_and_the_cut_ones_counted(tmp_path: Path) -> None:
    word, words = "Q" + "xqj" * 33_333, "dog " * 25_000
    write_captions(tmp_path, {"v": ["", " ", word, words, "x\0y", "dog"]})
    summary = encode(tmp_path)
    assert (summary.num_chunks, summary.num_encoded, summary.failures) == (1, 6, [])
    assert summary.added.values == {"num_captions": 6, "num_cut": 2, "num_left_out": 0}
    stored, texts = embedding_of_captions(plan_of(tmp_path).variant_dir), texts_of_captions(tmp_path)
    row_of = {text: stored[caption_id] for caption_id, text in texts.items()}
    assert row_of.keys() == {"", " ", word, words, "x\0y", "dog"}
    assert np.isfinite(np.stack(list(row_of.values()))).all()
    assert np.array_equal(row_of[""], row_of[" "])  # cleaning leaves nothing of the text
    assert not np.array_equal(row_of["dog"], row_of[words])


def test_embeddings_that_are_not_finite_are_counted_and_not_stored(
    prep: Command, data: Path, checkpoints: Checkpoints
) -> None:
    state = load_file(checkpoints.safetensors)
    (name,) = (name for name in state if name.endswith("token_embedding.weight"))
    (bird,) = open_clip.SimpleTokenizer().encode("bird")
    state[name][bird] = float("nan")
    clip = f"{checkpoints.model}:{checkpoints.folder / 'nan.safetensors'}"
    save_file(state, checkpoints.folder / "nan.safetensors")
    folder = plan_of(data, clip).variant_dir

    summary = encode(data, clip)
    assert [(failure.video_id, failure.code) for failure in summary.failures] == [("other", "not_finite")]
    assert "'a bird'" in summary.failures[0].message
    assert list(samples(folder)) == ["long", "short"]
    assert read_commits(folder).commits[1].files is None
    assert '"not_finite"' in (folder / "failures.jsonl").read_text()

    engine = Encoding()
    assert encode(data, clip, engine=engine).failures == summary.failures
    assert engine.texts == []  # the same weights would give the same result
    again = make_text_plan(data, resolve(TextSettings(clip=clip)), retry_codes=frozenset({FailureCode.NOT_FINITE}))
    assert [shard.state for shard in again.shards] == [ShardState.CURRENT, ShardState.RETRY]
    arguments = ("text", "--clip", clip, "--engine", "processes", "--data", data)
    assert "not counted: 1 video whose failures an earlier run reported" in prep(*arguments).stderr


class Losing:
    """Engine whose workers die on a certain text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, check: Check | None = None, **named: object
    ) -> Iterator[Outcome[T, R] | None]:
        for task in tasks:
            assert isinstance(task, Block)
            yield None
            is_lost = self._text in task.texts
            lost = "the worker was killed by signal 9 3 times" if is_lost else None
            yield Outcome(task, None if is_lost else function(task), lost)


def test_a_lost_worker_costs_the_shards_that_need_its_texts_until_the_next_run(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipmill.prep.text.bank.MAX_BLOCK_TEXTS", 1)
    encode(data)
    write_captions(data, {**CAPTIONS, "short": ["newer", "new"], "other": ["newest"]}, splits=SPLITS)
    plan = plan_of(data)
    use = TextEncoderOptions(plan.recipe, batch=8, device="cpu")
    summary = run_text(plan, use, Losing("new"))
    # The complete shard was abandoned, so neither of its videos is up to date.
    assert {(failure.code, failure.video_id) for failure in summary.failures} == {
        ("worker_lost", "long"),
        ("worker_lost", "short"),
    }
    assert summary.num_encoded == 2
    assert samples(plan.variant_dir)["short"]["json"]["texts"] == ["a cat", "the end"]  # the sample of the earlier run
    assert samples(plan.variant_dir)["other"]["json"]["texts"] == ["newest"]
    engine = Encoding()
    assert encode(data, engine=engine).failures == []
    assert engine.texts == ["new"]
    assert samples(plan.variant_dir)["short"]["json"]["texts"] == ["newer", "new"]
