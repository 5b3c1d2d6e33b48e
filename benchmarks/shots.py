"""CPU time of detecting shots, for `prep chunk --cut shots`, compared with encoding and with PySceneDetect run plainly.

    python -m benchmarks.shots [VIDEOS] [--rounds N] [--seconds S] [--json FILE]

The first S seconds of every video, one video and one process at a time:

    adaptive, content   `detect_cuts` as in a worker, at 30 frames per second with the default thresholds
    scenedetect         `scenedetect.detect` with the adaptive detector: every frame of the source, decoded by OpenCV
    encode              the ffmpeg passes of `prep chunk --len 15s` over the same seconds

CPU time is measured: user and system seconds of the process with all its threads, or of ffmpeg. The variants take turns
within a round, and the order rotates. Seconds are medians over the rounds; ratios are medians of the ratios within each
round. `/ encode` is what detection adds to the cost of encoding. PySceneDetect compares the frames of the source and
not those of the chunks, so its cuts are at other numbers, and may differ.

Without VIDEOS, synthetic ones are generated.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import scenedetect
from scenedetect.detectors import AdaptiveDetector

from benchmarks.chunk import make_manifest, whole_videos
from benchmarks.measure import run_measured
from benchmarks.report import parser_for, print_report
from prep.sources.detector import DEFAULT_THRESHOLD, Detector, DetectorName
from prep.sources.shots import detect_cuts
from prep.video.encode import span_arguments
from prep.video.ffmpeg import find_ffmpeg
from prep.video.plan import SpanPlan
from prep.video.planning import make_plan
from prep.video.recipe import Recipe, ResolvedRecipe, resolve

FPS = Fraction(30)
Measured = tuple[float, int | None]  # CPU seconds; number of cuts


def detected(plan: SpanPlan, name: DetectorName) -> Measured:
    """Detect the shots of the frames in the plan."""
    detector = Detector(name=name, threshold=DEFAULT_THRESHOLD[name], min_scene_frames=15, fps=FPS)
    begin_s = time.process_time()
    cuts = detect_cuts(Path(plan.path), num_frames=plan.span.num_frames, detector=detector)
    return time.process_time() - begin_s, len(cuts)


def plainly_detected(plan: SpanPlan) -> Measured:
    """Run PySceneDetect with its defaults over the same time."""
    begin_s = time.process_time()
    scenes = scenedetect.detect(plan.path, AdaptiveDetector(), end_time=float(plan.span.num_frames / FPS))
    return time.process_time() - begin_s, max(0, len(scenes) - 1)


def encoded(plan: SpanPlan, recipe: ResolvedRecipe) -> Measured:
    """Run the encoder pass over the frames in the plan."""
    program = find_ffmpeg().path
    arguments = span_arguments(Path(plan.path), source=plan.source, span=plan.span, recipe=recipe, program=program)
    with tempfile.TemporaryDirectory() as folder:
        return run_measured(arguments, folder=Path(folder)).cpu_s, None


def beginning(plan: SpanPlan, *, num_frames: int, chunk_frames: int) -> SpanPlan:
    """Return a span over the first `num_frames` frames of a video."""
    full, rest = divmod(min(num_frames, plan.span.num_frames), chunk_frames)
    chunks = (*([chunk_frames] * full), *([rest] if rest else []))
    return replace(plan, span=replace(plan.span, chunk_frames=chunks))


def row_of(plan: SpanPlan, rounds: list[dict[str, Measured]]) -> dict[str, object]:
    """Return the row of one video."""

    def seconds(name: str) -> float:
        return statistics.median(found[name][0] for found in rounds)

    def ratio(name: str, base: str) -> float:
        return statistics.median(found[name][0] / found[base][0] for found in rounds)

    source = plan.source
    return {
        "video": Path(plan.path).name,
        "size": f"{source.width} x {source.height}, {source.fps:.4g} fps",
        "s": float(plan.span.num_frames / FPS),
        "encode CPU s": seconds("encode"),
        "adaptive CPU s": seconds("adaptive"),
        "adaptive / encode": ratio("adaptive", "encode"),
        "content / encode": ratio("content", "encode"),
        "adaptive / scenedetect": ratio("adaptive", "scenedetect"),
        "cuts": f"{rounds[0]['adaptive'][1]}, {rounds[0]['content'][1]}, {rounds[0]['scenedetect'][1]}",
    }


def main() -> None:
    """Measure and print the table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", type=Path, nargs="?", help="folder of videos")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each video")
    options = parser.parse_args()
    recipe = resolve(Recipe(), ffmpeg_version=find_ffmpeg().version)
    chunk_frames = recipe.settings.chunk_frames
    variants: dict[str, Callable[[SpanPlan], Measured]] = {
        "adaptive": lambda plan: detected(plan, "adaptive"),
        "content": lambda plan: detected(plan, "content"),
        "scenedetect": plainly_detected,
        "encode": lambda plan: encoded(plan, recipe),
    }
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        make_manifest(options.videos, data, num_synthetic=1, minutes=options.seconds / 60)
        num_frames = int(options.seconds * FPS)
        plans = [
            beginning(plan, num_frames=num_frames, chunk_frames=chunk_frames)
            for plan in whole_videos(make_plan(data, recipe))
        ]
        found: list[list[dict[str, Measured]]] = [[] for _ in plans]
        names = list(variants)
        for number in range(options.rounds):
            order = names[number % len(names) :] + names[: number % len(names)]
            for plan, rounds in zip(plans, found, strict=True):
                rounds.append({name: variants[name](plan) for name in order})
    rows = [row_of(plan, rounds) for plan, rounds in zip(plans, found, strict=True)]
    total = {
        name: statistics.median(sum(rounds[number][name][0] for rounds in found) for number in range(options.rounds))
        for name in names
    }
    shares = ", ".join(f"{name} {total[name] / total['encode']:.2f}" for name in names if name != "encode")
    print_report(
        "Detection of shots",
        rows,
        notes=[f"all videos, CPU time / encode: {shares}", "cuts: adaptive, content, scenedetect"],
        json_path=options.json,
        figures={"total_cpu_s": total},
    )


if __name__ == "__main__":
    main()
