"""The decoder and its tokens: those of a folder, those of a name that they are downloaded under, or new ones."""

import re
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from pathlib import Path

import torch

from manifests.errors import UserError
from train.data.tokenizer import CaptionTokenizer, read_tokenizer, train_tokenizer
from train.models.gpt2 import Gpt2Size
from train.tasks.caption.settings import DecoderSettings
from train.tasks.caption.sizes import decoder_size
from train.weights.hf_caption import read_caption_folder
from train.weights.sources import Say

_FILES = ["config.json", "model.safetensors", "tokenizer.json", "vocab.json", "merges.txt"]
# As Hugging Face has them; all else can only be a folder.
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
# What a GPT-2 that has read nothing but text lacks.
CROSS_ATTENTION = (".cross_attn.", ".ln_cross.")


@dataclass(frozen=True, kw_only=True)
class DecoderParts:
    """What a captioner's decoder is made of.

    Attributes:
        tensors: its weights by a captioner's names; empty where they are new.
        source: where the weights are from, as the user named it.
        hint: what to do where tokenizer and decoder do not belong together.
    """

    tokenizer: CaptionTokenizer
    size: Gpt2Size
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    source: str = ""
    hint: InitVar[str] = "use the tokenizer that the decoder was trained with"

    def __post_init__(self, hint: str) -> None:
        if self.tokenizer.vocabulary_size > self.size.vocabulary_size:
            raise UserError(
                f"the tokenizer has {self.tokenizer.vocabulary_size:,} tokens, and the decoder "
                f"{self.size.vocabulary_size:,}: they do not belong together",
                hint=hint,
            )


def open_decoder(settings: DecoderSettings, texts: Iterable[str], *, say: Say) -> DecoderParts:
    """The decoder that the settings mean.

    Args:
        texts: captions, of which a tokenizer is made where none is named.

    Raises:
        UserError: a folder is missing, damaged, or of another model; tokenizer and decoder do not fit; the heads cannot
            share the width; captions may be longer than the decoder's context.
    """
    folder = None if settings.weights is None else decoder_folder(settings.weights, say=say)
    named = Path(settings.tokenizer) if settings.tokenizer is not None else folder
    if named is not None:
        tokenizer = read_tokenizer(named)
    else:
        tokenizer = train_tokenizer(texts, vocabulary_size=settings.vocabulary)
    if folder is None:
        size = decoder_size(settings, vocabulary_size=tokenizer.vocabulary_size)
        return DecoderParts(tokenizer=tokenizer, size=size)
    found = read_caption_folder(folder, needs_decoder=True)
    if found.config.decoder is None:
        raise UserError(f"{folder} has no GPT-2 (--decoder.weights)", hint="name a folder that has one")
    if settings.max_tokens > found.config.decoder.context_length:
        raise UserError(
            f"--decoder.max-tokens is {settings.max_tokens}, and the decoder of {folder} has a context of "
            f"{found.config.decoder.context_length}",
            hint="use fewer",
        )
    tensors = {name: one for name, one in found.converted.tensors.items() if name.startswith("decoder.")}
    hint = "name the tokenizer of the decoder, or leave --decoder.tokenizer out"
    if settings.tokenizer is None:
        hint = f"the tokenizer is that of {folder}: name the decoder's own with --decoder.tokenizer, or mend the folder"
    return DecoderParts(
        tokenizer=tokenizer, size=found.config.decoder, tensors=tensors, source=str(settings.weights), hint=hint
    )


def decoder_folder(wanted: str, *, say: Say) -> Path:
    """The folder of `--decoder.weights`: one that there is, or else what Hugging Face has under that name.

    Raises:
        UserError: there is neither.
    """
    folder = Path(wanted)
    if folder.is_dir():
        return folder
    if _NAME.fullmatch(wanted) is None:
        raise UserError(f"there is no folder {wanted} (--decoder.weights)", hint="name one with GPT-2's files")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    say(f"decoder: there is no folder {wanted} here; from Hugging Face's cache, or else downloaded")
    try:
        return Path(snapshot_download(wanted, allow_patterns=_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"there is no folder {wanted}, and nothing of that name in Hugging Face's cache or to be had: "
            f"{str(error).splitlines()[0]}",
            hint="is there a network? On a machine with one, fill the cache; or name a folder with GPT-2's files",
        ) from error
