"""`--towers.*` from the command line to the trained weights."""

import re
from pathlib import Path

import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.train.config.files import load_settings
from clipmill.train.config.model import DualEncoderTowers
from clipmill.train.inference import load_model
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from tests.tiers import nightly_beyond
from tests.train.running import losses, train

SMALL = "--model tiny --num-frames 4 --size-px 32 --batch 4 --warmup-steps 2 --lr 1e-3 --steps 4 --checkpoint-every 2"
TOWERS = (
    "--towers.tubelet 2 --towers.temporal random --towers.embedding-width 64 --towers.activation quick_gelu "
    "--towers.patch-dropout 0.5 --towers.drop-path 0.2 --towers.drop-path-rule constant "
    "--towers.activation-checkpointing"
)
SIZED = (
    "--towers.width 48 --towers.depth 3 --towers.heads 3 --towers.patch-px 8 --towers.text-width 48 "
    "--towers.text-depth 1 --towers.text-heads 3 --towers.embedding-width 24"
)


def test_flags_of_the_towers_reach_the_run_and_its_evaluation(data_dir: Path, tmp_path: Path) -> None:
    flags = [*SMALL.split(), *TOWERS.split(), "--shards", data_dir]
    for name, more in (("padded", ["--towers.no-packed-text"]), ("packed", [])):
        assert train("dual-encoder", *flags, *more, "--out", tmp_path / name) == 0
    towers = load_settings(RunFolder(tmp_path / "padded").settings, DualEncoderSettings).towers
    assert (towers.tubelet, towers.temporal, towers.embedding_width) == (2, "random", 64)
    assert (towers.packed_text, towers.activation_checkpointing, towers.drop_path_rule) == (False, True, "constant")
    packed, padded = (torch.tensor(losses(tmp_path / name)) for name in ("packed", "padded"))
    # Both runs draw the same omissions, so their losses differ only by rounding.
    torch.testing.assert_close(packed, padded, atol=1e-3, rtol=0)
    assert train("eval", "retrieval", tmp_path / "packed", "--shards", data_dir) == 0


@pytest.mark.nightly
def test_weights_of_another_size_start_with_the_flags_that_the_refusal_names(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, exported = [*SMALL.split(), "--shards", data_dir], tmp_path / "exported"
    assert train("dual-encoder", *flags, *SIZED.split(), "--out", tmp_path / "sized") == 0
    assert train("export", tmp_path / "sized", "--format", "open_clip", "--out", exported) == 0
    theirs = load_model(exported)
    assert theirs.identity == load_model(tmp_path / "sized").identity
    assert (theirs.opened.shape.size.text.trunk.num_heads, theirs.opened.shape.size.video.patch_px) == (3, 8)
    capsys.readouterr()
    start = [*flags, "--init.weights", exported, "--out", tmp_path / "started"]
    assert train("dual-encoder", *start) == 2
    hint = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("hint: "))
    needed = re.findall(r"--towers[.a-z-]+ \d+", hint)
    expected = re.findall(r"--towers[.a-z-]+ \d+", SIZED)
    # The weights determine the embedding width.
    assert sorted(needed) == sorted(flag for flag in expected if not flag.startswith("--towers.embedding-width"))
    assert train("dual-encoder", *start, *" ".join(needed).split()) == 0
    assert "tensors of the model copied unchanged" in capsys.readouterr().out


@pytest.mark.parametrize("task", nightly_beyond(["caption"], ["mae", "classify", "caption"]))
def test_every_task_takes_towers_of_any_size(moving: Path, tmp_path: Path, task: str) -> None:
    more = {"classify": "--label verb", "caption": "--decoder.name tiny", "mae": "--towers.tubelet 2"}[task]
    size = "--towers.width 32 --towers.depth 1 --towers.heads 2 --towers.patch-px 8"
    words = f"--model tiny --num-frames 2 --size-px 32 --batch 4 --steps 1 --warmup-steps 0 {size} {more}".split()
    assert train(task, "--shards", moving, "--out", tmp_path / "run", *words) == 0
    with_flags = load_model(tmp_path / "run").opened.shape.size.video
    assert (with_flags.trunk.width, with_flags.trunk.depth, with_flags.trunk.num_heads) == (32, 1, 2)
    assert with_flags.patch_px == 8


def test_heads_that_cannot_share_a_width_are_refused_before_training(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--towers\.text-width 50 is not a multiple of"):
        size_of("tiny", DualEncoderTowers(text_width=50, text_heads=3))
    assert size_of("tiny", DualEncoderTowers(width=64)).video.trunk.num_heads == 2  # as wide as the heads of tiny
    flags = [*SMALL.split(), "--shards", data_dir, "--towers.heads", "3", "--out", tmp_path / "run"]
    assert train("dual-encoder", *flags) == 2 and not (tmp_path / "run").exists()
