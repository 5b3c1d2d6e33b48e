"""The model card of an export: valid metadata, the run's metrics, and code that opens the weights."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from clipmill.train.inference.model import load_model
from tests.train.running import train


@pytest.fixture(scope="module")
def evaluated(runs: dict[str, Path], moving: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An evaluated run, and its export for open_clip."""
    run, out = tmp_path_factory.mktemp("carded") / "a_run|", tmp_path_factory.mktemp("out") / "exported"
    shutil.copytree(runs["dual-encoder"], run)
    assert train("eval", "retrieval", run, "--shards", moving) == 0
    assert train("export", run, "--format", "open_clip", "--out", out) == 0
    return run, out


def test_the_card_has_the_metrics_of_the_run_as_the_hub_reads_them(evaluated: tuple[Path, Path]) -> None:
    run, out = evaluated
    data = ModelCard.load(out / "README.md").data
    assert (data.license, data.library_name) == ("unknown", "open_clip")
    result = json.loads((run / "evaluations" / "retrieval-val.json").read_text())
    found = {one.metric_name: one.metric_value for one in data.eval_results}
    assert found["text → video: R@1"] == pytest.approx(100 * result["text_to_video"]["recall"]["1"], abs=0.01)
    assert len(found) == 6


def test_the_card_states_protocol_chance_and_limits_and_no_path_of_this_machine(evaluated: tuple[Path, Path]) -> None:
    text = (evaluated[1] / "README.md").read_text()
    assert "*chance*" in text and "ties count against the model" in text
    assert "temporal embedding of 4 steps has no place in an image tower" in text
    assert "# a\\_run\\|\n" in text, "names are not markup"
    assert str(evaluated[0].parent) not in text and "/tmp/" not in text


def test_the_code_of_the_card_opens_the_weights(evaluated: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    text = (evaluated[1] / "README.md").read_text()
    theirs, ours = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, Any] = {}
    monkeypatch.chdir(evaluated[1].parent)
    for code in (theirs, ours):
        exec(code, names)  # noqa: S102 - of a card that was written just now
    assert type(names["model"]) is type(load_model(evaluated[1]))
    assert names["tokenizer"](["a text"]).shape == (1, 77)


def test_results_of_other_checkpoints_are_left_out(runs: dict[str, Path], moving: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["mae"], run)
    assert train("eval", "reconstruction", run, "--shards", moving) == 0
    path = run / "evaluations" / "reconstruction-val.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 2}))
    assert train("export", run, "--format", "hf", "--out", tmp_path / "out") == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Not evaluated." in text and "VideoMAEForPreTraining.from_pretrained" in text
