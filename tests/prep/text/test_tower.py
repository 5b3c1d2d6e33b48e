"""Tests that stored embeddings equal open_clip's `encode_text`, regardless of the other texts in the batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipmill.prep.text.recipe import TINY, TextSettings
from clipmill.prep.text.tower import TINY_SHA256, TINY_WIDTH, Tower, load_tower, resolve
from tests.prep.text.conftest import Checkpoints, build_tokenizer
from tests.prep.text.sets import (
    CAPTIONS,
    SPLITS,
    embedding_of_captions,
    encode,
    plan_of,
    texts_of_captions,
    write_captions,
)
from tests.tiers import nightly_beyond

TEXTS = ["", "a dog", "a dog runs over the green grass and jumps", "dog " * 100, "A Dog", "é漢字", "x" * 300]


def by_open_clip(model: Any, texts: list[str]) -> np.ndarray:
    """Encode one text at a time, padded to the context length; float32 [texts, width]."""
    with torch.inference_mode():
        ids = [build_tokenizer()([text]) for text in texts]
        return np.concatenate([model.encode_text(each, normalize=True).numpy() for each in ids])


def assert_equal_but_for_rounding(stored: np.ndarray, exact: np.ndarray) -> None:
    assert stored.dtype == np.float16
    # Half a step of float16 for rounding, plus the effect of the order of float32 additions.
    assert (
        np.abs(stored.astype(np.float64) - exact) <= np.spacing(np.abs(exact.astype(np.float16))) * 0.51 + 2e-7
    ).all()


# Each layout of the state with each file format.
CASES = [(layout, kind) for layout in ("together", "apart") for kind in ("safetensors", "torch_file")]
EVERY_DAY = (("together", "safetensors"), ("apart", "torch_file"))


@pytest.mark.parametrize(("checkpoints", "kind"), nightly_beyond(EVERY_DAY, CASES), indirect=["checkpoints"])
def test_rows_of_a_checkpoint_are_those_of_open_clip(checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    write_captions(tmp_path, {**CAPTIONS, "more": TEXTS}, splits=SPLITS)
    clip = f"{checkpoints.model}:{getattr(checkpoints, kind)}"
    encode(tmp_path, clip)
    stored = embedding_of_captions(plan_of(tmp_path, clip).variant_dir)
    texts = texts_of_captions(tmp_path)
    assert stored.keys() == texts.keys() and len(stored) == 16
    exact = by_open_clip(checkpoints.load(), [texts[caption_id] for caption_id in stored])
    assert_equal_but_for_rounding(np.stack(list(stored.values())), exact)
    assert np.allclose(np.linalg.norm(np.stack(list(stored.values())).astype(np.float32), axis=1), 1, atol=1e-3)


def test_rows_of_tiny_are_those_of_its_model_and_differ_by_text() -> None:
    tower = load_tower(TINY, sha256=TINY_SHA256, device="cpu")
    encoded = tower.encode(TEXTS, batch=4)
    assert encoded.rows.shape == (len(TEXTS), TINY_WIDTH) and encoded.is_finite.all()
    assert encoded.num_cut == 1
    assert_equal_but_for_rounding(encoded.rows, by_open_clip(tower._model, TEXTS))
    likeness = encoded.rows.astype(np.float32) @ encoded.rows.astype(np.float32).T
    assert (likeness[~np.eye(len(TEXTS), dtype=bool)].reshape(-1) > 0.999).sum() == 2  # "a dog" and "A Dog"


def test_tiny_is_the_same_for_ever() -> None:
    row = load_tower(TINY, sha256=TINY_SHA256, device="cpu").encode(["a dog"], batch=1).rows[0]
    assert resolve(TextSettings(clip=TINY)).variant == "tiny-ecb76eda"
    assert np.allclose(row[:4].astype(np.float32), [0.03656, 0.00483, -0.02332, 0.01744], atol=1e-3)


def test_an_embedding_does_not_depend_on_what_is_computed_with_it() -> None:
    tower = load_tower(TINY, sha256=TINY_SHA256, device="cpu")
    texts = [f"caption {number} of a {'very ' * (number % 30)}small dog" for number in range(40)]
    rows = tower.encode(texts, batch=16).rows
    for chosen in ([0], [39, 3, 17], list(range(39, -1, -1))):
        assert np.array_equal(tower.encode([texts[n] for n in chosen], batch=16).rows, rows[chosen])


def test_only_the_text_side_is_kept(checkpoints: Checkpoints) -> None:
    tower = Tower(checkpoints.load(), build_tokenizer(), device="cpu")
    assert not [name for name in tower._model.state_dict() if name.startswith("visual.")]
