"""`train eval NAME`: scores a run's latest checkpoint, and adds the result to the run's page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from manifests.errors import FailedWork, UserError
from train.commands.training import docstring
from train.registry import evaluations, task_named, task_names
from train.run.folder import RunFolder, open_run
from train.spec import EvaluationSpec, TaskSpec


def score_run(evaluation: EvaluationSpec, run_path: Path, wanted: Any, *, shards: str | None = None) -> dict[str, Any]:
    """Evaluate a run's latest checkpoint, and write the result file and the run's page.

    Raises:
        UserError: there is no such run, it is of a task without this evaluation, or its data lack what is needed.
        FailedWork: nothing could be decoded.
    """
    from train.evaluation.runner import evaluate
    from train.report.results import write_page

    run = open_run(run_path)
    result = evaluate(_task_of(run, evaluation), evaluation, run, wanted, shards=shards)
    write_page(run)
    return result


def _task_of(run: RunFolder, evaluation: EvaluationSpec) -> TaskSpec:
    """The task of a run, which must have the evaluation."""
    having = [name for name in task_names() if evaluation.name in (one.name for one in task_named(name).evaluations)]
    found = str(run.read_facts().get("task", having[0]))
    if found not in having:
        raise UserError(
            f"{run.path} is a run of train {found}, not of train {', '.join(having)}", hint="name another run"
        )
    return task_named(found)


def evaluation_command(evaluation: EvaluationSpec) -> Callable[..., None]:
    """The command of an evaluation as cyclopts reads it: its flags are the fields of the evaluation's settings."""
    settings = evaluation.settings
    kind = Annotated[settings, Parameter(name="*")]  # type: ignore[valid-type]
    default = settings()

    def command(
        run: Path,
        wanted: kind = default,  # type: ignore[valid-type]
        *,
        shards: str | None = None,
        as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    ) -> None:
        result = score_run(evaluation, run, wanted, shards=shards)
        if as_json:
            print(json.dumps({name: value for name, value in result.items() if name != evaluation.pictures}))
        else:
            from train.evaluation.pages import describe

            print(describe(evaluation.table(result)))
        if failed := len(result["failed"]):
            raise FailedWork(f"{failed} samples could not be decoded; see `failed` in {run}/evaluations")

    command.__doc__ = docstring(
        evaluation.help,
        example=evaluation.example,
        run=evaluation.run_help,
        shards="Data folder or tar files. Default: those of the training run.",
        as_json="Print one JSON object, without images.",
    )
    return command


evaluate = App(name="eval", help="Evaluate the latest checkpoint of a run, and add the result to its results page.")
for _evaluation in evaluations().values():
    evaluate.command(evaluation_command(_evaluation), name=_evaluation.name)
