"""Runs that other runs start from."""

from pathlib import Path

import pytest

from tests.train.running import train
from tests.train.tuning.runs import LORA, SHORT, SMALL, TINY


@pytest.fixture(scope="session")
def source(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of a trained dual encoder."""
    out = tmp_path_factory.mktemp("source") / "run"
    flags = ("--lr", "1e-3", "--steps", 2, "--towers.temporal", "random")
    assert train("dual-encoder", *TINY, *flags, "--shards", data_dir, "--out", out) == 0
    return out


@pytest.fixture(scope="session")
def adapted_run(data_dir: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of that dual encoder with adapters in both towers."""
    out = tmp_path_factory.mktemp("adapted") / "run"
    flags = [*SMALL, *LORA, "--evaluate.every", 4, "--shards", data_dir, "--init.weights", source, "--out", out]
    assert train("dual-encoder", *flags) == 0
    return out


@pytest.fixture(scope="session")
def masked_run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of a masked autoencoder."""
    out = tmp_path_factory.mktemp("masked") / "run"
    assert train("mae", *SHORT, "--mask-ratio", 0.5, "--shards", data_dir, "--out", out) == 0
    return out
