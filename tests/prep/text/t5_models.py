"""Small random T5 and umT5 encoders, and `prep text` with them in this process."""

from pathlib import Path
from typing import Any

import torch
import transformers

from clipmill.prep.core.run import Summary
from clipmill.prep.text.bank import TextEncoderOptions
from clipmill.prep.text.plan import make_text_plan
from clipmill.prep.text.recipe import TextSettings
from clipmill.prep.text.t5 import resolve_t5
from clipmill.prep.text.work import run_text
from tests.prep.text.sets import Encoding

_LIBRARY: Any = transformers


def saved_t5(folder: Path, kind: str = "UMT5") -> Path:
    """Save an encoder of width 16 with a tokenizer of letters, as transformers saves it."""
    letters = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *letters, ("▁a", -1.5), ("▁dog", -1.0)]
    _LIBRARY.T5Tokenizer(vocab=words, extra_ids=0).save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(_LIBRARY, f"{kind}Config")(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    getattr(_LIBRARY, f"{kind}EncoderModel")(config).save_pretrained(folder)
    return folder


def encode(data: Path, model: Path, engine: Encoding | None = None) -> Summary:
    recipe = TextSettings(encoder=f"t5:{model}", max_tokens=20)
    plan = make_text_plan(data, resolve_t5(recipe))
    use = TextEncoderOptions(plan.recipe, batch=3, device="cpu")
    return run_text(plan, use, engine or Encoding())
