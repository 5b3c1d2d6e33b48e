"""CPU time of `prep chunk` compared with the bare ffmpeg commands, and with one ffmpeg call per chunk as in LaViLa.

    python -m benchmarks.chunk [VIDEOS] [--rounds N] [--json FILE]

Every variant encodes the same files to 15 s chunks with a short side of 288 pixels, one process at a time:

    prep chunk           complete command, processes engine, one worker: probing, planning, encoding, verifying,
                         packing, publishing
    prep chunk, ray      the same with a new Ray instance, including its daemons
    bare ffmpeg          only the encoder passes of the command, one after the other: the lower bound
    one pass per video   the same recipe, without a new pass every five minutes
    call per chunk       `-ss S -i VIDEO -t 15` for each chunk, with the size, rate and encoder settings of the recipe
    LaViLa's call        `-ss S -i VIDEO -vf scale -t 15` for each chunk, with the defaults of ffmpeg and x264
                         (preset medium, the rate of the source, with audio); its output differs

CPU time is the user and system time of the complete process tree; wall time is unreliable on a shared machine. The
variants take turns within a round, and the order rotates from round to round. Figures are medians over the rounds, and
ratios are medians of the ratios within each round. `/ bare` is the cost relative to the lower bound (target for
`prep chunk`: at most 1.05), `/ prep` the cost relative to `prep chunk` (target for one call per chunk: at least 1.25).
`/ own passes` divides the CPU time of `prep chunk` by the CPU time of the encoder passes in the same run, so that noise
between runs does not affect it. Starting Python costs one or two seconds per run, so the ratios are worse for very
short videos.

Without VIDEOS, synthetic videos are generated. The targets apply to natural videos.
"""

import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report
from benchmarks.tree import run_watched
from clipmill.prep.video.codecs import find_codec
from clipmill.prep.video.column import Recipe, resolve
from clipmill.prep.video.encode import SpanPlan, output_size, span_arguments
from clipmill.prep.video.ffmpeg import PROGRAM_VARIABLE, find_ffmpeg
from clipmill.prep.video.plan_inputs import PlanWithInputs, make_plan
from clipmill.prep.video.settings import ResolvedRecipe

PREP, BARE = "prep chunk", "bare ffmpeg"
# Wrapper for ffmpeg that records the cost of each encoder pass.
WRAPPER = """#!/bin/sh
"{program}" "$@"
code=$?
case "$*" in *-progress*) times > "{folder}/$$.times" ;; esac
exit $code
"""


@dataclass(frozen=True)
class Cost:
    """Cost of a variant: CPU and wall time in seconds, and the CPU time of its encoder passes if it is known."""

    cpu_s: float
    wall_s: float
    encoder_s: float | None = None


