"""Quality of `train caption`: captions of held-out clips compared with the best constant caption, over several seeds.

    python -m benchmarks.caption_learning [--seeds 3] [--videos 60] [--preset tiny-caption] [--folder DIR] [--json FILE]
        [FLAGS]

Videos of `prep manifest synthetic` (one moving shape; the captions name 6 motions, 4 shapes and 6 colours), a fifth of
them held out, are processed by `prep chunk`, and for each seed by `train caption --preset PRESET --seed N FLAGS` and
`train eval caption`, with the commands of a user. The row `ignores the clip` is reported by that command: the single
caption that scores best for all clips.

With --folder the videos, shards and runs are kept there, and an interrupted benchmark resumes if given the same
options. CPU seconds are those of training, including decoding.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.learning import found_of_seeds, learning_parser
from benchmarks.report import print_report
from train.commands import evaluation
from train.tasks.caption import evaluation as captions
from train.tasks.caption.settings import METRIC_LABELS
from train.tasks.caption.spec import CAPTIONS, CaptionFlags

_SHOWN = ("cider_d", "cider", "bleu4", "rouge_l", "exact_match")


def main() -> None:
    """Run the benchmark and print its table."""
    arguments, flags = learning_parser(__doc__ or "", preset="tiny-caption").parse_known_args()
    seeds = found_of_seeds("caption", arguments, flags, score=score_run, in_words=lambda found: found["means"])
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


def score_run(out: Path) -> dict[str, Any]:
    """Score the captions of a run on held-out clips."""
    without_java = replace(CAPTIONS, score=partial(captions.score_run, with_java=False))
    scored = evaluation.score_run(without_java, out, CaptionFlags(split="val"))
    return {name: scored[name] for name in ("means", "constant", "loss", "num_samples")}


def rows_of(seeds: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Return a row for each metric: the best constant caption, and the captioner."""
    rows: list[dict[str, object]] = []
    for name in _SHOWN:
        values = [float(one["means"][name]) for one in seeds]
        rows.append(
            {
                "metric": METRIC_LABELS[name],
                "ignores the clip": float(seeds[0]["constant"]["means"][name]),
                "captioner": statistics.mean(values),
                "+-": statistics.stdev(values) if len(values) > 1 else None,
                "by seed": " ".join(f"{one:.3f}" for one in values),
            }
        )
    return rows


if __name__ == "__main__":
    main()
