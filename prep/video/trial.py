"""Trial encodes: what the encoder costs on this machine with these videos, for the estimate of a plan.

Of up to four videos, a short and a longer section are encoded. The difference of the two is the cost of their
additional seconds alone: starting the program and decoding up to the first frame count in neither. A remote source is
copied for it, as a run does, if it is small enough for a command that should take seconds.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.units import size_text
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.video.encode import encode_span
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.plan import Plan, Workload
from clipmill.prep.video.span_task import StagedSources
from clipmill.prep.video.spans import Span, SpanPlan
from clipmill.shards.timeline.model import Timeline

_NUM_VIDEOS = 3  # and the heaviest one
_SHORT_S, _LONG_S = 1.0, 4.0
_MAX_COPY_BYTES = 512 << 20  # of a remote source


@dataclass(frozen=True)
class EncodeTrial:
    """Cost of one second of a video.

    Attributes:
        row: index in the workload that was estimated.
    """

    row: int
    core_s: float
    size_bytes: float


@dataclass(frozen=True)
class EncodeTrials:
    """The trial encodes of a plan.

    Attributes:
        lacking: Why videos were left out, one reason after another; empty if none was.
    """

    found: tuple[EncodeTrial, ...] = ()
    lacking: tuple[str, ...] = ()


def run_trials(plan: Plan, rows: np.ndarray, work: Workload) -> EncodeTrials:
    """Encode sections of videos that a plan has work for: a small one, a medium one, a large one and the heaviest one.

    The heaviest one has the most bytes per second at the size of the chunks: what took much in its source, such as
    grain and fast motion, takes much in chunks as well. Its costs are the upper end of the range. Videos that cannot be
    encoded, are too short, or are remote and too large, are left out; nothing is kept.

    Args:
        rows: rows of the layout with work, int64[N].
        work: `plan.workload(rows)`.
    """
    order = np.argsort(work.width * work.height * work.fps, kind="stable")
    scale = np.minimum(1.0, plan.recipe.settings.short_side / np.maximum(1, np.minimum(work.width, work.height)))
    heaviest = int(np.argmax(plan.source_bytes_per_s(rows) * scale**2))
    by_size = (int(order[(2 * part + 1) * len(order) // (2 * _NUM_VIDEOS)]) for part in range(_NUM_VIDEOS))
    chosen = sorted({heaviest, *by_size})
    found, lacking = [], []
    spans = plan.spans([int(rows[index]) for index in chosen])
    with StagedSources() as sources:
        for index, span in zip(chosen, spans, strict=True):
            if not Timeline.from_json(span.source.timeline).is_continuous:
                continue  # a copy of the file would have to be made first
            try:
                if is_remote(span.path) and span.source.size_bytes > _MAX_COPY_BYTES:
                    size = size_text(span.source.size_bytes)
                    message = f"{span.path} has {size}, and a plan copies up to {size_text(_MAX_COPY_BYTES)}"
                    raise SourceFailure(FailureCode.SOURCE_TOO_LARGE, message)
                path = sources.path_of(span.path)
                costs = [_cost(plan, span, path, length_s=length_s) for length_s in (_SHORT_S, _LONG_S)]
            except SourceFailure as failure:
                lacking.append(failure.message if span.path in failure.message else f"{span.path}: {failure.message}")
                continue
            except OSError as error:
                lacking.append(f"{span.path}: {error.strerror or error}")
                continue
            (short_s, short_core_s, short_bytes), (long_s, long_core_s, long_bytes) = costs
            if long_s > short_s:
                more_s = long_s - short_s
                core_s, size_bytes = (long_core_s - short_core_s) / more_s, (long_bytes - short_bytes) / more_s
                if core_s > 0 and size_bytes > 0:
                    found.append(EncodeTrial(index, core_s, size_bytes))
    return EncodeTrials(tuple(found), tuple(lacking))


def _cost(plan: Plan, span: SpanPlan, path: Path, *, length_s: float) -> tuple[float, float, int]:
    """Encode a section in the middle of a span of a local file; return its length in seconds, CPU seconds and bytes."""
    fps = plan.recipe.settings.fps_exact
    num_frames = min(span.span.num_frames, round(length_s * fps))
    first_frame = span.span.first_frame + (span.span.num_frames - num_frames) // 2
    section = Span(index=span.span.index, first_frame=first_frame, chunk_frames=(num_frames,), is_last=True)
    with tempfile.TemporaryDirectory() as folder:
        encoded = encode_span(
            path,
            source=span.source,
            span=section,
            recipe=plan.recipe,
            program=find_ffmpeg().path,
            folder=Path(folder),
        )
        return float(num_frames / fps), encoded.cpu_s, sum(path.stat().st_size for path in encoded.segments)


def factor_range(measured: Sequence[float], expected: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the lowest and the highest ratio of measured to expected costs.

    The range is at least a fifth wide to each side: few videos say little about many.
    """
    ratios = np.asarray(measured) / np.asarray(expected)
    middle = float(np.median(ratios))
    return middle, min(float(ratios.min()), 0.8 * middle), max(float(ratios.max()), 1.2 * middle)
