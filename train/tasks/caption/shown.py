"""What the model and what people say of clips: of some for the results page, of all for a page of their own."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train.data.tokenizer import one_line
from train.evaluation.pages import PicturedSamples, evenly_spaced, evenly_within, jpeg_uri
from train.tasks.caption.metrics.scores import CaptionScores
from train.tasks.caption.page import CaptionedVideo, sheet_uri

_NUM_SHOWN = 12
_MAX_PICTURES = 4
# Each is decoded once more, and has some 8 kB on the page.
_MAX_WITH_PICTURES = 2000


def shown_json(
    samples: PicturedSamples,
    names: Mapping[int, str],
    captions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    scores: CaptionScores,
    *,
    num_frames: int,
) -> list[dict[str, Any]]:
    """Clips spread evenly over those that were captioned, whatever their scores, as plain values.

    Args:
        names: of the samples that were captioned.
        num_frames: pictures of a clip.
    """
    shown = []
    for number in evenly_spaced(list(names), at_most=_NUM_SHOWN):
        name = names[number]
        begin_s, end_s = samples.span_s(number)
        pictures = samples.pictures(number, num_frames=num_frames)
        shown.append(
            {
                "key": samples.key(number),
                "begin_s": begin_s,
                "end_s": end_s,
                "frames": [jpeg_uri(frame) for frame in evenly_within(pictures, at_most=_MAX_PICTURES)],
                "caption": captions[name],
                "references": [one_line(reference) for reference in references[name]],
                "cider_d": scores.per_video[name]["cider_d"],
                "is_right": bool(scores.per_video[name]["exact_match"]),
            }
        )
    return shown


def all_shown(
    samples: PicturedSamples,
    names: Mapping[int, str],
    captions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    scores: CaptionScores,
    *,
    num_frames: int,
) -> Iterator[CaptionedVideo]:
    """All clips that were captioned, at most 2,000 of them with pictures; the arguments are those of `shown_json`."""
    every = -(-len(names) // _MAX_WITH_PICTURES)
    for place, (number, name) in enumerate(names.items()):
        begin_s, end_s = samples.span_s(number)
        times = f"{begin_s:.2f}-{end_s:.2f} s"
        yield CaptionedVideo(
            name=name,
            detail="" if name.endswith(times) else times,
            caption=captions[name],
            references=[one_line(reference) for reference in references[name]],
            scores=scores.per_video[name],
            picture=sheet_uri(samples.pictures(number, num_frames=num_frames)) if place % every == 0 else "",
        )
