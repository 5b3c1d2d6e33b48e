"""Tests that caches of trainers hold the contents of the columns, with the trainers' own names, keys and scaling.

None of the trainers can be installed as a package. These tests therefore contain the code that reads the files: musubi-
tuner's `VideoDataset.prepare_for_training` and `BucketBatchManager`, the `forward` of finetrainers' model
specifications, and diffusion-pipe's `Cache` and the order of its `SizeBucketDataset`.
"""

import json
import shutil
import sqlite3
import tomllib
from contextlib import closing
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from clipmill.manifests.publish import publish_json
from clipmill.shards.reader import Variant
from tests.prep.running import prep_here
from tests.prep.text.sets import write_captions
from tests.prep.text.t5_models import encode, saved_t5
from tests.train import tiny_data
from tests.train.latents.written import LATENTS_RECIPE, Chunk, Written, write_latents
from tests.train.tiny_data import Caption

MEAN, STD, SCALE = [0.1, -0.2, 0.3, 0.0], [0.5, 1.5, 2.0, 0.7], 0.8
CAPTIONS = {"long": ["a dog runs", "a cat"], "short": ["the end"], "silent": []}
SHAPE = (2, 4, 3, 4, 4)  # two segments of one second each, with 9 frames at 8 fps


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "data"
    write_captions(folder, CAPTIONS)
    encode(folder, saved_t5(folder.parent / "small-umt5"))
    return folder


def values(chunk: Chunk) -> np.ndarray:
    drawn = np.random.default_rng(len(chunk.key) + chunk.start_ms).standard_normal(SHAPE)
    return drawn.astype(np.float16)


def write(data: Path, kind: str, **recipe: Any) -> Written:
    written = Written(data)
    places = (("long", 0), ("long", 2000), ("short", 0), ("silent", 0))
    chunks = [Chunk(name, start, 6, (4, 4, 4), fps=Fraction(3)) for name, start in places]
    write_latents(written, [chunks[:3], chunks[3:]], values=values)
    is_normalised = kind in ("AutoencoderKLWan", "AutoencoderKLLTXVideo")
    of_vae = {
        "kind": kind,
        "factor": 8,
        "scaling_factor": 1.0 if is_normalised else SCALE,
        "shift_factor": None,
        "latents_mean": MEAN if is_normalised else None,
        "latents_std": STD if is_normalised else None,
    }
    segment = {"segment": "9f", "fps": "8", "latent_frames": 3, "size": 32, "dtype": "float16"}
    publish_json(written.latents_dir / "recipe.json", {**LATENTS_RECIPE, **segment, **of_vae, **recipe})
    return written


def expected_segments(data: Path) -> list[tuple[str, torch.Tensor, str]]:
    """Return the name, stored latents and caption of every segment.

    The caption is the one whose span covers the segment.
    """
    segments_by_name = []
    for name, start, second, caption in (
        ("long", 0, 0, "a dog runs"),
        ("long", 0, 1, "a cat"),
        ("short", 0, 0, "the end"),
    ):
        latents = values(Chunk(name, start, 6))[second]
        segments_by_name.append((f"{name}_{start:09d}-{second:02d}", torch.from_numpy(latents), caption))
    return segments_by_name


def sequence_of(data: Path, caption: str) -> torch.Tensor:
    for sample in Variant.open(data, column="text").iterate():
        told = json.loads(sample["json"])
        if caption in told["texts"]:
            at = told["texts"].index(caption)
            array = np.load(BytesIO(sample["text.npy"]))
            return torch.from_numpy(np.split(array, np.cumsum(told["row_tokens"])[:-1])[at])
    raise AssertionError(caption)


