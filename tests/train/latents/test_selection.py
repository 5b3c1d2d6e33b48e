"""`--where` on segments of latents."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.data.interface import open_latents
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.samples import Samples
from tests.shards.made_scores import write_scores
from tests.train.latents.conftest import SHARDS
from tests.train.latents.querying import segments
from tests.train.latents.written import Written


@pytest.fixture(scope="module")
def scored_data(written_data: Written, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with scores; the chunks of a at 0 and 15 s and the chunks of b and e have motion."""
    copy = tmp_path_factory.mktemp("scored") / "data"
    shutil.copytree(written_data.data_dir, copy)
    keys = [chunk.key for shard in SHARDS for chunk in shard]
    moving = ("a_000000000", "a_000015000", "b_000000000", "e_000000000")
    write_scores(copy, {key: {"motion": float(key in moving)} for key in keys})
    return copy


def open_segments(data_dir: Path, where: str | None, **how: Any) -> Samples[Any]:
    return open_latent_segments(segments(data_dir, split="train", where=where, captions="words", batch=2, **how))


def test_segments_of_selected_chunks_with_selected_captions_are_kept(scored_data: Path) -> None:
    moving = open_segments(scored_data, "motion > 0.5")
    assert {moving.key(sample) for sample in range(len(moving))} == {
        *["a_000000000", "a_000015000", "b_000000000", "e_000000000"]
    }
    assert "where motion > 0.5: 4 of" in moving.describe()
    told = open_segments(scored_data, "motion > 0.5 and ('moment' in text or 'second segment' in text)")
    # The text of each segment is its first selected caption.
    assert {(told.key(n), told.span_s(n)[0], told.text(n)) for n in range(len(told))} == {
        ("a_000000000", 0.0, "the second segment of a, and the end of the first"),
        ("a_000000000", 5.0, "the second segment of a, and the end of the first"),
        ("b_000000000", 5.0, "a moment of b"),
        ("e_000000000", 5.0, "the second segment of e"),
    }
    assert "captions not selected" in told.describe()
    assert len({open_segments(scored_data, where).fingerprint for where in (None, "motion > 0.5", "motion > 0.6")}) == 3


def test_open_latents_selects_without_captions_too(scored_data: Path) -> None:
    batches = open_latents(scored_data, where="motion < 0.5", captions=None, shuffle=False, batch=4)
    keys = {key for batch in batches for key in batch["key"]}
    assert keys == {"a_000030000", "c_000015000"}
    with pytest.raises(UserError, match="these samples have no captions"):
        open_latents(scored_data, where="words > 3", captions=None)
    with pytest.raises(UserError, match="selects none of the"):
        open_latents(scored_data, where="'zebra' in text")
