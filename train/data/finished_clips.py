"""What `open_clips` makes of a batch of the commands' loader: model input, views, spans and all captions of a clip."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import quote_value
from clipmill.train.augment.draws import draw
from clipmill.train.augment.pictures import to_model_input
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.data import Augment, CaptionSettings
from clipmill.train.data.decoding.clip import Views
from clipmill.train.data.frame_sampling import US_PER_S

ClipText = Literal["text", "embedding", "all"]


@dataclass(frozen=True, kw_only=True)
class FinishedClips:
    """How batches of clips are finished, in the caller's thread.

    Attributes:
        samples: Loader of clips, images or a stream, or of their mixture.
        settings: with the normalisation and augmentation of model input; without a mean, clips stay uint8.
        rgb: whether the loader makes RGB.
        is_training: augment clips.
        all_captions: add `captions`.
        device: None for NumPy arrays.
    """

    samples: Any
    settings: ClipSettings
    rgb: bool
    views: Views
    is_training: bool
    all_captions: bool
    device: str | torch.device | None

    def __call__(self, found: dict[str, Any]) -> dict[str, Any]:
        """The batch, finished in place."""
        mean = self.settings.init.pixel_mean
        if mean is not None:
            clips = self._model_input(found, mean=mean)
            found["video"] = clips.numpy() if self.device is None else clips
        elif len(self.views) > 1:
            video = found["video"]
            found["video"] = video.reshape(len(video), len(self.views), -1, *video.shape[2:])
        if self.rgb or mean is not None:
            del found["colour"]
        if self.samples.num_samples is not None:  # a stream does not know its clips
            found |= of_clips(found["clip_id"], self.samples, device=self.device)
            if self.all_captions:
                found["captions"] = texts_of_clips(self.samples, np.asarray(found["clip_id"]))
        return found

    def _model_input(self, found: dict[str, Any], *, mean: tuple[float, float, float]) -> torch.Tensor:
        """Normalised clips [B, 3, T, S, S]; of several views [B, V, 3, T, S, S]."""
        settings = self.settings
        assert settings.init.pixel_std is not None
        positions = np.asarray(found["position"])
        clips = to_model_input(
            torch.as_tensor(found["video"]),
            torch.as_tensor(found["colour"]),
            size_px=settings.size_px,
            mean=mean,
            std=settings.init.pixel_std,
            draw=draw(positions, settings.augment, seed=settings.seed) if self.is_training else None,
        )
        if len(self.views) == 1:
            return clips
        return clips.unflatten(2, (len(self.views), -1)).transpose(1, 2).contiguous()


def texts_of_clips(samples: Any, clips: NDArray[np.int64]) -> list[list[str]]:
    """All captions of each clip, of captioned clips or a mixture of them, in the order of their sources."""
    if samples.folders is None:
        return [samples.captions.texts_of(clip) for clip in clips.tolist()]
    texts: list[list[str]] = [[] for _ in clips]
    for folder, where, rows in samples.numbering.divide(clips):
        for index, of_clip in zip(where.tolist(), texts_of_clips(samples.parts[folder], rows), strict=True):
            texts[index] = of_clip
    return texts


def of_clips(clip_id: Any, samples: Any, *, device: Any) -> dict[str, Any]:
    """The span of each clip in seconds, and in a mixture the index of its folder."""
    convert = np.asarray if device is None else torch.from_numpy
    clips = np.asarray(clip_id)
    begin_us, end_us = samples.span_us(clips)
    entries = {"begin_s": convert(begin_us / US_PER_S), "end_s": convert(end_us / US_PER_S)}
    if samples.folders is not None:
        entries["folder"] = convert(samples.numbering.folder_of(clips))
    return entries


def caption_settings(sources: Mapping[str, float] | None, min_relevancy: float | None) -> CaptionSettings:
    """Which captions are shown; raises UserError for weights that are none."""
    if sources is not None and not isinstance(sources, Mapping):
        raise UserError(
            f"sources is {quote_value(sources)}", hint='give weights by name: {"human": 1, "*rephraser*": 2}'
        )
    text = None if sources is None else ",".join(f"{name}={weight}" for name, weight in sources.items())
    return CaptionSettings(sources=text, min_relevancy=min_relevancy)


def augmentation(wanted: Mapping[str, float] | None) -> Augment:
    """The augmentation by the names of its settings; raises UserError for others."""
    known = vars(Augment())
    if wanted is not None and (not isinstance(wanted, Mapping) or wanted.keys() - known.keys()):
        raise UserError(f"augment is {quote_value(wanted)}", hint=f"give a dictionary with some of {', '.join(known)}")
    given: Mapping[str, Any] = wanted or {}
    numbers: dict[str, Any] = {}
    for name, value in given.items():
        whole = isinstance(known[name], int)
        if isinstance(value, bool) or not isinstance(value, Real) or (whole and not float(value).is_integer()):
            raise UserError(
                f"augment.{name} is {quote_value(value)}", hint="use a whole number" if whole else "use a number"
            )
        numbers[name] = type(known[name])(value)
    return Augment(**numbers)
