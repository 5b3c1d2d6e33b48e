"""What all sets of clips have in common: clips of pictures, and a loader that makes batches of them."""

from collections.abc import Generator, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from manifests.errors import UserError
from train.data.batch import Sample
from train.data.clip_samples import VideoClips
from train.data.cursor import LoaderState
from train.data.decoding.clip import Clip
from train.data.failures import FailedSample
from train.data.loader import Loader, LoaderSettings, Visit
from train.data.outcomes import LoadedBatch


class ClipSamples:
    """Samples of one split; sample i is clip i. Safe to use from many threads.

    A subclass has what `describe` needs before it calls `__init__`.

    Attributes:
        split: of the manifest.
        clips: their pictures.

    Raises:
        UserError: there are none.
    """

    def __init__(self, clips: VideoClips, *, split: str, loading: LoaderSettings) -> None:
        self.split, self.clips, self._group = split, clips, loading.group
        if not len(self):
            raise UserError(
                f"no clip of split {split!r} can be shown: {self.describe()}",
                hint="see prep status; captions and labels come from prep manifest",
            )
        self._loader = Loader(self, loading)

    def __len__(self) -> int:
        return len(self.clips)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch: clips."""
        return len(self)

    @property
    def num_clips(self) -> int:
        """Ids of clips are from 0 to below this."""
        return len(self)

    @property
    def fingerprint(self) -> str:
        """Hash of what decides which sample stands where."""
        raise NotImplementedError

    def describe(self) -> str:
        """One line for the log: what is in the set, and what is left out and why."""
        raise NotImplementedError

    def sample(self, visit: Visit, clip: Clip) -> Sample:
        """The clip with what belongs to it."""
        raise NotImplementedError

    def load(self, visits: Sequence[Visit]) -> list[Sample | FailedSample]:
        """Reads, decodes and crops samples; a chunk that several of them show is decoded once."""
        return self.clips.load(visits, self.sample)

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins."""
        return self.clips.key(sample)

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of the clip in its video, seconds."""
        return self.clips.span_s(sample)

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as the model gets them in an evaluation, RGB [H, W, 3]; none where they cannot be had."""
        return self.clips.pictures(sample, num_frames=num_frames)

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """See `train.data.loader.Loader`."""
        return self._loader.batches(position=position, max_failures=max_failures)

    def evaluation_batches(self, *, every: int = 1) -> Iterator[LoadedBatch]:
        """See `train.data.loader.Loader`."""
        return self._loader.evaluation_batches(every=every)

    def state_dict(self) -> LoaderState:
        """See `train.data.loader.Loader`."""
        return self._loader.state_dict()

    def load_state_dict(self, *states: LoaderState) -> None:
        """See `train.data.loader.Loader`."""
        self._loader.load_state_dict(*states)
