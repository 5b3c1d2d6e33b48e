"""Samples of a captioner: the clips of one split, with captions as token targets.

Shape suffixes: K captions of a sample, L tokens.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shards.tars import TarBytes
from train.config.data import CaptionSettings
from train.data.batch import Sample
from train.data.decoding.clip import Clip, ClipShape
from train.data.decoding.reading import DecodeRule
from train.data.loader import LoaderSettings, Visit
from train.data.tokenizer import NO_TOKEN, CaptionTokenizer
from train.data.video_captions import ALL_CAPTIONS, VideoCaptions
from train.device.random import uniform


class CaptionedClips(VideoCaptions):
    """Samples of one split; sample i is clip i, a span of a video. Batches have `targets`.

    In training, a sample has `per_visit` of the clip's captions, drawn without replacement; an evaluation has the first
    ones. If a clip has fewer captions, the remaining rows of its targets are padding.

    Args:
        make_tokenizer: returns the tokenizer, given all captions.
        max_tokens: L, including the end token; longer captions are truncated and counted.
        captions: which captions are used, and with which probabilities.

    Attributes:
        tokenizer: of the targets.

    Raises:
        UserError: there is no such data, or no usable clip.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        shape: ClipShape,
        make_tokenizer: Callable[[Iterable[str]], CaptionTokenizer],
        max_tokens: int,
        per_visit: int,
        loading: LoaderSettings,
        decode: DecodeRule = "packets",
        captions: CaptionSettings = ALL_CAPTIONS,
        tars: TarBytes | None = None,
    ) -> None:
        self._max_tokens, self._per_visit = max_tokens, per_visit
        super().__init__(
            data_dir,
            split=split,
            shape=shape,
            tokenize=None,
            loading=loading,
            decode=decode,
            captions=captions,
            tars=tars,
        )
        self.tokenizer = make_tokenizer(self.all_texts())
        self._num_cut = self.tokenizer.num_longer(self.all_texts(), max_tokens=max_tokens)

    @cached_property
    def _order_sha256(self) -> str:
        """Hash of the order of samples and of the tokenizer."""
        return hashlib.sha256(super()._order_sha256.encode() + self.tokenizer.as_json()).hexdigest()

    def describe(self) -> str:
        """One line: number of captions in use, of unusable ones by reason, and of truncated ones."""
        described = super().describe()
        # The base class may call this in its error message, before the attribute exists.
        num_cut = getattr(self, "_num_cut", 0)
        return f"{described}; {num_cut:,} cut to {self._max_tokens} tokens" if num_cut else described

    def references(self, sample: int) -> list[str]:
        """All captions of a clip."""
        return [self.text_at(place) for place in self.captions.choice.places(sample)]

    def sample(self, visit: Visit, clip: Clip) -> Sample:
        """The clip with its targets, int64 [K, L]."""
        places = self._drawn(visit)
        targets_KL = np.full((self._per_visit, self._max_tokens), NO_TOKEN, np.int64)
        for row, place in enumerate(places):
            targets_KL[row] = self.tokenizer.targets(self.text_at(place), max_tokens=self._max_tokens)
        return Sample(
            position=visit.position,
            key=self.key(visit.sample),
            clip_id=visit.sample,
            caption_id=self.caption_id(places[0]),
            targets=targets_KL,
            video=clip.video,
            colour=clip.colour,
        )

    def _drawn(self, visit: Visit) -> list[int]:
        """Indices of the captions of a sample, ascending."""
        choice = self.captions.choice
        places = choice.places(visit.sample)
        if visit.seed is None or len(places) <= self._per_visit:
            return list(places[: self._per_visit])
        # Weighted sampling without replacement: the smallest exponential variates (Efraimidis and Spirakis 2006).
        position = np.array([visit.position])
        shares: NDArray[np.float64] = uniform(position, len(places), seed=visit.seed, purpose="captions")[0]
        waits = -np.log1p(-shares) / choice.weights(visit.sample)
        return sorted(places[int(one)] for one in np.argsort(waits, kind="stable")[: self._per_visit])
