"""`train caption --decoder.lm` from outside: runs, exact resumption, and what reads their captions."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.train.running import losses, steps, train, weights_of

SMALL = "--model tiny --size-px 32 --num-frames 2 --workers 1 --batch 8 --lr 1e-3 --warmup-steps 2 --device cpu"
LM = (*SMALL.split(), "--decoder.visual-tokens", 4, "--decoder.max-tokens", 16)
WAYS = {
    "qwen3": ("--decoder.prompt", "see {video} say:", "--towers.activation-checkpointing"),
    "llama": ("--lora.rank", 2, "--lora.towers", "decoder", "--decoder.reducer", "attention"),
    "gpt2": ("--freeze", "video", "decoder", "--optimizer.ema", 0.9),
}


@pytest.fixture(scope="module", params=WAYS)
def run(request: pytest.FixtureRequest, data_dir: Path, language_models: dict[str, Path]) -> Path:
    """A run of a language model that is trained, adapted or frozen."""
    out = language_models[request.param].parent / f"run_{request.param}"
    flags = ("--decoder.lm", language_models[request.param], *LM, *WAYS[request.param])
    assert train("caption", "--shards", data_dir, "--out", out, *flags, "--steps", 6, "--checkpoint-every", 3) == 0
    return out


def test_a_run_learns_and_continues_bit_by_bit(run: Path, tmp_path: Path) -> None:
    assert losses(run)[-1] < losses(run)[0]
    assert all(0 <= step["padding"] < 0.5 for step in steps(run))
    whole = weights_of(run)
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(max((again / "checkpoints").iterdir()))
    assert train("caption", "--out", again, "--resume") == 0
    after = weights_of(again)
    assert after.keys() == whole.keys() and all(torch.equal(after[name], one) for name, one in whole.items())


def test_a_run_is_scored_without_the_folder_of_the_language_model(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    assert train("eval", "caption", tmp_path / "run", "--split", "train") == 0
    assert "exact match" in capsys.readouterr().out
    beams = ("--decoding.method", "beam", "--decoding.num-beams", 3)
    assert train("eval", "caption", tmp_path / "run", "--split", "train", *beams) == 0
