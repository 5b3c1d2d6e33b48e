"""Mixtures of latents: every entry of a batch equals the entry of its own folder."""

import shutil
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from clipmill import open_latents
from clipmill.manifests.errors import UserError
from clipmill.train.config.shards import DataSettings
from clipmill.train.data.latents.reader import MixedLatentReader
from clipmill.train.data.loader import Block
from clipmill.train.data.mixed_samples import MixedSamples
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.query import open_mixed
from clipmill.train.data.samples import Samples
from tests.train.latents.querying import segments
from tests.train.latents.test_checksums import flip
from tests.train.latents.written import Caption, Chunk, Written, write_all, write_latents
from tests.train.tiny_data import write_captions

NEAR = [[Chunk("a", 0, 60), Chunk("a", 15000, 28)], [Chunk("b", 0, 60)]]
FAR = [[Chunk("a", 0, 40), Chunk("z", 0, 60)]]
VAE: dict[str, Any] = {"vae": "tiny", "vae_sha256": "ab" * 32, "scaling_factor": "0.5"}


def captions(name: str, *, sources: tuple[str, ...]) -> list[Caption]:
    return [
        Caption(video, 0.0, end_s, f"{video} in {name} by {source}", source)
        for video in (("a", "b") if name == "near" else ("a", "z"))
        for source, end_s in zip(sources, (9.0, 30.0), strict=False)
    ]


def write(folder: Path, *, width: int = 8, **recipe: str) -> Written:
    shards, sources = (NEAR, ("human",)) if folder.name == "near" else (FAR, ("human", "machine"))
    return write_all(folder, shards, captions(folder.name, sources=sources), width=width, **{**VAE, **recipe})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Written, Written]:
    """Two folders that share the name of a video; the captions of one folder have two sources."""
    base = tmp_path_factory.mktemp("latents")
    return write(base / "near"), write(base / "far")


def mixed_of(*folders: Path, mix: str | None = "1,1", **more: Any) -> MixedSamples:
    settings = DataSettings(shards=tuple(map(str, folders)), mix=mix)
    mixed = open_mixed(lambda folder: open_latent_segments(segments(Path(folder), **{**GIVEN, **more})), settings)
    assert isinstance(mixed, MixedSamples)
    return mixed


GIVEN: dict[str, Any] = {"split": "train", "segment": "5s", "batch": 4, "seed": 1, "can_keep": True}


def compare(mixed: MixedSamples, alone: list[Samples[Any]], loaded: LoadedBatch) -> None:
    """Compare each row with a batch of one sample that its own folder has at the same position."""
    batch, order = loaded.batch, mixed.folders.order
    for row, (position, clip) in enumerate(zip(batch["position"].tolist(), batch["clip_id"].tolist(), strict=True)):
        folder = int(order.folder_of(np.array([clip]))[0])
        folder_samples, sample = alone[folder], np.array([clip - int(order.offsets[folder])])
        [alike] = folder_samples.reader.read(Block(sample, np.array([position]), 1), folder_samples.loader.loading)
        assert not isinstance(alike, FailedSample)
        expected = folder_samples.reader.collate(folder_samples.loader.loading)([alike])
        assert torch.equal(batch["latents"][row].view(torch.int16), expected["latents"][0].view(torch.int16))
        assert batch["key"][row] == expected["key"][0]
        if "text" in expected:
            assert torch.equal(batch["text"][row].view(torch.int16), expected["text"][0].view(torch.int16))
        if "caption_id" in expected:
            captions = cast(MixedLatentReader, mixed.loader.reader).captions
            assert captions is not None
            if "text_row" in expected:
                text_rows = batch["text_row"][row : row + 1].numpy()
                assert captions.texts_at(text_rows) == folder_samples.captions.texts_at(expected["text_row"].numpy())
        if "num_frames" in expected:
            assert int(batch["num_frames"][row]) == int(expected["num_frames"][0])


@pytest.mark.parametrize(
    "more", [{}, {"captions": "words"}, {"captions": "none", "tails": "pad"}, {"max_segments": 2}], ids=str
)
def test_each_row_is_that_of_its_own_folder(pair: tuple[Written, Written], more: dict[str, Any]) -> None:
    folders = [data.data_dir for data in pair]
    mixed = mixed_of(*folders, **more)
    alone = [open_latent_segments(segments(folder, **{**GIVEN, **more, "batch": 1})) for folder in folders]
    assert mixed.num_samples == sum(map(len, alone)) and mixed.num_caption_ids == sum(
        folder_samples.num_caption_ids for folder_samples in alone
    )
    seen: set[int] = set()
    for loaded in islice(mixed.batches(max_failures=0), 12):
        compare(mixed, alone, loaded)
        seen.update(loaded.batch["clip_id"].tolist())
    assert seen == set(range(len(mixed)))
    assert sum(len(loaded_batch.batch["clip_id"]) for loaded_batch in mixed.evaluation_batches()) == len(mixed)


