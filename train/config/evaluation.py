"""Settings of the evaluation during training."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import Checked, GoesWith, Range, errors_of
from clipmill.shards.where_flag import check_where
from clipmill.train.config.fields import FIRST_RUN, SEVERAL, Steps
from clipmill.train.config.shards import short_name

EVERY = GoesWith("every", use="STEPS")

# The text before the first "=", unless that text is part of a path.
_NAME = re.compile(r"(?P<name>[^=/]*)=")
_GOOD_NAME = re.compile(r"\w[\w.-]*")
_DATA = re.compile(r"(?P<shards>.+?)(?:@(?P<split>[^/@:]+)(?::(?P<protocol>[\w-]+))?)?")
_USE = "use [NAME=]DATA[@SPLIT]"


@dataclass(frozen=True, kw_only=True)
class EvaluatedData:
    """Data of one evaluation during training.

    Attributes:
        name: Prefix of the metrics.
        shards: Data folder; None for the data folder of the run.
        split: Split to evaluate on.
        protocol: Evaluation protocol, for tasks with several protocols; None for the default protocol of the task.
        is_named: False if --evaluate.shards is not set, and the training set has several folders.
    """

    name: str
    shards: str | None
    split: str
    protocol: str | None = None
    is_named: bool = True

    def text(self, *, base: Path) -> str:
        """Return the data as a value of --evaluate.shards. A relative path is resolved against `base`."""
        shards = self.shards if self.shards is None or "://" in self.shards else base / self.shards
        return f"{self.name}={shards}@{self.split}" + (f":{self.protocol}" if self.protocol else "")

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Context manager that turns errors from opening these data into errors about the evaluation."""
        try:
            yield
        except UserError as error:
            if not self.is_named:
                hint = "; or ".join(filter(None, [error.hint, "select the data to evaluate with --evaluate.shards"]))
                raise UserError(f"evaluation of {self.shards}: {error}", hint=hint, flags=error.flags) from error
            prefix, names = "", {"--split": "--evaluate.split"}
            if self.shards is not None:
                prefix = f"--evaluate.shards {self.name}={self.shards}: "
                names = {"--split": f"--evaluate.shards {self.name}=DATA@SPLIT", "--shards": "--evaluate.shards"}
            renamed_error = UserError(f"{prefix}{error}", hint=error.hint, flags=error.flags)
            renamed_error.rename_flags(lambda flag: names.get(flag, flag))
            raise renamed_error from error


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Checked):
    """Data and frequency of the evaluations during training."""

    prefix = "evaluate"
    lower_is_better: ClassVar[tuple[str, ...]] = ()
    """Metrics that improve as they decrease, without the prefix for the data. --best selects their minimum."""

    every: Annotated[int | str, FIRST_RUN, Steps(least=0)] = 0
    """Interval between evaluations, in steps or epochs (1ep); 0: no evaluation. The last step is evaluated too."""
    split: Annotated[str, EVERY] = "val"
    """Split to evaluate on."""
    shards: Annotated[tuple[str, ...], SEVERAL, EVERY] = ()
    """Data folders to evaluate on instead of the run's data, each as [NAME=]DATA[@SPLIT]. NAME is the prefix of the
    metrics; default: the folder's name. SPLIT defaults to --evaluate.split."""
    where: Annotated[str | None, EVERY] = None
    """Condition that selects the samples to evaluate on, in the syntax of --where. --where itself does not apply to
    evaluations. Default: all samples."""
    max_samples: Annotated[int, Range(least=2), EVERY] = 5000
    """Maximum number of samples. If the split has more, every k-th sample is used, with the smallest sufficient k."""

    def evaluated_data(self) -> tuple[EvaluatedData, ...]:
        """Return the data of each evaluation.

        Raises:
            UserError: --evaluate.shards cannot be parsed.
        """
        if not self.shards:
            return (EvaluatedData(name=self.split, shards=None, split=self.split),)
        data: dict[str, EvaluatedData] = {}
        for text in self.shards:
            match = _NAME.match(text)
            parts = _DATA.fullmatch(text, match.end() if match else 0)
            if match and not _GOOD_NAME.fullmatch(match["name"]):
                raise UserError(
                    f"{self.flag('shards')} {text!r}: {match['name']!r} is not a valid NAME",
                    hint="use a name of letters, digits, '.', '-' and '_' that begins with a letter or digit, or omit "
                    "NAME=",
                    flags=(self.flag("shards"),),
                )
            if parts is None:
                raise UserError(
                    f"{self.flag('shards')} {text!r} does not name a data folder",
                    hint=_USE,
                    flags=(self.flag("shards"),),
                )
            name = match["name"] if match else short_name(parts["shards"].rstrip("/").rpartition("/")[2])
            if name in data:
                raise UserError(
                    f"{self.flag('shards')} gives the name {name!r} to two data folders",
                    hint="use NAME=DATA with different names",
                    flags=(self.flag("shards"),),
                )
            data[name] = EvaluatedData(
                name=name,
                shards=parts["shards"],
                split=parts["split"] or self.split,
                protocol=self.find_protocol(parts["protocol"]) if parts["protocol"] else None,
            )
        return tuple(data.values())

    def with_absolute_paths(self) -> Self:
        """Return the settings with absolute paths to the data folders, which are valid in any working directory."""
        all_data = [data for data in self.evaluated_data() if data.shards is not None]
        return replace(self, shards=tuple(data.text(base=Path.cwd()) for data in all_data))

    def metric_names(self, data: EvaluatedData) -> tuple[str, ...]:
        """Return the metrics that --best can select, without the prefix; empty if the metrics depend on the data."""
        return ()

    def rules(self) -> Iterator[UserError]:
        """Yield errors for an invalid --evaluate.shards or --evaluate.where."""
        yield from errors_of(self.evaluated_data)
        yield from errors_of(check_where, self.where)

    def find_protocol(self, name: str) -> str:
        """Return the protocol that a value of --evaluate.shards names.

        Raises:
            UserError: This task has no protocol with this name.
        """
        raise UserError(
            f"{self.flag('shards')} selects the protocol {name!r}, but this task has only one protocol",
            hint=_USE,
            flags=(self.flag("shards"),),
        )


