"""`prep latents` and `prep text` on the device make what they make on a CPU, within the bound of the precision."""

import shutil
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clipmill.prep.core.chunk_column import chunk_job
from clipmill.prep.core.data_folder import lock_for_writing
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import execute
from clipmill.prep.core.work import work_of
from clipmill.prep.latents.column import COLUMN
from clipmill.prep.latents.recipe import LatentsSettings, Precision
from clipmill.prep.latents.vae import Device
from clipmill.prep.latents.worker import EncoderOptions
from clipmill.prep.text.bank import TextEncoderOptions
from clipmill.prep.text.plan import make_text_plan
from clipmill.prep.text.recipe import TextSettings
from clipmill.prep.text.t5 import resolve_t5
from clipmill.prep.text.tower import resolve as resolve_text
from clipmill.prep.text.work import run_text
from clipmill.shards.reader import Variant
from tests.prep.here import Here
from tests.prep.latents.video_vaes import NAMES, save_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

# Relative error in norm of float16 numbers that were computed in each precision; the columns store float16 (2^-11).
BOUNDS: dict[Precision, float] = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 6e-2}
SIZE_PX, RESIZED_PX = 64, 48
LATENTS, TEXT = "latents", "text"
Record = Callable[[str, object], None]


def device_name(device: torch.device) -> Device:
    return "cuda" if device.type == "cuda" else "cpu"


def make_latents(
    data_dir: Path, *, device: Device, precision: Precision, size: int = SIZE_PX, batch: int = 8, **of_vae: Any
) -> None:
    with lock_for_writing(data_dir, column=LATENTS):
        settings = LatentsSettings(**{"vae": "tiny", "size": size, "fps": "2", "precision": precision, **of_vae})
        planned = work_of(COLUMN).plan(data_dir, settings, Request(data=data_dir))
        options = EncoderOptions(device=device, batch=batch, num_threads=1)
        summary = execute(chunk_job(COLUMN, planned, options=options), Here())  # type: ignore[arg-type]  # of this column
    assert not summary.failures and summary.gave_up is None


def make_text(data_dir: Path, *, device: Device, recipe: TextSettings = TextSettings(clip="tiny")) -> None:  # noqa: B008 - frozen
    with lock_for_writing(data_dir, column=TEXT):
        resolved = resolve_text(recipe) if recipe.encoder is None else resolve_t5(recipe)
        use = TextEncoderOptions(resolved, batch=32, device=device)
        summary = run_text(make_text_plan(data_dir, resolved), use, Here())
    assert not summary.failures and summary.gave_up is None


def column(data_dir: Path, name: str) -> dict[str, NDArray[np.float64]]:
    """The arrays of a column's current variant, by key."""
    samples = Variant.open(data_dir, column=name).iterate()
    arrays = {sample["__key__"]: np.load(BytesIO(sample[f"{name}.npy"]), allow_pickle=False) for sample in samples}
    return {key: array.astype(np.float64) for key, array in arrays.items()}


def relative_errors(found_dir: Path, expected_dir: Path, name: str) -> NDArray[np.float64]:
    """Of each array, in the norm."""
    arrays, expected = column(found_dir, name), column(expected_dir, name)
    assert arrays.keys() == expected.keys()
    return np.array([np.linalg.norm(arrays[key] - array) / np.linalg.norm(array) for key, array in expected.items()])


@pytest.fixture(scope="module")
def on_a_cpu(clips_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both columns, made on a CPU in float32."""
    data_dir = tmp_path_factory.mktemp("columns") / "cpu"
    shutil.copytree(clips_dir, data_dir)
    make_latents(data_dir, device="cpu", precision="float32")
    make_text(data_dir, device="cpu")
    return data_dir


@pytest.mark.parametrize("precision", BOUNDS)
def test_latents_are_those_of_a_cpu(
    precision: Precision,
    on_a_cpu: Path,
    clips_dir: Path,
    device: torch.device,
    tmp_path: Path,
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cpu" and precision == "float16":
        pytest.skip("convolutions in float16 are for GPUs: not in the dry run")
    # As a program finds it that has changed nothing: float32 must be float32 all the same.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    data_dir = tmp_path / "data"
    shutil.copytree(clips_dir, data_dir)
    make_latents(data_dir, device=device_name(device), precision=precision)
    errors = relative_errors(data_dir, on_a_cpu, LATENTS)
    record_property("relative_error", f"{errors.max():.2g}")
    assert bool((errors <= BOUNDS[precision]).all()), errors.max()


def test_latents_of_resized_pictures_are_those_of_a_cpu(
    clips_dir: Path, device: torch.device, tmp_path: Path, record_property: Record
) -> None:
    for name, place in (("found", device_name(device)), ("expected", "cpu")):
        shutil.copytree(clips_dir, tmp_path / name)
        make_latents(tmp_path / name, device=place, precision="float32", size=RESIZED_PX)  # type: ignore[arg-type]
    errors = relative_errors(tmp_path / "found", tmp_path / "expected", LATENTS)
    record_property("relative_error", f"{errors.max():.2g}")
    assert bool((errors <= BOUNDS["float32"]).all()), errors.max()


@pytest.mark.parametrize("name", NAMES)
def test_segments_of_a_video_vae_are_those_of_a_cpu_two_at_a_time(
    name: str, clips_dir: Path, device: torch.device, tmp_path: Path, record_property: Record
) -> None:
    if device.type == "cpu" and name != "AutoencoderKLWan":
        pytest.skip("one class is enough for the dry run")
    vae = str(save_model(name, tmp_path / "vae"))
    posterior = "mean" if name == "AutoencoderKLCosmos" else "sample"
    for folder, place in (("found", device_name(device)), ("expected", "cpu")):
        shutil.copytree(clips_dir, tmp_path / folder)
        of_vae = {"vae": vae, "fps": "8", "segment": "9f", "posterior": posterior}
        make_latents(tmp_path / folder, device=place, precision="float32", size=32, batch=18, **of_vae)  # type: ignore[arg-type]
    assert all(array.ndim == 5 for array in column(tmp_path / "found", LATENTS).values())
    errors = relative_errors(tmp_path / "found", tmp_path / "expected", LATENTS)
    record_property("relative_error", f"{errors.max():.2g}")
    assert bool((errors <= BOUNDS["float32"]).all()), errors.max()


def test_text_embeddings_are_those_of_a_cpu(
    on_a_cpu: Path, clips_dir: Path, device: torch.device, tmp_path: Path, record_property: Record
) -> None:
    data_dir = tmp_path / "data"
    shutil.copytree(clips_dir, data_dir)
    make_text(data_dir, device=device_name(device))
    errors = relative_errors(data_dir, on_a_cpu, TEXT)
    record_property("relative_error", f"{errors.max():.2g}")
    assert bool((errors <= BOUNDS["float32"]).all()), errors.max()


def test_the_commands_find_the_gpu_by_themselves(
    on_a_cpu: Path, clips_dir: Path, cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes, each with a GPU of its own: one here."""
    from clipmill.prep.cli import main

    data_dir = tmp_path / "data"
    shutil.copytree(clips_dir, data_dir)
    common = ["--data", str(data_dir), "--engine", "processes"]
    for words in (
        ["latents", "--vae", "tiny", "--size", str(SIZE_PX), "--fps", "2", *common],
        ["text", "--clip", "tiny", *common],
    ):
        monkeypatch.setattr(sys, "argv", ["prep", *words])
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code
        assert not status, words
    for name in (LATENTS, TEXT):
        assert bool((relative_errors(data_dir, on_a_cpu, name) <= BOUNDS["float32"]).all())
