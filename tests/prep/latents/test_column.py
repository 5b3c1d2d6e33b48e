"""End-to-end tests of `prep latents`: the VAE's output for the right frames is stored under the keys of video."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import webdataset as wds
from torch.nn import functional

from clipmill.shards.format import LATENTS_FIELDS
from clipmill.shards.reader import Variant
from tests.prep.latents.conftest import autoencoder_kl, make
from tests.prep.running import contents
from tests.prep.sets import ShardSet


def stored_latents(shard_set: ShardSet) -> dict[str, np.ndarray]:
    """Return every sample by its key."""
    latents = Variant.open(shard_set.data, column="latents")
    return {
        sample["__key__"]: np.load(BytesIO(sample["latents.npy"]), allow_pickle=False) for sample in latents.iterate()
    }


def plain_loop(shard_set: ShardSet, model: Any, *, random: bool = False) -> dict[str, np.ndarray]:
    """Compute the latents without code of the encoder: decode all frames, crop, resize, and encode one by one."""
    video = Variant.open(shard_set.data)
    rows: dict[str, list[int]] = {}
    for shard in Variant.open(shard_set.data, column="latents").shards():
        rows |= dict(zip(shard.index["key"].to_pylist(), shard.index["crops"].to_pylist(), strict=True))
    latents_by_key = {}
    for sample in video.iterate():
        with av.open(BytesIO(sample["mp4"]), "r") as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        crops = np.reshape(rows[sample["__key__"]], (-1, 4))
        latents = []
        for number, frame in enumerate(frames[int(moment * 7.5)] for moment in range(-(-len(frames) * 2 // 15))):
            left, top, width, height = crops[number // 20]
            square = np.ascontiguousarray(frame[top : top + height, left : left + width])
            picture = torch.from_numpy(square).permute(2, 0, 1)[None]
            small = functional.interpolate(picture, size=(64, 64), mode="bilinear", antialias=True)
            with torch.no_grad():
                latents.append(model.encode(small.float() / 127.5 - 1).latent_dist.mean[0].numpy())
        latents_by_key[sample["__key__"]] = np.stack(latents) * np.float32(model.config.scaling_factor)
    return latents_by_key


@pytest.mark.parametrize("crop", [pytest.param("centre", marks=pytest.mark.nightly), "random", "exact"])
def test_latents_are_those_of_a_plain_loop_over_diffusers(shard_set: ShardSet, checkpoint: Path, crop: str) -> None:
    make(shard_set.data, vae=str(checkpoint), crop=crop, batch=7)
    latents_by_key, expected = (
        stored_latents(shard_set),
        plain_loop(shard_set, autoencoder_kl().from_pretrained(checkpoint).eval()),
    )
    assert list(latents_by_key) == list(expected)
    for key, latents in latents_by_key.items():
        assert latents.dtype == np.float16 and latents.shape == expected[key].shape
        np.testing.assert_allclose(latents.astype(np.float32), expected[key], rtol=2e-3, atol=2e-4)


def test_rows_of_the_index_describe_the_arrays(shard_set: ShardSet) -> None:
    make(shard_set.data)
    video, latents = (Variant.open(shard_set.data, column=column) for column in ("video", "latents"))
    arrays = stored_latents(shard_set)
    assert [shard.split for shard in video.shards()] == [shard.split for shard in latents.shards()]
    for chunks, shard in zip(video.shards(), latents.shards(), strict=True):
        assert shard.shard_id == chunks.shard_id
        assert shard.index["key"].to_pylist() == chunks.index["key"].to_pylist()
        for row in shard.index.to_pylist():
            array = arrays[row["key"]]
            assert array.shape == tuple(row[name] for name in ("num_frames", "channels", "height", "width"))
            assert (row["dtype"], row["fps_num"], row["fps_den"]) == ("float16", 4, 1)
            assert (row["latents.npy_offset"] + row["latents.npy_size"] - array.nbytes) % 512 == 0
            assert {field.name for field in LATENTS_FIELDS} <= row.keys()
    recipe = latents.recipe
    assert (recipe["vae"], recipe["scaling_factor"], recipe["video"]) == ("tiny", 1.5, video.directory.name)
    assert latents.directory.name.startswith("tiny-64px-4fps-centre-mean-")


def test_batch_and_threads_change_rounding_only(shard_set: ShardSet) -> None:
    make(shard_set.data, batch=1, num_threads=1)
    again = stored_latents(shard_set)
    shard_set.data.joinpath("latents").rename(shard_set.data / ".before")
    make(shard_set.data, batch=64, num_threads=3)
    for key, latents in stored_latents(shard_set).items():
        np.testing.assert_allclose(latents.astype(np.float32), again[key].astype(np.float32), rtol=2e-3, atol=2e-3)


def test_bfloat16_is_stored_by_its_bits(shard_set: ShardSet) -> None:
    make(shard_set.data, dtype="bfloat16")
    bits = stored_latents(shard_set)
    shard_set.data.joinpath("latents").rename(shard_set.data / ".brain")
    make(shard_set.data)
    for key, half in stored_latents(shard_set).items():
        assert bits[key].dtype == np.uint16
        brain = torch.from_numpy(bits[key].view(np.int16)).view(torch.bfloat16).float().numpy()
        np.testing.assert_allclose(brain, half.astype(np.float32), rtol=2**-7, atol=1e-3)


def test_samples_are_seeded_and_of_the_posteriors_width(shard_set: ShardSet, checkpoint: Path) -> None:
    vae = str(checkpoint)
    make(shard_set.data, vae=vae)
    mean = stored_latents(shard_set)
    make(shard_set.data, vae=vae, posterior="sample")
    sample, before = stored_latents(shard_set), contents(shard_set.data / "latents")
    tar = next((shard_set.data / "latents").glob("*sample*/*.tar"))
    tar.unlink()
    make(shard_set.data, vae=vae, posterior="sample", batch=16)
    assert contents(shard_set.data / "latents") == before
    model, key = autoencoder_kl().from_pretrained(checkpoint).eval(), "short_000000000"
    with torch.no_grad():
        posterior = model.encode(torch.zeros(1, 3, 64, 64)).latent_dist
    width = float(posterior.std.mean()) * model.config.scaling_factor
    spread = float((sample[key].astype(np.float32) - mean[key].astype(np.float32)).std())
    assert spread == pytest.approx(width, rel=0.2)
    make(shard_set.data, vae=vae, posterior="sample", seed=1)
    assert not np.array_equal(stored_latents(shard_set)[key], sample[key])


def test_any_webdataset_reader_zips_the_columns_by_key(shard_set: ShardSet) -> None:
    make(shard_set.data)

    def samples(column: str) -> list[dict[str, bytes]]:
        folder = Variant.open(shard_set.data, column=column).directory
        tars = [str(folder / name) for name in (folder / "shards.txt").read_text().split()]
        return list(wds.WebDataset(tars, shardshuffle=False, empty_check=False))

    chunks, latents = samples("video"), samples("latents")
    assert len(chunks) == len(latents) == 5
    for chunk, latent in zip(chunks, latents, strict=True):
        assert chunk["__key__"] == latent["__key__"]
        frames = json.loads(chunk["json"])["num_frames"]
        assert len(np.load(BytesIO(latent["latents.npy"]), allow_pickle=False)) == -(-frames * 4 // 30)


def test_a_chunk_that_is_smaller_than_an_exact_crop_fails_by_name(shard_set: ShardSet) -> None:
    summary = make(shard_set.data, crop="exact", size=8 * 512)
    assert summary.failures and {failure.code for failure in summary.failures} == {"frames_differ"}
    assert all("--crop exact needs 4096" in failure.message for failure in summary.failures)
