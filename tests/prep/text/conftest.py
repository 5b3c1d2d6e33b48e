"""Small text tower in open_clip's own format, as a user would provide it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from clipmill.prep.text import tower


@dataclass(frozen=True)
class Checkpoints:
    """Random model with a unique name, and its weights in both formats."""

    model: str
    folder: Path

    @property
    def safetensors(self) -> Path:
        return self.folder / f"{self.model}.safetensors"

    @property
    def torch_file(self) -> Path:
        return self.folder / f"{self.model}.pt"

    def load(self) -> Any:
        """Load the model with open_clip."""
        return open_clip.create_model(self.model, pretrained=str(self.safetensors)).eval()


@pytest.fixture(scope="module", autouse=True)
def _tokenizers_are_built_once() -> Iterator[None]:
    """Build the tokenizer once, because CLIP's takes longer to build than the towers of these tests take to encode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("open_clip.factory.SimpleTokenizer", build_tokenizer)
        yield


build_tokenizer = cache(open_clip.SimpleTokenizer)


@pytest.fixture(scope="session", params=["together", pytest.param("apart", marks=pytest.mark.nightly)])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Create a model whose text tower is at the top level of the state, or in a separate module."""
    folder = tmp_path_factory.mktemp("checkpoints")
    name = f"small-{request.param}"
    config = {
        "embed_dim": 48,
        "vision_cfg": {"layers": 1, "width": 64, "head_width": 64, "patch_size": 16, "image_size": 32},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
        "custom_text": request.param == "apart",
    }
    (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{name}.json")
    torch.manual_seed(0)
    state = open_clip.create_model(name).state_dict()
    made = Checkpoints(name, folder)
    save_file(state, made.safetensors)
    # Save the state as open_clip's training does on several GPUs.
    torch.save({"epoch": 1, "state_dict": {f"module.{key}": value for key, value in state.items()}}, made.torch_file)
    return made


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restore the number of threads, which encoding on the CPU sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    tower.load_tower.cache_clear()
