"""A task from another package (`tests/plugin_example`): it trains, evaluates, resumes, is reported and is exported."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from clipmill.train.run.checkpoint import read_weights
from clipmill.train.run.folder import RunFolder, read_lines
from tests.forks import Forks
from tests.plugins import example_installed
from tests.served import Commands, run_commands
from tests.train.running import SMALL

STEPS = ["--steps", "6", "--checkpoint-every", "3", "--keep-checkpoints", "9"]


Trained = Callable[..., str]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[Commands]:
    """Run a command line in a program in which the task is installed; return exit status, stdout and stderr."""
    installed = example_installed(tmp_path_factory.mktemp("installed"))
    with run_commands("train", python=forks.python(), **installed) as run:
        yield run


@pytest.fixture(scope="module")
def train_command(train: Commands) -> Trained:
    """Run a command line that must succeed, and return its output."""

    def run(*arguments: object) -> str:
        status, out, err = train(*arguments)
        assert status == 0, err
        return out

    return run


@pytest.fixture(scope="module")
def run(train_command: Trained, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "order"
    evaluation = ["--evaluate.every", "3", "--best", "val/accuracy"]
    train_command("frame-order", "--shards", data_dir, "--out", out, *SMALL, *STEPS, *evaluation)
    return out


def test_it_trains_and_evaluates_in_the_loop(run: Path) -> None:
    lines = read_lines(RunFolder(run).metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "val/accuracy" in line] == [3, 6]
    assert json.loads((run / "run.json").read_bytes())["task"] == "frame-order"


def test_it_resumes_as_if_it_had_not_stopped(train_command: Trained, run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints/step_000006")
    settings = (again / "settings.yaml").read_text().replace(str(run), str(again))
    (again / "settings.yaml").write_text(settings)
    train_command("frame-order", "--resume", "--out", again)
    before, after = (read_lines(RunFolder(path).metrics) for path in (run, again))
    assert [line["loss"] for line in after] == [line["loss"] for line in before]


def test_it_is_evaluated_and_on_its_page_and_the_overview(train_command: Trained, run: Path, tmp_path: Path) -> None:
    result = json.loads(train_command("eval", "frame-order", run, "--split", "train", "--json"))
    assert result["evaluation"] == "frame-order" and 0 <= result["accuracy"] <= 1
    assert result["command"] == f"train eval frame-order {run} --split train"
    page = (run / "index.html").read_text()
    assert "<h2>Frame order</h2>" in page and "Frame order, %" in page
    train_command("overview", run, "--out", tmp_path / "all.html")
    assert "train frame-order" in (tmp_path / "all.html").read_text()
    assert "frame-order" in train_command("--help")


def test_other_evaluations_and_formats_are_refused(train: Commands, run: Path) -> None:
    status, out, err = train("eval", "retrieval", run)
    assert (status, out) == (2, "")
    assert "is a run of train frame-order, not of train dual-encoder" in err


def test_it_is_exported_and_another_run_starts_from_it(
    train_command: Trained, run: Path, data_dir: Path, tmp_path: Path
) -> None:
    train_command("export", run, "--format", "plain", "--out", tmp_path / "export")
    exported = load_file(tmp_path / "export/model.safetensors")
    weights = read_weights(RunFolder(run).require_checkpoint())
    assert exported.keys() == weights.keys() and all((exported[name] == weights[name]).all() for name in weights)
    start = ["--init.weights", run, "--steps", "1"]
    train_command("frame-order", "--shards", data_dir, "--out", tmp_path / "next", *SMALL, *start)
    assert json.loads((tmp_path / "next/run.json").read_bytes())["weights"]["num_copied"] == len(weights)
