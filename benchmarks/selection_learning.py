"""Whether selecting training data by scores helps: a dual encoder on chunks of which half are spoilt, with and without.

    python -m benchmarks.selection_learning [--seeds 3] [--steps 200] [--videos 60] [--folder DIR] [--json FILE]

Synthetic videos of one minute in chunks of 15 s. Of the chunks to train on, half are spoilt, a third of those each way:
`static` (the picture of the chunk's first moment throughout), `blurred` (a box blur over half of the picture's height)
and `wrong` (the captions that lie mostly in the chunk have texts of other scenes). The held-out videos are not spoilt.
Everything is done by the commands: `prep chunk`, `prep scores`, `train dual-encoder --preset tiny` and `train eval
retrieval`. The variants have the same initial weights, number of steps and batch size for each seed, and differ in
`--where`:

    all        none
    selected   by what scores show: `frozen` of static chunks, `sharpness` of blurred ones (with thresholds between the
               two heaps of their distributions). Scores cannot show wrong captions.
    unspoilt   the captions that are known not to be spoilt: the best that a selection could do

The second table counts the captions that the variants keep, by what was done to their chunks. With --folder the data
and the runs are kept there, and an interrupted benchmark resumes if given the same options.
"""

import random
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa

from benchmarks.learning import found_of, kept_folder
from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report
from manifests.errors import UserError
from manifests.publish import published
from manifests.store import write_manifest
from prep.synthetic.encode import TICKS_PER_FRAME, encode_video
from prep.synthetic.shapes import COMBINATIONS, HEIGHT, WIDTH, Scene, draw_scenes, plan_scenes
from train.commands import evaluation
from train.data.decoding.clip import ClipShape
from train.data.frame_sampling import Sampling
from train.data.loader import LoaderSettings
from train.data.video_captions import VideoCaptions
from train.tasks.dual_encoder.spec import RETRIEVAL, RetrievalFlags

CHUNK_S, FPS = 15, Fraction(25)
CLEAN, STATIC, BLURRED, WRONG = "clean", "static", "blurred", "wrong"
VIDEOS_PER_VAL = 5
BLUR_PX = HEIGHT // 2 + 1
VARIANTS = {
    "all": None,
    "selected": "frozen < 0.5 and sharpness > 5",
    "unspoilt": f"source == '{CLEAN}'",
}


@dataclass(frozen=True)
class Video:
    """A synthetic video; `ways` has what is done to each of its chunks."""

    number: int
    split: str
    ways: tuple[str, ...]

    @property
    def video_id(self) -> str:
        return f"spoilt-{self.number:04d}"

    @property
    def num_frames(self) -> int:
        return int(CHUNK_S * len(self.ways) * FPS)

    @property
    def scenes(self) -> list[Scene]:
        own = self.number // VIDEOS_PER_VAL if self.split == "val" else self.number
        return plan_scenes(duration_s=CHUNK_S * len(self.ways), seed=0, split=self.split, number=own)

    def captions(self) -> Iterator[dict[str, Any]]:
        """Yield rows of the manifest's captions; the source is what was done to them."""
        draw = random.Random(f"captions {self.number}")
        for scene in self.scenes:
            shares = [
                max(0.0, min(scene.end_s, (chunk + 1) * CHUNK_S) - max(scene.begin_s, chunk * CHUNK_S))
                for chunk in range(len(self.ways))
            ]
            is_wrong = self.ways[int(np.argmax(shares))] == WRONG
            others = [f"a {' '.join(one)}" for one in COMBINATIONS if f"a {' '.join(one)}" != scene.text]
            shown = [
                way for way, share in zip(self.ways, shares, strict=True) if share > 0 and way in (STATIC, BLURRED)
            ]
            yield {
                "video_id": self.video_id,
                "begin_s": scene.begin_s,
                "end_s": scene.end_s,
                "text": draw.choice(others) if is_wrong else scene.text,
                "source": shown[0] if shown else WRONG if is_wrong else CLEAN,
            }

    def pictures(self) -> Iterator[np.ndarray]:
        """Yield its frames, yuv420p."""
        drawn = draw_scenes(self.scenes, fps=FPS, num_frames=self.num_frames, seed=self.number)
        for number, picture in enumerate(drawn):
            chunk, place = divmod(number, CHUNK_S * int(FPS))
            if place == 0:
                first = picture
            if self.ways[chunk] == STATIC:
                yield first
            elif self.ways[chunk] == BLURRED:
                yield blurred(picture)
            else:
                yield picture

    def write(self, path: Path) -> None:
        """Encode the video."""
        with published(path) as temporary:
            encode_video(
                temporary,
                pictures=self.pictures(),
                ticks=range(0, self.num_frames * TICKS_PER_FRAME, TICKS_PER_FRAME),
                fps=FPS,
                width=WIDTH,
                height=HEIGHT,
                picture_format="yuv420p",
                options={"preset": "superfast", "crf": "23"},
            )


