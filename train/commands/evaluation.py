"""The `train eval` commands: evaluate a run's latest checkpoint, or other weights."""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.train.commands.training import docstring
from clipmill.train.config.clips import AS_IN_TRAINING, AS_TRAINED, OpenOptions, Overrides, Weights
from clipmill.train.config.fields import SEVERAL
from clipmill.train.config.files import read_values
from clipmill.train.config.shards import local_folder, require_paths, require_weights_exist
from clipmill.train.registry import evaluations, evaluations_of, tasks_where
from clipmill.train.run.folder import is_run, open_run, read_lines
from clipmill.train.run.tracking import add_evaluation, show_batch_counts
from clipmill.train.spec import EvaluationSpec, Tasks, take_tags


def score_run(
    evaluation: EvaluationSpec,
    weights: str | Path,
    flags: Any,
    options: OpenOptions = AS_IN_TRAINING,
    *,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    on_written: Callable[[Path], object] = lambda path: None,
) -> dict[str, Any]:
    """Evaluate the latest checkpoint of a run, or other weights, and write the result.

    If the weights are a run, the result is written into the run folder, and the results page of the run is rendered
    again.

    Args:
        flags: Settings of the evaluation, an instance of `evaluation.settings`.
        out: Folder for the result of weights that are not a run; None to write no file.
        on_written: Function to call with the path of the result file.

    Raises:
        UserError: The weights do not exist, or belong to a task without this evaluation; or the data lack what the
            evaluation needs, such as captions.
        FailedWork: No sample could be decoded.
    """
    tasks = _tasks_with(evaluation)
    require_weights_exist(weights, takes_tags=take_tags(tasks))
    require_paths(shards=(options.shards,))
    with Activity("importing torch"):
        from clipmill.train.evaluation.opening import open_weights_as, require_weights, task_of_run
        from clipmill.train.evaluation.runner import score_opened
        from clipmill.train.report.results import write_page
        from clipmill.train.run.variants import reading_variants_of_run

    path = local_folder(weights)
    run = open_run(path) if is_run(path) or is_remote(str(weights)) else None
    if run is not None:
        task_of_run(run, tasks, hint_for_task=_evaluations_of)
        for log in (run.metrics, run.failures):
            read_lines(log)  # report a damaged line before anything is computed
        if out is not None:
            raise UserError(
                f"--out is {out}, but the results of a run are written into {run.path}",
                hint="omit --out",
                flags=("--out",),
            )
    elif options.shards is None:
        require_weights(weights, tasks)
        raise UserError(
            f"--shards is missing: {weights} is not a run with a data folder",
            hint="add --shards DATA",
            flags=("--shards",),
        )
    with ExitStack() as stack:
        stack.enter_context(reading_variants_of_run(weights, options.shards, options.variant, say=say))
        opened = open_weights_as(tasks, weights, options, hint_for_task=_evaluations_of, say=say)
        stack.enter_context(show_batch_counts())
        result = score_opened(opened, evaluation, flags, out=out, on_write=on_written)
    if run is not None:
        with Activity(f"writing {run.page}"):
            write_page(run)
        try:
            add_evaluation(run, opened.settings.track, result)
        except UserError as error:  # the result file is already written
            say(f"the result was not added to W&B: {error}; {error.hint}")
    return result


def _tasks_with(evaluation: EvaluationSpec) -> Tasks:
    return tasks_where(lambda spec: any(item.name == evaluation.name for item in spec.evaluations))


def data_of(weights: str | Path) -> tuple[str | None, ...]:
    """Return the data folders to evaluate by default: each folder of a mixture, or None for the run's single folder."""
    if not is_run(path := local_folder(weights)):
        return (None,)
    try:
        shards = read_values(open_run(path).settings).get("shards")
    except UserError:
        return (None,)  # opening the run raises the error again
    return tuple(map(str, shards)) if isinstance(shards, list) and len(shards) > 1 else (None,)


def _evaluations_of(task: str) -> str:
    names = ", ".join(evaluation.name for evaluation in evaluations_of(task))
    return f"evaluations of train {task}: {names}" if names else "use other weights"


def _folders_error(errors: Mapping[str, UserError], *, has_results: bool) -> UserError:
    """Return one error for all folders of a mixture that cannot be evaluated; an error common to all is shown once."""
    if not has_results and len(set(map(str, errors.values()))) == 1:
        return next(iter(errors.values()))
    state = (
        "the run's other data folders were evaluated" if has_results else "none of the run's data folders was evaluated"
    )
    text = "; ".join(f"{folder} was not evaluated: {error}" for folder, error in errors.items())
    hints = dict.fromkeys(error.hint for error in errors.values() if error.hint)
    return UserError(text, hint="; ".join([state, *hints]))


def evaluation_command(evaluation: EvaluationSpec) -> Callable[..., None]:
    """Return the cyclopts command of an evaluation. The fields of the evaluation's settings are the flags."""
    settings = evaluation.settings
    kind = Annotated[settings, Parameter(name="*")]  # type: ignore[valid-type]
    default = settings()

    def command(
        weights: Weights,
        flags: kind = default,  # type: ignore[valid-type]
        *,
        shards: str | None = None,
        variant: Annotated[tuple[str, ...], SEVERAL] = (),
        where: str | None = None,
        shown: Overrides = AS_TRAINED,
        out: Path | None = None,
        as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    ) -> None:
        say = partial(print, file=sys.stderr) if as_json else print
        files: list[Path] = []
        errors: dict[str, UserError] = {}
        num_failed = 0
        for data in data_of(weights) if shards is None else (shards,):
            options = OpenOptions(shards=data, variant=variant, where=where, overrides=shown)
            try:
                result = score_run(evaluation, weights, flags, options, out=out, say=say, on_written=files.append)
            except UserError as error:
                if data is None or shards is not None:
                    raise
                errors[data] = error  # continue with the other folders of the mixture
                continue
            if as_json:
                print(json.dumps({name: value for name, value in result.items() if name != evaluation.pictures}))
            else:
                from clipmill.train.evaluation.tables import describe, table_of

                print(describe(table_of(evaluation.table, result)))
                if files:
                    page = f"; results page: {open_run(local_folder(weights)).page}" if out is None else ""
                    print(f"written: {files[-1]}{page}")
            num_failed += len(result["failed"])
        if errors:
            raise _folders_error(errors, has_results=bool(files))
        if num_failed:
            details = "; see `failed` in " + ", ".join(map(str, files)) if files else ""
            hint = details or ("" if as_json else "; use --json or --out to list them")
            raise FailedWork(f"{count_noun(num_failed, 'sample')} could not be decoded{hint}")

    tags = ", NAME:TAG of open_clip" if take_tags(_tasks_with(evaluation)) else ""
    command.__doc__ = docstring(
        evaluation.help,
        example=evaluation.example,
        weights=f"{evaluation.run_help} Alternatives: an exported folder, a weights file{tags} or hf:NAME on the Hub.",
        shards="Data folder or tar files. Default: each data folder of the training run.",
        variant="Names of variants to read, as listed by prep status. Default: the variants of the training run; for "
        "other data, the current variants.",
        where="Condition that selects the samples, such as 'motion > 0.2 and words > 3' (docs/data.md). The "
        "condition used in training does not apply. Default: all samples.",
        out="Folder for the result file, for weights that are not a run. Default: no file is written.",
        as_json="Print one JSON object per data folder, without images.",
    )
    return command


evaluate = App(name="eval", help="Evaluate a run and add the result to its results page, or evaluate other weights.")
for _evaluation in evaluations().values():
    evaluate.command(evaluation_command(_evaluation), name=_evaluation.name)
