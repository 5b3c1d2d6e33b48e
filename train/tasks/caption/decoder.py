"""The decoder of a captioner: its tokenizer, size and weights, and what run.json says of it.

The decoder comes from one of four places: `--decoder.weights` (a GPT-2) and `--decoder.lm` (any causal language model,
`clipmill.train.tasks.caption.language`), each a folder or a Hugging Face name; the captioner that `--init.weights`
names; or new weights with a tokenizer that is trained on the captions. Size and tokenizer always belong together: no
tensor shape shows that a token id means another piece of text in another tokenizer.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.models.captioner import Gpt2Size, gpt2_size
from clipmill.train.models.transformer import NORM_EPS, TransformerSize
from clipmill.train.run.folder import RunFolder, is_run
from clipmill.train.tasks.caption.language import (
    LANGUAGE_FILES,
    LANGUAGE_FOLDER,
    LanguageDecoder,
    open_language,
    read_language,
)
from clipmill.train.tasks.caption.spec import CaptionerSettings, DecoderSettings, has_captioner
from clipmill.train.tasks.caption.tokenizer import (
    TOKENIZER_FILE,
    CaptionTokenizer,
    has_tokenizer,
    read_tokenizer,
    train_tokenizer,
)
from clipmill.train.weights.files import MODEL_FILES, TOKENIZER_FILES, hub_folder, read_config
from clipmill.train.weights.hf_caption import caption_config_of, read_caption_folder
from clipmill.train.weights.loading import Change
from clipmill.train.weights.source import Say
from clipmill.train.weights.sources import place_of_weights

# A name on Hugging Face; anything else can only be a folder.
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class DecoderParts:
    """Tokenizer, size and weights of a decoder.

    Attributes:
        tensors: weights by their names in a captioner; empty for new weights.
        source: where the weights are from, as the user named it.
        hint: of the error if tokenizer and decoder do not belong together.
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

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a caption, including the end."""
        return self.size.context_length


Decoder = DecoderParts | LanguageDecoder


def open_decoder(settings: DecoderSettings, texts: Iterable[str], *, say: Say) -> Decoder:
    """Open the decoder that the settings name.

    Args:
        texts: captions on which a tokenizer is trained if none is named.

    Raises:
        UserError: a folder is missing, damaged, or of another model; tokenizer and decoder do not fit; the width is not
            a multiple of the heads; captions may be longer than the decoder's context.
    """
    if settings.lm is not None:
        its = decoder_folder(settings.lm, flag="--decoder.lm", files=LANGUAGE_FILES, say=say)
        return open_language(its, settings, tokenizer_folder=Path(settings.tokenizer or its)).with_weights()
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
        raise UserError(
            f"{folder} has no GPT-2 (--decoder.weights)",
            hint="name a folder that has one",
            flags=("--decoder.weights",),
        )
    if settings.max_tokens > found.config.decoder.context_length:
        raise UserError(
            f"--decoder.max-tokens is {settings.max_tokens}, and the decoder of {folder} has a context of "
            f"{found.config.decoder.context_length}",
            hint="use fewer",
            flags=("--decoder.max-tokens",),
        )
    tensors = {name: one for name, one in found.converted.tensors.items() if name.startswith("decoder.")}
    hint = "name the tokenizer of the decoder, or leave --decoder.tokenizer out"
    if settings.tokenizer is None:
        hint = (
            f"the tokenizer is that of {folder}: name the decoder's own with --decoder.tokenizer, or repair the folder"
        )
    return DecoderParts(
        tokenizer=tokenizer, size=found.config.decoder, tensors=tensors, source=str(settings.weights), hint=hint
    )


def decoder_of_start(settings: CaptionerSettings) -> Decoder | None:
    """Size and tokenizer of the decoder in the folder of `--init.weights`; None if it has no captioner.

    A captioner whose decoder `--decoder.lm` replaces gives nothing but its tower.

    Raises:
        UserError: it has no tokenizer, and none is named; the settings name another tokenizer or another size; or a
            file is damaged.
    """
    named, wanted = settings.init.weights, settings.decoder
    folder = None if named is None else place_of_weights(named)
    if folder is None or not has_captioner(folder):
        return None
    if (folder / LANGUAGE_FOLDER).is_dir():
        return kept_decoder(RunFolder(folder))["decoder"]
    if wanted.lm is not None:
        return None
    size = _size_in(folder)
    if size is None:
        return None
    for name, its in (("width", size.trunk.width), ("depth", size.trunk.depth), ("heads", size.trunk.num_heads)):
        given = getattr(wanted, name)
        if given not in (None, its):
            raise UserError(
                f"--decoder.{name} is {given}, and the decoder of {folder} has {its} (--init.weights)",
                hint="leave it out: the decoder comes with these weights",
                flags=(f"--decoder.{name}", "--init.weights"),
            )
    own = read_tokenizer(folder) if has_tokenizer(folder) else None
    other = None if wanted.tokenizer is None else read_tokenizer(Path(wanted.tokenizer))
    tokenizer = own or other
    if tokenizer is None:
        raise no_tokenizer(str(named))
    if own is not None and other is not None and own.numbers() != other.numbers():
        raise UserError(
            f"--decoder.tokenizer {wanted.tokenizer} has other tokens than those that the decoder of {folder} was "
            "trained with (--init.weights)",
            hint="leave --decoder.tokenizer out: the tokenizer comes with these weights",
            flags=("--decoder.tokenizer", "--init.weights"),
        )
    return DecoderParts(tokenizer=tokenizer, size=size)


def _size_in(folder: Path) -> Gpt2Size | None:
    if is_run(folder):
        return decoder_size_of(RunFolder(folder))
    return caption_config_of(read_config(folder / "config.json") or {}, source=str(folder)).decoder


def no_tokenizer(title: str) -> UserError:
    """The error for a decoder without a tokenizer."""
    return UserError(
        f"{title} has a decoder and no tokenizer, without which its tokens mean nothing",
        hint="name the folder of the tokenizer that it was trained with: --decoder.tokenizer FOLDER",
    )


def decoder_folder(
    wanted: str, *, flag: str = "--decoder.weights", files: Sequence[str] = (*MODEL_FILES, *TOKENIZER_FILES), say: Say
) -> Path:
    """The folder that a flag names: an existing one, or a download of that name from Hugging Face.

    Args:
        files: patterns of the names of files to download.

    Raises:
        UserError: there is neither.
    """
    folder = Path(wanted)
    if folder.is_dir():
        return folder
    if _NAME.fullmatch(wanted) is None:
        raise UserError(f"there is no folder {wanted} ({flag})", hint="name one with the model's files", flags=(flag,))
    say(f"decoder: there is no folder {wanted} here; the model comes from Hugging Face's cache or a download")
    return hub_folder(wanted, files=files, what="the model's files")


def decoder_size(settings: DecoderSettings, *, vocabulary_size: int) -> Gpt2Size:
    """Size of the decoder: that of `--decoder.name`, changed as the settings say.

    Raises:
        UserError: the width is not a multiple of the number of heads.
    """
    size = gpt2_size(settings.name, vocabulary_size=vocabulary_size, context_length=settings.max_tokens)
    trunk = size.trunk.resize(
        width=settings.width, depth=settings.depth, heads=settings.heads or size.trunk.num_heads, flag="--decoder."
    )
    return replace(size, trunk=trunk)


def decoder_facts(decoder: Decoder) -> dict[str, Any]:
    """Entry of run.json: the size of the decoder, so that the folder of its weights is not needed again."""
    if isinstance(decoder, LanguageDecoder):
        return decoder.facts()
    trunk = decoder.size.trunk
    return {
        "width": trunk.width,
        "depth": trunk.depth,
        "heads": trunk.num_heads,
        "norm_eps": trunk.norm_eps,
        "vocabulary": decoder.size.vocabulary_size,
        "context": decoder.size.context_length,
    }


def decoder_files(decoder: Decoder) -> dict[str, bytes]:
    """The files of a run without which its weights cannot be used, by path in its folder."""
    if isinstance(decoder, LanguageDecoder):
        return {f"{LANGUAGE_FOLDER}/{name}": content for name, content in decoder.files.items()}
    return {TOKENIZER_FILE: decoder.tokenizer.as_json()}


def start_facts(model: nn.Module, parts: Decoder) -> dict[str, Any]:
    """Entry of run.json about the decoder's initial weights; `model` is the captioner, also on the meta device."""
    wanted = {name: one for name, one in model.state_dict().items() if name.startswith("decoder.")}
    copied = parts.tensors if isinstance(parts, DecoderParts) else wanted if parts.folder is not None else {}
    if not copied:
        return {}
    changes = [
        Change(kind="created", name=name, new=tuple(one.shape), why="a plain GPT-2 has no cross-attention")
        for name, one in wanted.items()
        if name not in copied
    ]
    start = {
        "source": parts.source,
        "num_copied": len(wanted) - len(changes),
        "changes": [change.as_json() for change in changes],
    }
    return {"decoder_weights": start}


