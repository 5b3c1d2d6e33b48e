"""Caption tokenizer: a byte-level BPE like GPT-2's, read from a folder or trained on the captions.

The implementation uses the tokenizers library, which can also read GPT-2's files.

Shape suffixes: K captions per sample, L tokens.
"""

import string
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import parse_json
from clipmill.train.data.batch import Sample
from clipmill.train.data.captions import Captions, RowCaptions
from clipmill.train.data.loader import SampleRequest
from clipmill.train.device.random import draw_uniform

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Tokenizer


END = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
# Files that replace tokenizer.json in older GPT-2 folders.
_GPT2_FILES = ("vocab.json", "merges.txt")
# Target that the loss ignores (the default `ignore_index` of torch).
NO_TOKEN = -100
_LETTERS = string.ascii_letters + string.digits


class CaptionTokenizer:
    """Byte-level BPE that converts text to tokens and back.

    Args:
        where: Source of the tokenizer, for messages.
        end: Text of the end token.

    Attributes:
        end_id: Token before the first and after the last token of a caption.
        vocabulary_size: Number of token IDs, which start at 0.

    Raises:
        UserError: The tokenizer has no end token, or no tokens for some letters or digits.
    """

    def __init__(self, tokenizer: "Tokenizer", *, where: str, end: str = END) -> None:
        end_id = tokenizer.token_to_id(end)
        if end_id is None:
            special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
            special_tokens = f"its special tokens are {', '.join(special)}" if special else "it has no special tokens"
            raise UserError(
                f"the tokenizer of {where} has no {end}, the token at the end of a caption; {special_tokens}",
                hint=f"in {TOKENIZER_FILE}, rename the token that ends texts to {end} without changing its ID, or use "
                "the tokenizer of a GPT-2",
            )
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.end_id: int = end_id
        encodings = zip(_LETTERS, tokenizer.encode_batch(list(_LETTERS), add_special_tokens=False), strict=True)
        if missing_letters := [letter for letter, encoding in encodings if not encoding.ids or end_id in encoding.ids]:
            raise UserError(
                f"the tokenizer of {where} has no tokens for {len(missing_letters)} of {len(_LETTERS)} letters and "
                f"digits, such as {missing_letters[0]!r}: captions would lose these characters",
                hint="use the folder of a complete GPT-2 tokenizer: this tokenizer is truncated or of a different kind",
            )
        self.vocabulary_size: int = tokenizer.get_vocab_size()

    def ids(self, text: str) -> list[int]:
        """Return the token IDs of a caption, without the end token."""
        # Encode the text of an end token as ordinary characters, so that it does not end the caption. Set this before
        # each call, because a copied tokenizer loses the setting.
        self._tokenizer.encode_special_tokens = True
        ids: list[int] = self._tokenizer.encode(one_line(text), add_special_tokens=False).ids
        return ids

    def prompt_ids(self, text: str) -> list[int]:
        """Return the token IDs of a part of a prompt, including its line breaks and special tokens."""
        self._tokenizer.encode_special_tokens = False
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids if text else []
        return ids

    def targets(self, text: str, *, max_tokens: int) -> NDArray[np.int64]:
        """Return the targets of a decoder, int64 [max_tokens]: the caption's tokens, the end token, and then -100.

        A longer caption is truncated, without an end token, so that the decoder does not learn to stop there.
        """
        ids = [*self.ids(text), self.end_id][:max_tokens]
        targets = np.full(max_tokens, NO_TOKEN, np.int64)
        targets[: len(ids)] = ids
        return targets

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens before the first end token, on one line. Invalid UTF-8 becomes U+FFFD."""
        ids = list(ids)
        if self.end_id in ids:
            ids = ids[: ids.index(self.end_id)]
        return one_line(self._tokenizer.decode(ids, skip_special_tokens=True))

    def count_longer(self, texts: Iterable[str], *, max_tokens: int) -> int:
        """Count the captions with more than `max_tokens` tokens, including the end token."""
        # A token covers at least one byte, so captions with fewer bytes need not be encoded.
        lines = [line for line in map(one_line, texts) if len(line.encode()) >= max_tokens]
        self._tokenizer.encode_special_tokens = True
        encodings = self._tokenizer.encode_batch(lines, add_special_tokens=False)
        return sum(len(encoding.ids) >= max_tokens for encoding in encodings)

    def token_ids(self) -> dict[str, int]:
        """Return the ID of each token, by the token's text."""
        ids: dict[str, int] = self._tokenizer.get_vocab()
        return ids

    def as_json(self) -> bytes:
        """Return the content of a tokenizer.json for `read_tokenizer`."""
        return str(self._tokenizer.to_str()).encode()


def one_line(text: str) -> str:
    """Replace control characters and runs of white space in a caption with single spaces."""
    return " ".join("".join(" " if unicodedata.category(char) == "Cc" else char for char in text).split())


