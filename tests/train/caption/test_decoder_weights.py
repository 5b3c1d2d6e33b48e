"""`--decoder.weights`: a folder or a name on Hugging Face; other values are rejected."""

import json
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.tasks.caption.model import decoder_folder
from clipmill.train.weights.hf_caption import read_caption_folder


@pytest.mark.parametrize("expected", ["no gpt", "/nowhere/gpt2", "./gpt2", "~/gpt2", "a/b/c", "my gpt/2", "gpt²"])
def test_what_can_only_be_a_folder_is_not_asked_for_elsewhere(expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("nothing must be downloaded"))
    with pytest.raises(UserError, match="there is no folder"):
        decoder_folder(expected, say=lambda _: None)


@pytest.mark.parametrize("expected", ["gpt2", "openai-community/gpt2-medium", "my_gpt/v1.0"])
def test_before_a_name_is_asked_for_it_is_said_to_be_no_folder(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path / "found"))
    assert decoder_folder(expected, say=messages.append) == tmp_path / "found"
    assert f"there is no folder {expected}, so" in messages[0]


def test_instead_of_another_model_a_decoder_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match="is a bert") as caught:
        read_caption_folder(tmp_path, needs_decoder=True)
    assert "GPT-2" in (caught.value.hint or "") and "TimeSformer" not in (caught.value.hint or "")
