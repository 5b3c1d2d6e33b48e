"""Implementation of `train eval caption`: caption the clips of a split, score the captions, and write a page of them.

The page loads no external resources, regardless of the text in captions and names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import publish_atomically, publish_json
from clipmill.shards.pages.figures import data_uri, evenly_spaced_items, middle_items
from clipmill.shards.pages.templates import SEARCH_SCRIPT, load_template
from clipmill.train.data.chunks import ClipReader
from clipmill.train.data.samples import Samples
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.player import PicturedSamples, Player, SampleClip, ShownClip, clip_figure, open_player
from clipmill.train.evaluation.runner import OpenedRun, Score, describe_clip, sample_stride
from clipmill.train.run.folder import COCO_SUFFIX
from clipmill.train.run.tracking import count_batches
from clipmill.train.tasks.caption.java import Meteor, check_jars
from clipmill.train.tasks.caption.metrics import (
    CONSTANT_RULE,
    CaptionScores,
    best_constant,
    name_videos,
    score_captions,
)
from clipmill.train.tasks.caption.spec import (
    METRIC_LABELS,
    CaptionerSettings,
    CaptionFlags,
    DecodingSettings,
    length_penalty_of,
    max_tokens_of,
    num_beams_of,
    temperature_of,
)
from clipmill.train.tasks.caption.task import CaptionTask, caption_clips, comparable_captions, mean_loss
from clipmill.train.tasks.caption.tokenizer import one_line

_MAX_CONSTANT_CLIPS = 500  # maximum number of clips whose captions are candidates for the constant caption
_PROTOCOL = (
    "one generated caption per clip, compared with all references of the clip; tokenized as by Stanford's "
    "PTBTokenizer, without punctuation; idf from"
)
# Rows of the protocol on the page of all captions: maps each label to a key of the result.
_PAGE_ENTRIES = {
    **{name: name for name in ("split", "step", "weights", "data", "clip", "decoding", "protocol", "command")},
    "data folder": "shards",
    "clips": "num_samples",
    "hash of the clip names": "ids_hash",
}


def score_run(opened: OpenedRun, flags: CaptionFlags, *, with_java: bool = True) -> Score:
    """Caption the clips of a split with the latest checkpoint of a run, and score the captions.

    The best constant caption is scored for comparison.

    Args:
        with_java: True to compute METEOR and SPICE (`score_captions`).

    Raises:
        UserError: The split has no captions, no reference has words, or a jar of SPICE is missing.
        FailedWork: No clip could be decoded, predictions are not finite, or all generated captions are empty.
    """
    if flags.spice_jars is not None:
        check_jars(flags.spice_jars)
    settings, trained, task, split = opened.settings, opened.trained, opened.task, flags.split
    decoding_settings = task.decoding(flags.decoding)
    samples = task.samples(split, World())
    stride = sample_stride(len(samples), at_most=flags.max_samples)
    with trained.precision.autocast():
        generated = caption_clips(
            trained.fill(task.build_model(samples)),
            count_batches(samples.evaluation_batches(stride=stride), "captioning", total=-(-len(samples) // stride)),
            inputs=task.inputs,
            tokenizer=task.decoder.tokenizer,
            decoding=decoding_settings,
            device=trained.device,
        )
    loss = mean_loss([generated])
    # The name of a clip is the name of its video, followed by its times if a video of the split has several clips.
    videos = {index: samples.key(index).rpartition("_")[0] for index in range(len(samples))}
    is_single = len(set(videos.values())) == len(videos)
    names = {}
    for index in sorted(generated.captions):
        begin_s, end_s = samples.span_s(index)
        names[index] = videos[index] if is_single else f"{videos[index]} {begin_s:.2f}-{end_s:.2f} s"
    captions, references, wordless_clips = comparable_captions(
        {name: generated.captions[index] for index, name in names.items()},
        {name: samples.captions.texts_of(index) for index, name in names.items()},
    )
    constant, constant_rule = _constant_baseline(task, settings, references)
    with Meteor() as meteor:
        scores, constant_scores = (
            score_captions(candidates, references, with_java=with_java, spice_jars=flags.spice_jars, meteor=meteor)
            for candidates in (captions, dict.fromkeys(references, constant))
        )
    if len(scores.wordless_videos) == scores.num_videos:
        raise FailedWork(
            f"all generated captions are empty ({scores.num_videos:,}), so there is nothing to score: the model ends "
            "each caption immediately. It may have been trained for too few steps, or on captions without words"
        )
    scored_captions = ScoredCaptions(
        samples=samples,
        names={index: name for index, name in names.items() if name in captions},
        captions=captions,
        references=references,
        scores=scores,
        num_frames=settings.num_frames,
    )
    count = settings.captions_per_visit
    loss_references = "the first reference" if count == 1 else f"the first {count} references"
    name = f"captions-{split}"
    player = open_player(settings, split=split)
    values = {
        "data": "; ".join(
            [samples.describe(), *_omitted_notes(samples, stride=stride), *_wordless_notes(scores, wordless_clips)]
        ),
        "decoding": describe_decoding(decoding_settings),
        "protocol": f"{_PROTOCOL} {scores.idf}",
        "num_samples": scores.num_videos,
        "num_references": scores.num_references,
        "ids_hash": scores.ids_hash,
        "loss": loss,
        "loss_rule": f"mean cross-entropy per token of {loss_references} of each clip",
        "means": scores.means,
        "absent": scores.missing_reasons,
        "empty": list(scores.wordless_videos),
        "without_words": wordless_clips,
        "constant": {"caption": constant, "chosen": constant_rule, "means": constant_scores.means},
        "said": scored_captions.examples(player),
        "all_said": f"evaluations/{opened.result_name(name, flags)}.html",
    }

    def write_beside(path: Path, result: dict[str, Any]) -> None:
        write_coco_results(path.with_name(f"{path.stem}{COCO_SUFFIX}"), captions)
        write_captions_page(
            path.with_suffix(".html"),
            scored_captions.videos(player),
            title=f"Captions of split “{split}” by “{opened.name}”",
            means=scores.means,
            baseline=constant_scores.means,
            absent=scores.missing_reasons,
            protocol={
                **{label: str(result[key]) for label, key in _PAGE_ENTRIES.items()},
                **({} if player is None else {"videos": PLAYED}),
            },
        )

    return Score(
        name=name,
        samples=samples,
        clip=describe_clip(settings),
        values=values,
        failed=generated.failed,
        write_more=write_beside,
    )


def write_coco_results(path: Path, captions: Mapping[str, str]) -> None:
    """Publish captions by video ID in COCO's results format, in the given order."""
    publish_json(path, [{"image_id": video_id, "caption": caption} for video_id, caption in captions.items()])


