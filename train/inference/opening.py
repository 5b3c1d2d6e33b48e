"""Open trained weights for evaluation, embedding, export and captioning, whatever they are of."""

from pathlib import Path

from manifests.errors import UserError
from train.engine.trained_run import Overrides
from train.evaluation.runner import OpenedRun, open_for
from train.registry import DEFAULT, task_named, task_names
from train.run.folder import open_run
from train.weights.sources import Say

_AS_TRAINED = Overrides()


def open_weights_for_use(
    weights: str | Path,
    *,
    shards: str | None = None,
    device: str | None = None,
    overrides: Overrides = _AS_TRAINED,
    is_without_data: bool = False,
    say: Say,
) -> OpenedRun:
    """Open weights with the task whose model they are.

    Args:
        weights: a run.
        shards: data that replaces a run's own.
        device: replaces a run's own: auto, cpu or cuda.
        overrides: of how clips are shown.
        is_without_data: let the task build models without samples.
        say: prints what was interpolated.

    Raises:
        UserError: there are no such weights, they are damaged, or of a task that is not known here.
    """
    run = open_run(Path(weights))
    task = str(run.read_facts().get("task", DEFAULT))
    if task not in task_names():
        raise UserError(f"{run.path} is a run of train {task}, which is not known here", hint="name another run")
    return open_for(
        task_named(task),
        run,
        shards=shards,
        device=device,
        overrides=overrides,
        is_without_data=is_without_data,
        say=say,
    )
