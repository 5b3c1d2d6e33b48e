"""Implementation of `train TASK`: train a task's model in a new run, or resume a run."""

import math
import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.divided_videos import read_divided_videos, split_names
from clipmill.manifests.errors import Stopped, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity
from clipmill.manifests.publish import publish_bytes, publish_json
from clipmill.manifests.storage.mirrors import mirror_of, refresh
from clipmill.manifests.store import read_videos
from clipmill.shards.dataset import reading_variants
from clipmill.shards.marks import TOKEN_FACT, mark_run
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.fields import NamedPart, named_parts
from clipmill.train.config.files import Provenance
from clipmill.train.config.model import random_freeze_warning
from clipmill.train.config.shards import normalise_address
from clipmill.train.config.training import ParallelSettings
from clipmill.train.data.query import open_folder
from clipmill.train.data.variants import choose_variants
from clipmill.train.device.precision import choose_device, open_precision
from clipmill.train.distributed.launch import open_world
from clipmill.train.distributed.world import World
from clipmill.train.doctor.commands import doctor_facts
from clipmill.train.engine.loop import check_batch, describe_epochs, train
from clipmill.train.engine.metrics import FACT, consumption_entry
from clipmill.train.engine.rank_consistency import SAME_LAUNCH, launch_facts, open_consistent
from clipmill.train.engine.task import build_meta_model, check_stages, describe_parameters
from clipmill.train.models.attention_choice import choose_attention, describe_fallback, kernels_fact
from clipmill.train.registry import TASKS
from clipmill.train.report.results import initial_weights, write_page
from clipmill.train.run.checkpoint import all_checkpoints, checkpoint_name, read_content
from clipmill.train.run.checkpoint_writer import recover
from clipmill.train.run.environment import PACKAGES_FACT, machine, packages_of, versions
from clipmill.train.run.folder import (
    EVALUATIONS,
    Resume,
    RunFolder,
    create_run,
    open_run,
    read_lines,
    reopen_run,
    sweep,
)
from clipmill.train.run.shared_folder import require_shared, wait_for_files
from clipmill.train.run.tracking import Progress, check_tracking
from clipmill.train.run.variants import EVALUATED_FACT, VARIANTS_FACT, evaluated_data, recorded_variants, variants_facts
from clipmill.train.spec import TaskSpec
from clipmill.train.weights.source import Say, Source

# Maximum wait for the lock of a run: a lost rank exits within 50 s (clipmill.train.distributed.heartbeat), and an NFS
# server releases its locks after 90 s.
_LOST_RANK_S = 120.0


def launch(spec: TaskSpec, settings: ClipSettings, *, resume: Resume, provenance: Provenance) -> dict[str, Any] | None:
    """Train a model on all ranks of torchrun, write the results page, and return the summary on rank 0.

    Raises:
        UserError: The settings do not fit the data, the model, the machine or the run to resume.
        FailedWork, Stopped: See `clipmill.train.engine.loop.train`.
    """
    check_tracking(settings.track)
    device = choose_device(settings.device, needs_gpu=settings.require_gpu)
    start = launch_facts(settings, resume=resume)
    with open_world(device_type=device.type, start=start, hint=SAME_LAUNCH) as world, ExitStack() as stack:
        device = torch.device("cuda", world.local_rank) if device.type == "cuda" else device
        # Rank 0 decides for all ranks, because the folder may change before another rank looks at it.
        old_run = None
        if world.first(lambda: _find_and_lock(settings.out, resume, stack=stack) is not None):
            old_run = RunFolder(settings.out)  # if the run is in a bucket, each rank has its own local folder
            require_shared(old_run.path, world=world)
        old_facts: dict[str, Any] = {}
        if old_run is not None:
            # A run with a checkpoint has a run.json. Without the file, the variants of the run are unknown.
            old_facts = world.first(
                old_run.read_facts
                if world.first(old_run.latest_checkpoint) is None
                else partial(old_run.require_facts, "task", VARIANTS_FACT)
            )
        old_variants, old_evaluated = old_facts.get(VARIANTS_FACT, []), old_facts.get(EVALUATED_FACT, {})
        evaluated_folders = evaluated_data(settings)
        variants = world.each(
            lambda: choose_variants(settings.folders, settings.variant, recorded=old_variants, cache=settings.cache)
        )
        variants |= world.each(
            lambda: choose_variants(
                evaluated_folders,
                recorded=[old_evaluated.get(normalise_address(folder), {}) for folder in evaluated_folders],
                cache=settings.cache,
                print_note=partial(print, file=sys.stderr) if world.is_first else (lambda _: None),
            )
        )
        stack.enter_context(reading_variants(variants))
        try:
            return _train(
                spec,
                settings,
                old_run=old_run,
                old_facts=old_facts,
                stack=stack,
                world=world,
                device=device,
                provenance=provenance,
            )
        except Stopped as stop:
            resume_hint = f"continue with --resume --out {shlex.quote(str(settings.out))}"
            raise Stopped(
                f"{stop}, {'run the same command again to continue' if resume == 'auto' else resume_hint}"
            ) from None


