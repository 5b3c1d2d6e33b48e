"""Quality of `train mae`: classification with frozen features before and after training, over several seeds.

    python -m benchmarks.mae_learning [--seeds 3] [--videos 60] [--preset tiny-mae] [--folder DIR] [--json FILE] [FLAGS]

Videos of `prep manifest synthetic` (one moving shape, 6 motions, 4 shapes, 6 colours), a fifth of them held out, are
processed by `prep chunk`, and for each seed by `train mae --preset PRESET --seed N FLAGS` and `train eval probe`, with
the commands of a user. The model does not see captions. Features are those of `train eval probe`: a k-NN classifier and
a linear layer are fitted to the labelled clips of the training videos and scored on the held-out ones. `random` is the
same architecture with the seed's initial weights, `chance` always predicts the most frequent class in training.

With --folder the videos, shards and runs are kept there, and an interrupted benchmark resumes if given the same
options. CPU seconds are those of training, including decoding and the report page.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.learning import found_of_seeds, learning_parser
from benchmarks.report import print_report
from train.commands import evaluation
from train.config.evaluation import METHODS
from train.evaluation.probe.spec import PROBE, ProbeFlags
from train.run.folder import RunFolder, read_lines

LABELS = ("motion", "shape", "colour")
NAMES = {"knn": "k-NN", "linear": "linear"}
_LAST_STEPS = 20


def main() -> None:
    """Run the benchmark and print its table."""
    parser = learning_parser(__doc__ or "", preset="tiny-mae")
    parser.add_argument("--neighbours", type=int, default=20)
    arguments, flags = parser.parse_known_args()
    score = partial(score_run, neighbours=arguments.neighbours)
    seeds = found_of_seeds("mae", arguments, flags, score=score, in_words=_one_line)
    losses = ", ".join(f"{one['first_loss']:.3f} to {one['last_loss']:.3f}" for one in seeds)
    print_report(
        f"Held-out accuracy of frozen features, --preset {arguments.preset} {' '.join(flags)}".rstrip(),
        rows_of([one["findings"] for one in seeds]),
        notes=[
            f"Mean and standard deviation over {len(seeds)} seeds. Losses: {losses}.",
            f"Training: {statistics.mean(one['cpu_s'] for one in seeds):.0f} CPU seconds a seed.",
        ],
        json_path=arguments.json,
        figures={"seeds": seeds},
    )


def score_run(out: Path, *, neighbours: int) -> dict[str, Any]:
    """Probe a run, and read its losses."""
    probed = evaluation.score_run(PROBE, out, ProbeFlags(label=LABELS, method=METHODS, neighbours=neighbours))
    losses = [line["loss"] for line in read_lines(RunFolder(out).metrics)]
    return {
        "findings": probed["findings"],
        "first_loss": losses[0],
        "last_loss": statistics.mean(losses[-_LAST_STEPS:]),
    }


def rows_of(seeds: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, object]]:
    """Return a row for each label and method: top-1 of the trained and of the random tower, and chance, in percent."""
    rows: list[dict[str, object]] = []
    for label in LABELS:
        for method, name in NAMES.items():
            of_it = [[one for one in seed if (one["label"], one["method"]) == (label, method)] for seed in seeds]
            top1 = {
                encoder: [100 * one["found"]["top1"] for its in of_it for one in its if one["encoder"] == encoder]
                for encoder in ("trained", "random")
            }
            rows.append(
                {
                    "label": label,
                    "method": name,
                    "chance %": 100 * of_it[0][0]["chance"]["top1"],
                    "random %": statistics.mean(top1["random"]),
                    "+- random": _spread(top1["random"]),
                    "trained %": statistics.mean(top1["trained"]),
                    "+- trained": _spread(top1["trained"]),
                    "by seed": " ".join(f"{one:.1f}" for one in top1["trained"]),
                    "clips": of_it[0][0]["num_samples"],
                }
            )
    return rows


def _spread(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _one_line(seed: dict[str, Any]) -> str:
    return ", ".join(
        f"{one['label']} {one['method']} {one['encoder']} {100 * one['found']['top1']:.1f}" for one in seed["findings"]
    )


if __name__ == "__main__":
    main()
