"""Tests of missing, wrong and broken weights, and of damaged chunks: each is reported and counted, never stored."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from clipmill.shards.commit_table import read_commits
from clipmill.shards.reader import Variant
from tests.prep.latents.conftest import autoencoder_kl, make
from tests.prep.running import Ran, contents
from tests.prep.sets import ShardSet

Prep = Callable[..., Ran]
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint that a test may damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def error(prep: Prep, shard_set: ShardSet, *flags: object) -> str:
    before = contents(shard_set.data)
    message = prep("latents", *flags, "--data", shard_set.data, "--engine", "processes", status=2).error
    assert contents(shard_set.data) == before
    return message


@pytest.mark.parametrize("name", ["/nowhere/vae", "./nowhere", "nowhere", "a/b/c"])
def test_a_missing_folder_is_named(prep: Prep, shard_set: ShardSet, name: str) -> None:
    assert error(prep, shard_set, "--vae", name) == f"the VAE folder {name} (requested by --vae) does not exist"


def test_without_a_network_a_model_is_looked_for_in_the_cache_alone(
    prep: Prep, shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    # The client would otherwise send a request, and retry it.
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    assert error(prep, shard_set, "--vae", "some-owner/some-vae") == (
        'the VAE "some-owner/some-vae" cannot be downloaded from the Hugging Face Hub: hub.invalid cannot be resolved, '
        "and the cache does not contain the files"
    )
    assert not constants.HF_HUB_OFFLINE and "HF_HUB_OFFLINE" not in os.environ


def test_what_is_no_vae_is_refused_before_any_work(prep: Prep, shard_set: ShardSet, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_bytes())

    def refusal_of(**changed: object) -> str:
        (copy / "config.json").write_text(json.dumps({**config, **changed}))
        return error(prep, shard_set, "--vae", copy)

    assert "describes UNet2DModel, which is not a supported VAE" in refusal_of(_class_name="UNet2DModel")
    assert "expects 4 input channels, but RGB frames need 3" in refusal_of(in_channels=4)
    assert "is damaged" in refusal_of(scaling_factor="much")
    assert "is damaged: scaling_factor is 0" in refusal_of(scaling_factor=0)
    assert "shift_factor is nan" in refusal_of(shift_factor=math.nan)
    (copy / "config.json").write_text("{")
    assert "is damaged" in error(prep, shard_set, "--vae", copy)
    (copy / "config.json").write_text(json.dumps(config))
    assert "--size 100 is not a multiple of the VAE's downsampling factor, 8" in error(
        prep, shard_set, "--vae", copy, "--size", "100"
    )
    save_file({"weight": torch.zeros(1)}, copy / WEIGHTS)
    assert "does not contain a VAE encoder" in error(prep, shard_set, "--vae", copy)
    (copy / WEIGHTS).write_bytes(b"no weights at all")
    assert "is damaged" in error(prep, shard_set, "--vae", copy)
    (copy / WEIGHTS).rename(copy / "diffusion_pytorch_model.bin")
    assert f"does not contain {WEIGHTS}" in error(prep, shard_set, "--vae", copy)


def test_weights_of_another_configuration_stop_every_shard_by_name(shard_set: ShardSet, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_bytes())
    (copy / "config.json").write_text(json.dumps({**config, "block_out_channels": [8, 8, 16, 32]}))
    summary = make(shard_set.data, vae=str(copy))
    assert summary.failures_by_code() == {"model_unavailable": 2} and summary.num_chunks == 0
    assert str(copy) in summary.failures[0].message
    assert list((shard_set.data / "latents").rglob("*.tar")) == []


def test_numbers_that_are_not_finite_are_named_and_not_stored(prep: Prep, shard_set: ShardSet, copy: Path) -> None:
    weights = load_file(copy / WEIGHTS)
    weights["quant_conv.bias"][0] = torch.nan
    save_file(weights, copy / WEIGHTS)
    summary = make(shard_set.data, vae=str(copy))
    assert summary.failures_by_code() == {"not_finite": 5} and summary.num_chunks == 0
    assert (summary.num_shards_made, summary.num_shards_empty) == (2, 2)
    assert {failure.key for failure in summary.failures} == {
        *(f"long_{start:09d}" for start in (0, 2000, 4000)),
        *(f"short_{start:09d}" for start in (0, 2000)),
    }
    assert list((shard_set.data / "latents").rglob("*.tar")) == []
    assert make(shard_set.data, vae=str(copy)).num_shards_made == 0  # damaged weights fail again
    text = prep("status", "--data", shard_set.data).stdout
    assert "5 x not_finite of latents" in text and "failures.jsonl" in text
    retry = ("retry", "--column", "latents", "--engine", "processes", "--only", "not_finite", "--data", shard_set.data)
    ran = prep(*retry, "--json", "--workers", 1, status=1)
    assert ran.summary["failures"] == {"not_finite": 5} and ran.summary["num_shards_made"] == 2
    (copy.parent / "moved").mkdir()
    copy = copy.rename(copy.parent / "moved" / copy.name)
    assert "does not exist" in prep(*retry, status=2).error
    ran = prep(*retry, "--weights", copy, "--json", "--workers", 1, status=1)
    assert ran.summary["failures"] == {"not_finite": 5} and ran.summary["num_shards_made"] == 2
    ran = prep("latents", "--vae", copy, "--size", 64, "--data", shard_set.data, "--engine", "processes", status=1)
    assert "failed: 5 chunks in 2 of 2 videos;" in ran.stderr
    budget = ("--max-failures", "2")
    prep("latents", "--vae", copy, "--size", 64, "--data", shard_set.data, "--engine", "processes", *budget)


def test_too_large_for_float16_is_not_finite_and_fits_bfloat16(shard_set: ShardSet, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_bytes())
    (copy / "config.json").write_text(json.dumps({**config, "scaling_factor": 1e7}))
    assert make(shard_set.data, vae=str(copy)).failures_by_code() == {"not_finite": 5}
    assert make(shard_set.data, vae=str(copy), dtype="bfloat16").num_chunks == 5


def test_a_vae_of_sixteen_channels_and_a_shift_is_stored_as_it_is(shard_set: ShardSet, tmp_path: Path) -> None:
    torch.manual_seed(1)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    model = autoencoder_kl()(
        block_out_channels=[4, 8], norm_num_groups=2, latent_channels=16, shift_factor=0.1, scaling_factor=0.5, **blocks
    )
    # A pipeline keeps its VAE in a separate folder.
    model.save_pretrained(tmp_path / "pipeline" / "vae")
    assert make(shard_set.data, vae=str(tmp_path / "pipeline")).num_chunks == 5
    latents = Variant.open(shard_set.data, column="latents")
    row = latents.shards()[0].index.to_pylist()[0]
    assert (row["channels"], row["height"], row["width"]) == (16, 32, 32)
    assert (latents.recipe["shift_factor"], latents.recipe["vae"]) == (0.1, "pipeline")


def test_a_shard_of_chunks_that_cannot_be_read_is_named(shard_set: ShardSet) -> None:
    shard_set.tar(0).unlink()
    summary = make(shard_set.data)
    assert set(summary.failures_by_code()) == {"chunk_damaged"} and summary.num_shards == 1
    shard_set.index(1).write_bytes(b"no index")
    assert {failure.code for failure in make(shard_set.data).failures} == {"chunk_damaged"}
    folder = Variant.open(shard_set.data, column="latents").directory
    assert 1 in read_commits(folder).commits


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--fps", "x"), '--fps "x" is not a number'),
        (("--size", "4"), "--size is 4"),
        (("--segment", "5"), '--segment "5" is not a length'),
        (("--segment", "1s", "--fps", "1/2"), "has 0.5 frames"),
        (("--batch", "0"), "--batch is 0"),
        (("--num-gpus", "-1"), "--num-gpus is -1"),
        (("--num-gpus", "1"), "this machine has 0 GPUs, but a worker requires 1"),
        (("--seed", "-1"), "--seed is -1"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    prep: Prep, shard_set: ShardSet, flags: tuple[str, ...], part: str
) -> None:
    if flags[0] == "--num-gpus" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert part in error(prep, shard_set, "--vae", "tiny", *flags)
