"""Tiny causal language models for transformers, with random weights and a tokenizer trained on a few captions."""

from pathlib import Path
from typing import Any

import torch

from clipmill.train.tasks.caption.tokenizer import END, train_tokenizer

PAD = "<pad>"
_SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
KINDS = ("qwen3", "llama", "gpt2")


def tiny_config(kind: str, *, vocabulary_size: int) -> Any:
    """Return a configuration from transformers for one of `KINDS`."""
    import transformers

    common = {"vocab_size": vocabulary_size, "bos_token_id": None, "eos_token_id": None}
    if kind == "qwen3":
        return transformers.Qwen3Config(**common, **_SIZE, head_dim=8, tie_word_embeddings=True)
    if kind == "llama":
        return transformers.LlamaConfig(**common, **_SIZE)
    return transformers.GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=128)


def save_language_model(folder: Path, kind: str, *, texts: list[str], dtype: torch.dtype = torch.float32) -> Path:
    """Save a model and its tokenizer in the layout of transformers."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    trained = train_tokenizer(texts, vocabulary_size=300)
    (folder / "trained.json").write_bytes(trained.as_json())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "trained.json"), eos_token=END)
    (folder / "trained.json").unlink()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = tiny_config(kind, vocabulary_size=trained.vocabulary_size)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder
