"""The model card of an export: valid metadata, the run's metrics, and code that opens the weights."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from clipmill.manifests.formatting import percent
from clipmill.train.inference import load_model
from tests.train.running import train


@pytest.fixture(scope="module")
def evaluated_run(runs: dict[str, Path], moving: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An evaluated run and its export for open_clip."""
    run, out = tmp_path_factory.mktemp("carded") / "a_run|", tmp_path_factory.mktemp("out") / "exported"
    shutil.copytree(runs["dual-encoder"], run)
    assert train("eval", "retrieval", run, "--shards", moving) == 0
    assert train("export", run, "--format", "open_clip", "--out", out) == 0
    return run, out


def test_metrics_of_clips_are_not_given_out_as_those_of_an_image_model(evaluated_run: tuple[Path, Path]) -> None:
    run, out = evaluated_run
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, card.data.library_name) == ("unknown", "open_clip")
    assert card.data.eval_results is None and "model-index" not in card.content
    message = "These are metrics of the run's video model, which reads clips of 4 frames"
    assert message in card.text and "reads single images, computes something else, and was not evaluated" in card.text
    result = json.loads((run / "evaluations" / "retrieval-val.json").read_text())
    assert f"| {percent(result['text_to_video']['recall']['1'])} |" in card.text


def test_the_image_model_has_the_metrics_that_were_measured_with_single_frames(
    evaluated_run: tuple[Path, Path], moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = shutil.copytree(evaluated_run[0], tmp_path / "run"), tmp_path / "out"
    single = ("--num-frames", 1, "--sampling", "uniform")
    for more in ((), ("--clips", 4), ("--split", "train")):
        assert train("eval", "retrieval", run, "--shards", moving, *single, *more) == 0
    assert train("export", run, "--format", "open_clip", *single, "--out", out) == 0
    card = ModelCard.load(out / "README.md")
    assert "These are metrics of the run's video model" not in card.text
    names = [metric.metric_name for metric in card.data.eval_results]
    assert len(names) == 18 == len(set(names)) and {metric.dataset_split for metric in card.data.eval_results} == {
        "val",
        "train",
    }
    assert len({(metric.task_name, metric.dataset_name) for metric in card.data.eval_results}) == 3
    # The card contains the metrics of the model that open_clip reads from the folder, and no other metrics.
    shutil.rmtree(out / "clipmill")
    (out / "video_extras.safetensors").unlink()
    capsys.readouterr()
    assert train("eval", "retrieval", out, "--shards", moving, *single, "--clips", 4, "--json") == 0
    measured = json.loads(capsys.readouterr().out)
    for way, words in (("text_to_video", "text → video"), ("video_to_text", "video → text")):
        for k, recall in measured[way]["recall"].items():
            [metric_value] = [
                metric.metric_value
                for metric in card.data.eval_results
                if "4-clips" in metric.metric_name and metric.metric_name.endswith(f", {words}: R@{k}")
            ]
            assert metric_value == pytest.approx(100 * recall, abs=0.01)


def test_models_that_compute_what_their_run_does_have_its_metrics_as_the_hub_reads_them(
    runs: dict[str, Path], moving: Path, tmp_path: Path
) -> None:
    run, out = shutil.copytree(runs["mae"], tmp_path / "run"), tmp_path / "out"
    assert train("eval", "probe", run, "--shards", moving, "--label", "verb", "--neighbours", 5) == 0
    assert train("export", run, "--format", "hf", "--out", out) == 0
    card = ModelCard.load(out / "README.md")
    result = json.loads((run / "evaluations" / "probe-val.json").read_text())
    metric_values = {metric.metric_name: metric.metric_value for metric in card.data.eval_results}
    trained = next(
        finding_of
        for finding_of in result["findings"]
        if (finding_of["encoder"], finding_of["method"]) == ("trained", "knn")
    )
    assert metric_values["probe-val, verb, k-NN: top-1"] == pytest.approx(100 * trained["found"]["top1"], abs=0.01)
    assert "random" in card.text and not any("random" in name for name in metric_values), "written by another model"
    assert "*majority baseline*" in card.text


def test_the_card_states_protocol_chance_and_limits_and_no_path_of_this_machine(
    evaluated_run: tuple[Path, Path],
) -> None:
    text = (evaluated_run[1] / "README.md").read_text()
    assert "*chance*" in text and "ties count against the model" in text
    assert "an image tower cannot use the temporal embedding of 4 steps" in text
    assert "# a\\_run\\|\n" in text, "names must not become markup"
    assert str(evaluated_run[0].parent) not in text and "/tmp/" not in text


def test_the_code_of_the_card_opens_the_weights(
    evaluated_run: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (evaluated_run[1] / "README.md").read_text()
    theirs, ours = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, Any] = {}
    monkeypatch.chdir(evaluated_run[1].parent)
    for code in (theirs, ours):
        exec(code, names)  # noqa: S102 - of a card that was written just now
    assert type(names["model"]) is type(load_model(evaluated_run[1]))
    assert names["tokenizer"](["a text"]).shape == (1, 77)


def test_results_of_other_checkpoints_are_left_out(runs: dict[str, Path], moving: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["mae"], run)
    shutil.rmtree(run / "evaluations", ignore_errors=True)  # written by other tests
    assert train("eval", "reconstruction", run, "--shards", moving) == 0
    path = run / "evaluations" / "reconstruction-val.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 2}))
    assert train("export", run, "--format", "hf", "--out", tmp_path / "out") == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Not evaluated." in text and "VideoMAEForPreTraining.from_pretrained" in text
