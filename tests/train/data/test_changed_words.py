"""Resumed runs use the captions that they started with. Changed text under the same ids and spans is detected."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import MANIFEST_FOLDER, read_captions
from clipmill.train.data.order import LoaderState
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.samples import Samples
from clipmill.train.models.text import load_tokenizer
from tests.train.conftest import VIDEOS
from tests.train.latents.conftest import CAPTIONS, SHARDS, WITHOUT_EMBEDDING
from tests.train.latents.querying import segments
from tests.train.latents.written import write_all
from tests.train.test_video_captions import open_set
from tests.train.tiny_data import Caption, write_captions

OTHER_WORDS = "caption texts or sources have changed since the state was saved"


def rewrite(data_dir: Path, splits: dict[str, str], captions: list[Caption]) -> None:
    """Write a different manifest whose captions have the same ids."""
    shutil.rmtree(data_dir / MANIFEST_FOLDER)
    write_captions(data_dir, splits, captions)


def begun_with(samples: str) -> LoaderState:
    return LoaderState(position=3, ahead=[], seed=0, samples=samples)


def test_other_words_of_clips_are_noticed(data_dir: Path, tmp_path: Path) -> None:
    data_copy = tmp_path / "data"
    shutil.copytree(data_dir, data_copy)
    before = open_set(data_copy).fingerprint
    rows = read_captions(data_copy).to_pylist()
    captions = [Caption(row["video_id"], row["begin_s"], row["end_s"], row["text"]) for row in rows]
    rewrite(data_copy, VIDEOS, captions)
    assert open_set(data_copy).fingerprint == before
    # The first change alters one letter of one caption. The second moves a letter from one caption to the next, so the
    # concatenated text stays the same.
    for changed in ({1: "The middle of a"}, {0: "it begin", 1: "sthe middle of a"}):
        rewrite(
            data_copy,
            VIDEOS,
            [replace(caption, text=changed.get(at, caption.text)) for at, caption in enumerate(captions)],
        )
        samples = open_set(data_copy)
        with pytest.raises(UserError, match=OTHER_WORDS):
            samples.load_state_dict(begun_with(before))
    # Captions of a different split are not used in training.
    rewrite(
        data_copy,
        VIDEOS,
        [replace(caption, text=caption.text + (" d" if caption.video_id == "d" else "")) for caption in captions],
    )
    open_set(data_copy).load_state_dict(begun_with(before))


@pytest.mark.parametrize("is_stored", [True, False])
def test_other_words_of_latents_are_noticed(tmp_path: Path, is_stored: bool) -> None:
    data_dir = write_all(tmp_path / "data", SHARDS, CAPTIONS, without=WITHOUT_EMBEDDING).data_dir
    splits = dict.fromkeys((chunk.video_id for chunks in SHARDS for chunk in chunks), "train")

    def open_clips_of(sources: str | None = None) -> Samples[Any]:
        captions, tokenize = ("stored", None) if is_stored else ("words", load_tokenizer())
        return open_latent_segments(
            segments(data_dir, split="train", captions=captions, sources=sources), tokenize=tokenize
        )

    before = open_clips_of().fingerprint
    rewrite(data_dir, splits, [replace(caption, text=caption.text.replace("moment", "minute")) for caption in CAPTIONS])
    loader = open_clips_of()
    with pytest.raises(UserError, match=OTHER_WORDS):
        loader.load_state_dict(begun_with(before))


def test_words_of_sources_that_are_left_out_are_no_others(tmp_path: Path) -> None:
    captions = [*CAPTIONS, Caption("a", 0.0, 9.0, "as a model says", "model")]
    data_dir = write_all(tmp_path / "data", SHARDS, captions).data_dir
    splits = dict.fromkeys((chunk.video_id for chunks in SHARDS for chunk in chunks), "train")
    before = open_latent_segments(segments(data_dir, split="train", sources="test=1")).fingerprint
    rewrite(data_dir, splits, [*CAPTIONS, replace(captions[-1], text="as another model says")])
    assert open_latent_segments(segments(data_dir, split="train", sources="test=1")).fingerprint == before
    assert (
        open_latent_segments(segments(data_dir, split="train")).fingerprint.partition("-")[2]
        != before.partition("-")[2]
    )