@pytest.mark.parametrize(
    ("kind", "short", "full"),
    [
        ("AutoencoderKLWan", "wan", "wan"),
        ("AutoencoderKLHunyuanVideo", "hv", "hunyuan_video"),
        ("AutoencoderKLHunyuanVideo15", "hv15", "hunyuan_video_1_5"),
    ],
)
def test_musubi_tuner_finds_segments_and_texts_by_their_names(
    texts: Path, tmp_path: Path, kind: str, short: str, full: str
) -> None:
    write(texts, kind)
    cache = tmp_path / "cache"
    ran = prep_here("export", "musubi", cache, "--data", texts)
    assert "exported  3 segments" in ran.stdout and "left out  5: segments without a caption" in ran.stdout
    assert ("that has a sequence" in ran.stdout) == (short == "wan")
    files_by_item = {}
    for file in cache.glob(f"*_{short}.safetensors"):
        tokens = file.name.split("_")
        width, height = map(int, tokens[-2].split("x"))
        position, num_frames = map(int, tokens[-3].split("-")[:2])
        assert (width, height, position, num_frames) == (32, 32, 0, 9)
        files_by_item["_".join(tokens[:-3])] = file
    assert sorted(files_by_item) == sorted(name for name, *_ in expected_segments(texts))
    for name, latents, caption in expected_segments(texts):
        with safe_open(files_by_item[name], framework="pt") as opened:
            metadata = {"architecture": full, "width": "32", "height": "32", "frame_count": "9"}
            assert opened.metadata() == {**metadata, "format_version": "1.0.1"}
        [(key, tensor)] = load_file(files_by_item[name]).items()
        assert key == "latents_3x4x4_float16"
        assert torch.equal(tensor, latents if short == "wan" else (latents.float() / SCALE).half())
        te = cache / f"{name}_{short}_te.safetensors"
        assert te.exists() == (short == "wan")
        if te.exists():
            assert torch.equal(load_file(te)["varlen_t5_float16"], sequence_of(texts, caption))
            with safe_open(te, framework="pt") as opened:
                assert opened.metadata()["caption1"] == caption


def test_segments_and_captions_of_another_split_are_left_out(tmp_path: Path) -> None:
    data = tmp_path / "data"
    spans = [Caption("long", 0, 1, "a dog runs"), Caption("long", 1, 2, "a cat", labels={"split": "val"})]
    tiny_data.write_captions(data, dict.fromkeys(("long", "short", "silent"), "train"), spans)
    write(data, "AutoencoderKLHunyuanVideo")
    for split, name, others in (("train", "long_000000000-00", 1), ("val", "long_000000000-01", 3)):
        ran = prep_here("export", "musubi", tmp_path / split, "--data", data, "--split", split)
        [file] = (tmp_path / split).glob("*_hv.safetensors")
        assert file.name.startswith(name) and f"{others}: segments with seconds of other splits" in ran.stdout


