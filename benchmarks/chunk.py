"""CPU time of `prep chunk` against the bare ffmpeg commands, and against one ffmpeg call a chunk as LaViLa does it.

    python -m benchmarks.chunk [VIDEOS] [--rounds N] [--json FILE]

Every way makes 15 s chunks with a short side of 288 pixels of the same files, one process at a time:

    prep chunk           the whole command, processes engine, one worker: probing, planning, encoding, proving,
                         packing, publishing
    prep chunk, ray      the same through a Ray instance of its own; its daemons are counted too
    bare ffmpeg          the same encoder passes, run one by one and nothing else: the floor
    one pass a video     the same recipe, without cutting passes every five minutes
    call a chunk         `-ss S -i VIDEO -t 15` for each chunk, with this recipe's encoder settings and rate
    LaViLa's call        `-ss S -i VIDEO -vf scale -t 15` for each chunk, everything else as ffmpeg and x264 have it
                         (preset medium, the source's rate, audio kept); its output is not the same

What counts is CPU time: user and system seconds of the whole process tree, since wall time says little on a machine
that others use too. The ways take turns within a round, and the order turns from round to round. Figures are medians
over the rounds; ratios are medians of the ratios within each round. `/ bare` is the cost over the floor (target for
`prep chunk`: at most 1.05), `/ prep` how many times the cost of `prep chunk` a way has (target for the calls a chunk:
at least 1.25). Starting Python costs a second or two once, so very short sets look worse than long ones.

Without VIDEOS, synthetic ones are made; natural videos are what the targets are about.
"""

import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path

from benchmarks.measure import Usage, prep_command, run_measured
from benchmarks.report import parser_for, print_report
from benchmarks.tree import run_watched
from prep.codecs import codec_named
from prep.encode import output_size, span_arguments
from prep.ffmpeg import find_ffmpeg
from prep.plan import SpanPlan
from prep.planning import Planned, make_plan
from prep.recipe import Recipe, ResolvedRecipe, resolve

PREP, BARE = "prep chunk", "bare ffmpeg"


class Ways:
    """The ways to make chunks of one data folder's videos; each call runs one and gives its cost."""

    def __init__(self, data: Path, recipe: ResolvedRecipe, *, scratch: Path, program: str) -> None:
        self._data, self._recipe, self._scratch, self._program = data, recipe, scratch, program
        planned = make_plan(data, recipe)
        self._spans = [span for shard in planned.plan.shards for span in planned.plan.spans(shard.rows)]
        self._videos = list(whole_videos(planned))

    def all(self) -> dict[str, Callable[[], Usage]]:
        """Name -> way."""
        return {
            PREP: lambda: self.prep_chunk("processes"),
            BARE: lambda: self._run(map(self._span_command, self._spans)),
            "one pass a video": lambda: self._run(map(self._span_command, self._videos)),
            "call a chunk": lambda: self._run(chain.from_iterable(map(self._chunk_commands, self._videos))),
            "LaViLa's call": lambda: self._run(chain.from_iterable(map(self._lavila_commands, self._videos))),
            "prep chunk, ray": lambda: self.prep_chunk("ray"),
        }

    @property
    def num_chunks(self) -> int:
        """Chunks that each way makes."""
        return sum(len(video.span.chunk_frames) for video in self._videos)

    @property
    def seconds(self) -> float:
        """Length of all videos."""
        return sum(video.source.end_s for video in self._videos)

    def prep_chunk(self, engine: str) -> Usage:
        """The whole command, in a data folder that has nothing but its manifest."""
        data = self._scratch / "data"
        shutil.copytree(self._data / "manifest", data / "manifest")
        settings = self._recipe.settings
        command = prep_command("chunk", "--len", settings.len, "--data", data, "--engine", engine, "--workers", "1")
        try:
            if engine == "ray":  # whose daemon does not wait for its workers, so that the kernel forgets their cost
                watched = run_watched(command)
                return Usage(cpu_s=watched.cpu_s, wall_s=watched.wall_s, peak_bytes=0, stdout="")
            return run_measured(command)
        finally:
            shutil.rmtree(data)

    def _run(self, commands: Iterable[list[str]]) -> Usage:
        usages = []
        for command in commands:
            with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
                usages.append(run_measured(command, folder=Path(folder)))
        return Usage(
            cpu_s=sum(usage.cpu_s for usage in usages),
            wall_s=sum(usage.wall_s for usage in usages),
            peak_bytes=max(usage.peak_bytes for usage in usages),
            stdout="",
        )

    def _span_command(self, plan: SpanPlan) -> list[str]:
        return span_arguments(
            Path(plan.path), source=plan.source, span=plan.span, recipe=self._recipe, program=self._program
        )

    def _chunk_commands(self, plan: SpanPlan) -> Iterable[list[str]]:
        settings = self._recipe.settings
        codec = codec_named(settings.codec)
        options: dict[str, object] = {
            "an": None,
            "c:v": codec.encoder,
            "threads:v": 1,
            codec.crf_argument: settings.crf,
            **codec.gop_arguments(settings.gop or codec.gops[0], settings.keyint),
            codec.preset_argument: settings.preset,
        }
        listed = [str(word) for name, value in options.items() for word in (f"-{name}", value) if word is not None]
        width, height = self._size(plan)
        resize = f"scale={width}:{height},fps={settings.fps}"
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