class Chunkers:
    """Variants of chunking the videos of a data folder. The method of a variant runs it and returns its cost."""

    def __init__(self, data: Path, recipe: ResolvedRecipe, *, scratch: Path, program: str) -> None:
        self._data, self._recipe, self._scratch, self._program = data, recipe, scratch, program
        planned = make_plan(data, recipe)
        self._spans = [span for shard in planned.plan.shards for span in planned.plan.spans(shard.rows)]
        self._videos = list(whole_videos(planned))

    def all(self) -> dict[str, Callable[[], Cost]]:
        """Return the variants by name."""
        return {
            PREP: lambda: self.prep_chunk("processes"),
            BARE: lambda: self._run(map(self._span_command, self._spans)),
            "one pass per video": lambda: self._run(map(self._span_command, self._videos)),
            "call per chunk": lambda: self._run(chain.from_iterable(map(self._chunk_commands, self._videos))),
            "LaViLa's call": lambda: self._run(chain.from_iterable(map(self._lavila_commands, self._videos))),
            "prep chunk, ray": lambda: self.prep_chunk("ray"),
        }

    @property
    def num_chunks(self) -> int:
        """Number of chunks that each variant produces."""
        return sum(len(video.span.chunk_frames) for video in self._videos)

    @property
    def seconds(self) -> float:
        """Total duration of the videos in seconds."""
        return sum(video.source.end_s for video in self._videos)

    def prep_chunk(self, engine: str) -> Cost:
        """Run the complete command in a data folder that contains only a manifest."""
        data = self._scratch / "data"
        shutil.copytree(self._data / "manifest", data / "manifest")
        settings = self._recipe.settings
        command = prep_command("chunk", "--len", settings.len, "--data", data, "--engine", engine, "--workers", "1")
        try:
            if engine == "ray":  # Ray's daemon does not wait for its workers, so the kernel does not count their time
                watched = run_watched(command)
                return Cost(watched.cpu_s, watched.wall_s)
            with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
                wrapper = Path(folder) / "ffmpeg"
                wrapper.write_text(WRAPPER.format(program=self._program, folder=folder))
                wrapper.chmod(0o755)
                usage = run_measured(["env", f"{PROGRAM_VARIABLE}={wrapper}", *command])
                encoder_s = sum(children_s(path.read_text()) for path in Path(folder).glob("*.times"))
            return Cost(usage.cpu_s, usage.wall_s, encoder_s)
        finally:
            shutil.rmtree(data)

    def _run(self, commands: Iterable[list[str]]) -> Cost:
        usages = []
        for command in commands:
            with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
                usages.append(run_measured(command, folder=Path(folder)))
        return Cost(sum(usage.cpu_s for usage in usages), sum(usage.wall_s for usage in usages))

    def _span_command(self, plan: SpanPlan) -> list[str]:
        return span_arguments(
            Path(plan.path), source=plan.source, span=plan.span, recipe=self._recipe, program=self._program
        )

    def _chunk_commands(self, plan: SpanPlan) -> Iterable[list[str]]:
        settings = self._recipe.settings
        codec = find_codec(settings.codec)
        options: dict[str, object] = {
            "an": None,
            "c:v": codec.encoder,
            "threads:v": 1,
            codec.crf_argument: settings.crf,
            **codec.gop_arguments(settings.gop, settings.keyint),
            codec.preset_argument: settings.preset,
        }
        listed = [str(word) for name, value in options.items() for word in (f"-{name}", value) if word is not None]
        width, height = self._size(plan)
        flags = f"{settings.scaler}+accurate_rnd+bitexact"
        resize = f"scale={width}:{height}:flags={flags}:out_range=tv,fps={settings.fps}"
        for begin_s in self._starts_s(plan):
            source = ["-threads", "1", "-ss", begin_s, "-i", plan.path, "-t", self._length_s]
            yield [self._program, "-v", "error", "-nostdin", *source, "-vf", resize, *listed, "out.mp4"]

    def _lavila_commands(self, plan: SpanPlan) -> Iterable[list[str]]:
        width, height = self._size(plan)
        for begin_s in self._starts_s(plan):
            rest = ["-vf", f"scale={width}:{height}", "-t", self._length_s, "out.mp4"]
            yield [self._program, "-v", "error", "-nostdin", "-y", "-ss", begin_s, "-i", plan.path, *rest]

    @property
    def _length_s(self) -> str:
        return f"{float(self._recipe.settings.len_s):g}"

    def _starts_s(self, plan: SpanPlan) -> Iterable[str]:
        length_s = float(self._recipe.settings.len_s)
        return (f"{number * length_s:g}" for number in range(len(plan.span.chunk_frames)))

    def _size(self, plan: SpanPlan) -> tuple[int, int]:
        return output_size(plan.source, short_side=self._recipe.settings.short_side)


