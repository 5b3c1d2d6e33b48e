"""Open trained weights for evaluation, embedding, export and captioning, whatever they are of."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.settings import deferred_checks
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.files import load_settings
from clipmill.train.config.model import Init, Towers
from clipmill.train.config.places import HUB_PREFIX, NAME_AND_TAG, is_name_and_tag, no_weights
from clipmill.train.engine.trained_run import prepare_run
from clipmill.train.evaluation.record import read_record
from clipmill.train.evaluation.runner import OpenedRun, open_for
from clipmill.train.evaluation.use import AS_IN_TRAINING, Use
from clipmill.train.models.dual_encoder import ModelShape, size_of
from clipmill.train.run.folder import RunFolder, is_run, open_run
from clipmill.train.run.packages import PACKAGES_FACT, require_parts
from clipmill.train.spec import Adopted, Tasks, TaskSpec, take_tags
from clipmill.train.weights.architecture import match_size
from clipmill.train.weights.files import has_weights
from clipmill.train.weights.loading import load_whole
from clipmill.train.weights.open_clip import named_towers
from clipmill.train.weights.source import Say, Source
from clipmill.train.weights.sources import fetch_tag, open_weights


def open_weights_as(
    tasks: Tasks,
    weights: str | Path,
    use: Use = AS_IN_TRAINING,
    *,
    suited: Callable[[str], str] | None = None,
    say: Say,
) -> OpenedRun:
    """Open weights as the model of one of several tasks.

    Args:
        tasks: their specs, by name; a run that does not name its task is of the first.
        weights: a run, an exported folder, a file of another project, or a NAME:TAG of open_clip.
        suited: the hint for weights of another task, by its name.
        say: prints origin, and what was interpolated.

    Raises:
        UserError: there are no such weights, they are damaged, of an unknown task, or of a model that is not supported.
    """
    path = Path(weights)
    if is_run(path):
        return open_for(task_of_run(open_run(path), tasks, suited=suited), open_run(path), use, say=say)
    if use.checkpoint is not None:
        raise UserError(
            f"--checkpoint is {use.checkpoint}, and {weights} is not a run",
            hint="leave it out",
            flags=("--checkpoint",),
        )
    require_weights(weights, tasks)
    record = read_record(path)
    if record is None:
        adopted, spec = _adopt(source := _source(str(weights), say=say), path, tasks, say=say)
    else:
        settings, spec = _recorded_settings(record, tasks, suited=suited)
        source = _source(str(weights), settings.towers, say=say)
        adopted = Adopted(settings=settings, shape=_shape_of(record, settings, source))
    with deferred_checks():  # which are about --model
        settings, overrides = use.applied(adopted.settings)
    shape = adopted.shape
    if not settings.reads_latents:
        shape = replace(shape, image_px=settings.size_px)
        _require_whole_cubes(settings, shape)
    facts = {} if record is None else record.read_facts()
    trained = prepare_run(settings, run=None, facts=facts, step=None, weights=source.title, load=_skip_loading)
    task: Any = spec.open(
        settings, run=record, attention=trained.attention, device=trained.device, shape=shape, **adopted.given
    )
    return OpenedRun(
        spec=spec,
        title=str(weights),
        run=None,
        settings=settings,
        shape=shape,
        shards=use.shards,
        trained=replace(trained, load=partial(load_whole, source=source, fit=task.fit_whole, say=say)),
        task=task,
        overrides=overrides,
        lacks=adopted.lacks,
        source=source,
    )


def require_weights(weights: str | Path, tasks: Tasks) -> None:
    """Raise a UserError if there is neither a run nor a file of weights.

    A NAME:TAG of open_clip is accepted if it may be the model of one of the tasks.
    """
    path = Path(weights)
    if path.is_file() or is_run(path) or has_weights(path):
        return
    takes_tags = take_tags(tasks)
    if not is_name_and_tag(str(weights)):
        raise no_weights(weights, takes_tags=takes_tags)
    if not takes_tags and not str(weights).startswith(HUB_PREFIX):
        raise UserError(
            f"{weights} is a CLIP of open_clip, not a model of train {', '.join(tasks)}",
            hint="name a run (a training command's --out), an exported folder, or a file of weights",
        )


def _source(weights: str, towers: Towers | None = None, *, say: Say) -> Source:
    match = None if Path(weights).exists() else NAME_AND_TAG.fullmatch(weights)
    init = Init(weights=weights)
    towers = towers or (match and named_towers(match[1], match[2])) or Towers()
    fetch_tag(init, towers, say=say)
    source = open_weights(init, towers)
    assert source is not None
    return source


def task_of_run(run: RunFolder, tasks: Tasks, *, suited: Callable[[str], str] | None = None) -> TaskSpec:
    """The one of some tasks that a run is of; UserError if it is of another (`suited` is its hint, by that name)."""
    return _task_of(run, tasks, whose=f"{run.path} is a run", suited=suited)


def _task_of(run: RunFolder, tasks: Tasks, *, whose: str, suited: Callable[[str], str] | None) -> TaskSpec:
    facts = run.read_facts()
    task = str(facts.get("task", next(iter(tasks))))
    if task not in tasks:
        wanted = ", ".join(tasks)
        hint = f"name a run or other weights of train {wanted}" if suited is None else suited(task)
        if package := facts.get(PACKAGES_FACT, {}).get(f"task {task}"):
            hint = f"train {task} is of the package {package}, which has to be installed; {hint}"
        raise UserError(f"{whose} of train {task}, not of train {wanted}", hint=hint)
    return tasks[task]()


def _recorded_settings(
    record: RunFolder, tasks: Tasks, *, suited: Callable[[str], str] | None
) -> tuple[ClipSettings, TaskSpec]:
    """The settings that were exported with weights."""
    spec = _task_of(record, tasks, whose=f"{record.path.parent} holds weights", suited=suited)
    settings: ClipSettings = load_settings(record.settings, spec.settings)
    require_parts(settings.towers, record)
    return settings, spec


def _shape_of(record: RunFolder, settings: ClipSettings, source: Source) -> ModelShape:
    latents = record.read_facts().get("latents", {})
    size = match_size(size_of(settings.model, settings.towers), source)
    return ModelShape(size=size, image_px=latents.get("side", settings.size_px))


def _adopt(source: Source, path: Path, tasks: Tasks, *, say: Say) -> tuple[Adopted, TaskSpec]:
    """The task whose model the weights of another project are."""
    specs = {name: open_spec() for name, open_spec in tasks.items()}
    adopting = {name: spec for name, spec in specs.items() if spec.adopt is not None}
    for spec in adopting.values():
        assert spec.adopt is not None
        if (adopted := spec.adopt(source, path, say=say)) is not None:
            return adopted, spec
    raise UserError(
        f"{source.title}: these are not the weights of a whole model of train {', '.join(tasks)}",
        hint="there are " + "; ".join(f"{one.adopted} ({name})" for name, one in adopting.items()),
    )


def _require_whole_cubes(settings: ClipSettings, shape: ModelShape) -> None:
    try:
        shape.size.video.grid(image_px=shape.image_px, num_frames=settings.num_frames)
    except ValueError as error:
        size = shape.size.video
        raise UserError(
            f"--num-frames {settings.num_frames}, --size-px {settings.size_px}: {error}",
            hint=f"use multiples of {count_noun(size.cube_frames, 'frame')} and {size.patch_px} px",
            flags=("--num-frames", "--size-px"),
        ) from error


def _skip_loading(_: object) -> None:
    raise AssertionError("the task that fits the weights is opened next")