def _find_and_lock(path: Path, resume: Resume, *, stack: ExitStack) -> RunFolder | None:
    """Lock the run to resume, remove the leftovers of a killed process, and return the run; None for a new run."""
    if resume is False or (resume == "auto" and not RunFolder(path).settings.is_file()):
        return None
    run = open_run(path)
    # After a restart by torchrun, a process of the previous attempt may still be running on a lost node.
    is_restart = resume == "auto" and "TORCHELASTIC_RUN_ID" in os.environ
    stack.enter_context(run.hold(wait_s=_LOST_RANK_S if is_restart else 0.0))
    sweep(run)
    recover(run.checkpoints)
    return run


def _create_and_lock(settings: ClipSettings, *, stack: ExitStack, world: World, comment: str) -> RunFolder:
    def create() -> None:
        run = create_run(settings, comment=comment)
        stack.enter_context(run.hold())

    is_remote = mirror_of(settings.out) is not None
    if not is_remote:
        require_shared(settings.out, world=world)
    world.first(create)
    if is_remote:  # in a bucket, the check looks for the lock, which rank 0 now holds
        require_shared(settings.out, world=world)
    return RunFolder(settings.out)


def _train(
    spec: TaskSpec,
    settings: ClipSettings,
    *,
    old_run: RunFolder | None,
    old_facts: dict[str, Any],
    stack: ExitStack,
    world: World,
    device: torch.device,
    provenance: Provenance,
) -> dict[str, Any] | None:
    world = world.cut(settings.parallel.stages)
    precision = open_precision(settings.precision, device_type=device.type)
    with Activity("choosing an attention backend"):
        attention, attention_facts = choose_attention(
            settings,
            device=device,
            products=precision.matmul_dtype,
            world=world,
            facts=old_facts,
        )
    progress = Progress(is_quiet=not world.is_first)
    progress.say(f"attention: {attention.name} ({attention.reason}); precision: {precision.name} ({precision.reason})")
    # Rank 0 looks for a checkpoint; the other ranks wait until they can see the checkpoint too.
    step = None if old_run is None else world.first(lambda: max(all_checkpoints(old_run.checkpoints), default=None))
    if world.is_first and old_run is not None and step is None and (num_lines := len(read_lines(old_run.metrics))):
        progress.say(
            f"{old_run.path} has no checkpoint: training restarts at step 0, and replaces "
            f"{count_noun(num_lines, 'logged step')}"
        )
    if old_run is not None and step is not None:
        wait_for_files(old_run.checkpoints / checkpoint_name(step), world=world)
    has_weights = step is not None
    source = _open_weights(settings, world=world, say=progress.say, run=old_run if has_weights else None)
    settings = spec.effective_settings(settings, None if has_weights else source, say=progress.say)
    if old_run is not None:
        world.first(lambda: reopen_run(settings))
    task = spec.open(settings, attention=attention, device=device, run=old_run if has_weights else None)
    with Activity(f"opening {', '.join(settings.folders)}"):
        samples = open_consistent(
            lambda: task.training_set(world.replicas), settings, columns=task.columns, world=world
        )
    # Print the description before the checks. If the set is too small, the description says why captions were omitted.
    progress.say(f"data: {'; '.join(filter(None, [samples.describe(), samples.variant_name]))}")
    check_batch(settings, samples)
    epochs = [*describe_epochs(settings, samples)]
    check_stages(task, samples, settings, world=world)
    if old_run is not None and step is not None:
        # If the run cannot be resumed with these data, run.json must keep the variants that it was trained on.
        old_content = world.first(partial(read_content, old_run.checkpoints / checkpoint_name(step)))
        world.each(lambda: samples.load_state_dict(*old_content["loader"]))
    # A resumed run does not repeat the messages about its initial weights.
    start = (
        None
        if source is None
        else task.start_from(source, samples, say=(lambda _: None) if has_weights else progress.say)
    )
    model = build_meta_model(task, samples)
    parameters = describe_parameters(task, model)
    fallback = [*describe_fallback(attention, model, device=device, products=precision.matmul_dtype)]
    # Create the folder after all checks, so that a mistake in the flags leaves nothing behind.
    run = old_run or _create_and_lock(settings, stack=stack, world=world, comment=provenance.as_comment())
    task_facts = {**parameters, **task.facts()}
    # Print warnings after everything that can fail, so that an error is not preceded by warnings.
    for remark in (*provenance.remarks, *_remarks(settings, world=world, has_weights=has_weights)):
        progress.say(remark)
    if settings.freeze or settings.lora.rank:
        progress.say(f"parameters: {parameters['parameters']}")
    for line in (*fallback, *epochs, *spec.start_lines(task_facts)):
        progress.say(line)
    for name, plan in task_facts.get("evaluations", {}).items():
        parts = [f"split {plan['split']!r} of {plan['shards']}", plan["data"], plan["variant"]]
        parts += [plan.get("protocol", ""), plan.get("caution", "")]
        progress.say(f"evaluation {name}: {'; '.join(filter(None, parts))}")
    folders = getattr(samples, "folders", None)
    # An export needs the dimensions of the latents, which cannot be read from the model's tensors.
    latents = getattr(samples, "frame_shape", None)
    packages = packages_of([NamedPart("", TASKS, spec.name), *named_parts(settings)])
    facts = {
        "task": spec.name,
        **({PACKAGES_FACT: packages} if packages else {}),
        "processes": _processes(settings.parallel, world),
        "world_size": world.size,
        "attention": f"{attention.name} ({attention.reason})",
        "attention_kernels": kernels_fact(attention, settings, device=device, products=precision.matmul_dtype),
        "precision": f"{precision.name} ({precision.reason})",
        "data": samples.describe(),
        "variant": samples.variant_name,
        TOKEN_FACT: old_facts.get(TOKEN_FACT) or secrets.token_hex(8),
        **variants_facts(settings, columns=task.columns),
        **({} if latents is None else {"latents": {"channels": latents.channels, "side": latents.height}}),
        **({} if folders is None else {"sources": folders.facts()}),
        # A resumed run does not read the initial weights, so it keeps their entries in run.json.
        **initial_weights(old_facts),
        **({} if has_weights or start is None else {"weights": start.as_json()}),
        **attention_facts,
        **task_facts,
        **consumption_entry(old_facts),
        "machine": machine(device),
        "versions": versions(),
        "doctor": doctor_facts(asked_device=settings.device, device_type=device.type) if world.is_first else {},
    }
    if world.is_first:
        for name, content in task.files().items():
            (run.path / name).parent.mkdir(exist_ok=True)
            publish_bytes(run.path / name, content)
        publish_json(run.facts, facts)
    variants = recorded_variants(facts, settings) if world.is_first else {}
    with (
        run.upload_periodically() if world.is_first else nullcontext(),
        mark_run(run.facts, facts[TOKEN_FACT], variants),
    ):
        train(task, samples, settings, run=run, world=world, device=device, progress=progress)
    if world.is_first:
        refresh(run.path / EVALUATIONS)  # other machines may have written evaluations
        with Activity(f"writing {run.page}"):
            if spec.finish_run is not None:
                spec.finish_run(run, settings, say=progress.say)
            write_page(run)
    num_failed, lines = len(read_lines(run.failures)), read_lines(run.metrics)
    remark = f"; {count_noun(num_failed, 'sample')} failed (see {run.failures})" if num_failed else ""
    if sources := lines[-1].get("sources") if lines else None:
        progress.say(f"samples: {', '.join(f'{count:,} of {name}' for name, count in sources.items())}")
    progress.say(
        f"done: {count_noun(settings.steps, 'step')}, checkpoints and results page ({run.page.name}) in "
        f"{run.path}{remark}"
    )
    if not world.is_first:
        return None
    if (next_command := _next_command(spec, settings)) is not None:
        progress.say(f"next: {next_command}")
    return _summary(spec, settings, run=run, lines=lines, num_failed=num_failed, next_command=next_command)


