"""What the commands of `train` do, once their flags are read."""

from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from manifests.errors import UserError
from manifests.publish import publish_bytes, publish_json
from train.caption.runs import read_decoder_parts, start_lines
from train.caption.settings import CaptionerSettings
from train.checkpoint import latest_checkpoint
from train.classify.run_classes import read_run_classes
from train.classify.settings import ClassifySettings
from train.common_start import SAME_START, NamedSamples, open_alike, start_of
from train.data.latents.records import FrameShape
from train.distributed.launch import open_world
from train.distributed.settings import ParallelSettings
from train.distributed.world import World
from train.loop import check_batch, train
from train.mae.settings import MaeSettings, without_effect
from train.models.attention import AttentionDoor, open_attention
from train.precision import open_precision
from train.progress import Progress
from train.report import write_page
from train.run_folder import RunFolder, create_run, read_lines, reopen_run
from train.settings import ClipSettings, DualEncoderSettings
from train.surroundings import machine, versions
from train.tasks import Task
from train.tasks.caption import CaptionTask
from train.tasks.classify import ClassifyTask
from train.tasks.dual_encoder import DualEncoderTask
from train.tasks.mae import MaeTask
from train.tasks.stages import check_stages
from train.tracking.trackers import check_tracking
from train.weights.effective import effective_caption_settings, effective_clip_settings, effective_settings
from train.weights.loading import Loaded
from train.weights.settings import Init
from train.weights.sources import Say, Source, fetch_tag, open_weights

Settings = TypeVar("Settings", bound=ClipSettings)
Settings_contra = TypeVar("Settings_contra", bound=ClipSettings, contravariant=True)


class StartableTask(Task, Protocol):
    """A task whose model can start from weights."""

    def training_set(self, world: World) -> NamedSamples:
        """This rank's part of the samples to train on."""
        ...

    def start_from(self, source: Source, samples: Any, *, say: Say) -> Loaded:
        """Has `build_model` give models these weights, once they fit; UserError where they do not."""
        ...

    def facts(self) -> dict[str, Any]:
        """What run.json says of this task, once its training set is open."""
        ...

    def files(self) -> dict[str, bytes]:
        """What a run keeps beside run.json, by name, so that its weights can be used without the data."""
        ...


class MakesTask(Protocol[Settings_contra]):
    """The class of a task."""

    def __call__(self, settings: Settings_contra, /, *, door: AttentionDoor, device: torch.device) -> StartableTask: ...


class MakesEffective(Protocol[Settings]):
    """Gives the settings that take effect with the weights of a source."""

    def __call__(self, settings: Settings, source: Source | None, /, *, say: Say) -> Settings: ...


class AtEnd(Protocol[Settings_contra]):
    """What the first rank does with a run that is done, before its page is written."""

    def __call__(self, run: RunFolder, settings: Settings_contra, /, *, say: Say) -> None: ...


def train_dual_encoder(settings: DualEncoderSettings, *, resume: bool) -> None:
    """Trains a dual encoder, on all ranks that torchrun launched, and writes the run's results page."""
    _launch(settings, DualEncoderTask, effective_settings, resume=resume)


def train_classify(settings: ClassifySettings, *, resume: bool) -> None:
    """Fine-tunes a video tower on labels, likewise."""
    run = RunFolder(settings.out)
    # The data may have labels that it did not have then.
    has_classes = resume and latest_checkpoint(run.checkpoints) is not None
    classes = read_run_classes(run) if has_classes else None
    _launch(settings, partial(ClassifyTask, classes=classes), effective_clip_settings, resume=resume)


def train_mae(settings: MaeSettings, *, resume: bool) -> None:
    """Trains a masked autoencoder, likewise."""

    def effective(settings: MaeSettings, source: Source | None, *, say: Say) -> MaeSettings:
        if unused := without_effect(settings):
            say(f"without effect with --input {settings.input}, given or from a preset: {', '.join(unused)}")
        return effective_clip_settings(settings, source, say=say)

    def at_end(run: RunFolder, settings: MaeSettings, *, say: Say) -> None:
        from train.mae.commands import reconstruct_at_end

        reconstruct_at_end(run, settings, say=say)

    _launch(settings, MaeTask, effective, resume=resume, at_end=at_end)


def train_caption(settings: CaptionerSettings, *, resume: bool) -> None:
    """Trains a captioner, likewise."""
    run = RunFolder(settings.out)
    # The data may have captions that it did not have then, and tokens are made of captions.
    has_decoder = resume and latest_checkpoint(run.checkpoints) is not None
    decoder = read_decoder_parts(run) if has_decoder else None
    _launch(settings, partial(CaptionTask, decoder=decoder), effective_caption_settings, resume=resume)


