"""`open_latents`: the segments of the training commands, with texts, embeddings or labels."""

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from lightning_utilities.core.apply_func import apply_to_collection

from clipmill import Batches, open_latents
from clipmill.manifests.errors import UserError
from clipmill.manifests.store import read_captions
from clipmill.train.data.batches import LateBatch
from clipmill.train.data.producers.latent_segments import open_latent_segments
from tests.train.latents.conftest import CAPTIONS, SHARDS
from tests.train.latents.querying import segments as latent_query
from tests.train.latents.written import Caption, Chunk, Written, write_all

VIDEOS = ("a", "b", "c", "d", "e")


@pytest.fixture(scope="module")
def written_data(tmp_path_factory: pytest.TempPathFactory) -> Written:
    captions = [
        Caption(caption.video_id, caption.begin_s, caption.end_s, caption.text, labels={"label_x": "x"})
        for caption in CAPTIONS
    ]
    captions.append(Caption("b", 0.0, 4.0, "of the other class", labels={"label_x": "y"}))
    return write_all(tmp_path_factory.mktemp("columns"), SHARDS, captions)


def open_batches(written: Written, **changes: Any) -> Batches:
    return open_latents(written.data_dir, **{"batch": 3, **changes})


def test_batches_are_those_of_the_latent_loader(written_data: Written) -> None:
    expected = open_latent_segments(latent_query(written_data.data_dir, split="train", batch=3, seed=5))
    with open_batches(written_data, seed=5, captions="embedding") as segments:
        assert len(segments) == len(expected) // 3
        for loaded, batch in zip(islice(expected.batches(), len(segments)), segments, strict=True):
            for name in ("position", "clip_id", "caption_id", "latents", "text"):
                assert torch.equal(loaded.batch[name], batch[name]), name  # type: ignore[literal-required]
            assert batch["key"] == list(loaded.batch["key"]) and "caption" not in batch


def test_captions_are_texts_and_times_are_those_of_the_segment(written_data: Written) -> None:
    texts = read_captions(written_data.data_dir)["text"].to_pylist()
    with open_batches(written_data, shuffle=False) as segments:
        batches = list(segments)
    for batch in batches:
        assert batch["caption"] == [texts[number] for number in batch["caption_id"].tolist()] and "text" not in batch
        assert (batch["end_s"] - batch["begin_s"]).tolist() == [5.0] * len(batch["key"])
        num_frames = batch["latents"].shape[1]
        assert torch.allclose(batch["time_s"], batch["begin_s"][:, None] + torch.arange(num_frames) * 5 / num_frames)
    assert batches[0]["begin_s"].tolist() == [0, 5, 10] and batches[0]["key"] == ["a_000000000"] * 3


def test_a_maximum_of_segments_is_spread_over_each_video(written_data: Written) -> None:
    with open_batches(written_data, shuffle=False, captions=None, batch=100, max_segments=2) as segments:
        (batch,) = segments
    begins: dict[str, list[float]] = {}
    for key, begin_s in zip(batch["key"], batch["begin_s"].tolist(), strict=True):
        begins.setdefault(key.partition("_")[0], []).append(begin_s)
    assert begins["a"] == [15, 30] and max(map(len, begins.values())) == 2
    with pytest.raises(UserError, match="max_segments is 0"):
        open_batches(written_data, max_segments=0)


NAMES = {"input", "position", "key", "time_s", "clip_id", "caption_id", "latents", "caption", "begin_s", "end_s"}
READ = {
    "dict": dict,
    "unpacked": lambda batch: {**batch},
    "keywords": lambda batch: dict(**batch),
    "copy": lambda batch: batch.copy(),
    "joined": lambda batch: {} | batch | {},
    "items": lambda batch: dict(batch.items()),
    "values": lambda batch: dict(zip(batch.keys(), batch.values(), strict=True)),
    "get": lambda batch: {name: batch.get(name) for name in batch},
    "pop": lambda batch: {name: batch.pop(name) for name in tuple(batch)},
    "set": lambda batch: batch.__setitem__("further", 1) or {name: batch[name] for name in NAMES},
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "Lightning": lambda batch: apply_to_collection(batch, torch.Tensor, torch.Tensor.clone),
    "Accelerate": lambda batch: send_to_device(batch, "cpu"),
}


