"""Runs whose settings or files were changed after training, when they are opened for an evaluation."""

import json
from pathlib import Path

import pytest

from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.files import save_settings
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.caption.spec import CaptionerSettings
from clipmill.train.tasks.classify.spec import ClassifySettings
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.mae.spec import MaeSettings
from tests.train.running import train, two_lines

SETTINGS: dict[str, type[ClipSettings]] = {
    "dual-encoder": DualEncoderSettings,
    "classify": ClassifySettings,
    "mae": MaeSettings,
    "caption": CaptionerSettings,
}


@pytest.mark.parametrize(
    ("task", "command"),
    [
        ("dual-encoder", ("eval", "retrieval")),
        ("classify", ("eval", "classification")),
        ("mae", ("eval", "reconstruction")),
        ("mae", ("eval", "probe", "--label", "shape")),
        ("caption", ("eval", "caption")),
        ("caption", ("export", "--format", "hf", "--out", "exported")),
    ],
)
def test_a_run_without_a_checkpoint_is_named_before_its_data_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, command: tuple[str, ...]
) -> None:
    run = RunFolder(tmp_path)
    save_settings(SETTINGS[task](shards=str(tmp_path / "nowhere")), run.settings)
    run.facts.write_text(json.dumps({"task": task, "classes": {"label": "shape", "names": ["a", "b"]}}))
    assert train(*command, tmp_path) == 2
    error, hint = two_lines(capsys)
    assert f"{tmp_path} has no checkpoint yet" in error and "--checkpoint-every" in hint