def _launch(
    settings: Settings,
    make_task: MakesTask[Settings],
    effective: MakesEffective[Settings],
    *,
    resume: bool,
    at_end: AtEnd[Settings] | None = None,
) -> None:
    check_tracking(settings.track)
    device = choose_device(settings.device)
    start = start_of(settings, resume=resume)
    with open_world(device_type=device.type, start=start, hint=SAME_START) as world:
        device = torch.device("cuda", world.local_rank) if device.type == "cuda" else device
        _train(settings, make_task, effective, resume=resume, world=world, device=device, at_end=at_end)


def _train(
    settings: Settings,
    make_task: MakesTask[Settings],
    effective: MakesEffective[Settings],
    *,
    resume: bool,
    world: World,
    device: torch.device,
    at_end: AtEnd[Settings] | None,
) -> None:
    world = world.cut(settings.parallel.stages)
    share = world.replicas.share(settings.batch)
    door = open_attention(settings.attention, device_type=device.type, compiles=settings.compile)
    precision = open_precision(settings.precision, device_type=device.type)
    progress = Progress(is_quiet=not world.is_first)
    progress.say(f"attention: {door.name} ({door.reason}); precision: {precision.name} ({precision.reason})")
    if world.replicas.size > 1 and share % settings.samples_per_chunk:
        progress.say(
            f"--samples-per-chunk {settings.samples_per_chunk} does not divide the {share} samples of a process: "
            "batches are others than on one process"
        )
    if settings.warmup_steps >= settings.steps:
        progress.say(
            f"--warmup-steps {settings.warmup_steps} leaves nothing of --steps {settings.steps}: the learning rate "
            "rises to the end"
        )
    old_run = reopen_run(settings) if resume else None
    has_weights = old_run is not None and latest_checkpoint(old_run.checkpoints) is not None
    source = None if has_weights else _open_weights(settings.init, world=world, say=progress.say)
    settings = effective(settings, source, say=progress.say)
    task = make_task(settings, door=door, device=device)
    samples = open_alike(lambda: task.training_set(world.replicas), settings, columns=task.columns, world=world)
    check_batch(settings, samples)
    check_stages(task, samples, settings, world=world)
    start = None if source is None else task.start_from(source, samples, say=progress.say)
    # The folder is made last: a mistake in the flags leaves nothing behind.
    run = old_run or world.first(lambda: create_run(settings))
    progress.say(f"data: {samples.describe()}; {samples.variant_name}")
    about = task.facts()
    for line in start_lines(about):
        progress.say(line)
    facts = {
        "task": task.name,
        "processes": _processes(settings.parallel, world),
        "attention": f"{door.name} ({door.reason})",
        "precision": f"{precision.name} ({precision.reason})",
        "data": samples.describe(),
        "variant": samples.variant_name,
        **_latents_facts(samples),
        **_weights_facts(start, old_run),
        **about,
        "machine": machine(device),
        "versions": versions(),
    }
    if world.is_first:
        for name, content in task.files().items():
            publish_bytes(run.path / name, content)
        publish_json(run.facts, facts)
    with ExitStack() as held:
        world.first(lambda: held.enter_context(run.held()))
        train(task, samples, settings, run=run, world=world, device=device, progress=progress)
    if world.is_first:
        if at_end is not None:
            at_end(run, settings, say=progress.say)
        write_page(run)
    failed = len(read_lines(run.failures))
    remark = f"; {failed} samples failed, all are listed in {run.failures}" if failed else ""
    progress.say(f"done: {settings.steps} steps, checkpoints and results page ({run.page.name}) in {run.path}{remark}")


def _processes(parallel: ParallelSettings, world: World) -> str:
    if world.size == 1:
        return "1"
    pipelines = (
        f", {world.replicas.size} x {parallel.stages} stages, {parallel.schedule}" if parallel.stages > 1 else ""
    )
    return f"{world.size}, {parallel.strategy}{pipelines}"


def _open_weights(init: Init, *, world: World, say: Say) -> Source | None:
    # One rank downloads; the others find it in the cache.
    world.first(lambda: fetch_tag(init, say=say))
    return open_weights(init)


def _latents_facts(samples: object) -> dict[str, Any]:
    """How large latents are: what an export has to say of the model, and no tensor shows."""
    shape = getattr(samples, "frame_shape", None)
    return {"latents": {"channels": shape.channels, "side": shape.height}} if isinstance(shape, FrameShape) else {}


def _weights_facts(start: Loaded | None, old_run: RunFolder | None) -> dict[str, Any]:
    """What the run began with: also of one that is resumed, which does not read it again."""
    old = {} if old_run is None else old_run.read_facts()
    kept: dict[str, Any] = {name: old[name] for name in ("weights", "decoder_weights") if name in old}
    return kept if start is None else {**kept, "weights": start.as_json()}


def choose_device(name: str) -> torch.device:
    """The device of `--device`.

    Raises:
        UserError: cuda was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("torch finds no CUDA device (asked for by --device cuda)", hint="use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