def start_lines(facts: Mapping[str, Any]) -> list[str]:
    """The entries of `start_facts` as lines for the console."""
    lines = []
    if (start := facts.get("decoder_weights")) is not None:
        num_copied, num_new = start["num_copied"], len(start["changes"])
        copied = f"{num_copied} of {num_copied + num_new} tensors copied as they are"
        new = f", {num_new} are new (cross-attention)" if num_new else ""
        lines.append(f"decoder: {start['source']}: {copied}{new}")
    return lines


def kept_decoder(run: RunFolder) -> dict[str, Decoder]:
    """Tokenizer and decoder of a run, without weights, as an argument of its task (`TaskSpec.kept`)."""
    facts = run.require_facts().get("decoder")
    if isinstance(facts, dict) and "lm" in facts:
        return {"decoder": read_language(run, facts)}
    return {"decoder": read_decoder_parts(run)}


def read_decoder_parts(run: RunFolder) -> DecoderParts:
    """Tokenizer and decoder size of a run.

    Raises:
        UserError: it is not a run of `train caption`.
    """
    return DecoderParts(tokenizer=read_tokenizer(run.path, hint="restore the run's files"), size=decoder_size_of(run))


def decoder_size_of(run: RunFolder) -> Gpt2Size:
    """Decoder size of a run.

    Raises:
        UserError: it is not a run of `train caption`.
    """
    try:
        facts = run.require_facts()["decoder"]
        trunk = TransformerSize(
            width=facts["width"],
            depth=facts["depth"],
            num_heads=facts["heads"],
            norm_eps=facts.get("norm_eps", NORM_EPS),
        )
        return Gpt2Size(trunk=trunk, vocabulary_size=facts["vocabulary"], context_length=facts["context"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{run.facts} names no decoder: {run.path} is not a run of train caption",
            hint="other runs are scored by other commands: train eval --help",
        ) from error
