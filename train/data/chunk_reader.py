"""`read_chunks`: whole chunks of a split, decoded, for analysis in Python (docs/python.md)."""

import base64
import html
import os
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.keys import split_key
from clipmill.train.data.arguments import names_arguments, require_process, require_texts, require_whole_numbers
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.folders import open_data_folder
from clipmill.train.data.outcomes import FailedSample, SampleFailed, list_failures
from clipmill.train.data.workers import Stuck, in_order

if TYPE_CHECKING:
    import av

_STUCK_AFTER_S = 120.0
_MAX_SHOWN, _SHOWN_PX = 8, 120


@dataclass(frozen=True)
class Chunk:
    """A chunk of a video, decoded. A notebook shows up to eight of its frames.

    Attributes:
        key: `<video id>_<start in ms>`.
        begin_s, end_s: its span in the video, seconds.
        frames: uint8 [T, H, W, 3], RGB, in the size that is stored.
        time_s: float64 [T], when each frame is shown, in the video.
    """

    key: str
    video_id: str
    begin_s: float
    end_s: float
    frames: NDArray[np.uint8] = field(repr=False)
    time_s: NDArray[np.float64] = field(repr=False)

    def _repr_html_(self) -> str:
        import cv2

        shown = self.frames[np.linspace(0, len(self.frames) - 1, min(_MAX_SHOWN, len(self.frames))).round().astype(int)]
        width_px = round(_SHOWN_PX * shown.shape[2] / shown.shape[1])
        strip = np.concatenate([cv2.resize(frame, (width_px, _SHOWN_PX)) for frame in shown], axis=1)
        jpeg = base64.b64encode(cv2.imencode(".jpg", strip[..., ::-1])[1].tobytes()).decode()
        text = html.escape(
            f"{self.key}: {self.begin_s:.2f} to {self.end_s:.2f} s, {count_noun(len(self.frames), 'frame')}"
        )
        return f'<img src="data:image/jpeg;base64,{jpeg}" alt="{text}"><br>{text}'


class Chunks:
    """The chunks of a split, decoded in order of videos and time; opened by `read_chunks`.

    Attributes:
        failures: the chunks that could not be decoded so far, with key, reason and detail.
    """

    def __init__(self, chunks: ChunkSet, *, every: int, workers: int, max_failures: int) -> None:
        self._chunks, self._every, self._workers, self._max_failures = chunks, every, workers, max_failures
        self.failures: list[FailedSample] = []

    def __len__(self) -> int:
        return len(self._chunks.table)

    def __iter__(self) -> Generator[Chunk, None, None]:
        process = os.getpid()
        loaded = in_order(
            self._load,
            range(len(self)),
            num_threads=self._workers,
            num_ahead=self._workers + 1,
            stuck_after_s=_STUCK_AFTER_S,
        )
        for number, outcome in loaded:
            if isinstance(outcome, Chunk):
                yield outcome
                require_process(process, what="chunks")
                continue
            if isinstance(outcome, Stuck):
                outcome = FailedSample(number, self._chunks.key(number), "stuck", str(outcome))
            list_failures(self.failures, [outcome], max_failures=self._max_failures)

    def _load(self, number: int) -> Chunk | FailedSample:
        chunks, times = self._chunks, self._chunks.table.times(number)
        key = chunks.key(number)
        wanted = range(0, times.num_frames, self._every)
        pictures: dict[int, NDArray[np.uint8]] = {}

        def add(frame: int, picture: "av.VideoFrame") -> None:
            # One thread: to start others takes longer than to convert a picture of this size.
            pictures[frame] = np.asarray(picture.to_ndarray(format="rgb24", threads=1), np.uint8)

        try:
            chunks.decoder.decode_each(chunks.read(number, wanted), add)
        except SampleFailed as error:
            return error.at(number)
        begin_s, frame_s = times.start_ms / 1000, times.fps_den / times.fps_num
        return Chunk(
            key=key,
            video_id=split_key(key)[0],
            begin_s=begin_s,
            end_s=begin_s + times.num_frames * frame_s,
            frames=np.stack([pictures[frame] for frame in wanted]),
            time_s=begin_s + np.array(wanted) * frame_s,
        )


@names_arguments
def read_chunks(
    data: str | Path,
    *,
    split: str = "train",
    every: int = 1,
    workers: int = 4,
    max_failures: int = 100,
    cache: Path | None = None,
) -> Chunks:
    """Read whole chunks of a split for analysis: an iterable of `Chunk`, with a length.

    Args:
        data: data folder that prep made, as a path or an address.
        every: decode every n-th frame, from the first one on. A chunk of 450 frames of 456 x 256 takes 158 MB.
        split, workers, max_failures, cache: see `open_clips`.

    Raises:
        UserError: there is no such data or split, or an argument is out of range.
    """
    require_whole_numbers(every=every, workers=workers, max_failures=max_failures)
    require_texts(split=split)
    if every < 1 or workers < 1:
        raise UserError(f"every is {every} and workers is {workers}", hint="use 1 or more")
    folder = open_data_folder(str(data), cache=cache)
    chunks = ChunkSet(folder.path, split=split, rule="packets", tars=folder.tars)
    return Chunks(chunks, every=every, workers=workers, max_failures=max_failures)
