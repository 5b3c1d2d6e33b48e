"""Segments with captions from several sources, and with caption texts in place of embeddings."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.samples import Samples
from clipmill.train.models.text import load_tokenizer
from tests.train.latents.querying import segments
from tests.train.latents.written import Caption, Chunk, Written, write_all

# Caption ids are list indices, and segments have 5 s. The third segment has captions from one source only.
CAPTIONS = [
    Caption("a", 0.0, 4.0, "said", "human"),
    Caption("a", 6.0, 9.0, "said later", "human"),
    Caption("a", 0.0, 9.0, "in other words", "rephraser"),
    Caption("a", 1.0, 2.0, "once more", "rephraser"),
    Caption("a", 3.0, 4.0, "and again", "rephraser"),
    Caption("a", 11.0, 12.0, "by a model", "narrator"),
]
SEGMENTS = [{0, 2, 3, 4}, {1, 2}, {5}]


@pytest.fixture(scope="module")
def spoken_data(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_all(tmp_path_factory.mktemp("sources"), [[Chunk("a", 0, 60)]], CAPTIONS)


def draw_captions(loader: Samples[Any], count: int) -> list[tuple[int, int, int]]:
    return [
        (int(loaded.batch["position"][0]), int(loaded.batch["clip_id"][0]), int(loaded.batch["caption_id"][0]))
        for loaded in islice(loader.batches(), count)
    ]


def test_sources_are_drawn_by_weight_and_segments_are_clips(spoken_data: Written) -> None:
    query = segments(spoken_data.data_dir, split="train", sources="rephraser=3,human=1", batch=1, can_keep=True)
    loader = open_latent_segments(query)
    assert (len(loader), loader.num_clips, loader.num_caption_ids) == (2, 2, 5)
    drawn_captions = draw_captions(loader, 4000)
    assert all(sorted(clip for _, clip, _ in drawn_captions[at : at + 2]) == [0, 1] for at in range(0, 4000, 2))
    counts = Counter((clip, caption) for _, clip, caption in drawn_captions)
    expected = {(0, 0): 500, (0, 2): 500, (0, 3): 500, (0, 4): 500, (1, 1): 500, (1, 2): 1500}
    assert counts.keys() == expected.keys()
    assert all(abs(counts[key] - expected[key]) < 4 * np.sqrt(expected[key]) for key in expected)
    [first] = [
        loaded.batch for loaded in open_latent_segments(replace(query, loading=LoaderSettings())).evaluation_batches()
    ]
    assert first["caption_id"].tolist() == [2, 2]
    assert "1 caption from other sources left out" in loader.describe()


def test_by_default_all_sources_weigh_alike_and_the_first_of_the_alphabet_is_shown(spoken_data: Written) -> None:
    loader = open_latent_segments(segments(spoken_data.data_dir, split="train", batch=3, can_keep=True))
    [shown] = [loaded.batch for loaded in loader.evaluation_batches()]
    assert shown["clip_id"].tolist() == [0, 1, 2] and shown["caption_id"].tolist() == [0, 1, 5]
    counts = Counter(
        (clip, caption)
        for loaded in islice(loader.batches(), 1000)
        for clip, caption in zip(loaded.batch["clip_id"].tolist(), loaded.batch["caption_id"].tolist(), strict=True)
    )
    assert set(counts) == {(clip, caption) for clip, captions in enumerate(SEGMENTS) for caption in captions}
    assert abs(counts[0, 0] - 500) < 70 and abs(counts[0, 3] - 500 / 3) < 50


def test_captions_come_as_words_where_a_tokenizer_is_given(spoken_data: Written, tmp_path: Path) -> None:
    for name in ("manifest", "latents", "dataset.json"):
        (tmp_path / name).symlink_to(spoken_data.data_dir / name)  # the folder has no text column
    samples = open_latent_segments(
        segments(tmp_path, split="train", captions="words", batch=3), tokenize=load_tokenizer()
    )
    assert samples.text_width is None and samples.text(1) == "said later"
    for loaded in islice(samples.batches(), 5):
        assert "text" not in loaded.batch
        for tokens, caption in zip(loaded.batch["tokens"], loaded.batch["caption_id"].tolist(), strict=True):
            assert tokens.tolist() == load_tokenizer()(CAPTIONS[caption].text).tolist()
