"""Parts of the report of `prep plan` that list individual videos."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.formatting import count_noun, duration_text, on_one_line, size_text
from clipmill.prep.core.column import Addition
from clipmill.prep.core.failure_list import MAX_ENTRIES
from clipmill.prep.video.plan import Plan
from clipmill.prep.video.plan_inputs import Planned, named_videos
from clipmill.prep.video.spans import EvenCutting

_SLOW_BYTES_PER_S = 1e8  # speed of a slow disk, or of one connection to a bucket
_UNINDEXED = '"is_indexed":false'  # part of the JSON of a timeline
_SHORT_TAIL_S = 1  # shorter than most clips


def sources_read_twice(planned: Planned) -> Addition:
    """Return the report's lines about sources without an index, which both the plan and the run read completely."""
    plan = planned.plan
    videos = np.unique(plan.video_rows[planned.rows_to_encode()])
    timelines = plan.probes["timeline"].take(pa.array(videos))
    rows = videos[np.asarray(pc.fill_null(pc.match_substring(timelines, _UNINDEXED), False))]
    size_bytes = int(np.asarray(plan.probes["size_bytes"])[rows].sum())
    first = plan.video_ids(rows[:MAX_ENTRIES].tolist())
    values = {"num_read_twice": len(rows), "read_twice_bytes": size_bytes, "first_read_twice": first}
    each = f"{duration_text(size_bytes / _SLOW_BYTES_PER_S)} at {size_text(round(_SLOW_BYTES_PER_S))}/s"
    lines = [
        f"twice    {count_noun(len(rows), 'video')} without an index (MKV, TS and others), {size_text(size_bytes)}:"
        f" read completely by a plan, for exact times, and again by the run; each time {each}",
        f"         {named_videos(first, num_all=len(rows))}",
    ]
    return Addition(lines if len(rows) else [], values)


def short_tails(plan: Plan) -> Addition:
    """Return the report's lines about videos whose last chunk is very short; empty with `--cut shots`."""
    if not isinstance(plan.cutting, EvenCutting):
        return Addition([], {})
    fps = plan.recipe.settings.fps_exact
    tails = plan.cutting.short_tails(max_frames=math.ceil(_SHORT_TAIL_S * fps))
    rows = list(tails)[:MAX_ENTRIES]
    first = dict(zip(plan.video_ids(rows), (float(tails[row] / fps) for row in rows), strict=True))
    videos = [f"{on_one_line(video)} {length_s:.2g} s" for video, length_s in first.items()]
    more = ", ..." if len(tails) > len(first) else ""
    lines = [
        f"tails    {count_noun(len(tails), 'video')} with a last chunk shorter than {_SHORT_TAIL_S} s:"
        f" {', '.join(videos)}{more}",
        "         kept: every frame is in a chunk; --tail merge adds it to the chunk before, --tail drop omits it",
    ]
    return Addition(lines if tails else [], {"num_short_tails": len(tails), "first_short_tails_s": first})
