"""A captioner with a language model, sharded by the library's blocks on two ranks, equals the run of one process."""

from pathlib import Path

import pytest

from tests.train.caption.language.tiny_models import save_language_model
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.distributed.runs import run_command
from tests.train.running import losses, steps, train

SMALL = "--model tiny --size-px 32 --num-frames 2 --workers 1 --batch 8 --lr 1e-3 --warmup-steps 2 --device cpu"
LM = "--decoder.visual-tokens 4 --decoder.max-tokens 16 --lora.rank 2 --lora.towers decoder --microbatch 2 --steps 2"
EVALUATION = "--evaluate.every 2 --evaluate.split train --evaluate.max-samples 4"


@pytest.mark.nightly
def test_two_ranks_of_fsdp_give_the_losses_of_one_process(data_dir: Path, tmp_path: Path) -> None:
    folder = save_language_model(tmp_path / "qwen3", "qwen3", texts=["it begins", "the middle of a", "the end of b"])
    words = ["caption", "--shards", str(data_dir), "--decoder.lm", str(folder)]
    words += [*SMALL.split(), *LM.split(), *EVALUATION.split()]
    sharded = ("--out", str(tmp_path / "two"), "--parallel.strategy", "fsdp", "--towers.activation-checkpointing")
    end_well(fork_ranks(run_command, *words, *sharded, size=2, folder=tmp_path))
    assert train(*words, "--out", tmp_path / "one") == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    last_step, expected = (steps(tmp_path / name)[-1] for name in ("two", "one"))
    assert last_step["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-4)
