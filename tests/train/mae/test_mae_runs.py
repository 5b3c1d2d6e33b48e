"""`train mae` from the command line: videos without captions, latents, microbatches, initial weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.latents.written import Chunk, Written, write_latents
from tests.train.running import error_of, losses, steps, train, weights_of
from tests.train.tiny_data import chunks_of, write_captions, write_shard

TINY = ("--model", "tiny", "--size-px", 32, "--num-frames", 4, "--stride", 2, "--mask-ratio", 0.75, "--workers", 1)
STEPS = ("--batch", 4, "--warmup-steps", 2, "--decoder-depth", 1)
RATE = ("--lr", 0.1)  # scaled by 4 / 256
FOUR = ("--segment", "2s", "--steps", 4)
LATENTS = ("--input", "latents", "--model", "tiny", "--mask-ratio", 0.5)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two videos of three chunks, without captions; the last chunk of each is short."""
    data_dir = tmp_path_factory.mktemp("videos")
    write_shard(data_dir, 0, [*chunks_of("a", 45), *chunks_of("b", 41)], split="train")
    write_captions(data_dir, {"a": "train", "b": "train"}, [])
    return data_dir


def write_columns(data_dir: Path, *, frame: tuple[int, int, int] = (4, 8, 8)) -> Path:
    """Write latents of two videos, with 8 frames per segment of 2 s."""
    written = Written(data_dir)
    write_latents(written, [[Chunk(name, 0, 20, frame=frame) for name in "ab"]], values=noise)
    write_captions(data_dir, {"a": "train", "b": "train"}, [])
    return data_dir


def noise(chunk: Chunk) -> Any:
    drawn = torch.randn(chunk.num_frames, *chunk.frame, generator=torch.Generator().manual_seed(1))
    return drawn.to(torch.float16).numpy()


def test_a_run_says_what_it_shows_and_learns(videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = ("--samples-per-chunk", 3, "--repeat", "masks", "--augment.flip", 0.5, "--decoder-mask", "running-cell")
    out = tmp_path / "run"
    assert train("mae", "--shards", videos, "--out", out, *TINY, *STEPS, *RATE, *several, "--steps", 8) == 0
    printed = capsys.readouterr().out
    assert "6 chunks of 2 videos of split 'train'" in printed
    assert "3 crops of the same frames of each clip per epoch" in printed
    assert "; 1 of a single frame, which is repeated;" in printed
    assert "; 2 shorter than 4 x 2 frames and sampled with a smaller stride;" in printed
    its = steps(out)
    # An epoch has 18 samples. The learning rate is given for a batch of 256, so a batch of 4 uses 1 / 64 of it.
    assert its[-1]["epoch"] == pytest.approx(8 * 4 / 18) and its[1]["lr"] == pytest.approx(0.1 / 64)
    assert its[-1]["loss"] < its[0]["loss"]


def test_a_batch_in_parts_and_another_seed(videos: Path, tmp_path: Path) -> None:
    flags = ("mae", "--shards", videos, *TINY, *STEPS, *RATE, "--steps", 3, "--precision", "fp32")
    assert train(*flags, "--out", tmp_path / "whole") == 0
    assert train(*flags, "--out", tmp_path / "parts", "--microbatch", 3) == 0
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert train(*flags, "--out", tmp_path / "other", "--seed", 1) == 0
    assert abs(losses(tmp_path / "other")[0] - losses(tmp_path / "whole")[0]) > 1e-4


def test_latents_are_reconstructed_without_decoding_and_without_captions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = write_columns(tmp_path / "data")
    flags = ("mae", "--shards", data_dir, *LATENTS, "--num-frames", 4, *STEPS, "--crop", "centre")
    assert train(*flags, *RATE, *FOUR, "--out", tmp_path / "whole") == 0
    printed = capsys.readouterr().out
    assert "--input latents ignores these settings from flags or a preset: --crop" in printed
    assert "4 segments of 8 frames (4 x 8 x 8 float16 at 4 frames a second) in 2 chunks" in printed
    assert weights_of(tmp_path / "whole")["video.conv1.weight"].shape == (128, 4, 2, 2, 2)

    # A new run starts from the final weights.
    begin = ("--init.weights", tmp_path / "whole", "--lr", 1e-9, "--steps", 1)
    assert train(*flags, "--segment", "2s", "--out", tmp_path / "more", *begin) == 0
    ours, theirs = weights_of(tmp_path / "more"), weights_of(tmp_path / "whole")
    assert max((value - theirs[name]).abs().max() for name, value in ours.items()) < 1e-6


@pytest.mark.parametrize(
    ("frame", "flags", "message"),
    [
        ((4, 8, 8), ("--segment", "2s", "--num-frames", 16), "but a segment of 2s has only 8 frames"),
        ((4, 8, 8), ("--segment", "0.3s", "--num-frames", 2), "a segment of '0.3s' is 1.2 frames"),
        ((4, 6, 8), ("--segment", "2s", "--num-frames", 4), "latents of 6 x 8 cannot be cut into squares of 2"),
        ((4, 5, 5), ("--segment", "2s", "--num-frames", 4), "latents of 5 x 5 cannot be cut into squares of 2"),
        ((4, 2, 2), ("--segment", "2s", "--num-frames", 4), "masks 0 of the 1 cube in a time step"),
        ((4, 8, 8), ("--segment", "2s", "--num-frames", 4, "--batch", 5), "--batch 5 is larger than the 4 "),
    ],
)
def test_latents_that_do_not_suit_the_model_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    frame: tuple[int, int, int],
    flags: tuple[Any, ...],
    message: str,
) -> None:
    data_dir = write_columns(tmp_path / "data", frame=frame)
    few = ("--batch", 2, "--steps", 1) if "--batch" not in flags else ("--steps", 1)
    assert train("mae", "--shards", data_dir, *LATENTS, *few, *flags, "--out", tmp_path / "run") == 2
    assert message in error_of(capsys)
    assert not (tmp_path / "run").exists()


def test_tars_and_splits_that_are_not_there_are_named(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (
            ("--shards", next(videos.rglob("*.tar")), "--batch", 2),
            "names video tars, but chunks are in a data folder",
        ),
        (("--shards", videos, "--batch", 2, "--split", "test"), "has no videos of split 'test'"),
        (("--shards", videos, "--batch", 2, "--input", "latents"), "latents"),
        (("--shards", videos, "--batch", 7), "--batch 7 is larger than the 6 training samples"),
    ):
        assert train("mae", *TINY, *flags, "--out", tmp_path / "run") == 2
        assert message in error_of(capsys)
        assert not (tmp_path / "run").exists()
