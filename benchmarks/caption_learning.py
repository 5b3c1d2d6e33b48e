"""What `train caption` learns: captions of held-out clips beside the best caption that ignores the clip, over seeds.

    python -m benchmarks.caption_learning [--seeds 3] [--videos 60] [--preset tiny-caption] [--folder DIR] [--json FILE]
        [FLAGS]

Videos of `prep manifest synthetic` (one shape that moves; 6 motions, 4 shapes, 6 colours in words), a fifth of them
held out, go through `prep chunk`, and for each seed through `train caption --preset PRESET --seed N FLAGS` and `train
eval caption`, as a user would type it. `ignores the clip` is the row of that command: the one caption that scores best
as the caption of every clip.

With --folder the videos, shards and runs stay there, and a benchmark that was stopped goes on where it was, given the
same options. CPU seconds are those of training, with its decoding.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.mae_learning import kept_folder, make_data
from benchmarks.report import parser_for, print_report
from manifests.publish import publish_json
from train.caption.commands import evaluate_captions
from train.caption.metrics.scores import LABELS
from train.cli import app

_SHOWN = ("cider_d", "cider", "bleu4", "rouge_l", "exact_match")


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--videos", type=int, default=60, help="of one minute each")
    parser.add_argument("--minutes", type=float, default=1.0, help="length of a video")
    parser.add_argument("--preset", default="tiny-caption")
    parser.add_argument("--folder", type=Path, help="where everything is kept")
    arguments, flags = parser.parse_known_args()
    with kept_folder(arguments.folder) as folder:
        data = make_data(folder, num_videos=arguments.videos, minutes=arguments.minutes)
        seeds = []
        for seed in range(arguments.seeds):
            words = ["--preset", arguments.preset, "--seed", str(seed), *flags]
            seeds.append(score_seed(folder / f"seed-{seed}", words, data=data))
            print(f"seed {seed}: {seeds[-1]['means']}", file=sys.stderr, flush=True)
    print_report(
        f"Captions of held-out clips, --preset {arguments.preset} {' '.join(flags)}".rstrip(),
        rows_of(seeds),
        notes=[
            f"Mean and standard deviation over {len(seeds)} seeds; {seeds[0]['num_samples']} clips. "
            f"Training: {statistics.mean(one['cpu_s'] for one in seeds):.0f} CPU seconds a seed.",
        ],
        json_path=arguments.json,
        figures={"seeds": seeds},
    )


def score_seed(out: Path, words: Sequence[str], *, data: Path) -> dict[str, Any]:
    """Trains and scores one seed, and keeps what it found beside the run."""
    found = out.with_suffix(".json")
    if found.exists():
        kept: dict[str, Any] = json.loads(found.read_bytes())
        return kept
    begun = (out / "settings.yaml").exists()
    began_s = time.process_time()
    with contextlib.redirect_stdout(sys.stderr):
        app(["caption", "--shards", str(data), "--out", str(out), *(["--resume"] if begun else words)])
    cpu_s = time.process_time() - began_s
    scored = evaluate_captions(out, split="val", with_java=False)
    result = {
        "means": scored["means"],
        "constant": scored["constant"],
        "loss": scored["loss"],
        "num_samples": scored["num_samples"],
        "cpu_s": cpu_s,
        "was_resumed": begun,
    }
    publish_json(found, result)
    return result


def rows_of(seeds: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """A row for each metric: of the best caption that ignores the clip, and of the captioner."""
    rows: list[dict[str, object]] = []
    for name in _SHOWN:
        values = [float(one["means"][name]) for one in seeds]
        rows.append(
            {
                "metric": LABELS[name],
                "ignores the clip": float(seeds[0]["constant"]["means"][name]),
                "captioner": statistics.mean(values),
                "+-": statistics.stdev(values) if len(values) > 1 else None,
                "by seed": " ".join(f"{one:.3f}" for one in values),
            }
        )
    return rows


if __name__ == "__main__":
    main()
