"""Tiny models by name, and a run that starts from the weights of such a model."""

from collections.abc import Iterator
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip import factory

from tests.train.library.small_library import SIGLIP2, add_open_clip, train_tokenizer
from tests.train.running import train

TOWERS = ("--towers.image", f"open_clip:{SIGLIP2}", "--towers.text", f"open_clip:{SIGLIP2}")
TINY = ("--model", "tiny", "--num-frames", 2, "--size-px", 32, "--batch", 4, "--warmup-steps", 1, "--workers", 1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of tiny models, which are registered in open_clip for this package; `tokenizer` holds their tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    before = list(factory._MODEL_CONFIG_PATHS), dict(factory._MODEL_CONFIGS)
    add_open_clip(folder, tokenizer=train_tokenizer(folder / "tokenizer"))
    yield folder
    factory._MODEL_CONFIG_PATHS[:], factory._MODEL_CONFIGS = before


@pytest.fixture(scope="session")
def siglip2(models: Path) -> Path:
    """File with random weights of a tiny SigLIP 2, in open_clip's format."""
    torch.manual_seed(3)
    file = models / "siglip2.pt"
    torch.save(open_clip.create_model(SIGLIP2, precision="fp32").state_dict(), file)
    return file


@pytest.fixture(scope="session")
def run(data_dir: Path, siglip2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of two steps that starts from these weights, with microbatches and attention pooling."""
    out = tmp_path_factory.mktemp("run") / "run"
    flags = ("--towers.pool-frames", "attention", "--microbatch", 2, "--steps", 2, "--checkpoint-every", 1)
    some = ("--init.weights", siglip2, "--lr", "1e-3", "--optimizer.layer-decay", 0.5)
    assert train("dual-encoder", *TINY, *TOWERS, *flags, *some, "--shards", data_dir, "--out", out) == 0
    return out
