"""Runs that others start from."""

from pathlib import Path

import pytest

from tests.train.tuning.runs import LORA, SHORT, SMALL, TINY, call


@pytest.fixture(scope="session")
def source(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained dual encoder."""
    out = tmp_path_factory.mktemp("source") / "run"
    flags = ("--lr", "1e-3", "--steps", 2, "--towers.temporal", "random")
    call("dual-encoder", *TINY, *flags, "--shards", data_dir, "--out", out)
    return out


@pytest.fixture(scope="session")
def adapted(data_dir: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That dual encoder with adapters in both towers."""
    out = tmp_path_factory.mktemp("adapted") / "run"
    flags = [*SMALL, *LORA, "--evaluate.every", 4, "--shards", data_dir, "--init.weights", source, "--out", out]
    call("dual-encoder", *flags)
    return out


@pytest.fixture(scope="session")
def masked(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked autoencoder."""
    out = tmp_path_factory.mktemp("masked") / "run"
    call("mae", *SHORT, "--mask-ratio", 0.5, "--shards", data_dir, "--out", out)
    return out