def test_compressed_latents_and_labels(tmp_path: Path) -> None:
    folders = []
    for name, shards, moves in (("near", NEAR, ("up", "down")), ("far", FAR, ("left", "up"))):
        (tmp_path / name).mkdir()
        folders.append(written := Written(tmp_path / name))
        videos = sorted({chunk.video_id for chunks in shards for chunk in chunks})
        labelled = [
            Caption(video, 0.0, 30.0, move, labels={"label_motion": move})
            for video, move in zip(videos, moves, strict=True)
        ]
        write_captions(written.data_dir, dict.fromkeys(videos, "train"), labelled)
        write_latents(written, shards, recipe=VAE, is_compressed=True)
    mixed = open_latents([data.data_dir for data in folders], label="motion", batch=3, shuffle=False, device=None)
    assert mixed.classes == ("down", "left", "up")
    for batch in mixed:
        for row, (folder, key) in enumerate(zip(batch["folder"].tolist(), batch["key"], strict=True)):
            of_video = {"a": ("up", "left"), "b": ("down", ""), "z": ("", "up")}[key[0]]
            assert mixed.classes[int(batch["label"][row])] == of_video[folder]
            begin = round((batch["begin_s"][row] - int(key.partition("_")[2]) / 1000) * 4)
            expected = folders[folder].latents[key][begin : begin + 20]
            assert np.array_equal(batch["latents"][row].view(np.uint16), expected)


def test_failures_name_the_tar_and_so_the_folder(pair: tuple[Written, Written], tmp_path: Path) -> None:
    broken = write(tmp_path / "far")
    flip(broken.data_dir, column="latents", key="z_000000000")
    loaded_batches = list(islice(mixed_of(pair[0].data_dir, broken.data_dir).batches(max_failures=100), 8))
    failed = [failure for loaded_batch in loaded_batches for failure in loaded_batch.failed]
    assert failed and all(str(broken.data_dir) in failure.detail and failure.reason == "checksum" for failure in failed)


def test_latents_in_python(pair: tuple[Written, Written]) -> None:
    mixed = open_latents([data.data_dir for data in pair], mix=[1, 1], batch=4, segment="5s", device=None)
    batch = next(iter(mixed))
    assert sorted(batch["folder"].tolist()) == [0, 0, 1, 1]
    for folder, caption in zip(batch["folder"].tolist(), batch["caption"], strict=True):
        assert (f"in {('near', 'far')[folder]} by") in caption


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vae_sha256": "cd" * 32}, ("VAE tiny abababab", "tiny cdcdcdcd")),
        ({"scaling_factor": "0.18"}, ("* 0.5 in the first", "* 0.18 in the second")),
        ({"width": 16}, ("text embeddings", "width 8 in the first", "width 16 in the second")),
    ],
)
def test_other_models_are_refused_by_name(
    pair: tuple[Written, Written], tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    other = write(tmp_path / "far", **change)
    with pytest.raises(UserError) as raised:
        mixed_of(pair[0].data_dir, other.data_dir)
    for word in (*words, str(pair[0].data_dir), str(other.data_dir), "cannot be mixed"):
        assert word in str(raised.value)


def test_other_shapes_are_refused_by_name(pair: tuple[Written, Written], tmp_path: Path) -> None:
    shards = [[Chunk("a", 0, 60, frame=(2, 8, 8))]]
    other = write_all(tmp_path / "far", shards, captions("far", sources=("human",))[:1], **VAE)
    with pytest.raises(
        UserError, match=r"latents 2 x 4 x 4 float16 .* in the first, 2 x 8 x 8 float16 .* in the second"
    ):
        mixed_of(pair[0].data_dir, other.data_dir)


def test_a_folder_without_the_column_is_named(pair: tuple[Written, Written], tmp_path: Path) -> None:
    other = write(tmp_path / "far")
    shutil.rmtree(other.data_dir / "text")
    with pytest.raises(UserError) as raised:
        mixed_of(pair[0].data_dir, other.data_dir)
    assert str(other.data_dir) in str(raised.value)
