"""Open trained weights for evaluation, embedding, export and captioning. Write and read the record of an export.

The record describes the preprocessing of clips. It also holds facts about the run that are not in the tensors:

    OUT/clipmill/settings.yaml   settings of the run, without its data, paths and initial weights
    OUT/clipmill/run.json        task, classes, decoder, height and width of latents
    OUT/clipmill/tokenizer.json  tokenizer of a captioner
    OUT/clipmill/files.json      size and SHA-256 of these files, the weights and their configuration

The exported weights are complete: adapters are merged, and the settings in the record contain neither adapters nor
frozen parts. Other libraries ignore the record. `train eval NAME OUT` evaluates the model on the same clips as the run.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import publish_bytes, publish_json
from clipmill.manifests.settings import deferred_checks
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.train.config.clips import AS_IN_TRAINING, ClipSettings, OpenOptions
from clipmill.train.config.files import load_settings, save_settings
from clipmill.train.config.model import Init, Towers
from clipmill.train.config.shards import HUB_PREFIX, NAME_AND_TAG, is_name_and_tag, local_folder, missing_weights_error
from clipmill.train.config.training import TrainingSettings
from clipmill.train.engine.trained_run import prepare_run
from clipmill.train.evaluation.runner import OpenedRun, open_for
from clipmill.train.models.attention_choice import CHOICE_FACT
from clipmill.train.models.dual_encoder import ModelShape, size_of
from clipmill.train.run.checkpoint import file_facts
from clipmill.train.run.environment import PACKAGES_FACT, require_parts
from clipmill.train.run.folder import RunFolder, is_run, open_run, read_object
from clipmill.train.spec import AdoptedModel, Tasks, TaskSpec, take_tags
from clipmill.train.weights.architecture import match_size
from clipmill.train.weights.exported import EXTRAS_FILE
from clipmill.train.weights.files import WEIGHT_FILES, weights_file
from clipmill.train.weights.loading import load_all_parameters
from clipmill.train.weights.open_clip import named_towers
from clipmill.train.weights.source import Say, Source
from clipmill.train.weights.sources import fetch_tag, open_weights


def open_weights_as(
    tasks: Tasks,
    weights: str | Path,
    options: OpenOptions = AS_IN_TRAINING,
    *,
    hint_for_task: Callable[[str], str] | None = None,
    say: Say,
) -> OpenedRun:
    """Open weights as the model of one of several tasks.

    Args:
        tasks: Specs of the tasks by name. A run that does not record its task belongs to the first task.
        weights: Run, exported folder, file from a different project, or open_clip's NAME:TAG.
        options: Checkpoint, data and overrides.
        hint_for_task: Function that takes the name of a task that is not in `tasks`, and returns the hint of the error.
        say: Function that prints the source of the weights, and the names of interpolated tensors.

    Raises:
        UserError: The weights do not exist, are damaged, or belong to an unknown task or an unsupported model.
    """
    path = local_folder(weights)
    if is_run(path) or is_remote(str(weights)):
        return open_for(
            task_of_run(open_run(path), tasks, hint_for_task=hint_for_task), open_run(path), options, say=say
        )
    if options.checkpoint is not None:
        raise UserError(
            f"--checkpoint is {options.checkpoint}, but {weights} is not a run",
            hint="omit --checkpoint",
            flags=("--checkpoint",),
        )
    require_weights(weights, tasks)
    record = read_record(path)
    if record is None:
        adopted_model, spec = _adopt(source := _source(str(weights), say=say), path, tasks, say=say)
    else:
        spec = _task_of(record, tasks, subject=f"{record.path.parent} holds weights", hint_for_task=hint_for_task)
        recorded_settings: ClipSettings = load_settings(record.settings, spec.settings)
        require_parts(recorded_settings.towers, record)
        source = _source(str(weights), recorded_settings.towers, say=say)
        # The height and width of latents depend on the data, and cannot be read from the tensors.
        side = record.read_facts().get("latents", {}).get("side", recorded_settings.size_px)
        size = match_size(
            size_of(recorded_settings.model, recorded_settings.towers, num_views=recorded_settings.num_views), source
        )
        adopted_model = AdoptedModel(settings=recorded_settings, shape=ModelShape(size=size, image_px=side))
    with deferred_checks():  # the checks of --model do not apply to these weights
        settings, overrides = options.apply_to(adopted_model.settings)
    shape = adopted_model.shape
    if not settings.reads_latents:
        shape = replace(shape, image_px=settings.size_px)
        _require_whole_cubes(settings, shape)
    facts = {} if record is None else record.read_facts()
    trained = prepare_run(settings, run=None, facts=facts, step=None, weights=source.title, load=_skip_loading)
    task: Any = spec.open(
        settings,
        run=record,
        attention=trained.attention,
        device=trained.device,
        shape=shape,
        **adopted_model.open_arguments,
    )
    return OpenedRun(
        spec=spec,
        title=str(weights),
        run=None,
        settings=settings,
        shape=shape,
        shards=options.shards,
        variant=options.variant,
        trained=replace(
            trained, load=partial(load_all_parameters, source=source, fit=task.fit_all_parameters, say=say)
        ),
        task=task,
        overrides=overrides,
        missing_part=adopted_model.missing_part,
        source=source,
    )


def require_weights(weights: str | Path, tasks: Tasks) -> None:
    """Raise a UserError unless `weights` is a run, a weights file, or a folder that contains weights.

    open_clip's NAME:TAG is also accepted if one of the tasks can load such a model.
    """
    path = local_folder(weights)
    if path.is_file() or is_run(path) or any((path / name).is_file() for name in WEIGHT_FILES):
        return
    takes_tags = take_tags(tasks)
    if not is_name_and_tag(str(weights)):
        raise missing_weights_error(weights, takes_tags=takes_tags)
    if not takes_tags and not str(weights).startswith(HUB_PREFIX):
        raise UserError(
            f"{weights} is a CLIP model from open_clip, not a model of train {', '.join(tasks)}",
            hint="use a run (the --out of a training command), an exported folder, or a weights file",
        )


def _source(weights: str, towers: Towers | None = None, *, say: Say) -> Source:
    match = None if Path(weights).exists() else NAME_AND_TAG.fullmatch(weights)
    init = Init(weights=weights)
    towers = towers or (match and named_towers(match[1], match[2])) or Towers()
    fetch_tag(init, towers, say=say)
    source = open_weights(init, towers)
    assert source is not None
    return source


def task_of_run(run: RunFolder, tasks: Tasks, *, hint_for_task: Callable[[str], str] | None = None) -> TaskSpec:
    """Return the task of a run. If `tasks` lacks the task, raise a UserError with the hint `hint_for_task(name)`."""
    return _task_of(run, tasks, subject=f"{run.path} is a run", hint_for_task=hint_for_task)


def _task_of(run: RunFolder, tasks: Tasks, *, subject: str, hint_for_task: Callable[[str], str] | None) -> TaskSpec:
    facts = run.read_facts()
    task = str(facts.get("task", next(iter(tasks))))
    if task not in tasks:
        names = ", ".join(tasks)
        hint = f"use a run or other weights of train {names}" if hint_for_task is None else hint_for_task(task)
        if package := facts.get(PACKAGES_FACT, {}).get(f"task {task}"):
            hint = f"install the package {package}, which provides train {task}; or {hint}"
        raise UserError(f"{subject} of train {task}, not of train {names}", hint=hint)
    return tasks[task]()


def _adopt(source: Source, path: Path, tasks: Tasks, *, say: Say) -> tuple[AdoptedModel, TaskSpec]:
    """Convert weights of a different project with the first task that supports them; return the model and its task."""
    specs = {name: open_spec() for name, open_spec in tasks.items()}
    adopting_specs = {name: spec for name, spec in specs.items() if spec.adopt is not None}
    for spec in adopting_specs.values():
        assert spec.adopt is not None
        if (model := spec.adopt(source, path, say=say)) is not None:
            return model, spec
    raise UserError(
        f"{source.title}: these are not the weights of a complete model for train {', '.join(tasks)}",
        hint="use one of: " + "; ".join(f"{spec.adoptable} ({name})" for name, spec in adopting_specs.items()),
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
    raise AssertionError("the weights must not be loaded before their task is open")


FOLDER = "clipmill"
_FILES = "files.json"
# Other files in an exported folder that affect the outputs of the model.
_OTHER_FILES = (EXTRAS_FILE, "config.json", "open_clip_config.json")
# Settings that a record omits: they describe the machine, the training data, or which parameters were trained.
_OMITTED_SETTINGS = (
    "shards",
    "mix",
    "cache",
    "cache_size",
    "out",
    "track",
    "evaluate",
    "parallel",
    "best",
    "device",
    "freeze",
    "lora",
)


def write_record(folder: Path, opened: OpenedRun) -> None:
    """Write the record of exported weights to the exported folder."""
    settings, record = opened.settings, RunFolder(folder / FOLDER)
    defaults: TrainingSettings = type(settings)()
    init = Init(pixel_mean=settings.init.pixel_mean, pixel_std=settings.init.pixel_std)
    facts: dict[str, Any] = {"task": opened.spec.name, **opened.task.facts()}
    # Record the packages that provide parts of the model, and the attention backend used in training, because other
    # backends round differently.
    keys = ("attention", CHOICE_FACT, PACKAGES_FACT)
    facts |= {name: value for name, value in opened.trained.facts.items() if name in keys}
    if settings.reads_latents:
        shape = opened.shape
        facts["latents"] = {"channels": shape.size.video.num_channels, "side": shape.image_px}
    record.path.mkdir()
    with deferred_checks():
        save_settings(
            replace(settings, init=init, **{name: getattr(defaults, name) for name in _OMITTED_SETTINGS}),
            record.settings,
        )
    publish_json(record.facts, facts)
    for name, content in opened.task.files().items():
        publish_bytes(record.path / name, content)
    files = [weights_file(folder), *_other_files(folder), *sorted(record.path.iterdir())]
    publish_json(record.path / _FILES, {path.relative_to(folder).as_posix(): file_facts(path) for path in files})


def read_record(folder: Path) -> RunFolder | None:
    """Return the record in an exported folder as a run folder without checkpoints; None if there is no record.

    Raises:
        UserError: The record is damaged, or an exported file is missing or has changed.
    """
    record = RunFolder(folder / FOLDER)
    if not record.settings.is_file() and not (record.path / _FILES).is_file():
        return None
    weights, recorded_facts = weights_file(folder), read_object(record.path / _FILES)
    if recorded_facts.get(weights.name) != file_facts(weights):
        raise UserError(
            f"{record.path} does not belong to {weights.name}, which has changed since the export",
            hint=f"delete {record.path} to use {weights.name} without this record",
        )
    for name in sorted({*recorded_facts, *(path.name for path in _other_files(folder))}):
        path = folder / name
        if not path.is_file() or recorded_facts.get(name) != file_facts(path):
            raise UserError(
                f"{path} {'has changed since the export' if path.is_file() else 'was exported, but is missing'}",
                hint=f"export again, or delete {record.path} to use {weights.name} without this record",
            )
    return record


def _other_files(folder: Path) -> list[Path]:
    return [folder / name for name in _OTHER_FILES if (folder / name).is_file()]