def describe_decoding(settings: DecodingSettings) -> str:
    """Describe decoding settings for the protocol of a result."""
    match settings.method:
        case "greedy":
            method = "greedy"
        case "sample":
            method = f"sampling at temperature {temperature_of(settings):g}, seed {settings.seed}"
            method += "" if settings.top_k is None else f", top-k {settings.top_k}"
            method += "" if settings.top_p is None else f", top-p {settings.top_p:g}"
        case "beam":
            method = f"{num_beams_of(settings)} beams, length penalty {length_penalty_of(settings):g}"
            method += ", early stopping" if settings.early_stopping else ""
    minimum = f"{settings.min_tokens} to " if settings.min_tokens else "at most "
    return f"{method}, {minimum}{max_tokens_of(settings)} tokens"


def _constant_baseline(
    task: CaptionTask, settings: CaptionerSettings, references: Mapping[str, Sequence[str]]
) -> tuple[str, str]:
    """Return the best constant caption, and a description of the rule that selected it.

    The caption is chosen from the training split or, if that split cannot be read, from the references.
    """
    split = settings.split
    try:
        training_set = task.samples(split, World())
    except UserError as error:
        rule = f"{CONSTANT_RULE}; chosen from the references, because split {split!r} cannot be read: {error}"
        return best_constant(references), rule
    stride = sample_stride(len(training_set), at_most=_MAX_CONSTANT_CLIPS)
    captions = {str(index): training_set.captions.texts_of(index) for index in range(0, len(training_set), stride)}
    clips = count_noun(len(captions), "clip")
    rule = f"{CONSTANT_RULE}; chosen from the captions of {clips}, spread evenly over split {split!r}"
    return best_constant(captions), rule


def _omitted_notes(samples: Samples[ClipReader], *, stride: int) -> list[str]:
    """Return remarks on videos without captions, and on the clips that --max-samples omits."""
    chunks = samples.reader.chunks
    remarks = []
    if num_without := len(chunks.video_ids) - len(np.unique(samples.video)):
        have = "video of the split has" if num_without == 1 else "videos of the split have"
        remarks.append(f"{num_without:,} {have} no captions")
    if stride > 1:
        num_captioned = count_noun(len(range(0, len(samples), stride)), "clip")
        remarks.append(f"1 in {stride:,} clips is captioned ({num_captioned})")
    return remarks


def _wordless_notes(scores: CaptionScores, wordless_clips: Sequence[str]) -> list[str]:
    """Return remarks on generated captions without words, and on clips whose references have no words."""
    remarks = []
    if scores.wordless_videos:
        remarks.append(
            f"{len(scores.wordless_videos):,} of {scores.num_videos:,} generated captions are empty "
            f"({name_videos(scores.wordless_videos)})"
        )
    if wordless_clips:
        clips = f"{count_noun(len(wordless_clips), 'clip')} ({name_videos(wordless_clips)})"
        remarks.append(f"omitted because the references have no words: {clips}")
    return remarks


