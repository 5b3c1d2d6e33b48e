from pathlib import Path

import pytest

from tests.train.running import train

SMALL = "--model tiny --size-px 32 --num-frames 2 --workers 1 --batch 4 --lr 1e-3 --warmup-steps 2 --device cpu"
DECODER = "--decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280"


@pytest.fixture(scope="package")
def captioner_run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of a briefly trained captioner for clips of 2 frames at 32 px."""
    out = tmp_path_factory.mktemp("captioner") / "run"
    assert train("caption", "--shards", data_dir, "--out", out, *SMALL.split(), *DECODER.split(), "--steps", 12) == 0
    return out