def whole_videos(planned: PlanWithInputs) -> Iterable[SpanPlan]:
    """Return a span for each video that covers all of its chunks."""
    spans: dict[str, list[SpanPlan]] = {}
    for shard in planned.plan.shards:
        for plan in planned.plan.spans(shard.rows):
            spans.setdefault(plan.video_id, []).append(plan)
    for plans in spans.values():
        plans.sort(key=lambda plan: plan.span.index)
        frames = tuple(chain.from_iterable(plan.span.chunk_frames for plan in plans))
        yield replace(plans[0], span=replace(plans[0].span, chunk_frames=frames, is_last=True))


def make_manifest(videos: Path | None, data: Path, *, num_synthetic: int, minutes: float) -> None:
    """Write the manifest of a folder of videos; if `videos` is None, of synthetic videos."""
    if videos is not None:
        run_measured(prep_command("manifest", "folder", videos.resolve(), "--data", data))
        return
    amount = ["--videos", str(num_synthetic), "--minutes", str(minutes)]
    run_measured(prep_command("manifest", "synthetic", *amount, "--data", data))


def children_s(times: str) -> float:
    """Parse the second line of the shell's `times`: user and system time of its children, such as `0m1.25s`."""
    parts = (word.removesuffix("s").split("m") for word in times.splitlines()[1].split())
    return sum(60 * int(minutes) + float(seconds) for minutes, seconds in parts)


def rows_of(costs: dict[str, list[Cost]]) -> list[dict[str, object]]:
    """Return a table row for each variant."""

    def ratio(name: str, base: str) -> float | None:
        if base not in costs:
            return None
        pairs = zip(costs[name], costs[base], strict=True)
        return statistics.median(cost.cpu_s / other.cpu_s for cost, other in pairs)

    def own_ratio(runs: list[Cost]) -> float | None:
        known = [cost.cpu_s / cost.encoder_s for cost in runs if cost.encoder_s]
        return statistics.median(known) if known else None

    return [
        {
            "way": name,
            "CPU s": statistics.median(cost.cpu_s for cost in runs),
            "lowest": min(cost.cpu_s for cost in runs),
            "highest": max(cost.cpu_s for cost in runs),
            "/ bare": ratio(name, BARE),
            "/ prep": ratio(name, PREP),
            "/ own passes": own_ratio(runs),
            "wall s": statistics.median(cost.wall_s for cost in runs),
        }
        for name, runs in costs.items()
    ]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, metavar="VIDEOS", help="folder of videos to cut")
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each variant (default 3)")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help="names of the variants to run")
    parser.add_argument("--synthetic", type=int, default=4, metavar="N", help="number of synthetic videos (default 4)")
    parser.add_argument("--minutes", type=float, default=5.0, help="length of each synthetic video (default 5)")
    arguments = parser.parse_args()
    ffmpeg = find_ffmpeg()
    with tempfile.TemporaryDirectory() as folder:
        data, scratch = Path(folder) / "planned", Path(folder) / "scratch"
        scratch.mkdir()
        make_manifest(arguments.videos, data, num_synthetic=arguments.synthetic, minutes=arguments.minutes)
        recipe = resolve(Recipe(), ffmpeg_version=ffmpeg.version)
        variants = Chunkers(data, recipe, scratch=scratch, program=ffmpeg.path)
        chosen = {
            name: variant for name, variant in variants.all().items() if name in (arguments.variants or variants.all())
        }
        costs: dict[str, list[Cost]] = {name: [] for name in chosen}
        for number in range(arguments.rounds):
            names = list(chosen)
            turned = names[number % len(names) :] + names[: number % len(names)]
            for name in turned:
                costs[name].append(chosen[name]())
                print(f"round {number + 1}, {name}: {costs[name][-1].cpu_s:.2f} CPU s", file=sys.stderr, flush=True)
    notes = [
        f"{variants.num_chunks} chunks of {variants.seconds / 60:.1f} minutes of "
        f"{'synthetic' if arguments.videos is None else 'the given'} video, {arguments.rounds} rounds."
    ]
    print_report("prep chunk", rows_of(costs), notes=notes, json_path=arguments.json)


if __name__ == "__main__":
    main()
