"""Captions to token ids and back: byte-level BPE as GPT-2's, read from a folder or trained on the captions themselves.

The tokenizers library does it, the one that transformers uses: its files are what GPT-2 comes with.
"""

import string
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
# What GPT-2 has had instead of it.
_PARTS = ("vocab.json", "merges.txt")
# What a loss leaves out; torch's own number for it.
NO_TOKEN = -100
_LETTERS = string.ascii_letters + string.digits


class CaptionTokenizer:
    """A byte-level BPE: every text has tokens, from which it can be restored.

    Attributes:
        end_id: the token before the first and behind the last one of a caption.
        vocabulary_size: ids are from 0 to below this.

    Args:
        end: the token at the end of a caption, as text.
    """

    def __init__(self, tokenizer: "Tokenizer", *, where: str, end: str = END) -> None:
        end_id = tokenizer.token_to_id(end)
        if end_id is None:
            special = [one.content for one in tokenizer.get_added_tokens_decoder().values() if one.special]
            raise UserError(
                f"the tokenizer of {where} has no {end}, the token at the end of a caption; its special tokens: "
                f"{', '.join(special) or 'none'}",
                hint=f"if one of them ends its texts, rename it to {end} in {TOKENIZER_FILE}, which keeps its number; "
                "otherwise use the tokenizer of a GPT-2",
            )
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.end_id: int = end_id
        tokens_of = zip(_LETTERS, tokenizer.encode_batch(list(_LETTERS), add_special_tokens=False), strict=True)
        if lost := [letter for letter, found in tokens_of if not found.ids or end_id in found.ids]:
            raise UserError(
                f"the tokenizer of {where} has no tokens for {len(lost)} of {len(_LETTERS)} letters and digits, such "
                f"as {lost[0]!r}: captions would lose them",
                hint="use a whole one of GPT-2's kind; is the file that of another model, or cut short?",
            )
        self.vocabulary_size: int = tokenizer.get_vocab_size()

    def ids(self, text: str) -> list[int]:
        """The tokens of a caption, without the end token."""
        found: list[int] = self._tokenizer.encode(one_line(text), add_special_tokens=False).ids
        return found

    def prompt_ids(self, text: str) -> list[int]:
        """The tokens of a part of a prompt, whose line breaks count."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids if text else []
        return found

    def targets(self, text: str, *, max_tokens: int) -> NDArray[np.int64]:
        """Return the target tokens of a decoder, int64 [max_tokens]: the tokens, the end, and -100 after it.

        A caption that is longer is cut, and then has no end: the decoder does not learn to stop there.
        """
        ids = [*self.ids(text), self.end_id][:max_tokens]
        targets = np.full(max_tokens, NO_TOKEN, np.int64)
        targets[: len(ids)] = ids
        return targets

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens up to the first end token, on one line; bytes that are not UTF-8 become U+FFFD."""
        ids = list(ids)
        if self.end_id in ids:
            ids = ids[: ids.index(self.end_id)]
        return one_line(self._tokenizer.decode(ids, skip_special_tokens=True))

    def num_longer(self, texts: Iterable[str], *, max_tokens: int) -> int:
        """Number of captions that do not fit with all of their tokens and the end token."""
        # A token is a byte at least: most captions need not be looked at.
        long = [line for line in map(one_line, texts) if len(line.encode()) >= max_tokens]
        return sum(len(one.ids) >= max_tokens for one in self._tokenizer.encode_batch(long, add_special_tokens=False))

    def numbers(self) -> dict[str, int]:
        """The number of each token."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def as_json(self) -> bytes:
        """What `read_tokenizer` reads."""
        return str(self._tokenizer.to_str()).encode()


def one_line(text: str) -> str:
    """A caption without control characters, its words with one space between them."""
    return " ".join("".join(" " if unicodedata.category(one) == "Cc" else one for one in text).split())


def train_tokenizer(texts: Iterable[str], *, vocabulary_size: int) -> CaptionTokenizer:
    """A BPE of the most frequent pairs of these captions, from 256 bytes up (Sennrich et al. 2016).

    Args:
        vocabulary_size: at most; few texts have fewer pairs. The same texts give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(one_line, texts), trainer)
    return CaptionTokenizer(tokenizer, where="the captions")


def has_tokenizer(folder: Path) -> bool:
    """Whether `read_tokenizer` finds its files."""
    return (folder / TOKENIZER_FILE).is_file() or all((folder / name).is_file() for name in _PARTS)


def read_tokenizer(folder: Path, *, hint: str | None = None) -> CaptionTokenizer:
    """The tokenizer in a folder: tokenizer.json, or GPT-2's vocab.json and merges.txt.

    Args:
        hint: replaces the hint of errors about a missing or damaged tokenizer.

    Raises:
        UserError: there is none, it is damaged, or it has no token for the end of a text.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    whole, parts = folder / TOKENIZER_FILE, [folder / name for name in _PARTS]
    if not has_tokenizer(folder):
        raise UserError(
            f"there is no tokenizer in {folder}",
            hint=hint or f"it is {TOKENIZER_FILE}, or vocab.json and merges.txt, as GPT-2's folder has them",
        )
    files = [whole] if whole.is_file() else parts
    try:
        if files == parts:
            vocabulary = parse_json(parts[0].read_text(encoding="utf-8"))
            lines = parts[1].read_text(encoding="utf-8").splitlines()
            merges = [(left, right) for left, right in (line.split(" ") for line in lines if _is_merge(line))]
            tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        else:
            tokenizer = Tokenizer.from_str(whole.read_text(encoding="utf-8"))
    except Exception as error:
        raise UserError(
            f"cannot read the tokenizer {files[0]}: {error}", hint=hint or "get the folder of the decoder again"
        ) from error
    return CaptionTokenizer(tokenizer, where=str(folder))


def _is_merge(line: str) -> bool:
    return bool(line) and not line.startswith("#version")
