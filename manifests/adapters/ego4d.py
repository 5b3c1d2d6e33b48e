"""Ego4D narrations (Grauman et al. 2022): the official narration.json, and the pickled lists of AVION and LaViLa.

narration.json gives every narration one point in time. EgoVLP's rule (Lin et al. 2022, section 3) makes it an
interval: [t - beta_i / (2 alpha), t + beta_i / (2 alpha)], where beta_i is the mean gap between consecutive
narrations of video i and alpha is the mean of beta_i over all videos of the file. Gaps are taken within one
annotator's pass. All videos of the file count, whether there is a file for them or not, so that a caption does
not move when more of the data set is downloaded. A begin before 0 becomes 0.

As in EgoVLP, narrations with #unsure are left out (they are listed as rejected), and all other tags stay in the
text (`#C C opens the door`). The published list says nothing of splits: its videos are all in train.

A pickled list holds (video, begin second, end second, narration or list of narrations), with exact intervals;
split and source are those of its file name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from manifests.adapters.json_stream import object_items
from manifests.adapters.plain_pickle import load_plain_pickle
from manifests.adapters.reading import Reading, ReadingBuilder, encodable
from manifests.adapters.reasons import Reason
from manifests.adapters.splits import TRAIN, split_in_file_name
from manifests.adapters.video_files import VideoLookup, find_video_files
from manifests.adapters.wanted import WantedVideos
from manifests.errors import UserError

PASSES = ("narration_pass_1", "narration_pass_2")
REDACTED_STATUS = "redacted"


def read_ego4d(
    directory: Path, *, annotations: Sequence[Path], dataset: str = "ego4d", skip: Path | None = None
) -> Reading:
    """Reads Ego4D narrations from JSON and pickle files.

    Raises:
        UserError: there are no videos, or an annotation file cannot be read.
    """
    builder = ReadingBuilder(dataset)
    wanted = WantedVideos(builder, VideoLookup(find_video_files(directory, skip=skip)))
    for path in annotations:
        match path.suffix.lower():
            case ".json":
                _add_narrations(builder, wanted, path=path)
            case ".pkl" | ".pickle":
                _add_pickled_list(builder, wanted, path=path)
            case _:
                raise UserError(f"{path} is neither .json nor .pkl", hint="give narration.json, or a pickled list")
    return builder.build()


@dataclass(frozen=True)
class _Pass:
    """The usable narrations of one annotator's pass over one video."""

    video: int
    source: str
    times_s: np.ndarray  # float64[N]
    texts: pa.Array  # string[N]
    rows: np.ndarray  # int64[N], place in the pass


def _add_narrations(builder: ReadingBuilder, wanted: WantedVideos, *, path: Path) -> None:
    passes: list[_Pass] = []
    beta_of_video: dict[int, float] = {}
    betas: list[float] = []
    seen: set[str] = set()
    for source_id, entry in object_items(path, inside="videos"):
        if not _is_video(entry):
            continue
        if source_id in seen:
            detail = "the file has an entry with this id before"
            builder.reject(Reason.DUPLICATE_ID, file=str(path), source_id=source_id, detail=detail)
            continue
        seen.add(source_id)
        narrations = {name: _narrations_of(entry, name) for name in PASSES}
        times = {name: _times(rows) for name, rows in narrations.items()}
        beta_s = _mean_gap_s(list(times.values()))
        if beta_s is not None:
            betas.append(beta_s)
        num_captions = sum(len(rows) for rows in narrations.values())
        video = wanted.number(source_id, split=TRAIN, file=path, row=None, num_captions=num_captions)
        if video is None:
            continue
        if not num_captions and entry.get("status") == REDACTED_STATUS:
            detail = "its narrations are redacted"
            builder.reject(Reason.REDACTED, file=str(path), source_id=source_id, detail=detail)
        beta_of_video[video] = beta_s or 0.0
        for name in PASSES:
            passes += _usable(
                builder, narrations[name], times[name], video=video, source=name, source_id=source_id, path=path
            )
    if not seen:
        raise UserError(f"{path} holds no narrations", hint="expected Ego4D's narration.json")
    alpha_s = float(np.mean(betas)) if betas else 0.0
    # Taken off the list one by one, so that texts are not held twice.
    passes.reverse()
    while passes:
        _add_pass(builder, passes[-1], half_s=_half_length(beta_of_video[passes[-1].video], alpha_s), path=path)
        passes.pop()


def _is_video(entry: object) -> bool:
    return isinstance(entry, dict) and any(name in entry for name in (*PASSES, "status"))


