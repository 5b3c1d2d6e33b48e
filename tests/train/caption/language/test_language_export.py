"""`train export --format lm`: transformers, peft and torch can open the folder, and the script of its card runs."""

import re
import runpy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.language import LanguageCaptioner
from clipmill.train.tasks.caption.video_captions import open_captioner
from tests.train.caption.language.test_language_runs import LM
from tests.train.running import train

ADAPTED = ("--decoding.min-tokens", 4, "--lora.rank", 2, "--lora.alpha", 8, "--lora.towers", "decoder", "--lr", "1e-2")


WAYS = [("llama", ADAPTED), pytest.param("qwen3", ("--decoder.reducer", "attention"), marks=pytest.mark.nightly)]


@pytest.mark.parametrize(("kind", "flags"), WAYS)
def test_the_cards_script_writes_what_the_run_writes(
    kind: str,
    flags: tuple[object, ...],
    data_dir: Path,
    language_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, folder = tmp_path / "run", tmp_path / "folder"
    words = (
        "--decoder.lm",
        language_models[kind],
        *LM,
        "--decoder.prompt",
        "see {video} of ",
        "--steps",
        6,
        "--towers.depth",
        1,
        *flags,
    )
    assert train("caption", "--shards", data_dir, "--out", run, *words) == 0
    assert train("export", run, "--format", "lm", "--out", folder) == 0
    FrameNumberVideo(num_frames=40, fps=Fraction(10), width=64, height=48).write(folder / "video.mp4")
    monkeypatch.chdir(folder)
    script = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "caption.py").write_text(script)
    names: dict[str, Any] = runpy.run_path(str(tmp_path / "caption.py"))
    captioner = open_captioner(str(run))
    model, end_id = captioner.model, captioner.task.decoder.tokenizer.end_id
    assert isinstance(model, LanguageCaptioner)
    decoding = captioner.task.decoding()
    captions = generate_captions(model, names["clips"], decoding, end_id=end_id, samples=[0])
    with torch.no_grad():
        torch.testing.assert_close(names["prefix"](names["clips"]), model.encode(names["clips"]))
        # The language model includes its adapter, if it has one.
        prefix = model.encode(names["clips"])
        torch.testing.assert_close(names["lm"](inputs_embeds=prefix).logits, model.decoder(inputs_embeds=prefix).logits)
    assert (folder / "adapter").is_dir() == (kind != "qwen3")
    ids = names["ids"][0].tolist()
    assert ids == captions.tokens_VL[0].tolist()[: len(ids)] and len(ids) > 2
    assert captioner.task.decoder.tokenizer.text(ids) == " ".join(names["caption"].split())
