"""What a run of `train caption` keeps beside its weights."""

from typing import Any

from manifests.errors import UserError
from train.caption.decoder_weights import DecoderParts
from train.caption.tokenizer import read_tokenizer
from train.models.gpt2 import Gpt2Size
from train.models.transformer import TransformerSize
from train.run_folder import RunFolder


def decoder_facts(size: Gpt2Size) -> dict[str, Any]:
    """For run.json: the size of the decoder, which its weights' own folder is not needed for again."""
    trunk = size.trunk
    return {
        "width": trunk.width,
        "depth": trunk.depth,
        "heads": trunk.num_heads,
        "vocabulary": size.vocabulary_size,
        "context": size.context_length,
    }


def read_decoder_parts(run: RunFolder) -> DecoderParts:
    """Tokenizer and size of the decoder of a run.

    Raises:
        UserError: it is no run of `train caption`.
    """
    try:
        facts = run.read_facts()["decoder"]
        trunk = TransformerSize(width=facts["width"], depth=facts["depth"], num_heads=facts["heads"])
        size = Gpt2Size(trunk=trunk, vocabulary_size=facts["vocabulary"], context_length=facts["context"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{run.facts} names no decoder: {run.path} is no run of train caption",
            hint="other runs are scored by other commands: train eval --help",
        ) from error
    return DecoderParts(tokenizer=read_tokenizer(run.path), size=size)
