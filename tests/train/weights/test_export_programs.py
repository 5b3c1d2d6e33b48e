"""`train export --format torch` and `onnx`: a process without clipmill computes the output of the run's tower."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from clipmill import load_model
from tests.forks import Forks
from tests.train.running import train

SIDE = 32
SMALL = ["--model", "tiny", "--towers.depth", "2", "--num-frames", "2", "--size-px", str(SIDE), "--batch", "4"]
SMALL += ["--lr", "1e-3", "--steps", "2"]
MEAN = ["--init.pixel-mean", "0.42", "0.46", "0.41"]
RNG = np.random.default_rng(0)
BATCHES = [RNG.standard_normal((size, 3, 2, SIDE, SIDE), dtype=np.float32) for size in (1, 5)]
# The script runs without clipmill: sys.modules would contain the package if it had been imported.
OPEN = {
    "torch": "import torch\n"
    "def opened(folder):\n"
    "    model = torch.export.load(folder + '/model.pt2').module()\n"
    "    return lambda clips: model(torch.from_numpy(clips)).detach().numpy()",
    "onnx": "import onnxruntime\n"
    "def opened(folder):\n"
    "    model = onnxruntime.InferenceSession(folder + '/model.onnx')\n"
    "    return lambda clips: model.run(None, {'clips': clips})[0]",
}
SCRIPT = """
import sys, numpy
OPEN
folder, *names = sys.argv[1:]
run = opened(folder)
for number, name in enumerate(names):
    numpy.save(f"{folder}/{number}.out.npy", run(numpy.load(name)))
assert not any(name.partition('.')[0] == 'clipmill' for name in sys.modules)
"""


@pytest.fixture(scope="module")
def run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dual encoder with a temporal embedding and custom normalisation."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train("dual-encoder", "--shards", data_dir, "--out", out, *SMALL, *MEAN, "--towers.temporal", "random") == 0
    return out


@pytest.fixture(scope="module")
def classifier(moving: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train("classify", "--shards", moving, "--label", "action", "--out", out, *SMALL) == 0
    return out


def export_and_run(weights: Path, form: str, folder: Path, *, python: Path) -> Path:
    """Export a model to a folder, and save the outputs that a process without clipmill computes for both batches."""
    names = [str(folder / f"{number}.npy") for number in range(len(BATCHES))]
    for name, clips in zip(names, BATCHES, strict=True):
        np.save(name, clips)
    out = folder / form
    assert train("export", weights, "--format", form, "--out", out) == 0
    command = [str(python), "-m", "tests.fresh", SCRIPT.replace("OPEN", OPEN[form]), str(out), *names]
    subprocess.run(command, check=True, cwd=folder, timeout=200)
    return out


def outputs(folder: Path) -> list[np.ndarray]:
    return [np.load(folder / f"{number}.out.npy") for number in range(len(BATCHES))]


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_the_video_tower_is_served_without_clipmill(run: Path, tmp_path: Path, forks: Forks, form: str) -> None:
    out, model = export_and_run(run, form, tmp_path, python=forks.python()), load_model(run, device="cpu")
    for clips, expected_output in zip(BATCHES, outputs(out), strict=True):
        np.testing.assert_allclose(expected_output, model.encode_video(clips).numpy(), atol=1e-5)
    told = json.loads((out / "preprocessing.json").read_text())
    assert told["input"]["shape"] == ["batch", 3, 2, SIDE, SIDE] and told["input"]["sampling"] == "uniform"
    assert told["input"]["mean"] == [0.42, 0.46, 0.41] and len(told["input"]["std"]) == 3
    assert told["output"]["logit_scale"] == pytest.approx(model.logit_scale) and model.logit_scale is not None
    card = (out / "README.md").read_text()
    assert "[0.42, 0.46, 0.41]" in card and "load_model" not in card


@pytest.mark.nightly
def test_a_classifier_is_served_as_its_logits(classifier: Path, tmp_path: Path, forks: Forks) -> None:
    out = export_and_run(classifier, "torch", tmp_path, python=forks.python())
    model = load_model(classifier, device="cpu").model
    for clips, expected_output in zip(BATCHES, outputs(out), strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(expected_output, model(torch.from_numpy(clips)).numpy(), atol=1e-5)
    told = json.loads((out / "preprocessing.json").read_text())["output"]
    assert len(told["classes"]) == expected_output.shape[1]
