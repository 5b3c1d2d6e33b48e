"""VAEs as a user would provide them, and latents made in this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.prep.core.chunk_column import chunk_job, resolve
from clipmill.prep.core.chunk_plan import ChunksPlan
from clipmill.prep.core.data_folder import lock_for_writing
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Summary, execute
from clipmill.prep.core.work import work_of
from clipmill.prep.latents.column import COLUMN
from clipmill.prep.latents.recipe import LATENTS, LatentsSettings
from clipmill.prep.latents.work import WORK
from clipmill.prep.latents.worker import EncoderOptions
from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import current_variant
from tests.prep.here import Here


def autoencoder_kl() -> Any:
    """Import the class, which takes seconds.

    Its type annotations do not cover its methods.
    """
    from diffusers import AutoencoderKL

    return AutoencoderKL


def make(data: Path, *, batch: int = 16, num_threads: int = 2, **settings: Any) -> Summary:
    """Make the latents of `data`, by default with the tiny VAE at 64 pixels."""
    with lock_for_writing(data, column=LATENTS):
        options = EncoderOptions(device="cpu", batch=batch, num_threads=num_threads)
        return execute(chunk_job(COLUMN, plan(data, **settings), options=options), Here())


def plan(data: Path, **settings: Any) -> ChunksPlan:
    """Plan the latents of `data`, by default with the tiny VAE at 64 pixels."""
    given = LatentsSettings(**{"vae": "tiny", "size": 64, **settings})
    planned: Any = work_of(COLUMN).plan(data, given, Request(data=data))
    return planned


def recipe(video: str, **settings: Any) -> Recipe[LatentsSettings]:
    """Return the recipe of `prep latents` for a variant of video."""
    return resolve(COLUMN, WORK, LatentsSettings(**settings), video=video)


def video(data: Path) -> str:
    """Return the current variant of video."""
    name = current_variant(data, VIDEO)
    assert name is not None
    return name


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random VAE with attention, as diffusers saves it."""
    folder = tmp_path_factory.mktemp("vae") / "random-kl-f8"
    torch.manual_seed(0)
    model = autoencoder_kl()(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 8, 16, 16],
        norm_num_groups=4,
        scaling_factor=0.18215,
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restore the number of torch's threads, which is global to the process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