@pytest.mark.parametrize("way", READ)
def test_keys_captions_and_times_are_there_however_a_batch_is_read(written_data: Written, way: str) -> None:
    with open_batches(written_data, shuffle=False) as segments:
        expected, batch = ([*segments][1] for _ in range(2))
    assert isinstance(batch, dict) and len(batch) == len(NAMES) and set(batch) == NAMES
    expected = {name: expected[name] for name in NAMES}
    assert repr(batch["latents"]) and "begin_s" in batch
    latents_read = READ[way](batch)
    assert set(latents_read) == NAMES
    assert (
        type(latents_read["key"]) is list
        and latents_read["key"] == expected["key"]
        and latents_read["caption"] == expected["caption"]
    )
    for name in ("begin_s", "end_s", "latents", "position"):
        assert torch.equal(latents_read[name], expected[name]), name


def test_entries_that_are_set_stay_and_equal_batches_are_equal() -> None:
    def make_batch() -> LateBatch:
        return LateBatch({"clip_id": 1}, ("key",), lambda: {"key": ["a"]})

    batch = make_batch()
    batch["key"] = ["other"]
    assert batch["key"] == ["other"]
    del batch["key"]
    assert list(batch) == ["clip_id"] and batch != make_batch()
    assert (
        make_batch() == make_batch() == {"clip_id": 1, "key": ["a"]}
        and repr(make_batch()) == "{'clip_id': 1, 'key': ['a']}"
    )


def test_segments_alone_and_padded_tails(written_data: Written) -> None:
    with open_batches(written_data, captions=None, tails="pad", shuffle=False) as segments:
        batches = list(segments)
    assert sum(len(batch["key"]) for batch in batches) == segments.num_samples
    assert {"caption", "text", "caption_id"}.isdisjoint(batches[0])
    assert {frames for batch in batches for frames in batch["num_frames"].tolist()} == {20, 8, 12}


def test_labels_take_the_place_of_captions(written_data: Written) -> None:
    with open_batches(written_data, label="x", shuffle=False) as segments:
        numbers = [number for batch in segments for number in batch["label"].tolist()]
        assert segments.classes == ("x", "y") and set(numbers) == {0, 1}


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_state_in_the_middle_goes_on_exactly(written_data: Written, shuffle: bool) -> None:
    with open_batches(written_data, shuffle=shuffle) as segments:
        whole = list(segments)
    with open_batches(written_data, shuffle=shuffle) as segments:
        next(iter(segments))
        state = segments.state_dict()
    with open_batches(written_data, shuffle=shuffle) as segments:
        segments.load_state_dict(state)
        next(iter(segments))
        state = segments.state_dict()
    with open_batches(written_data, shuffle=shuffle) as segments:
        segments.load_state_dict(state)
        rest = list(segments)
    assert [batch["clip_id"].tolist() for batch in rest] == [batch["clip_id"].tolist() for batch in whole[2:]]
    assert all(torch.equal(batch["latents"], other["latents"]) for batch, other in zip(rest, whole[2:], strict=True))


def test_bfloat16_becomes_float32_in_numpy(tmp_path: Path) -> None:
    written = write_all(tmp_path / "data", [[Chunk("a", 0, 60, dtype="bfloat16")]], [Caption("a", 0, 15, "all")])
    [tensors], [arrays] = open_batches(written), open_batches(written, device=None)
    assert tensors["latents"].dtype == torch.bfloat16
    assert arrays["latents"].dtype == np.float32
    assert np.array_equal(arrays["latents"], tensors["latents"].float().numpy())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "val"}, "has no videos of split 'val'"),
        ({"segment": "0.3s"}, "is 1.2 frames"),
        ({"tails": "keep"}, "tails is 'keep'"),
        ({"captions": "tokens"}, "captions is 'tokens'"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 100}, "batch=100 is larger than the data, which contain [0-9]+ samples"),
        ({"batch": "3"}, "batch is '3'"),
        ({"seed": None}, "seed is None"),
        ({"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(written_data: Written, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_batches(written_data, **changes)


def test_latents_of_a_stream_of_tars_are_refused() -> None:
    with pytest.raises(UserError, match=r"\{00\.\.11\}\.tar names image tars or video tars, but only data folders"):
        open_latents("s3://bucket/{00..11}.tar")