def train_tokenizer(texts: Iterable[str], *, vocabulary_size: int) -> CaptionTokenizer:
    """Train a byte-level BPE on captions (Sennrich et al. 2016). The same texts yield the same tokenizer.

    Args:
        vocabulary_size: Maximum size of the vocabulary. A few short texts may contain too few pairs to reach this size.
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
    """Return True if a folder contains the files that `read_tokenizer` needs."""
    return (folder / TOKENIZER_FILE).is_file() or all((folder / name).is_file() for name in _GPT2_FILES)


def read_tokenizer(folder: Path, *, hint: str | None = None) -> CaptionTokenizer:
    """Read the tokenizer in a folder: tokenizer.json, or GPT-2's vocab.json and merges.txt.

    Args:
        hint: Hint for the error if the tokenizer is missing or damaged. Default: a hint about the files.

    Raises:
        UserError: The tokenizer is missing or damaged, or has no end token.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer_file, parts = folder / TOKENIZER_FILE, [folder / name for name in _GPT2_FILES]
    if not has_tokenizer(folder):
        raise UserError(
            f"there is no tokenizer in {folder}",
            hint=hint or f"use a folder with {TOKENIZER_FILE}, or with vocab.json and merges.txt as in GPT-2's folder",
        )
    files = [tokenizer_file] if tokenizer_file.is_file() else parts
    try:
        if files == parts:
            vocabulary = parse_json(parts[0].read_text(encoding="utf-8"))
            lines = parts[1].read_text(encoding="utf-8").splitlines()
            pairs = (line.split(" ") for line in lines if line and not line.startswith("#version"))
            merges = [(left, right) for left, right in pairs]
            tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        else:
            tokenizer = Tokenizer.from_str(tokenizer_file.read_text(encoding="utf-8"))
    except Exception as error:
        raise UserError(
            f"cannot read the tokenizer {files[0]}: {error}", hint=hint or "download the folder of the decoder again"
        ) from error
    return CaptionTokenizer(tokenizer, where=str(folder))


class TargetCaptions(Captions):
    """Captions of clips as targets for the decoder (`targets` in a batch).

    A training sample has `per_visit` captions, drawn from the captions of its clip without replacement. An evaluation
    uses the first captions of the clip. If a clip has fewer captions, the remaining rows are padding.

    Args:
        make_tokenizer: Function that takes all captions and returns a tokenizer, which may be trained on the captions.
        max_tokens: Maximum number of tokens per caption, including the end token, L. Longer captions are truncated and
            counted.
        per_visit: Number K of captions per sample.
    """

    def __init__(
        self,
        rows: RowCaptions,
        texts: "pa.ChunkedArray",
        *,
        make_tokenizer: Callable[[Iterable[str]], CaptionTokenizer],
        max_tokens: int,
        per_visit: int,
    ) -> None:
        super().__init__(rows, texts)
        self._max_tokens, self._per_visit, self._make_tokenizer = max_tokens, per_visit, make_tokenizer

    @cached_property
    def tokenizer(self) -> CaptionTokenizer:
        """Tokenizer of the targets, created on first use, because it may depend on the captions of several sets."""
        return self._make_tokenizer(self.all_texts())

    def visits_per_epoch(self, num_samples: int) -> float:
        """Return the number of samples in an epoch, in which each caption is drawn about once.

        Args:
            num_samples: Number of clips. The result is at least this number.
        """
        return max(num_samples, self.num_entries / self._per_visit)

    @cached_property
    def _num_truncated(self) -> int:
        return self.tokenizer.count_longer(self.all_texts(), max_tokens=self._max_tokens)

    def facts(self) -> tuple[Any, ...]:
        """Return a hash of the tokenizer for the fingerprint of the samples."""
        return (sha256(self.tokenizer.as_json()).hexdigest(),)

    def describe(self) -> list[str]:
        """Return a remark on the number of truncated captions, if there are any."""
        return [f"{self._num_truncated:,} cut to {self._max_tokens} tokens"] if self._num_truncated else []

    def add(self, sample: Sample, request: SampleRequest) -> None:
        """Add the targets of the clip's captions to a sample, int64 [K, L]."""
        entries = self._draw_entries(request)
        targets_KL = np.full((self._per_visit, self._max_tokens), NO_TOKEN, np.int64)
        for row, entry in enumerate(entries):
            targets_KL[row] = self.tokenizer.targets(self.text_at(entry), max_tokens=self._max_tokens)
        sample["caption_id"] = self.caption_id(entries[0])
        sample["targets"] = targets_KL

    def _draw_entries(self, request: SampleRequest) -> list[int]:
        """Return the indices of a sample's captions: a random draw in training, and the first captions otherwise."""
        choice = self.rows.choice
        entries = choice.entries(request.sample)
        if request.seed is None or len(entries) <= self._per_visit:
            return list(entries[: self._per_visit])
        # For weighted sampling without replacement, take the smallest exponential waiting times (Efraimidis and
        # Spirakis 2006).
        position = np.array([request.position])
        draws: NDArray[np.float64] = draw_uniform(position, len(entries), seed=request.seed, purpose="captions")[0]
        waits = -np.log1p(-draws) / choice.weights(request.sample)
        return sorted(entries[int(index)] for index in np.argsort(waits, kind="stable")[: self._per_visit])
