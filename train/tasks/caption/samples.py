"""The captions of a captioner's clips: captions are targets, not inputs.

Shape suffixes: K captions of a visit, L tokens.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.batch import Sample
from clipmill.train.data.captions import Captions, RowCaptions
from clipmill.train.data.loader import SampleRequest
from clipmill.train.device.random import draw_uniform
from clipmill.train.tasks.caption.tokenizer import NO_TOKEN, CaptionTokenizer

if TYPE_CHECKING:
    import pyarrow as pa


class TargetCaptions(Captions):
    """The captions of clips as targets; batches have `targets`.

    A visit in training has `per_visit` of the clip's captions, drawn without repeats, all where there are no more; an
    evaluation has the first ones. Places of captions that a clip lacks hold no tokens.

    Args:
        make_tokenizer: Gives the tokenizer, and may look at the captions for it.
        max_tokens: L, the end of a caption included; longer ones are cut, and counted.
        per_visit: K.
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
        """The tokenizer of the targets; created on first use, since it may depend on the captions of several sets."""
        return self._make_tokenizer(self.all_texts())

    def visits_per_epoch(self, num_samples: int) -> float:
        """An epoch shows as many captions as there are, as that of a loader of (video, caption) pairs does."""
        return max(num_samples, self.num_entries / self._per_visit)

    @cached_property
    def _num_cut(self) -> int:
        return self.tokenizer.num_longer(self.all_texts(), max_tokens=self._max_tokens)

    def facts(self) -> tuple[Any, ...]:
        """The tokenizer, for the fingerprint of the samples."""
        return (sha256(self.tokenizer.as_json()).hexdigest(),)

    def describe(self) -> list[str]:
        """How many captions are cut, for the log."""
        return [f"{self._num_cut:,} cut to {self._max_tokens} tokens"] if self._num_cut else []

    def add(self, sample: Sample, request: SampleRequest) -> None:
        """Add the targets of the clip's captions, int64 [K, L]."""
        entries = self._drawn(request)
        targets_KL = np.full((self._per_visit, self._max_tokens), NO_TOKEN, np.int64)
        for row, entry in enumerate(entries):
            targets_KL[row] = self.tokenizer.targets(self.text_at(entry), max_tokens=self._max_tokens)
        sample["caption_id"] = self.caption_id(entries[0])
        sample["targets"] = targets_KL

    def _drawn(self, request: SampleRequest) -> list[int]:
        """Entries of the captions that a visit shows, in order."""
        choice = self.rows.choice
        entries = choice.entries(request.sample)
        if request.seed is None or len(entries) <= self._per_visit:
            return list(entries[: self._per_visit])
        # Weighted drawing without repeats: the smallest of exponential waiting times (Efraimidis and Spirakis 2006).
        position = np.array([request.position])
        shares: NDArray[np.float64] = draw_uniform(position, len(entries), seed=request.seed, purpose="captions")[0]
        waits = -np.log1p(-shares) / choice.weights(request.sample)
        return sorted(entries[int(one)] for one in np.argsort(waits, kind="stable")[: self._per_visit])
