from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.data import write_latents_folder
from tests.prep.captions.tiny_vlm import save_tiny_vlm
from tests.simulated_gpu.device import simulation
from tests.simulated_gpu.inside.runs import train_all
from tests.simulated_gpu.journal import Journal
from tests.train.caption.language.tiny_models import save_language_model
from tests.train.classify.moving import write_moving
from tests.train.conftest import _no_java  # noqa: F401 - for every test
from tests.train.library.small_library import add_open_clip, save_hf, train_tokenizer
from tests.train.library.test_texts_of_transformers import CONFIGS, save_model, save_tokenizer


@pytest.fixture(scope="session", autouse=True)
def _is_simulated() -> None:
    torch.set_num_threads(1)
    assert torch.cuda.is_available(), "this process has no simulated GPU"


@pytest.fixture
def journal() -> Iterator[Journal]:
    """What happens on the GPU during a test."""
    with simulation() as journal:
        yield journal


@pytest.fixture(scope="session")
def clips_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of bars that move, with captions and labels: 13 captions in split train, 4 in val."""
    folder = tmp_path_factory.mktemp("clips")
    write_moving(folder, num_videos=4)
    return folder


@pytest.fixture(scope="session")
def latents_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of latents and text, without videos."""
    return write_latents_folder(tmp_path_factory.mktemp("latents"))


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory: pytest.TempPathFactory, clips_dir: Path) -> dict[str, Path]:
    """A run of every task, trained on the CPU."""
    return train_all(tmp_path_factory.mktemp("trained"), shards=clips_dir)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny models with random weights: of transformers by kind, and those that open_clip knows by name."""
    folder = tmp_path_factory.mktemp("models")
    add_open_clip(folder, tokenizer=train_tokenizer(folder / "tokenizer"))
    for kind in ("clip", "dinov2", "bert"):
        save_hf(folder / kind, kind)
    save_model(folder / "t5", CONFIGS["t5"](0))
    save_tokenizer(folder / "t5", side="right", pad="[PAD]")
    for kind in ("qwen3", "llama"):
        save_language_model(folder / kind, kind, texts=["a bright one", "a dark one"])
    save_tiny_vlm(folder / "vlm")
    return folder