Method = Literal["knn", "linear"]
METHODS: tuple[Method, ...] = ("knn", "linear")
NEIGHBOURS = Range(1, 10_000)

# Metrics for each method and label: top-1 and top-5 accuracy over clips, and the mean top-1 accuracy over classes.
PROBE_NUMBERS = ("top1", "top5", "mean_class")


@dataclass(frozen=True, kw_only=True)
class ProbeEvaluation(EvaluationSettings):
    """Settings of probes, which predict labels from frozen features. `max_samples` limits the evaluated samples."""

    # The split is read even without evaluations, for the reconstructions at the end of a run.
    split: str = "val"
    """Split to evaluate on, and source of the reconstructed clips on the results page."""
    labels: Annotated[tuple[str, ...], FIRST_RUN, EVERY] = ()
    """Labels to predict from frozen features: label columns of the captions, such as motion."""
    methods: Annotated[tuple[Method, ...], EVERY] = ("knn",)
    """Prediction methods. knn: k-nearest-neighbour classifier; linear: linear probe trained on the features."""
    neighbours: Annotated[int, NEIGHBOURS, EVERY] = 20
    """Number of neighbours of knn (k)."""
    temperature: Annotated[float, Range(1e-3, 1e3), EVERY] = 0.07
    """Temperature of knn: the vote of a neighbour has weight exp(cosine / temperature)."""
    max_bank: Annotated[int, Range(least=2), EVERY] = 20_000
    """Maximum number of training samples for knn and the linear probe, spread evenly over the training split."""

    def metric_names(self, data: EvaluatedData) -> tuple[str, ...]:
        """Return the metric names of each label and method."""
        return tuple(
            f"{label}_{method}_{name}" for label in self.labels for method in self.methods for name in PROBE_NUMBERS
        )

    def rules(self) -> Iterator[UserError]:
        """Yield errors for missing or repeated labels and methods."""
        yield from super().rules()
        if self.every and not self.labels:
            yield UserError(
                f"--evaluate.every {self.every} needs --evaluate.labels, the labels to predict from frozen features",
                hint="use a label column of the captions, such as --evaluate.labels motion, or omit --evaluate.every",
                flags=("--evaluate.every", "--evaluate.labels"),
            )
        yield from repetition_mistakes(self.flag("labels"), self.labels)
        yield from repetition_mistakes(self.flag("methods"), self.methods, allowed_values=METHODS)


def repetition_mistakes(
    flag: str, values: tuple[str, ...], *, allowed_values: tuple[str, ...] = ()
) -> Iterator[UserError]:
    """Yield errors for a repeated value and, if `allowed_values` is given, for a flag without values."""
    if len(set(values)) < len(values):
        yield UserError(f"{flag} has a repeated value: {', '.join(values)}", hint="use each value once", flags=(flag,))
    if allowed_values and not values:
        yield UserError(f"{flag} has no value", hint=f"use at least one of: {', '.join(allowed_values)}", flags=(flag,))
