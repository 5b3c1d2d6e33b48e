"""Retrieval after training on a quarter of the captions, with and without pseudo-captions of the other videos.

    python -m benchmarks.pseudo_captions [--seeds 3] [--videos 100] [--steps 150] [--caption-steps 200] [--folder DIR]
        [--json FILE] [FLAGS]

Videos of `prep manifest synthetic` (one moving shape; the captions name 6 motions, 4 shapes and 6 colours), a fifth of
them held out. Every fourth of the others keeps its captions. For each seed, with the commands of a user:

1. `train dual-encoder` learns from the labelled videos alone.
2. `train caption` learns from them, `train caption-chunks` captions all chunks in segments of 5 s, and
   `prep manifest captions` adds the captions of the videos without labels.
3. `train dual-encoder` learns from both, with the same settings, number of steps and seed.

R@K is that of texts to videos among all held-out clips, of `train eval retrieval`. FLAGS are those of both dual
encoders and of the captioner. CPU seconds are those of training. With --folder everything is kept there, and an
interrupted benchmark resumes if given the same options.
"""

import contextlib
import csv
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.learning import found_of, kept_folder, learning_parser
from benchmarks.measure import prep_command, run_measured
from benchmarks.report import print_report
from manifests.store import read_captions, read_videos
from train.cli import app
from train.commands import evaluation
from train.tasks.dual_encoder.spec import RETRIEVAL, RetrievalFlags

ONE_IN = 4  # labelled videos of the training split
RECALLS = ("1", "5")
ALONE, BOTH = "labelled videos", "and pseudo-captions"


def main() -> None:
    """Run the benchmark and print its table."""
    parser = learning_parser(__doc__ or "", preset="tiny")
    parser.set_defaults(videos=100)
    parser.add_argument("--steps", type=int, default=150, help="of a dual encoder (default 150)")
    parser.add_argument("--caption-steps", type=int, default=200, help="of the captioner (default 200)")
    parser.add_argument("--min-likelihood", type=float, help="of pseudo-captions (default: all are used)")
    arguments, flags = parser.parse_known_args()
    seeds = []
    with kept_folder(arguments.folder) as folder:
        labelled = labelled_data(folder, arguments)
        for seed in range(arguments.seeds):
            seeds.append(found_of_seed(folder, labelled, seed=seed, arguments=arguments, flags=flags))
            print(f"seed {seed}: {seeds[-1]}", file=sys.stderr, flush=True)
    print_report(
        f"Text-to-video retrieval, --preset {arguments.preset} {' '.join(flags)}".rstrip(),
        rows_of(seeds),
        notes=[
            f"Mean and standard deviation over {len(seeds)} seeds, in percent; {seeds[0][ALONE]['num_clips']} held-out "
            f"clips. Captions: {seeds[0]['num_labelled']} of labelled videos, "
            f"{', '.join(str(one['num_pseudo']) for one in seeds)} pseudo-captions by seed.",
            f"Training: {statistics.mean(one['cpu_s'] for one in seeds):.0f} CPU seconds a seed.",
        ],
        json_path=arguments.json,
        figures={"seeds": seeds},
    )


def labelled_data(folder: Path, arguments: Any) -> Path:
    """Make the data folder in which a quarter of the training videos have captions."""
    data, table = folder / "labelled", folder / "captions.csv"
    if not (data / "manifest").exists():
        whole, count = folder / "whole", ("--videos", str(arguments.videos), "--minutes", str(arguments.minutes))
        run_measured(prep_command("manifest", "synthetic", *count, "--data", whole))
        write_labels(whole, table)
        run_measured(prep_command("manifest", "folder", whole / "synthetic", "--captions", table, "--data", data))
    run_measured(prep_command("chunk", "--len", "15s", "--data", data, "--engine", "processes"))
    return data


def write_labels(whole: Path, table: Path) -> None:
    """Write the captions of the held-out videos, and of every fourth of the others."""
    videos = read_videos(whole).sort_by("video_id").to_pylist()
    training = [video["video_id"] for video in videos if video["split"] == "train"]
    unlabelled = {name for number, name in enumerate(training) if number % ONE_IN}
    by_id = {video["video_id"]: video for video in videos if video["video_id"] not in unlabelled}
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("video", "begin_s", "end_s", "text", "split"))
        for caption in read_captions(whole).to_pylist():
            if (video := by_id.get(caption["video_id"])) is not None:
                values = (caption["begin_s"], caption["end_s"], caption["text"], video["split"])
                rows.writerow((video["path"], *values))