def _summary(
    spec: TaskSpec,
    settings: ClipSettings,
    *,
    run: RunFolder,
    lines: Sequence[dict[str, Any]],
    num_failed: int,
    next_command: str | None,
) -> dict[str, Any]:
    """Return the summary of a finished run that `--json` prints; non-finite numbers become None."""
    last_line = lines[-1] if lines else {}
    numbers = {name: value for name, value in last_line.items() if isinstance(value, int | float)}
    finite_values = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return {
        "task": spec.name,
        "run": os.fspath(run.path),
        "checkpoint": str(run.latest_checkpoint()),
        "page": os.fspath(run.page),
        "steps": settings.steps,
        "samples": settings.steps * settings.batch,
        "failed_samples": num_failed,
        "loss": finite_values.get("loss"),
        "epoch": finite_values.get("epoch"),
        "step_s": sum(line["step_s"] for line in lines),
        "data_wait_s": sum(line["data_wait_s"] for line in lines),
        "evaluation": {name: value for name, value in finite_values.items() if "/" in name},
        **run.read_facts().get(FACT, {}),
        "next": next_command,
    }


def _next_command(spec: TaskSpec, settings: ClipSettings) -> str | None:
    """Return the `train eval` command to suggest; None if the task has no evaluation or the data lack its split."""
    evaluation = spec.first_evaluation
    if evaluation is None:
        return None
    try:
        folder = open_folder(settings.with_data(settings.folders[0]), reason="splits are in a manifest", column=None)
        splits = split_names(read_videos(folder.path), read_divided_videos(folder.path))
    except UserError:
        return None
    split = evaluation.settings().split
    return f"train eval {evaluation.name} {shlex.quote(str(settings.out))}" if split in splits else None


