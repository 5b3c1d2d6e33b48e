"""Tests of `prep text --where`: which captions are encoded, and the effect of a different condition."""

from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.prep.core.run import Summary
from clipmill.prep.core.variants import stored_request
from clipmill.prep.text.bank import TextEncoderOptions
from clipmill.prep.text.column import COLUMN
from clipmill.prep.text.plan import make_text_plan, pending_text
from clipmill.prep.text.recipe import TextSettings
from clipmill.prep.text.tower import resolve
from clipmill.prep.text.work import run_text
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant
from tests.prep.text.sets import CAPTIONS, SPLITS, Encoding, samples, write_captions


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_captions(folder, CAPTIONS, splits=SPLITS)
    return folder


def encode(data: Path, where: str | None, engine: Encoding) -> Summary:
    plan = make_text_plan(data, resolve(TextSettings(clip="tiny", where=where)))
    return run_text(plan, TextEncoderOptions(plan.recipe, batch=8, device="cpu"), engine)


def stored_texts(data: Path) -> dict[str, list[str]]:
    folder = data / "text" / str(current_variant(data, "text"))
    return {key: sample["json"]["texts"] for key, sample in samples(folder).items()}


def test_only_the_selected_captions_are_encoded(data: Path) -> None:
    engine = Encoding()
    where = "words >= 2 and 'dog' in text"
    encode(data, where, engine)
    # The other captions of a video are omitted, and so is a video without further captions.
    assert stored_texts(data) == {"long": ["a dog runs"], "other": ["a dog runs"]}
    assert sorted(engine.texts) == ["a dog runs"]
    variant = Variant.open(data, column="text")
    assert pending_text(data, variant).to_make == {}
    assert COLUMN.command_line(stored_request(variant), data_dir=data).startswith(
        """prep text --clip tiny --where 'words >= 2 and '"'"'dog'"'"' in text' --data"""
    )
    assert encode(data, where, Encoding()).num_shards_made == 0

    # A different condition keeps the variant, and only new texts are encoded.
    engine = Encoding()
    encode(data, "split == 'train' and words >= 1", engine)
    assert stored_texts(data) == {"long": ["a dog runs", "a cat"], "short": ["a cat", "the end"]}
    assert sorted(engine.texts) == ["a cat", "the end"]
    engine = Encoding()
    encode(data, None, engine)
    assert sorted(engine.texts) == ["", "a bird"]
    assert Variant.open(data, column="text").directory == variant.directory
    assert stored_request(Variant(variant.directory)).get("where") is None


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("motion > 1 and words > 2", "--where uses motion, but prep text encodes captions"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(data: Path, where: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        encode(data, where, Encoding())
    assert not (data / "text").exists()
