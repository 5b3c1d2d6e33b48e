"""Runs and exports of 893498c are resumed, evaluated, exported and used as initial weights, with the numbers of then.

`make_old_runs.py` made `old_runs.tar.xz` and describes it. The tests use the command line and public file formats only,
so that they do not depend on where the code is. Numbers are compared bit by bit where the processor and torch are the
same, with two exceptions. The run `infonce` resizes its frames: bilinear interpolation is rounded to the nearest level
since then, which changed its losses by 2 in 100,000 and its gradients' norms by 8 in 10,000. On another processor the
losses differed by less than 1 in 1,000,000. Both have a relative tolerance of 5e-3.
"""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.train.make_old_runs import (
    EVALUATIONS,
    EXPORTS,
    PIXEL_FORMATS,
    PIXELS,
    RUNS,
    VOCABULARY,
    WRITTEN,
    arithmetic,
    read_lines,
    start_flags,
)
from tests.train.test_cli import train
from train.evaluation.record import FOLDER
from train.report.card import CARD_FILE

__all__ = ["train"]

Train = Callable[..., int]
pytestmark = pytest.mark.usefixtures("whole_text_tower")
RESIZED = "infonce"
TOLERANCE = 5e-3
ALIKE = ("loss", "grad_norm", "lr", "epoch", "num_failed")  # of a step; evaluations are alike too, times are not
VERSIONS = ("transformers_version",)  # of the library, not of what was written
NAMES = ("evaluation", "ids_hash", "label", "split", "variant")  # texts of a score that are no prose
# Random numbers, and a bias that began at 0: another processor may round them otherwise.
NEW_LAYERS = ("classifier.weight", "head.weight", "fc_norm.bias")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the archive holds, 0.3 GB, until the module is done."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(Path(__file__).with_name("old_runs.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def expected(old: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((old / "expected.json").read_bytes())
    return found


@pytest.fixture
def here(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which the data and the exports lie where the runs' settings say, and runs can be made."""
    for name in ("data", "exports"):
        (tmp_path / name).symlink_to(old / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def is_exact(expected: dict[str, Any]) -> bool:
    return bool(arithmetic() == expected["arithmetic"])


def assert_same_numbers(now: Any, before: Any, *, rel: float, key: str = "") -> None:
    """Compares what is a number or a name, wherever it stands; prose may be worded anew, and there may be more."""
    if isinstance(before, dict):
        for name, value in before.items():
            assert_same_numbers(now[name], value, rel=rel, key=name)
    elif isinstance(before, list):
        assert len(now) == len(before), key
        for one, other in zip(now, before, strict=True):
            assert_same_numbers(one, other, rel=rel, key=key)
    elif isinstance(before, float):
        assert now == pytest.approx(before, rel=rel, abs=0), key
    elif not isinstance(before, str) or key in NAMES:
        assert now == before, key


def assert_same_files(now: Path, before: Path) -> None:
    """Compares two exports: the same files, tensors that are equal bit by bit, and equal configurations."""
    files = {path.name for path in now.iterdir()} - set(VOCABULARY) - {FOLDER, CARD_FILE}
    assert files == {path.name for path in before.iterdir()}
    for name in files:
        if name.endswith(".json"):
            assert holds(read_json(now / name), read_json(before / name)), name
        else:
            assert_same_tensors(tensors(now / name), tensors(before / name))


def assert_same_tensors(now: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    assert now.keys() == before.keys()
    for name, tensor in before.items():
        assert (now[name].dtype, now[name].shape) == (tensor.dtype, tensor.shape), name
        if name in NEW_LAYERS:
            torch.testing.assert_close(now[name], tensor)
        else:
            assert torch.equal(now[name], tensor), name


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def holds(now: Any, before: Any) -> bool:
    """Whether a configuration has all that it had; transformers writes its own defaults beside it."""
    if isinstance(before, dict):
        return all(key in VERSIONS or (key in now and holds(now[key], value)) for key, value in before.items())
    return bool(now == before)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor]
    found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)["model"]
    return found


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_goes_on_as_it_would_have(
    train: Train, old: Path, expected: dict[str, Any], here: Path, name: str
) -> None:
    shutil.copytree(old / "runs" / name, here / "runs" / name)
    task = RUNS[name].split()[0]
    assert train(task, "--out", f"runs/{name}", "--resume") == 0
    before, now = expected["runs"][name]["steps"], read_lines(here / "runs" / name / "metrics.jsonl")
    assert [line["step"] for line in now] == [line["step"] for line in before]
    rel = 0.0 if is_exact(expected) and name != RESIZED else TOLERANCE
    for step, line in zip(now, before, strict=True):
        same = {key: value for key, value in line.items() if key in ALIKE or "/" in key}
        assert_same_numbers(step, same, rel=rel)
    assert "<svg" in (here / "runs" / name / "index.html").read_text()


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_old_run_is_evaluated_to_its_numbers(
    train: Train,
    old: Path,
    expected: dict[str, Any],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    (here / "runs").symlink_to(old / "runs")
    monkeypatch.setenv("PATH", "")  # METEOR would wait for java
    for evaluation, score in expected["runs"][name]["scores"].items():
        kind, _, flags = evaluation.partition(" ")
        capsys.readouterr()
        assert train("eval", kind, f"runs/{name}", *flags.split(), "--json") == 0
        now, written = json.loads(capsys.readouterr().out), score.pop("written", None)
        assert_same_numbers(now, score, rel=0.0 if is_exact(expected) else TOLERANCE)
        if written is not None and is_exact(expected):
            assert json.loads((old / "runs" / name / WRITTEN).read_bytes()) == written


@pytest.mark.parametrize("name", EXPORTS)
def test_an_old_run_is_exported_to_the_same_files(
    train: Train, old: Path, expected: dict[str, Any], here: Path, name: str
) -> None:
    (here / "runs").symlink_to(old / "runs")
    assert train("export", *f"runs/{EXPORTS[name][0]}".split(), "--out", "again") == 0
    assert_same_files(here / "again", old / "exports" / name)
    for file, checksum in expected["exports"][name]["vocabulary"].items():
        assert hashlib.sha256((here / "again" / file).read_bytes()).hexdigest() == checksum, file


@pytest.mark.parametrize("name", EXPORTS)
def test_a_run_starts_from_an_old_export(train: Train, expected: dict[str, Any], here: Path, name: str) -> None:
    assert train(*EXPORTS[name][1].split(), *start_flags(f"exports/{name}", "run").split()) == 0
    (line,) = read_lines(here / "run" / "metrics.jsonl")
    rel = 0.0 if is_exact(expected) else TOLERANCE
    assert line["loss"] == pytest.approx(expected["exports"][name]["first_loss"], rel=rel, abs=0)


@pytest.mark.parametrize("name", PIXELS)
def test_an_old_export_of_videomae_on_pixels_comes_back(train: Train, old: Path, here: Path, name: str) -> None:
    weights = "exports/pixels-hf"
    assert train(*PIXELS[name][1].split(), *start_flags(weights, "run", lr="1e-12").split()) == 0
    for form in PIXEL_FORMATS:
        assert train("export", "run", "--format", form, "--out", form) == 0
        assert_same_files(here / form, old / "exports" / f"{name}-{form}")


def test_one_page_shows_all_old_runs(train: Train, old: Path, here: Path) -> None:
    runs = [str(old / "runs" / name) for name in RUNS]
    assert train("overview", *runs, "--out", "all.html") == 0
    page = (here / "all.html").read_text()
    assert all(f'runs/{name}/index.html">{name}</a>' in page for name in RUNS)