def _remarks(settings: ClipSettings, *, world: World, has_weights: bool) -> Iterator[str]:
    """Yield warnings about settings that are valid, but probably unintended."""
    local_batch = world.replicas.share(settings.batch)
    if world.replicas.size > 1 and local_batch % settings.samples_per_chunk:
        yield (
            f"--samples-per-chunk {settings.samples_per_chunk} does not divide the local batch of "
            f"{count_noun(local_batch, 'sample')}: batches differ from the batches of a single process"
        )
    if isinstance(settings.warmup_steps, int) and settings.warmup_steps >= settings.steps:
        yield (
            f"--warmup-steps {settings.warmup_steps} is not less than --steps {settings.steps}: the learning rate "
            "increases until the end"
        )
    if settings.init.weights is None and not has_weights and (remark := random_freeze_warning(settings.freeze)):
        yield remark


def _processes(parallel: ParallelSettings, world: World) -> str:
    if world.size == 1:
        return "1"
    pipelines = (
        f", {world.replicas.size} x {parallel.stages} stages, {parallel.schedule}" if parallel.stages > 1 else ""
    )
    return f"{world.size}, {parallel.strategy}{pipelines}"


def _open_weights(settings: ClipSettings, *, world: World, say: Say, run: RunFolder | None) -> Source | None:
    """Open the initial weights or, for a resumed `run`, the base weights that its checkpoints omit."""
    if settings.init.weights is None and not settings.lora.rank:
        return None
    from clipmill.train.weights.sources import fetch_tag, open_base, open_weights

    if run is None or settings.lora.rank:
        # Rank 0 downloads the weights; the other ranks read the cache.
        world.first(lambda: fetch_tag(settings.init, settings.towers, say=say))
    if run is None:
        return open_weights(settings.init, settings.towers)
    base = open_base(run.require_checkpoint()) if settings.lora.rank else None
    return None if base is None else base[1]
