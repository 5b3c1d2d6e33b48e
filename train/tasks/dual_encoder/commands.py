"""What `train eval` does, once its flags are read: a run's weights, a protocol, a result file and the page."""

import shlex
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from train.config.evaluation import DualEncoderEvaluation
from train.data.decoding.clip import Views
from train.distributed.world import World
from train.engine.trained_run import open_trained_run, read_settings
from train.evaluation.embeddings import Embeddings, distinct_texts, embed_all, gathered
from train.evaluation.examples import ShownSet, clip_in_words, retrieval_examples
from train.report.results import write_page
from train.run.folder import RunFolder, open_run
from train.tasks.dual_encoder.evaluation import open_scorer, score
from train.tasks.dual_encoder.settings import DualEncoderSettings
from train.tasks.dual_encoder.task import DualEncoderTask

_MAX_CLIPS = 100


def evaluate_run(
    run_path: Path, wanted: DualEncoderEvaluation, *, shards: str | None, num_clips: int = 1
) -> tuple[dict[str, Any], int]:
    """Scores a run's latest checkpoint and adds the result to its page.

    Args:
        num_clips: looks at each clip, whose embeddings are averaged.

    Returns:
        The result as plain values, and the number of samples that failed.

    Raises:
        UserError: there is no such run, or its data has not what the protocol needs.
        FailedWork: nothing could be decoded.
    """
    run = open_run(run_path)
    run.require_task(DualEncoderTask.name)
    settings = read_settings(run, DualEncoderSettings, shards=shards)
    if not 1 <= num_clips <= _MAX_CLIPS or (num_clips > 1 and settings.input == "latents"):
        raise UserError(f"--clips is {num_clips}", hint=f"use 1 to {_MAX_CLIPS}; latents are looked at once")
    scorer = open_scorer(wanted, settings)
    trained = open_trained_run(run, settings)
    device = trained.device
    task = DualEncoderTask(settings, attention=trained.attention, device=device)
    # Two narrations of one span are two queries of multi-instance retrieval.
    samples = task.samples(wanted.split, World(), num_clips=num_clips, each_caption=wanted.protocol == "mir")
    model = trained.fill(task.build_model(samples))
    with trained.precision.autocast():
        own = embed_all(task, model, samples.evaluation_batches(), device=device, num_clips=num_clips)
        found = gathered(own, World(), device=device)
        scores = score(scorer, found, model, device=device)
    result = {
        "evaluation": wanted.protocol,
        "split": samples.split,
        **run.data_facts(shards),
        "step": trained.step,
        "weights": trained.weights,
        "data": samples.describe(),
        "variant": samples.variant_name,
        "clip": clip_in_words(settings, views=Views(num_clips=num_clips), mean_of="embeddings"),
        **scores,
        "failed": [failure.as_json() for failure in found.failed],
        "command": _command(run, wanted, shards=shards, num_clips=num_clips),
    }
    if wanted.protocol == "retrieval":
        result["examples"] = _examples(found, samples, num_frames=settings.num_frames)
    run.write_evaluation(_file_name(wanted, num_clips=num_clips), result)
    write_page(run)
    return result, found.num_failed


def _examples(found: Embeddings, samples: ShownSet, *, num_frames: int) -> list[dict[str, Any]]:
    first_rows, text_of_clip = distinct_texts(found.text_key)
    return retrieval_examples(
        samples,
        found.samples,
        num_frames=num_frames,
        similarity_NM=found.video @ found.text[first_rows].T,
        first_rows=first_rows,
        text_of_clip=text_of_clip,
    )


def _command(run: RunFolder, wanted: DualEncoderEvaluation, *, shards: str | None, num_clips: int) -> str:
    """The command line that gives this result."""
    words = ["train", "eval", wanted.protocol, str(run.path), "--split", wanted.split]
    words += [] if shards is None else ["--shards", shards]
    for name in ("relevancy", "sentences", "classes", "templates", "label"):
        value = getattr(wanted, name)
        words += [] if value is None else [f"--{name}", str(value)]
    words += [] if num_clips == 1 else ["--clips", str(num_clips)]
    return shlex.join(words)


def _file_name(wanted: DualEncoderEvaluation, *, num_clips: int) -> str:
    """Results by other protocols stand beside one another; the same one again takes the place of the old one."""
    parts: list[str] = [wanted.protocol, wanted.split]
    parts += [path.stem for path in (wanted.relevancy, wanted.classes) if path is not None]
    parts += [] if wanted.label is None else [wanted.label]
    parts += [] if num_clips == 1 else [f"{num_clips}-clips"]
    return "-".join(parts)