def whole_videos(planned: Planned) -> Iterable[SpanPlan]:
    """Each video as one span that holds all its chunks."""
    spans: dict[str, list[SpanPlan]] = {}
    for shard in planned.plan.shards:
        for plan in planned.plan.spans(shard.rows):
            spans.setdefault(plan.video_id, []).append(plan)
    for plans in spans.values():
        plans.sort(key=lambda plan: plan.span.index)
        frames = tuple(chain.from_iterable(plan.span.chunk_frames for plan in plans))
        yield replace(plans[0], span=replace(plans[0].span, chunk_frames=frames, is_last=True))


def make_manifest(videos: Path | None, data: Path, *, num_synthetic: int, minutes: float) -> None:
    """Writes the manifest of a folder of videos, or makes synthetic ones where there is none."""
    if videos is not None:
        run_measured(prep_command("manifest", "folder", videos.resolve(), "--data", data))
        return
    amount = ["--videos", str(num_synthetic), "--minutes", str(minutes)]
    run_measured(prep_command("manifest", "synthetic", *amount, "--data", data))


def rows_of(costs: dict[str, list[Usage]]) -> list[dict[str, object]]:
    """One row of the table for each way."""

    def ratio(name: str, base: str) -> float:
        pairs = zip(costs[name], costs[base], strict=True)
        return statistics.median(usage.cpu_s / other.cpu_s for usage, other in pairs)

    return [
        {
            "way": name,
            "CPU s": statistics.median(usage.cpu_s for usage in usages),
            "lowest": min(usage.cpu_s for usage in usages),
            "highest": max(usage.cpu_s for usage in usages),
            "/ bare": math.nan if BARE not in costs else ratio(name, BARE),
            "/ prep": math.nan if PREP not in costs else ratio(name, PREP),
            "wall s": statistics.median(usage.wall_s for usage in usages),
        }
        for name, usages in costs.items()
    ]


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, metavar="VIDEOS", help="folder of videos to cut")
    parser.add_argument("--rounds", type=int, default=3, help="times that each way is run (default 3)")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="only these ways, by the names of the table")
    parser.add_argument("--synthetic", type=int, default=4, metavar="N", help="synthetic videos (default 4)")
    parser.add_argument("--minutes", type=float, default=5.0, help="length of each (default 5)")
    arguments = parser.parse_args()
    ffmpeg = find_ffmpeg()
    with tempfile.TemporaryDirectory() as folder:
        data, scratch = Path(folder) / "planned", Path(folder) / "scratch"
        scratch.mkdir()
        make_manifest(arguments.videos, data, num_synthetic=arguments.synthetic, minutes=arguments.minutes)
        recipe = resolve(Recipe(), ffmpeg_version=ffmpeg.version)
        ways = Ways(data, recipe, scratch=scratch, program=ffmpeg.path)
        chosen = {name: way for name, way in ways.all().items() if name in (arguments.ways or ways.all())}
        costs: dict[str, list[Usage]] = {name: [] for name in chosen}
        for number in range(arguments.rounds):
            names = list(chosen)
            turned = names[number % len(names) :] + names[: number % len(names)]
            for name in turned:
                costs[name].append(chosen[name]())
    notes = [
        f"{ways.num_chunks} chunks of {ways.seconds / 60:.1f} minutes of "
        f"{'synthetic' if arguments.videos is None else 'the given'} video, {arguments.rounds} rounds."
    ]
    print_report("prep chunk", rows_of(costs), notes=notes, json_path=arguments.json)


if __name__ == "__main__":
    main()