def _narrations_of(entry: dict[str, Any], name: str) -> list[Any]:
    of_pass = entry.get(name)
    rows = of_pass.get("narrations") if isinstance(of_pass, dict) else None
    return rows if isinstance(rows, list) else []


def _times(rows: list[Any]) -> np.ndarray:
    """Point in time of every narration, float64[N]; NaN where it has none that can be used."""
    times = [row.get("timestamp_sec") if isinstance(row, dict) else None for row in rows]
    numbers = [time if type(time) in (float, int) else np.nan for time in times]
    array = np.array(numbers, np.float64)
    array[~np.isfinite(array) | (array < 0)] = np.nan
    return array


def _mean_gap_s(passes: list[np.ndarray]) -> float | None:
    """beta_i: mean gap between consecutive narrations, over all passes of a video; None without a gap."""
    gaps = [np.diff(np.sort(times[np.isfinite(times)])) for times in passes]
    joined = np.concatenate(gaps) if gaps else np.empty(0)
    return float(joined.mean()) if len(joined) else None


def _half_length(beta_s: float, alpha_s: float) -> float:
    return beta_s / (2 * alpha_s) if alpha_s > 0 else 0.0


def _usable(
    builder: ReadingBuilder,
    rows: list[Any],
    times_s: np.ndarray,
    *,
    video: int,
    source: str,
    source_id: str,
    path: Path,
) -> list[_Pass]:
    """The pass without the narrations that are rejected; no pass when none is left."""
    texts: list[str] = []
    kept: list[int] = []
    for row, (narration, time_s) in enumerate(zip(rows, times_s.tolist(), strict=True)):
        text = narration.get("narration_text") if isinstance(narration, dict) else None
        if not isinstance(text, str) or not encodable(text):
            reason, detail = Reason.MALFORMED_ROW, f"{source}: it has no text"
        elif not isfinite(time_s):
            reason, detail = Reason.BAD_TIME, f"{source}: timestamp_sec is {narration.get('timestamp_sec')!r:.40}"
        elif "#unsure" in text.lower():
            reason, detail = Reason.UNSURE, f"{source}: {text:.200}"
        elif not (text := text.strip()):
            reason, detail = Reason.EMPTY_CAPTION, f"{source}: its text is empty"
        else:
            texts.append(text)
            kept.append(row)
            continue
        builder.reject(reason, file=str(path), row=row, source_id=source_id, detail=detail)
    if not kept:
        return []
    indices = np.array(kept, np.int64)
    return [_Pass(video, source, times_s[indices], pa.array(texts, pa.string()), indices)]


def _add_pass(builder: ReadingBuilder, narrations: _Pass, *, half_s: float, path: Path) -> None:
    begin_s = np.maximum(narrations.times_s - half_s, 0.0)
    end_s = narrations.times_s + half_s
    if half_s > 0:
        builder.add_captions(
            narrations.video, texts=narrations.texts, source=narrations.source, begin_s=begin_s, end_s=end_s
        )
        return
    for row in narrations.rows.tolist():
        builder.reject(
            Reason.NO_INTERVAL,
            file=str(path),
            row=row,
            source_id=builder.source_id_of(narrations.video),
            detail=f"{narrations.source}: the interval rule needs two narrations at different times",
        )


def _add_pickled_list(builder: ReadingBuilder, wanted: WantedVideos, *, path: Path) -> None:
    rows = load_plain_pickle(path)
    if not isinstance(rows, list | tuple):
        raise UserError(
            f"{path} holds a {type(rows).__name__}, not a list", hint="expected (video, begin, end, narration) rows"
        )
    split = split_in_file_name(path.name)
    for row, entry in enumerate(rows):
        if not isinstance(entry, list | tuple) or len(entry) != 4:
            detail = f"not (video, begin, end, narration): {entry!r:.80}"
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=detail)
            continue
        source_id, begin_s, end_s, narration = entry
        texts = narration if isinstance(narration, list | tuple) else [narration]
        video = wanted.number(source_id, split=split, file=path, row=row, num_captions=len(texts))
        if video is None:
            continue
        if type(begin_s) not in (float, int) or type(end_s) not in (float, int):
            detail = f"times are {begin_s!r:.40} and {end_s!r:.40}, not numbers"
            builder.reject(Reason.BAD_TIME, file=str(path), row=row, source_id=source_id, detail=detail)
            continue
        for text in texts:
            builder.add_caption(video, text=text, begin_s=begin_s, end_s=end_s, source=path.stem, file=path, row=row)
