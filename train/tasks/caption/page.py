"""Pages of generated captions: examples for the results page, and a page of all captions of an evaluation.

Both load nothing, whatever captions and names contain.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.publish import publish_atomically
from clipmill.shards.pages.figures import data_uri, evenly_spaced_items, evenly_within
from clipmill.shards.pages.templates import SEARCH_SCRIPT, load_template
from clipmill.train.evaluation.player import PicturedSamples, Player, SampleClip, Shown, clip_figure
from clipmill.train.evaluation.runner import every_for
from clipmill.train.tasks.caption.metrics.scores import CaptionScores
from clipmill.train.tasks.caption.settings import METRIC_LABELS
from clipmill.train.tasks.caption.tokenizer import one_line

_FOLDER = Path(__file__).parent
_NUM_EXAMPLES = 12
# On the page of all captions; each is decoded once more, and has some 8 kB.
_MAX_WITH_PICTURES = 2000
_NUM_PLAYED = 30  # of the lowest and of the highest CIDEr-D each
PLAYED = f"the {_NUM_PLAYED} clips of the lowest and the {_NUM_PLAYED} of the highest CIDEr-D play"
# The contact sheet of a clip.
_NUM_COLUMNS = 2
_MAX_FRAMES = 4
_HEIGHT_PX = 96
_QUALITY = 78
_GAP_PX = 2
_GAP_GREY = 128


@dataclass(frozen=True, kw_only=True)
class ScoredCaptions:
    """Generated captions of clips, their references and scores.

    Attributes:
        samples: the split.
        names: name of each captioned clip, by its index in `samples`.
        captions, references: by name.
        num_frames: of a clip.
    """

    samples: PicturedSamples
    names: Mapping[int, str]
    captions: Mapping[str, str]
    references: Mapping[str, Sequence[str]]
    scores: CaptionScores
    num_frames: int

    def examples(self, player: Player | None) -> list[dict[str, Any]]:
        """Clips spread evenly over the split, regardless of their scores, as plain values."""
        return [
            {
                **clip_figure(self.samples, index, num_frames=self.num_frames, player=player),
                "caption": self.captions[name],
                "references": [one_line(reference) for reference in self.references[name]],
                "cider_d": self.scores.per_video[name]["cider_d"],
                "is_right": bool(self.scores.per_video[name]["exact_match"]),
            }
            for index, name in evenly_spaced_items(list(self.names.items()), at_most=_NUM_EXAMPLES)
        ]

    def videos(self, player: Player | None) -> "Iterator[CaptionedVideo]":
        """All clips, at most 2,000 of them with pictures; those of the lowest and the highest CIDEr-D play."""
        every = every_for(len(self.names), at_most=_MAX_WITH_PICTURES)
        by_score = sorted(self.names, key=lambda index: self.scores.per_video[self.names[index]]["cider_d"])
        played = set() if player is None else {*by_score[:_NUM_PLAYED], *by_score[-_NUM_PLAYED:]}
        for row, (index, name) in enumerate(self.names.items()):
            begin_s, end_s = self.samples.span_s(index)
            shown = Shown()
            if player is not None and index in played:
                shown = player.show(SampleClip(index, self.samples.key(index), begin_s, end_s))
            times = f"{begin_s:.2f}-{end_s:.2f} s"
            is_pictured = row % every == 0 or index in played
            pictures = self.samples.pictures(index, num_frames=self.num_frames) if is_pictured else []
            yield CaptionedVideo(
                name=name,
                detail="" if name.endswith(times) else times,
                caption=self.captions[name],
                references=[one_line(reference) for reference in self.references[name]],
                scores=self.scores.per_video[name],
                picture=sheet_uri(pictures),
                shown=shown,
            )


@dataclass(frozen=True)
class CaptionedVideo:
    """One row of the page of all captions.

    Attributes:
        name: of the video, or of the clip where a video has several.
        detail: shown next to the name, such as its times.
        scores: metric to value, with keys of METRIC_LABELS.
        picture: a data URI, or empty.
        shown: the clip, if it plays.
    """

    name: str
    detail: str
    caption: str
    references: Sequence[str]
    scores: Mapping[str, float]
    picture: str = ""
    shown: Shown = Shown()  # noqa: RUF009


def write_captions_page(
    path: Path,
    videos: Iterable[CaptionedVideo],
    *,
    title: str,
    means: Mapping[str, float],
    baseline: Mapping[str, float],
    absent: Mapping[str, str],
    protocol: Mapping[str, str],
) -> None:
    """Publish the page of all captions.

    Args:
        videos: rows in their initial order; rendered one at a time.
        means, baseline: metric to value over all videos; of the best constant caption.
        absent: metric to the reason why it is missing.
        protocol: what must be known to compare the values with others.
    """
    script = (_FOLDER / "captions.js").read_text(encoding="utf-8")
    parts = load_template(_FOLDER / "captions.html.j2").stream(
        title=title,
        videos=videos,
        means={name: means[name] for name in METRIC_LABELS if name in means},
        baseline=baseline,
        labels=METRIC_LABELS,
        absent=absent,
        protocol=protocol,
        scripts=[SEARCH_SCRIPT, script],
    )
    with publish_atomically(path) as temporary:
        parts.dump(str(temporary), encoding="utf-8", errors="replace")


def sheet_uri(frames: Sequence[NDArray[np.uint8]]) -> str:
    """Contact sheet: four of the frames in two rows, as the data URI of a JPEG of some 8 kB.

    Args:
        frames: uint8 RGB [H, W, 3], all of one size; fewer than four are in one row. The URI is empty without frames.
    """
    import cv2

    chosen = evenly_within(list(frames), at_most=_MAX_FRAMES)
    if not chosen:
        return ""
    height, width = chosen[0].shape[:2]
    size = (max(1, round(width * _HEIGHT_PX / height)), _HEIGHT_PX)
    gap = ((0, _GAP_PX), (0, _GAP_PX), (0, 0))
    small = [
        np.pad(cv2.resize(frame, size, interpolation=cv2.INTER_AREA), gap, constant_values=_GAP_GREY)
        for frame in chosen
    ]
    columns = _NUM_COLUMNS if len(small) == _MAX_FRAMES else len(small)
    rows = [np.hstack(small[place : place + columns]) for place in range(0, len(small), columns)]
    sheet = np.vstack(rows)[:-_GAP_PX, :-_GAP_PX]
    # OpenCV expects BGR.
    _, jpeg = cv2.imencode(".jpg", sheet[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    return data_uri(jpeg.tobytes(), "image/jpeg")
