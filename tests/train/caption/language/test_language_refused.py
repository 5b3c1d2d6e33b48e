"""`--decoder.lm` values that are rejected before a run starts, with a two-line message."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.caption.language.test_language_runs import LM
from tests.train.running import train, two_lines


def _change(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, **values}))

    return change


def _without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def _other(kind: str, **values: Any) -> Callable[[Path], None]:
    """Replace the model of a folder with a different kind of model that uses the same tokenizer."""

    def change(folder: Path) -> None:
        import transformers

        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 300}
        config = getattr(transformers, f"{kind}Config")(**{**size, **values})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    return change


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
BAD: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no tokenizer": (_without("tokenizer.json"), "there is no tokenizer in", "--decoder.tokenizer"),
    "no configuration": (_without("config.json"), "has no config.json", "causal language model"),
    "no weights": (_without("model.safetensors"), "cannot read the weights of", "in safetensors files"),
    "cut weights": (_cut, "cannot read the weights of", "download the folder"),
    "other weights": (_change("config.json", intermediate_size=65), "do not fit its config.json", "download the"),
    "contradiction": (
        _change("config.json", num_hidden_layers=3),
        "(3) must be equal to the number",
        "download the folder",
    ),
    "other vocabulary": (_change("config.json", vocab_size=100), "do not belong together", "use the tokenizer"),
    "encoder and decoder": (
        _change("config.json", **T5),
        "T5ForConditionalGeneration (an encoder and a decoder of type t5)",
        "Qwen3",
    ),
    "state space": (_other("Mamba", state_size=4), "is a mamba, which does not generate text token by token", "Qwen3"),
    "no cache": (_other("OpenAIGPT", n_embd=32, n_layer=1, n_head=2), "is a openai-gpt, which does not", "Qwen3"),
    "encoder": (_other("Bert", num_attention_heads=2), "is a bert, which does not generate text", "Qwen3"),
    "no causal model": (_change("config.json", **BERT), "BertForMaskedLM (type bert)", "Qwen3"),
    "unknown model": (_change("config.json", model_type="mine", architectures=["Mine"]), "Mine (type mine)", "Qwen3"),
    "no end": (_change("tokenizer_config.json", eos_token=None), "no end token", "eos_token"),
    "short context": (_change("config.json", max_position_embeddings=19), "has 19 tokens, but a captioner", "fewer"),
    "quantized": (_change("config.json", quantization_config={"bits": 4}), "are quantized", "bfloat16"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_folder_that_cannot_be_the_decoder(
    what: str,
    data_dir: Path,
    language_models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change, message, hint = BAD[what]
    folder, out = tmp_path / "folder", tmp_path / "run"
    shutil.copytree(language_models["qwen3"], folder)
    change(folder)
    capsys.readouterr()
    assert train("caption", "--shards", data_dir, "--out", out, "--decoder.lm", folder, *LM, "--steps", 1) == 2
    lines = two_lines(capsys)
    assert message in lines[0] and hint in lines[1], lines
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--decoder.lm", "/nowhere/qwen3"), "there is no folder /nowhere/qwen3 (--decoder.lm)"),
        (("--decoder.visual-tokens", 8), "--decoder.lm"),
        (
            ("--decoder.lm", "LM", "--decoder.weights", "gpt2"),
            "--decoder.weights is gpt2, but --decoder.lm has its own",
        ),
        (("--decoder.lm", "LM", "--decoder.width", 64), "--decoder.width is 64, but --decoder.lm has its own"),
        (("--decoder.lm", "LM", "--decoder.name", "gpt2"), "--decoder.name is gpt2, which has no effect"),
        (("--decoder.lm", "LM", "--decoder.prompt", "say:"), "which contains {video} 0 times"),
        (("--decoder.lm", "LM", "--decoder.visual-tokens", 9), "the encoder has only 8 tokens per clip"),
        (("--decoder.lm", "LM", "--freeze", "decoder-except-cross-attention"), "has no cross-attention"),
        (
            ("--decoder.lm", "LM", "--decoder.visual-tokens", 8, "--freeze", "decoder.blocks:3"),
            "the decoder tower has only 2 blocks",
        ),
        (("--decoder.lm", "LM", "--parallel.stages", 2), "a captioner with --decoder.lm has no stages"),
        (("--decoder.lm", "LM", "--lora.rank", 2), "there are no pretrained weights to adapt"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: tuple[object, ...],
    message: str,
    data_dir: Path,
    language_models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [language_models["qwen3"] if flag == "LM" else flag for flag in flags]
    small = [flag for flag in LM if flag not in ("--decoder.visual-tokens", 4)]
    assert train("caption", "--shards", data_dir, "--out", tmp_path / "run", *small, *words, "--steps", 1) == 2
    assert message in two_lines(capsys)[0]
    assert not (tmp_path / "run").exists()
