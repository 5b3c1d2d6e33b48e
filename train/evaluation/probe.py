"""Flags and table of `train eval probe`, which probes frozen features with k-NN and a linear layer.

The bank consists of the labelled clips of the training split. The classes of a label are all classes that occur in the
training split or in the evaluated split. Settings that make a probe impossible are reported before training starts.
docs/evaluation.md contains definitions and sources.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.plugins import import_late
from clipmill.manifests.settings import Checked
from clipmill.train.config.evaluation import (
    METHODS,
    NEIGHBOURS,
    PROBE_NUMBERS,
    Method,
    ProbeEvaluation,
    repetition_mistakes,
)
from clipmill.train.evaluation.tables import (
    BASELINE_KEYS,
    CLASSES_SECTION,
    FEW_CLASSES,
    MAJORITY,
    Row,
    Table,
    protocol_of,
    share_cell,
)
from clipmill.train.spec import CurveGroup, EvaluationSpec

METHOD_TITLES: dict[str, str] = {"knn": "k-NN", "linear": "linear"}


@dataclass(frozen=True, kw_only=True)
class ProbeFlags(Checked):
    """Flags of `train eval probe`."""

    label: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Caption label to predict. Repeat the flag for several labels."""
    method: Annotated[tuple[Method, ...], Parameter(negative="")] = METHODS
    """Classifier: knn or linear. Repeat the flag for both. Default: both."""
    split: str = "val"
    """Split to evaluate on."""
    train_split: str = "train"
    """Split that provides the neighbours for k-NN and the training data for the linear probe."""
    neighbours: Annotated[int, NEIGHBOURS] = 20
    """Number of neighbours (k)."""

    def rules(self) -> Iterator[UserError]:
        """Yield errors for repeated labels, and for missing or repeated methods."""
        yield from repetition_mistakes("--label", self.label)
        yield from repetition_mistakes("--method", self.method, allowed_values=METHODS)

    def evaluation(self) -> ProbeEvaluation:
        """Return these flags in the form of the settings for a probe during training."""
        return ProbeEvaluation(split=self.split, labels=self.label, methods=self.method, neighbours=self.neighbours)


def probe_table(result: dict[str, Any]) -> Table:
    """Return a table with a row for each combination of label, method and encoder."""
    rows, notes = [], []
    for finding in result["findings"]:
        accuracies, baseline = finding["found"], finding["majority_baseline"]
        cells = [share_cell(accuracies[key], baseline[key]) for key in BASELINE_KEYS]
        if finding["num_classes"] <= FEW_CLASSES:
            cells[1] = share_cell(None)
        is_random = finding["encoder"] == "random"
        label_parts = [finding["label"], METHOD_TITLES[finding["method"]], *(["random"] if is_random else [])]
        detail = f"{count_noun(finding['num_samples'], 'clip')}, {finding['num_bank']:,} in the bank, "
        detail += count_noun(finding["num_classes"], "class", "classes")
        detail += "" if finding["l2"] is None else f", L2 {finding['l2']:g}"
        rows.append(Row(", ".join(label_parts), detail, tuple(cells), is_baseline=is_random))
        if finding["num_unseen"]:
            notes.append(
                f"{count_noun(finding['num_unseen'], 'clip')} whose class is missing from the bank "
                f"({count_noun(finding['num_unseen_classes'], 'class', 'classes')} of label {finding['label']}): "
                "always wrong"
            )
    unseen_note = "; ".join(dict.fromkeys(notes))
    protocol = protocol_of(
        result,
        count_noun(result["num_samples"], "clip"),
        bank=result["bank"],
        features=result["features"],
        unseen=unseen_note,
    )
    columns = ("top-1", "top-5", "mean class")
    return Table("Probes of frozen features", columns, tuple(rows), protocol, reference=MAJORITY)


PROBE = EvaluationSpec(
    name="probe",
    needs="--label NAME",
    help="Evaluate frozen features of the video tower with a k-NN classifier and a linear probe.\n\n"
    "Baselines: predicting the most frequent classes, and the same tower with random weights.",
    example="train eval probe runs/first --shards data --label motion --label shape",
    run_help="Run folder of a task with a video tower.",
    settings=ProbeFlags,
    score=import_late("clipmill.train.evaluation.probing:score_features"),
    table=probe_table,
    pictures="by_class",
    section=CLASSES_SECTION,
    curves=tuple(
        CurveGroup(rf"(.+)_{method}_{name}", f"{method_title}, {title}, %")
        for method, method_title in (("knn", "k-NN"), ("linear", "Linear probe"))
        for name, title in zip(PROBE_NUMBERS, ("top-1", "top-5", "mean class"), strict=True)
    ),
)
