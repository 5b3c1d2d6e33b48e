"""Golden losses of complete runs, from packets to weights.

The values were reviewed before they were stored. An intended change stores the values that the failing test prints, and
gives the reason in its commit.
"""

import json
from pathlib import Path

import cv2
import pytest

from tests.tiers import nightly_beyond
from tests.train.classify.moving import write_moving
from tests.train.running import losses, train

pytestmark = pytest.mark.usefixtures("complete_tiny")
GOLDEN = Path(__file__).with_name("golden_runs.json")
SMALL = "--model tiny --num-frames 2 --size-px 32 --warmup-steps 2 --lr 1e-3 --steps 6 --workers 1 --device cpu"
FINE_TUNING = (
    "--towers.kind videomae --batch 6 --repeats 2 --optimizer.lr-batch 1 --optimizer.layer-decay 0.75 --mixup 0.8"
    " --cutmix 1 --label-smoothing 0.1 --augment.rand-ops 4 --augment.erase 0.25 --towers.drop-path 0.1"
)
RUNS = {
    "infonce": f"dual-encoder {SMALL} --batch 4 --towers.temporal random --augment.flip 0.5 --augment.hue 0.1",
    "fastclip-v3": f"dual-encoder {SMALL} --batch 4 --microbatch 2 --loss.kind fastclip-v3 --optimizer.name lion",
    "siglip": f"dual-encoder {SMALL} --batch 4 --loss.kind siglip --towers.patch-dropout 0.5 --optimizer.ema 0.9",
    "mae": f"mae {SMALL} --batch 4 --mask-ratio 0.75 --samples-per-chunk 2 --augment.flip 0.5 --decoder-mask random",
    "fine-tuning": f"classify {SMALL} {FINE_TUNING}",
}


@pytest.mark.parametrize("name", nightly_beyond(["infonce", "mae", "fine-tuning"], RUNS))
def test_a_run_has_its_golden_losses(data_dir: Path, tmp_path: Path, name: str) -> None:
    if name == "fine-tuning":
        if not cv2.ipp.useIPP():
            pytest.skip("this OpenCV has no IPP, and resizes otherwise (clipmill.train.data.clip_frames)")
        data_dir = tmp_path / "labelled"
        write_moving(data_dir, num_videos=4)
    assert train(*RUNS[name].split(), "--shards", data_dir, "--out", tmp_path / "run") == 0
    # Other processors sum numbers in a different order.
    assert losses(tmp_path / "run") == pytest.approx(json.loads(GOLDEN.read_bytes())[name], rel=1e-3)
