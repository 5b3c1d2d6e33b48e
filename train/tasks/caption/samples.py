"""The set of (clip, captions) samples of one split for a captioner: captions are targets, not inputs.

Shape suffixes: K captions of a visit, L tokens.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from clipmill.train.config.data import CaptionSettings
from clipmill.train.data.batch import Sample
from clipmill.train.data.clip_query import ClipQuery
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.video_captions import ALL_CAPTIONS, VideoCaptions
from clipmill.train.device.random import uniform
from clipmill.train.tasks.caption.tokenizer import NO_TOKEN, CaptionTokenizer


class CaptionedClips(VideoCaptions):
    """Samples of one split; sample i is clip i, a span of a video. Batches have `targets`.

    A visit in training has `per_visit` of the clip's captions, drawn without repeats, all where there are no more; an
    evaluation has the first ones. Places of captions that a clip lacks hold no tokens.

    Args:
        make_tokenizer: gives the tokenizer, and may look at the captions for it.
        max_tokens: L, the end of a caption included; longer ones are cut, and counted.
        captions: which captions there are, and how likely a visit shows each.

    Raises:
        UserError: there is no such data, or nothing that can be shown.
    """

    def __init__(
        self,
        query: ClipQuery,
        *,
        make_tokenizer: Callable[[Iterable[str]], CaptionTokenizer],
        max_tokens: int,
        per_visit: int,
        captions: CaptionSettings = ALL_CAPTIONS,
    ) -> None:
        self._max_tokens, self._per_visit, self._make_tokenizer = max_tokens, per_visit, make_tokenizer
        super().__init__(query, tokenize=None, captions=captions)

    @cached_property
    def tokenizer(self) -> CaptionTokenizer:
        """The tokenizer of the targets; created on first use, since it may depend on the captions of several sets."""
        return self._make_tokenizer(self.all_texts())

    @property
    def visits_per_epoch(self) -> float:
        """An epoch shows as many captions as there are, as that of a loader of (video, caption) pairs does."""
        return max(len(self), self.num_references / self._per_visit)

    @property
    def num_references(self) -> int:
        """Number of captions of all clips."""
        return int(self.captions.choice.first_entry[-1])

    @cached_property
    def _num_cut(self) -> int:
        return self.tokenizer.num_longer(self.all_texts(), max_tokens=self._max_tokens)

    @cached_property
    def _order_sha256(self) -> str:
        """Hash of the order of samples, of their captions and of the tokenizer."""
        return hashlib.sha256(super()._order_sha256.encode() + self.tokenizer.as_json()).hexdigest()

    def describe(self) -> str:
        """One line for the log: captions used and excluded, by reason, and truncated ones."""
        described = super().describe()
        # The set describes itself before it is whole, where nothing can be shown.
        num_cut = self._num_cut if len(self) else 0
        return f"{described}; {num_cut:,} cut to {self._max_tokens} tokens" if num_cut else described

    def references(self, sample: int) -> list[str]:
        """All captions of a clip."""
        return [self.text_at(entry) for entry in self.captions.choice.entries(sample)]

    def complete(self, sample: Sample, request: SampleRequest) -> None:
        """Add the targets of the clip's captions, int64 [K, L]."""
        entries = self._drawn(request)
        targets_KL = np.full((self._per_visit, self._max_tokens), NO_TOKEN, np.int64)
        for row, entry in enumerate(entries):
            targets_KL[row] = self.tokenizer.targets(self.text_at(entry), max_tokens=self._max_tokens)
        sample["caption_id"] = self.caption_id(entries[0])
        sample["targets"] = targets_KL

    def _drawn(self, request: SampleRequest) -> list[int]:
        """Entries of the captions that a visit shows, in order."""
        choice = self.captions.choice
        entries = choice.entries(request.sample)
        if request.seed is None or len(entries) <= self._per_visit:
            return list(entries[: self._per_visit])
        # Weighted drawing without repeats: the smallest of exponential waiting times (Efraimidis and Spirakis 2006).
        position = np.array([request.position])
        shares: NDArray[np.float64] = uniform(position, len(entries), seed=request.seed, purpose="captions")[0]
        waits = -np.log1p(-shares) / choice.weights(request.sample)
        return sorted(entries[int(one)] for one in np.argsort(waits, kind="stable")[: self._per_visit])