@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        ("AutoencoderKLWan", None),
        ("AutoencoderKLLTXVideo", "encoder_attention_mask"),
        ("AutoencoderKLCogVideoX", "prompt_attention_mask"),
    ],
)
def test_finetrainers_samples_and_normalises_to_what_is_stored(
    texts: Path, tmp_path: Path, kind: str, mask: str | None
) -> None:
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution  # this import takes seconds

    write(texts, kind)
    prep_here("export", "finetrainers", tmp_path / "out", "--data", texts)
    folder = tmp_path / "out" / "finetrainers-precomputed-data"
    assert len([*folder.iterdir()]) == 6
    for number, (_, latents, caption) in enumerate(expected_segments(texts)):
        item = torch.load(folder / f"latent-{number}.pt", weights_only=True)
        is_cog = kind == "AutoencoderKLCogVideoX"
        parameters = item["latents"].float()
        if kind == "AutoencoderKLWan":  # this class normalises the parameters, not the sample
            shift, factor = (item[name].view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
            parameters = torch.cat([(half - shift) * factor for half in parameters.chunk(2, dim=1)], dim=1)
        sample = DiagonalGaussianDistribution(parameters.transpose(1, 2) if is_cog else parameters).sample()[0]
        if kind == "AutoencoderKLLTXVideo":
            assert (item["num_frames"], item["height"], item["width"]) == (3, 4, 4)
            sample = (sample - item["latents_mean"].view(-1, 1, 1, 1)) / item["latents_std"].view(-1, 1, 1, 1)
        if is_cog:
            assert item["latents"].shape == (1, 3, 8, 4, 4)
            sample = sample * SCALE
        torch.testing.assert_close(sample, latents.float(), rtol=2**-7, atol=2e-2)
        condition = torch.load(folder / f"condition-{number}.pt", weights_only=True)
        sequence = sequence_of(texts, caption)
        padded = condition.pop("encoder_hidden_states")
        assert padded.shape == (1, 20, 16) and not padded[0, len(sequence) :].any()
        assert torch.equal(padded[0, : len(sequence)], sequence.bfloat16())
        assert list(condition) == ([] if mask is None else [mask])
        assert all(mask.shape == (1, 20) and int(mask.sum()) == len(sequence) for mask in condition.values())


def items(folder: Path) -> list[dict[str, Any]]:
    """Return the items in a cache of diffusion-pipe."""
    contents = []
    with closing(sqlite3.connect(folder / "metadata.db")) as database:
        assert not database.execute("SELECT value FROM fingerprint").fetchall(), "the trainer adds its own fingerprint"
        for shard, number in database.execute("SELECT shard, shard_index FROM items").fetchall():
            offset, size = database.execute(f"SELECT offset, size FROM shard_{shard}").fetchall()[number]
            content = (folder / f"shard_{shard}.bin").read_bytes()[offset : offset + size]
            assert len(content) == size
            contents.append(torch.load(BytesIO(content), weights_only=True))
    return contents


@pytest.mark.parametrize(
    ("kind", "factor", "model", "entries"),
    [
        ("AutoencoderKLWan", 8, "wan", ("text_embeddings", "seq_lens", 512)),
        ("AutoencoderKLWan", 16, "wan2.2_5b", ("text_embeddings", "seq_lens", 512)),
        ("AutoencoderKLLTXVideo", 32, "ltxv-13b", ("prompt_embeds", "prompt_attention_mask", 256)),
        ("AutoencoderKLHunyuanVideo", 8, "hunyuan-video", None),
    ],
)
def test_diffusion_pipe_pairs_latents_with_their_captions(
    texts: Path, tmp_path: Path, kind: str, factor: int, model: str, entries: tuple[str, str, int] | None
) -> None:
    write(texts, kind, factor=factor)
    line = ("export", "diffusion-pipe", tmp_path / "out", "--data", texts)
    prep_here(*line, *(["--model", model] if kind == "AutoencoderKLLTXVideo" else []))
    told = tomllib.loads((tmp_path / "out" / "dataset.toml").read_text())
    assert (told["resolutions"], told["frame_buckets"], told["enable_ar_bucket"]) == ([32], [9], False)
    cache = Path(told["directory"][0]["path"]) / "cache" / model
    assert json.loads((cache / "metadata" / "grouping_keys.json").read_bytes()) == [[1.0, 9]]
    grouped = cache / "metadata" / "grouped_metadata_1.000_9"
    state = json.loads((grouped / "state.json").read_bytes())
    with pa.ipc.open_stream(grouped / state["_data_files"][0]["filename"]) as stream:
        listed = stream.read_all().to_pylist()
    segments = expected_segments(texts)
    assert [(item["image_spec"], item["caption"]) for item in listed] == [
        ([None, f"{name}.mp4"], [caption]) for name, _, caption in segments
    ]
    shuffled = [2, 0, 1]  # order of three items with the seed of (1.0, 32, 32, 9) in `datasets` 5.2.0
    for number, item in zip(shuffled, items(cache / "cache_1.000x32x32x9" / "latents"), strict=True):
        assert torch.equal(item["latents"], segments[number][1]) and item["mask"] is None
    folder = cache / "ar_frames_1.000_9" / "text_embeddings_1"
    assert folder.exists() == (entries is not None)
    if entries is not None:
        vectors, length, num_tokens = entries
        for item, (_, _, caption) in zip(items(folder), segments, strict=True):
            sequence, padded = sequence_of(texts, caption), item[vectors]
            assert padded.shape == (num_tokens, 16) and not padded[len(sequence) :].any()
            assert torch.equal(padded[: len(sequence)], sequence.bfloat16()) and int(item[length].sum()) == len(
                sequence
            )
            assert item[length].shape == (() if length == "seq_lens" else (num_tokens,))


def test_a_rerun_for_diffusion_pipe_links_shards_and_writes_again_what_the_trainer_writes_into(
    texts: Path, tmp_path: Path
) -> None:
    write(texts, "AutoencoderKLWan")
    line = ("export", "diffusion-pipe", tmp_path / "out", "--data", texts)
    prep_here(*line)
    databases = sorted((tmp_path / "out").rglob("metadata.db"))
    for path in databases:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("INSERT INTO fingerprint VALUES('of the trainer')")
    assert "nothing to do" in prep_here(*line).stdout
    text, latents = sorted((tmp_path / "out").rglob("*.bin"))
    inode = latents.stat().st_ino
    text.unlink()  # the trainer deletes a cache whose fingerprint differs
    order = latents.parent / "iteration_order"
    order.write_text("of the trainer")
    (tmp_path / "out" / "train.toml").write_text("of the user")
    assert "exported  3 segments" in prep_here(*line).stdout
    assert latents.stat().st_ino == inode
    assert [len(items(path.parent)) for path in databases] == [3, 3]
    assert not order.exists() and (tmp_path / "out" / "train.toml").read_text() == "of the user"


def test_a_rerun_links_what_has_not_changed(texts: Path, tmp_path: Path) -> None:
    write(texts, "AutoencoderKLWan")
    cache = tmp_path / "cache"
    line = ("export", "musubi", cache, "--data", texts)
    prep_here(*line)
    before = {file.name: file.stat().st_ino for file in cache.iterdir() if file.suffix == ".safetensors"}
    assert "nothing to do" in prep_here(*line).stdout
    gone = next(cache.glob("long_000000000-00_*_wan.safetensors"))
    gone.unlink()
    (cache / "mine").mkdir()
    (cache / "mine" / "a_wan_te.safetensors").write_bytes(b"of another program")
    assert "exported  1 segment " in prep_here(*line).stdout
    after = {file.name: file.stat().st_ino for file in cache.iterdir() if file.suffix == ".safetensors"}
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} <= {gone.name}
    assert (cache / "mine" / "a_wan_te.safetensors").read_bytes() == b"of another program"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    (tmp_path / "link").symlink_to(cache)
    gone.unlink()
    assert "exported  1 segment " in prep_here("export", "musubi", tmp_path / "link", "--data", texts).stdout
    assert (tmp_path / "link").is_symlink() and gone.is_file()


