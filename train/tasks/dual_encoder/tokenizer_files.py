"""CLIP's byte-pair tokenizer as the files that transformers reads, from the vocabulary that open_clip ships."""

import json
from pathlib import Path

# The same tokens under the names that OpenAI and transformers give them.
_NAMES = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
_START, _END = "<|startoftext|>", "<|endoftext|>"


def write_tokenizer(folder: Path, *, context_length: int) -> None:
    """Writes vocab.json, merges.txt and their configuration."""
    from open_clip.tokenizer import SimpleTokenizer

    tokenizer = SimpleTokenizer()
    vocabulary = {_NAMES.get(token, token): number for token, number in tokenizer.encoder.items()}
    merges = [" ".join(pair) for pair in tokenizer.bpe_ranks]
    special = {"bos_token": _START, "eos_token": _END, "unk_token": _END, "pad_token": _END}
    config = {
        **special,
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": context_length,
        "tokenizer_class": "CLIPTokenizer",
    }
    _write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
