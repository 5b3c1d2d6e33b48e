"""`train caption --decoder.lm` from the command line: runs, exact resumption, and commands that use the captions."""

import json
import shutil
from fractions import Fraction
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen3ForCausalLM

from clipmill.prep.synthetic import FrameNumberVideo
from tests.tiers import nightly_beyond
from tests.train.running import facts, losses, steps, train, weights_of

SMALL = "--model tiny --size-px 32 --num-frames 2 --workers 1 --batch 8 --lr 1e-3 --warmup-steps 2 --device cpu"
LM = (*SMALL.split(), "--decoder.visual-tokens", 4, "--decoder.max-tokens", 16)
WAYS = {
    "qwen3": ("--decoder.prompt", "see {video} say:", "--towers.activation-checkpointing"),
    "llama": ("--lora.rank", 2, "--lora.towers", "decoder", "--decoder.reducer", "attention"),
    "gpt2": ("--freeze", "video", "decoder", "--optimizer.ema", 0.9),
}


@pytest.fixture(scope="module", params=nightly_beyond(["llama"], WAYS))
def run(request: pytest.FixtureRequest, data_dir: Path, language_models: dict[str, Path]) -> Path:
    """Run of a language model that is trained, adapted or frozen."""
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
    assert after.keys() == whole.keys() and all(torch.equal(after[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("run", ["llama"], indirect=True)
def test_a_run_is_scored_without_the_folder_of_the_language_model(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    assert train("eval", "caption", tmp_path / "run", "--split", "train") == 0
    assert "exact match" in capsys.readouterr().out
    beams = ("--decoding.method", "beam", "--decoding.num-beams", 3)
    assert train("eval", "caption", tmp_path / "run", "--split", "train", *beams) == 0


@pytest.mark.parametrize("run", ["llama"], indirect=True)
def test_videos_and_chunks_are_captioned_with_likelihoods(run: Path, data_dir: Path, tmp_path: Path) -> None:
    FrameNumberVideo(num_frames=30, fps=Fraction(10), width=64, height=48).write(tmp_path / "film.mp4")
    assert train("caption-video", run, tmp_path / "film.mp4", "--len", "1s", "--out", tmp_path / "film.json") == 0
    of_film = json.loads((tmp_path / "film.json").read_text())
    assert len(of_film) == 3 and all(caption["likelihood"] < 0 for caption in of_film)
    chunks = ("caption-chunks", run, "--shards", data_dir, "--split", "train", "--num-samples", 2, "--min-tokens", 2)
    assert train(*chunks, "--out", tmp_path / "chunks.parquet") == 0
    table = pq.read_table(tmp_path / "chunks.parquet")
    assert len(table) > 4 and all(likelihood < 0 for likelihood in table["likelihood"].to_pylist())


def test_stages_of_training_start_from_each_other(
    data_dir: Path, language_models: dict[str, Path], tmp_path: Path
) -> None:
    """Train in stages as LLaVA does: first the projector, then everything.

    A tower can also start without the decoder that it was trained with.
    """
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    shards = ("caption", "--shards", data_dir, "--steps", 2)
    prompt = ("--decoder.prompt", "see {video} of ")
    frozen = ("--decoder.lm", language_models["qwen3"], *LM, *prompt, "--freeze", "video", "decoder")
    assert train(*shards, "--out", first, *frozen) == 0
    before = weights_of(first)
    model_state = Qwen3ForCausalLM.from_pretrained(language_models["qwen3"]).state_dict()
    assert all(torch.equal(before[f"decoder.{name}"], tensor) for name, tensor in model_state.items())
    still = [word if word != "1e-3" else "1e-12" for word in SMALL.split()]
    adapted = ("--decoder.max-tokens", 16, "--lora.rank", 2, "--lora.towers", "decoder")
    assert train(*shards, "--out", second, *still, "--init.weights", first, *adapted) == 0
    assert facts(second)["decoder"] == facts(first)["decoder"]
    for name, tensor in weights_of(second).items():
        if ".lora_" not in name:
            torch.testing.assert_close(tensor, before[name], atol=1e-9, rtol=0)
    other = ("--decoder.lm", language_models["llama"], *LM, "--freeze", "video", "--init.weights", second)
    assert train(*shards, "--out", tmp_path / "no", *other) == 2
    gpt2 = ("--decoder.name", "tiny", "--decoder.max-tokens", 16, "--decoder.vocabulary", 280)
    assert train(*shards, "--out", third, *SMALL.split(), *gpt2) == 0
    onward = ("--decoder.lm", language_models["llama"], *LM, "--freeze", "video", "--init.weights", third)
    assert train(*shards, "--out", tmp_path / "fourth", *onward) == 0
    tower = {name: tensor for name, tensor in weights_of(third).items() if name.startswith("video.")}
    after = weights_of(tmp_path / "fourth")
    assert all(torch.equal(after[name], tensor) for name, tensor in tower.items())
