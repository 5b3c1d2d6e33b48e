"""Clips with target captions for a captioner.

Captions are drawn without repeats, in proportion to their source weights.
"""

from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from clipmill.train.config.clips import CaptionSettings
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.samples import Samples
from clipmill.train.tasks.caption.tokenizer import CaptionTokenizer, TargetCaptions, train_tokenizer
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

HUMAN = ["a dog runs", "a dog plays", "the dog"]
MODEL = ["an animal", "something moves"]
LONG = "a caption of many words " * 4


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data_dir = tmp_path_factory.mktemp("captioned")
    write_shard(data_dir, 0, [*chunks_of("a", 20), *chunks_of("b", 20)], split="train")
    captions = [Caption("a", 0.0, 1.0, text, "human") for text in HUMAN]
    captions += [Caption("a", 0.0, 1.0, text, "model") for text in MODEL]
    write_captions(data_dir, {"a": "train", "b": "train"}, [*captions, Caption("b", 0.0, 1.0, LONG, "human")])
    return data_dir


@pytest.fixture(scope="module")
def tokenizer() -> CaptionTokenizer:
    return train_tokenizer([*HUMAN, *MODEL], vocabulary_size=300)


def open_clips_of(data_dir: Path, tokenizer: CaptionTokenizer, *, per_visit: int, **captions: Any) -> Samples[Any]:
    return open_captioned_clips(
        ClipQuery(
            data_dir,
            split="train",
            shape=ClipShape(sampling=Sampling(num_frames=1), size_px=16),
            loading=LoaderSettings(batch=1, num_threads=1, num_ahead=4, seed=0),
        ),
        captions=CaptionSettings(**captions),
        make_captions=partial(TargetCaptions, make_tokenizer=lambda _: tokenizer, max_tokens=24, per_visit=per_visit),
    )


def captions_of_visits(samples: Samples[Any], tokenizer: CaptionTokenizer, *, num_visits: int) -> list[list[str]]:
    """Return the captions of each visit of clip 0."""
    visits = (loaded.batch for loaded in islice(samples.batches(max_failures=0), 2 * num_visits))
    return [
        [
            text
            for text in (tokenizer.text(row) for row in batch["targets"][0].clamp(min=tokenizer.end_id).tolist())
            if text
        ]
        for batch in visits
        if int(batch["clip_id"][0]) == 0
    ]


def test_a_visit_has_all_captions_or_some_without_repeats(data_dir: Path, tokenizer: CaptionTokenizer) -> None:
    everything = captions_of_visits(open_clips_of(data_dir, tokenizer, per_visit=8), tokenizer, num_visits=3)
    assert all(sorted(texts) == sorted(HUMAN + MODEL) for texts in everything)
    some = captions_of_visits(open_clips_of(data_dir, tokenizer, per_visit=3), tokenizer, num_visits=60)
    assert all(len(set(texts)) == 3 for texts in some)
    assert {text for texts in some for text in texts} == {*HUMAN, *MODEL}
    assert some == captions_of_visits(open_clips_of(data_dir, tokenizer, per_visit=3), tokenizer, num_visits=60)


def test_sources_weigh_in_the_first_draw(data_dir: Path, tokenizer: CaptionTokenizer) -> None:
    samples = open_clips_of(data_dir, tokenizer, per_visit=1, sources="human=1,model=3")
    assert samples.captions.rows.choice.weights(0).tolist() == pytest.approx([1 / 12] * 3 + [3 / 8] * 2)
    counted = Counter(text for texts in captions_of_visits(samples, tokenizer, num_visits=400) for text in texts)
    assert sum(counted[text] for text in MODEL) / counted.total() == pytest.approx(0.75, abs=0.06)


def test_captions_without_room_are_cut_and_counted(data_dir: Path, tokenizer: CaptionTokenizer) -> None:
    samples = open_clips_of(data_dir, tokenizer, per_visit=1)
    assert "1 cut to 24 tokens" in samples.describe()
    assert samples.captions.texts_of(1) == [LONG]
    other = train_tokenizer([LONG], vocabulary_size=320)
    assert open_clips_of(data_dir, other, per_visit=1).fingerprint != samples.fingerprint