def found_of_seed(folder: Path, labelled: Path, *, seed: int, arguments: Any, flags: Sequence[str]) -> dict[str, Any]:
    """Train the two dual encoders and the captioner of a seed."""

    def trained(name: str, command: str, data: Path, *words: str, score: Any) -> dict[str, Any]:
        words = (*words, "--seed", str(seed), *flags)
        return found_of(folder / f"seed-{seed}-{name}", [command, "--shards", str(data)], words, score=score)

    dual_encoder = ("--preset", arguments.preset, "--steps", str(arguments.steps))
    alone = trained("alone", "dual-encoder", labelled, *dual_encoder, score=score_run)
    caption = ("--preset", "tiny-caption", "--steps", str(arguments.caption_steps))
    captioner = trained("captioner", "caption", labelled, *caption, score=lambda out: {})
    data = folder / f"seed-{seed}-data"
    num_pseudo = add_pseudo_captions(labelled, data, folder / f"seed-{seed}-captioner", arguments=arguments)
    both = trained("both", "dual-encoder", data, *dual_encoder, score=score_run)
    return {
        ALONE: alone,
        BOTH: both,
        "num_labelled": num_captions(labelled),
        "num_pseudo": num_pseudo,
        "cpu_s": sum(one["cpu_s"] for one in (alone, captioner, both)),
    }


def add_pseudo_captions(labelled: Path, data: Path, captioner: Path, *, arguments: Any) -> int:
    """Add captions of the videos without labels to a copy of the labelled data folder; return their number."""
    table, others = (captioner.with_name(f"{captioner.name}{end}.parquet") for end in ("", "-others"))
    words = ("--shards", str(labelled), "--segment", "5s", "--workers", "2", "--out", str(table))
    with contextlib.redirect_stdout(sys.stderr):
        app(["caption-chunks", str(captioner), *words])
    rows = pq.read_table(table)
    has_labels = pc.is_in(rows["video"], value_set=pc.unique(read_captions(labelled)["video_id"].cast(pa.string())))
    pq.write_table(rows.filter(pc.invert(has_labels)), others)
    if not data.exists():
        shutil.copytree(labelled, data, copy_function=os.link)
    least = () if arguments.min_likelihood is None else ("--min-likelihood", str(arguments.min_likelihood))
    run_measured(prep_command("manifest", "captions", others, "--drop-duplicates", *least, "--data", data))
    return num_captions(data) - num_captions(labelled)


def num_captions(data: Path) -> int:
    """Return the number of captions of the training split."""
    videos = read_videos(data)
    training = videos.filter(pc.equal(videos["split"], "train"))["video_id"]
    captions = read_captions(data)["video_id"].cast(pa.string())
    return int(pc.sum(pc.is_in(captions, value_set=training.combine_chunks())).as_py() or 0)


def score_run(out: Path) -> dict[str, Any]:
    """Score a dual encoder on the held-out clips."""
    scored = evaluation.score_run(RETRIEVAL, out, RetrievalFlags(split="val"))
    found = scored["text_to_video"]
    shares = {name: {str(k): share for k, share in found[name].items()} for name in ("recall", "chance")}
    return {**shares, "num_clips": found["gallery_size"]}


def rows_of(seeds: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Return a row for each training set, and one for the difference."""
    rows: list[dict[str, object]] = []
    for name, of in (
        ("chance", lambda one, k: one[ALONE]["chance"][k]),
        (ALONE, lambda one, k: one[ALONE]["recall"][k]),
        (BOTH, lambda one, k: one[BOTH]["recall"][k]),
        ("difference", lambda one, k: one[BOTH]["recall"][k] - one[ALONE]["recall"][k]),
    ):
        row: dict[str, object] = {"trained on": name}
        for k in RECALLS:
            values = [100 * of(one, k) for one in seeds]
            row |= {
                f"R@{k}": statistics.mean(values),
                f"+- R@{k}": statistics.stdev(values) if len(values) > 1 else None,
                f"R@{k} by seed": " ".join(f"{value:.1f}" for value in values),
            }
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