def blurred(picture: np.ndarray) -> np.ndarray:
    """Blur all planes of a yuv420p frame."""
    luma = cv2.blur(picture[:HEIGHT], (BLUR_PX, BLUR_PX))
    planes = picture[HEIGHT:].reshape(2, HEIGHT // 2, WIDTH // 2)
    chroma = [cv2.blur(plane, (BLUR_PX // 2, BLUR_PX // 2)) for plane in planes]
    return np.concatenate([luma, np.stack(chroma).reshape(HEIGHT // 2, WIDTH)])


def plan_videos(count: int, *, num_chunks: int) -> list[Video]:
    """Plan the videos: every fifth is held out; of the chunks of the others, half are spoilt."""
    splits = ["val" if number % VIDEOS_PER_VAL == VIDEOS_PER_VAL - 1 else "train" for number in range(count)]
    num_trained = splits.count("train") * num_chunks
    num_each = num_trained // 6
    ways = [STATIC, BLURRED, WRONG] * num_each + [CLEAN] * (num_trained - 3 * num_each)
    random.Random("ways").shuffle(ways)
    drawn = iter(ways)
    return [
        Video(number, split, tuple(next(drawn) if split == "train" else CLEAN for _ in range(num_chunks)))
        for number, split in enumerate(splits)
    ]


def make_data(folder: Path, videos: list[Video]) -> Path:
    """Write videos, manifest, chunks and scores; what exists is kept."""
    data, sources = folder / "data", folder / "videos"
    sources.mkdir(parents=True, exist_ok=True)
    data.mkdir(exist_ok=True)
    paths = [sources / f"{video.video_id}.mp4" for video in videos]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one[1].exists() or one[0].write(one[1]), zip(videos, paths, strict=True)))
    ids = [video.video_id for video in videos]
    table = {"video_id": ids, "source_id": ids, "path": [str(path.resolve()) for path in paths]}
    rows = [row for video in videos for row in video.captions()]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    coded = {name: pa.array(columns[name]).dictionary_encode() for name in ("video_id", "source")}
    write_manifest(
        data, "spoilt", pa.table({**table, "split": [video.split for video in videos]}), pa.table({**columns, **coded})
    )
    for command in (("chunk", "--len", f"{CHUNK_S}s"), ("scores",)):
        run_measured(prep_command(*command, "--engine", "processes", "--data", data))
    return data


def num_kept(data: Path, where: str | None, *, source: str) -> int:
    """Return how many captions of a source a variant trains on."""
    both = f"source == '{source}'" + ("" if where is None else f" and {where}")
    shape = ClipShape(sampling=Sampling(num_frames=1), size_px=32)
    loading = LoaderSettings(batch=1, num_threads=1, num_ahead=1, seed=0)
    try:
        return len(VideoCaptions(data, split="train", shape=shape, tokenize=None, loading=loading, where=both))
    except UserError:
        return 0  # none is selected


def score_run(out: Path) -> dict[str, Any]:
    """Return R@1 and R@5 in percent on the held-out videos, the means of both directions."""
    scored = evaluation.score_run(RETRIEVAL, out, RetrievalFlags(split="val"))
    both = (scored["text_to_video"], scored["video_to_text"])
    return {f"r{k}": 100 * statistics.mean(one["recall"][k] for one in both) for k in (1, 5)}


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--videos", type=int, default=60)
    parser.add_argument("--chunks", type=int, default=4, help="length of a video in chunks (default 4)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--folder", type=Path, help="for data and runs, kept at the end (default: a temporary one)")
    arguments = parser.parse_args()
    scores: dict[str, list[dict[str, Any]]] = {variant: [] for variant in arguments.variants}
    with kept_folder(arguments.folder) as folder:
        data = make_data(folder, plan_videos(arguments.videos, num_chunks=arguments.chunks))
        kept = [
            {
                "variant": variant,
                "--where": f"`{where}`" if where else "",
                **{source: num_kept(data, where, source=source) for source in (CLEAN, STATIC, BLURRED, WRONG)},
            }
            for variant, where in VARIANTS.items()
        ]
        for seed in range(arguments.seeds):
            for variant, found in scores.items():
                where = VARIANTS[variant]
                words = ["--preset", "tiny", "--steps", str(arguments.steps), "--seed", str(seed)]
                words += ["--batch", str(arguments.batch)]
                words += [] if where is None else ["--where", where]
                command = ["dual-encoder", "--shards", str(data)]
                found.append(found_of(folder / f"{variant}-{seed}", command, words, score=score_run))
                print(f"{variant}, seed {seed}: {found[-1]}", file=sys.stderr, flush=True)
    print_report(
        f"Held-out retrieval after {arguments.steps} steps on data of which half is spoilt",
        [
            {
                "variant": variant,
                **{
                    f"{name} %": statistics.mean(one[key] for one in found)
                    for name, key in (("R@1", "r1"), ("R@5", "r5"))
                },
                "R@1 by seed": " ".join(f"{one['r1']:.1f}" for one in found),
                "R@5 by seed": " ".join(f"{one['r5']:.1f}" for one in found),
            }
            for variant, found in scores.items()
        ],
        notes=["Mean of text-to-video and video-to-text."],
        json_path=arguments.json,
        further={"Captions to train on, by what was done to their chunks": kept},
    )


if __name__ == "__main__":
    main()
