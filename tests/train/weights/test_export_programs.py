"""`train export --format torch` and `onnx`: a process without clipmill computes what the run's own tower does."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from clipmill import load_model
from tests.train.running import train

SIDE = 32
SMALL = ["--model", "tiny", "--num-frames", "2", "--size-px", str(SIDE), "--batch", "4", "--lr", "1e-3", "--steps", "2"]
MEAN = ["--init.pixel-mean", "0.42", "0.46", "0.41"]
# Without clipmill: an installed package that was imported would show in sys.modules.
OPEN = {
    "torch": "import torch; model = torch.export.load(folder + '/model.pt2').module()\n"
    "run = lambda clips: model(torch.from_numpy(clips)).detach().numpy()",
    "onnx": "import onnxruntime; model = onnxruntime.InferenceSession(folder + '/model.onnx')\n"
    "run = lambda clips: model.run(None, {'clips': clips})[0]",
}
SCRIPT = """
import sys, numpy
folder = sys.argv[1]
OPEN
for name in sys.argv[2:]:
    numpy.save(name + '.out.npy', run(numpy.load(name)))
assert not any(name.partition('.')[0] == 'clipmill' for name in sys.modules)
"""


@pytest.fixture(scope="module")
def run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dual encoder with a temporal embedding and a normalisation of its own."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train("dual-encoder", "--shards", data_dir, "--out", out, *SMALL, *MEAN, "--towers.temporal", "random") == 0
    return out


def outputs(folder: Path, form: str, batches: list[np.ndarray], *, tmp_path: Path) -> list[np.ndarray]:
    """What a fresh process computes from the exported program."""
    names = [str(tmp_path / f"{number}.npy") for number in range(len(batches))]
    for name, clips in zip(names, batches, strict=True):
        np.save(name, clips)
    script = SCRIPT.replace("OPEN", OPEN[form])
    subprocess.run([sys.executable, "-c", script, str(folder), *names], check=True, cwd=tmp_path, timeout=200)
    return [np.load(f"{name}.out.npy") for name in names]


def clips_of(*sizes: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((size, 3, 2, SIDE, SIDE), dtype=np.float32) for size in sizes]


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_the_video_tower_is_served_without_clipmill(run: Path, tmp_path: Path, form: str) -> None:
    out, batches = tmp_path / "exported", clips_of(1, 5)
    assert train("export", run, "--format", form, "--out", out) == 0
    model = load_model(run, device="cpu")
    for clips, found in zip(batches, outputs(out, form, batches, tmp_path=tmp_path), strict=True):
        np.testing.assert_allclose(found, model.encode_video(clips).numpy(), atol=1e-5)
    told = json.loads((out / "preprocessing.json").read_text())
    assert told["input"]["shape"] == ["batch", 3, 2, SIDE, SIDE] and told["input"]["sampling"] == "uniform"
    assert told["input"]["mean"] == [0.42, 0.46, 0.41] and len(told["input"]["std"]) == 3
    assert told["output"]["logit_scale"] == pytest.approx(model.logit_scale) and model.logit_scale is not None
    card = (out / "README.md").read_text()
    assert "[0.42, 0.46, 0.41]" in card and "load_model" not in card


def test_a_classifier_is_served_as_its_logits(moving: Path, tmp_path: Path) -> None:
    run, out, batches = tmp_path / "run", tmp_path / "exported", clips_of(1, 5)
    assert train("classify", "--shards", moving, "--label", "action", "--out", run, *SMALL) == 0
    assert train("export", run, "--format", "torch", "--out", out) == 0
    model = load_model(run, device="cpu").model
    for clips, found in zip(batches, outputs(out, "torch", batches, tmp_path=tmp_path), strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(found, model(torch.from_numpy(clips)).numpy(), atol=1e-5)
    told = json.loads((out / "preprocessing.json").read_text())["output"]
    assert len(told["classes"]) == found.shape[1]
