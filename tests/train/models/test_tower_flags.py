"""`--towers.*` from the command line to the trained weights."""

from pathlib import Path

import torch

from clipmill.train.config.files import load_settings
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.dual_encoder.settings import DualEncoderSettings
from tests.train.running import losses, train

SMALL = "--model tiny --num-frames 4 --size-px 32 --batch 4 --warmup-steps 2 --lr 1e-3 --steps 4 --checkpoint-every 2"
TOWERS = (
    "--towers.tubelet 2 --towers.temporal random --towers.embedding-width 64 --towers.activation quick_gelu "
    "--towers.patch-dropout 0.5 --towers.drop-path 0.2 --towers.drop-path-rule constant "
    "--towers.activation-checkpointing"
)


def test_flags_of_the_towers_reach_the_run_and_its_evaluation(data_dir: Path, tmp_path: Path) -> None:
    flags = [*SMALL.split(), *TOWERS.split(), "--shards", data_dir]
    for name, more in (("padded", ["--towers.no-packed-text"]), ("packed", [])):
        assert train("dual-encoder", *flags, *more, "--out", tmp_path / name) == 0
    towers = load_settings(RunFolder(tmp_path / "padded").settings, DualEncoderSettings).towers
    assert (towers.tubelet, towers.temporal, towers.embedding_width) == (2, "random", 64)
    assert (towers.packed_text, towers.activation_checkpointing, towers.drop_path_rule) == (False, True, "constant")
    packed, padded = (torch.tensor(losses(tmp_path / name)) for name in ("packed", "padded"))
    # What is left out is drawn alike: the two differ by rounding alone.
    torch.testing.assert_close(packed, padded, atol=1e-3, rtol=0)
    assert train("eval", "retrieval", tmp_path / "packed", "--shards", data_dir) == 0
