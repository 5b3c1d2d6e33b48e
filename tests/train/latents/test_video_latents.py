"""Latents of a video VAE: a segment is a complete tensor [C, T', h, w], and models see its frames first."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from clipmill import open_latents
from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import split_key
from clipmill.train.data.producers.latent_segments import open_latent_segments
from tests.train.latents.columns import FRAME, WIDTH, pattern_and_noise, unit_vector
from tests.train.latents.querying import segments
from tests.train.latents.test_batches import bits
from tests.train.latents.written import Caption, Chunk, Written, write_captions, write_latents, write_text
from tests.train.running import losses, train

T = 5  # latent frames per segment of two seconds
RECIPE = {"latent_frames": str(T), "segment": "17f"}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "compressed"])
def written_data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Four videos of two chunks, each with three segments."""
    data_written = Written(tmp_path_factory.mktemp("latents"))
    videos = [f"v{number}" for number in range(4)]
    chunks = [[Chunk(name, start, 3 * T, frame=FRAME, fps=Fraction(T, 2)) for start in (0, 6000)] for name in videos]
    captions = [Caption(name, 0.0, float("inf"), f"pattern of {name}") for name in videos]
    write_captions(data_written.data_dir, dict.fromkeys(videos, "train"), captions)
    write_latents(data_written, chunks, values=pattern_and_noise, recipe=RECIPE, is_compressed=request.param)
    write_text(data_written, captions, width=WIDTH, embed=unit_vector)
    return data_written


def expected_segments(written: Written) -> list[np.ndarray]:
    """Return the stored segments in order, as bits [C, T', h, w]."""
    ordered = sorted(written.latents, key=split_key)
    stored = [written.latents[key].reshape(3, FRAME[0], T, *FRAME[1:]) for key in ordered]
    return [segment for chunk in stored for segment in chunk]


def test_a_segment_is_read_as_it_was_stored(written_data: Written) -> None:
    with open_latents(written_data.data_dir, segment="2s", batch=5, captions=None, shuffle=False) as opened:
        batches = list(opened)
    segments_read = [segment for batch in batches for segment in batch["latents"]]
    assert batches[0]["latents"].shape == (5, FRAME[0], T, *FRAME[1:]) and batches[0]["latents"].is_contiguous()
    assert len(segments_read) == 24 and all(
        map(np.array_equal, map(bits, segments_read), expected_segments(written_data))
    )
    assert batches[0]["end_s"].tolist() == [2, 4, 6, 8, 10]
    with open_latents(
        written_data.data_dir, segment="2s", batch=5, captions=None, shuffle=False, device=None
    ) as opened:
        assert np.array_equal(
            next(iter(opened))["latents"].view(np.uint16), np.stack(expected_segments(written_data)[:5])
        )


def test_models_see_frames_first(written_data: Written) -> None:
    loader = open_latent_segments(segments(written_data.data_dir, split="train", segment="2s", batch=4, can_keep=True))
    latents = next(loader.evaluation_batches()).batch["latents"]
    assert latents.shape == (4, T, *FRAME)
    assert torch.equal(
        latents.transpose(1, 2).contiguous().view(torch.int16),
        torch.tensor(np.stack(expected_segments(written_data)[:4]).view(np.int16)),
    )
    assert f"in segments of {T}" in loader.describe()
    [first, *_] = loader.shown_frames(0, num_frames=T)
    shown = latents[0, 0, :3].permute(1, 2, 0).float().numpy() / 4 + 0.5
    assert np.array_equal(first, (np.clip(shown, 0, 1) * 255).astype(np.uint8))


@pytest.mark.parametrize("segment", ["1s", "4s", "2.1s"])
def test_a_segment_is_not_cut_out_of_another(written_data: Written, segment: str) -> None:
    with pytest.raises(UserError, match="encoded complete segments of 2 s") as caught:
        open_latent_segments(segments(written_data.data_dir, split="train", segment=segment))
    assert caught.value.hint is not None and "use 2s" in caught.value.hint


@pytest.mark.parametrize("written_data", [False], indirect=True)
def test_a_dual_encoder_and_a_masked_autoencoder_train_on_them(written_data: Written, tmp_path: Path) -> None:
    flags = (
        "--shards",
        written_data.data_dir,
        "--input",
        "latents",
        "--model",
        "tiny",
        "--segment",
        "2s",
        "--batch",
        4,
    )
    steps = ("--steps", 3, "--warmup-steps", 1, "--num-frames", 4)
    assert train("dual-encoder", *flags, *steps, "--text-tower", "frozen", "--out", tmp_path / "dual") == 0
    assert train("mae", *flags, *steps, "--mask-ratio", 0.5, "--out", tmp_path / "mae") == 0
    for name in ("dual", "mae"):
        assert np.isfinite(losses(tmp_path / name)).all()


@pytest.mark.parametrize("written_data", [False], indirect=True)
def test_segments_are_the_stored_ones_unless_a_length_is_given(
    written_data: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_latents(written_data.data_dir, batch=5, captions=None, shuffle=False) as opened:
        assert next(iter(opened))["latents"].shape == (5, FRAME[0], T, *FRAME[1:])
    flags = (
        "--shards",
        written_data.data_dir,
        "--input",
        "latents",
        "--model",
        "tiny",
        "--batch",
        4,
        "--num-frames",
        4,
    )
    steps = ("--steps", 1, "--warmup-steps", 0, "--out")
    assert train("mae", *flags, "--mask-ratio", 0.5, *steps, tmp_path / "mae") == 0
    assert train("dual-encoder", *flags, "--num-frames", 9, *steps, tmp_path / "none") == 2
    assert "--num-frames is 9, but a segment of 2s has only 5 frames" in capsys.readouterr().err
    assert train("dual-encoder", *flags, "--text-tower", "frozen", *steps, tmp_path / "dual") == 0
    capsys.readouterr()
    assert train("eval", "retrieval", tmp_path / "dual", "--split", "train", "--json") == 0
    assert "latents from a 2s segment" in json.loads(capsys.readouterr().out)["clip"]


def test_a_frozen_text_tower_without_embeddings_is_refused_with_both_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Written(tmp_path / "data")
    captions = [Caption("v", 0.0, 2.0, "a dog"), Caption("v", 2.0, 6.0, "a cat")]
    write_captions(data.data_dir, {"v": "train"}, captions)
    write_latents(data, [[Chunk("v", 0, 3 * T, frame=FRAME, fps=Fraction(T, 2))]], recipe=RECIPE)
    preset = ("--shards", data.data_dir, "--preset", "tiny-latents", "--segment", "2s", "--steps", 1)
    line = ("dual-encoder", *preset, "--warmup-steps", 0, "--batch", 2)
    assert train(*line, "--out", tmp_path / "frozen") == 2
    error = capsys.readouterr().err
    assert "has no text shards, but --text-tower is frozen" in error
    assert f"run prep text --clip NAME --data {data.data_dir}, or train a text tower: --text-tower trained" in error
    assert train(*line, "--text-tower", "trained", "--out", tmp_path / "trained") == 0
