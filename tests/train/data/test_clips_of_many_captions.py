"""Clips with several captions: one visit per clip and epoch, one caption per visit, and stable ids for losses."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import CaptionSettings
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.relevancy import Actions, relevancy_of_classes
from clipmill.train.data.samples import Samples
from clipmill.train.models.text import load_tokenizer
from tests.train.latents.test_checksums import flip
from tests.train.latents.written import Written, write_text
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

SHAPE = ClipShape(sampling=Sampling(num_frames=1), size_px=16)
VIDEOS = {"a": "train", "b": "train", "d": "val"}


def action(verb: int, *nouns: int) -> dict[str, Any]:
    return {"label_verb": verb, "label_nouns": list(nouns)}


# Caption ids are the indices in this list.
CAPTIONS = [
    Caption("a", 0.0, 1.0, "said of a", "human", action(0, 1)),
    Caption("a", 1.0, 3.0, "across the border of a", "human", action(0, 2)),
    Caption("b", 0.0, 1.0, "said of b", "human", action(3, 4)),
    Caption("d", 0.0, 1.0, "held out", "human", action(3, 4)),
    Caption("a", 0.0, 1.0, "a, in other words", "rephraser", action(0, 1)),
    Caption("a", 0.0, 1.0, "a, once more", "rephraser", action(0, 1)),
    Caption("b", 0.0, 1.0, "b, in other words", "rephraser", action(3, 4)),
    Caption("b", 2.0, float("inf"), "said by a model", "narrator", action(1, 2, 1)),
    Caption("b", 2.0, 4.0, "by another", "narrator", action(1, 2, 1)),  # 4 s is the video's end: the same clip
    Caption("b", 1.0, 2.0, "said of a", "narrator", action(5, 6)),  # a different clip has the same text
]
CLIPS = [{0, 4, 5}, {1}, {2, 6}, {9}, {7, 8}]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = Written(tmp_path_factory.mktemp("many"))
    for shard_id, split in enumerate(("train", "val")):
        samples = [chunk for name, its in VIDEOS.items() if its == split for chunk in chunks_of(name, 40)]
        write_shard(written.data_dir, shard_id, samples, split=split)
    write_captions(written.data_dir, VIDEOS, CAPTIONS)
    write_text(written, CAPTIONS, width=4, without=frozenset({1}))
    return written.data_dir


def open_clips_of(
    data_dir: Path, *, rank: int = 0, num_ranks: int = 1, batch: int = 1, stored: bool = False, **captions: Any
) -> Samples[Any]:
    loading = LoaderSettings(batch=batch, num_threads=1, num_ahead=4, seed=0, rank=rank, num_ranks=num_ranks)
    return open_captioned_clips(
        ClipQuery(data_dir, split="train", shape=SHAPE, loading=loading),
        tokenize=None if stored else load_tokenizer(),
        captions=CaptionSettings(**captions),
        has_stored_text=stored,
    )


def visits(samples: Samples[Any], count: int) -> list[tuple[int, int, int]]:
    """Return (position, clip, caption) of the first `count` samples."""
    batches = samples.batches(max_failures=0)
    visit_rows = [
        (int(position), int(clip), int(caption))
        for loaded in islice(batches, count)
        for position, clip, caption in zip(
            loaded.batch["position"], loaded.batch["clip_id"], loaded.batch["caption_id"], strict=True
        )
    ]
    batches.close()
    return visit_rows


def test_every_clip_comes_once_an_epoch_with_one_of_its_captions(data_dir: Path) -> None:
    samples = open_clips_of(data_dir)
    assert (len(samples), samples.num_samples, samples.num_clips, samples.num_caption_ids) == (5, 5, 5, 10)
    all_visits = visits(samples, 200)
    for epoch in range(40):
        assert sorted(clip for _, clip, _ in all_visits[5 * epoch : 5 * epoch + 5]) == [0, 1, 2, 3, 4]
    drawn = Counter((clip, caption) for _, clip, caption in all_visits)
    assert set(drawn) == {(clip, caption) for clip, captions in enumerate(CLIPS) for caption in captions}
    # Sources have equal weights: the one human caption is drawn as often as both rephraser captions together.
    assert 8 <= drawn[0, 0] <= 32
    assert "9 of 9 captions of split 'train', one at a time for each of 5 clips" in samples.describe()
    assert "human = 1 (3 captions), narrator = 1 (3 captions), rephraser = 1 (3 captions)" in samples.describe()


def test_tokens_are_those_of_the_caption_that_is_named(data_dir: Path) -> None:
    batches = open_clips_of(data_dir, batch=5).batches(max_failures=0)
    for loaded in islice(batches, 4):
        for tokens, caption in zip(loaded.batch["tokens"], loaded.batch["caption_id"].tolist(), strict=True):
            assert tokens.tolist() == load_tokenizer()(CAPTIONS[caption].text).tolist()
    batches.close()


def test_an_evaluation_shows_the_first_caption_of_the_first_source(data_dir: Path) -> None:
    by_default = [open_clips_of(data_dir).text(clip) for clip in range(5)]
    assert by_default == ["said of a", "across the border of a", "said of b", "said of a", "said by a model"]
    samples = open_clips_of(data_dir, sources="rephraser=1,human=5")
    assert [samples.text(clip) for clip in range(3)] == [
        "a, in other words",
        "across the border of a",
        "b, in other words",
    ]
    [batch] = [loaded.batch for loaded in samples.evaluation_batches()][:1]
    assert batch["caption_id"].tolist() == [4]


def test_sources_that_are_not_named_are_left_out_with_the_clips_that_have_no_other(data_dir: Path) -> None:
    samples = open_clips_of(data_dir, sources="human=1,re*=0")
    assert len(samples) == 3 and {caption for _, _, caption in visits(samples, 30)} == {0, 1, 2}
    assert "6 captions from other sources left out" in samples.describe()
    assert samples.fingerprint != open_clips_of(data_dir).fingerprint


def test_stored_embeddings_come_with_pixels(data_dir: Path) -> None:
    samples = open_clips_of(data_dir, stored=True, batch=4)
    assert (len(samples), samples.text_width) == (4, 4)
    assert "1 without embedding" in samples.describe() and "tiny-89abcdef" in samples.variant_name
    text = {}
    written = Written(data_dir)
    write_text(written, CAPTIONS, width=4, without=frozenset({1}))  # writes the same bits again, for the comparison
    text = {caption: bits.tolist() for caption, bits in written.text.items()}
    batches = samples.batches(max_failures=0)
    for loaded in islice(batches, 10):
        assert loaded.batch["text"].dtype == torch.float16 and "tokens" not in loaded.batch
        for row, caption in zip(loaded.batch["text"], loaded.batch["caption_id"].tolist(), strict=True):
            assert row.view(torch.int16).numpy().view(np.uint16).tolist() == text[caption]
    batches.close()


def test_clips_whose_stored_embeddings_are_damaged_fail_by_name(tmp_path: Path) -> None:
    written = Written(tmp_path)
    write_shard(tmp_path, 0, [chunk for name in ("a", "b") for chunk in chunks_of(name, 40)], split="train")
    write_captions(tmp_path, {"a": "train", "b": "train"}, CAPTIONS[:3])
    write_text(written, CAPTIONS[:3], width=4)
    flip(tmp_path, column="text", key="a")
    batches = open_clips_of(tmp_path, stored=True).batches(max_failures=100)
    loaded = list(islice(batches, 4))
    batches.close()
    failed = [failure for loaded_batch in loaded for failure in loaded_batch.failed]
    assert failed and {(failure.key.partition("_")[0], failure.reason) for failure in failed} == {("a", "checksum")}
    assert all("embeddings in the text column" in failure.detail for failure in failed)
    assert {int(loaded_batch.batch["caption_id"]) for loaded_batch in loaded} == {2}


def test_captions_by_relevancy_are_those_of_the_definition(data_dir: Path) -> None:
    samples = open_clips_of(data_dir, min_relevancy=0.1)
    batches = samples.batches(max_failures=0)
    relevancies: dict[int, dict[str, float]] = {clip: {} for clip in range(5)}
    for loaded in islice(batches, 300):
        batch = loaded.batch
        text = CAPTIONS[int(batch["caption_id"])].text
        relevancies[int(batch["clip_id"])][text] = float(batch["relevancy"])
    batches.close()
    # The classes of a text come from the first caption with that text.
    texts = list(dict.fromkeys(caption.text for caption in CAPTIONS if caption.video_id != "d"))
    classes = {caption.text: caption.labels for caption in reversed(CAPTIONS) if caption.video_id != "d"}
    clip_texts = [CAPTIONS[min(captions)] for captions in CLIPS]
    for clip, caption in enumerate(clip_texts):
        expected = {}
        for text in texts:
            same_verb = caption.labels["label_verb"] == classes[text]["label_verb"]
            mine, theirs = set(caption.labels["label_nouns"]), set(classes[text]["label_nouns"])
            expected[text] = (same_verb + len(mine & theirs) / len(mine | theirs)) / 2
        expected[caption.text] = 1.0
        assert relevancies[clip] == pytest.approx({text: value for text, value in expected.items() if value > 0.1})
    # No other clip shares the verb or the nouns of this clip, so it is shown with its own text.
    assert relevancies[3] == {"said of a": 1.0}


def test_what_is_drawn_by_relevancy_is_what_the_matrix_has() -> None:
    rng = np.random.default_rng(0)
    actions = Actions(rng.integers(0, 3, 30), rng.random((30, 5)) < 0.4)
    matrix = relevancy_of_classes(actions, actions)
    assert np.allclose(matrix.rows(np.array([7]))[0], [matrix.at(np.array([7]), np.array([at]))[0] for at in range(30)])


def test_captions_without_classes_cannot_be_drawn_by_relevancy(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", 20), split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 0, 1, "one"), Caption("a", 1, 2, "two")])
    with pytest.raises(UserError, match="2 of 2 captions have no label_verb"):
        open_clips_of(tmp_path, min_relevancy=0.1)


def test_one_text_for_all_is_nothing_to_learn_from(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", 20), split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", at, at + 1, "someone cooks") for at in (0, 0.5, 1)])
    samples = open_clips_of(tmp_path)
    with pytest.raises(UserError, match="all 3 captions of split 'train' are 'someone cooks'"):
        samples.require_different_texts()


def test_an_evaluation_may_ask_for_every_caption(data_dir: Path) -> None:
    loading = LoaderSettings(batch=20, num_threads=1, num_ahead=4, seed=0)
    samples = open_captioned_clips(
        ClipQuery(data_dir, split="train", shape=SHAPE, loading=loading), tokenize=load_tokenizer(), each_caption=True
    )
    [batch] = [loaded.batch for loaded in samples.evaluation_batches()]
    assert sorted(batch["caption_id"].tolist()) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert batch["clip_id"].tolist() == list(range(9))


def test_captions_of_which_none_can_be_shown_are_said(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", 20), split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 7.0, 9.0, "too late")])
    with pytest.raises(UserError, match=r"no clip of split 'train' is usable: 0 of 1 caption .*; 1 begins after"):
        open_clips_of(tmp_path)