_FOLDER = Path(__file__).parent
_NUM_EXAMPLES = 12
# Maximum number of evenly spaced clips with images on the page of all captions. Each image must be decoded again, and
# takes about 8 kB.
_MAX_WITH_IMAGES = 2000
_NUM_PLAYED = 30  # number of playable clips at each end of the ranking by CIDEr-D
PLAYED = f"the {_NUM_PLAYED} clips with the lowest and the {_NUM_PLAYED} clips with the highest CIDEr-D can be played"
# Layout of a clip's contact sheet.
_NUM_COLUMNS = 2
_MAX_FRAMES = 4
_HEIGHT_PX = 96
_QUALITY = 78
_GAP_PX = 2
_GAP_GREY = 128


@dataclass(frozen=True, kw_only=True)
class ScoredCaptions:
    """Generated captions of clips, with their references and scores.

    Attributes:
        samples: Samples of the split.
        names: Names of the captioned clips, by index in `samples`.
        captions, references: Captions and references of the clips, by name.
        num_frames: Number of frames per clip.
    """

    samples: PicturedSamples
    names: Mapping[int, str]
    captions: Mapping[str, str]
    references: Mapping[str, Sequence[str]]
    scores: CaptionScores
    num_frames: int

    def examples(self, player: Player | None) -> list[dict[str, Any]]:
        """Return examples, spread evenly over the split regardless of their scores, as JSON-serialisable values."""
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
        """Yield the rows of the page of all captions.

        Up to 2,000 evenly spaced clips have images. The clips with the lowest and the highest CIDEr-D also have images,
        and can be played.
        """
        stride = sample_stride(len(self.names), at_most=_MAX_WITH_IMAGES)
        indices_by_score = sorted(self.names, key=lambda index: self.scores.per_video[self.names[index]]["cider_d"])
        playable = set() if player is None else {*indices_by_score[:_NUM_PLAYED], *indices_by_score[-_NUM_PLAYED:]}
        for row, (index, name) in enumerate(self.names.items()):
            begin_s, end_s = self.samples.span_s(index)
            shown_clip = ShownClip()
            if player is not None and index in playable:
                shown_clip = player.show(SampleClip(index, self.samples.key(index), begin_s, end_s))
            times = f"{begin_s:.2f}-{end_s:.2f} s"
            has_image = row % stride == 0 or index in playable
            frames = self.samples.shown_frames(index, num_frames=self.num_frames) if has_image else []
            yield CaptionedVideo(
                name=name,
                detail="" if name.endswith(times) else times,
                caption=self.captions[name],
                references=[one_line(reference) for reference in self.references[name]],
                scores=self.scores.per_video[name],
                picture=sheet_uri(frames),
                shown=shown_clip,
            )


@dataclass(frozen=True)
class CaptionedVideo:
    """Row on the page of all captions.

    Attributes:
        name: Name of the video, or name of the clip if videos have several clips.
        detail: Text next to the name, such as the times of the clip.
        scores: Values by metric, with the keys of METRIC_LABELS.
        picture: Data URI of an image; empty if there is no image.
        shown: Playable clip; empty if the clip cannot be played.
    """

    name: str
    detail: str
    caption: str
    references: Sequence[str]
    scores: Mapping[str, float]
    picture: str = ""
    shown: ShownClip = ShownClip()  # noqa: RUF009


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
        videos: Rows in their initial order, rendered one at a time.
        means: Values of the captions by metric, over all videos.
        baseline: Values of the best constant caption by metric, over all videos.
        absent: Reason for each missing metric.
        protocol: Facts for comparing the result with other results.
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
    """Return a contact sheet of up to four frames as a data URI with a JPEG of about 8 kB.

    Four frames are arranged in two rows, and fewer frames in one row. Without frames, the URI is empty.

    Args:
        frames: Frames with equal resolution, uint8 RGB [H, W, 3].
    """
    import cv2

    sheet_frames = middle_items(list(frames), at_most=_MAX_FRAMES)
    if not sheet_frames:
        return ""
    height, width = sheet_frames[0].shape[:2]
    size = (max(1, round(width * _HEIGHT_PX / height)), _HEIGHT_PX)
    gap = ((0, _GAP_PX), (0, _GAP_PX), (0, 0))
    tiles = [
        np.pad(cv2.resize(frame, size, interpolation=cv2.INTER_AREA), gap, constant_values=_GAP_GREY)
        for frame in sheet_frames
    ]
    num_columns = _NUM_COLUMNS if len(tiles) == _MAX_FRAMES else len(tiles)
    rows = [np.hstack(tiles[start : start + num_columns]) for start in range(0, len(tiles), num_columns)]
    sheet = np.vstack(rows)[:-_GAP_PX, :-_GAP_PX]
    # OpenCV expects BGR.
    _, jpeg = cv2.imencode(".jpg", sheet[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    return data_uri(jpeg.tobytes(), "image/jpeg")