def test_models_without_a_t5_need_no_texts(texts: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(texts, data)
    shutil.rmtree(data / "text")
    write(data, "AutoencoderKLHunyuanVideo")
    for kind in ("musubi", "diffusion-pipe"):
        assert "exported  3 segments" in prep_here("export", kind, tmp_path / kind, "--data", data).stdout
    write(data, "AutoencoderKLWan")
    assert (
        "prep text --encoder t5:NAME"
        in prep_here("export", "musubi", tmp_path / "out", "--data", data, status=2).stderr
    )


def test_what_cannot_be_exported_is_named(texts: Path, tmp_path: Path) -> None:
    write(texts, "AutoencoderKLCosmos")
    for kind in ("musubi", "finetrainers", "diffusion-pipe"):
        error = prep_here("export", kind, tmp_path / "out", "--data", texts, status=2).error
        assert "AutoencoderKLCosmos" in error
    for of_5b in ({"factor": 16}, {"channels": 48}):
        write(texts, "AutoencoderKLWan", **of_5b)
        error = prep_here("export", "musubi", tmp_path / "out", "--data", texts, status=2).stderr
        assert "from the VAE of Wan 2.2 TI2V-5B" in error and "prep export diffusion-pipe" in error
    assert not (tmp_path / "out").exists()
    write(texts, "AutoencoderKLWan")
    (tmp_path / "mine").mkdir()

    def refusal_of(folder: str, *flags: str) -> str:
        return prep_here("export", "musubi", tmp_path / folder, "--data", texts, *flags, status=2).error

    assert "was not written by `prep export`" in refusal_of("mine")
    (tmp_path / "mine" / "clipmill.json").write_text('{"files": {"a": ["b"]}}')
    assert "was not written by `prep export`" in refusal_of("mine")
    assert "no latents of split 'val'" in refusal_of("out", "--split", "val")
    write(texts, "AutoencoderKLWan", latent_frames=None)
    assert "latents of individual frames" in refusal_of("out")
    for recipe, flags, words in (
        ({"size": 40}, (), "is not a multiple of 16"),
        ({"kind": "AutoencoderKLLTXVideo", "factor": 32}, (), "pass --model with the name of the file"),
        ({}, ("--model", "../wan"), "is not a folder name"),
    ):
        of_vae: dict[str, Any] = {"kind": "AutoencoderKLWan", **recipe}
        write(texts, **of_vae)
        line = ("export", "diffusion-pipe", tmp_path / "out", "--data", texts, *flags)
        assert words in prep_here(*line, status=2).stderr
